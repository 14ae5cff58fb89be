"""Which framework wrote a log, by what only it prints. The advice depends on it."""

from __future__ import annotations

import re
from collections.abc import Iterator

_SIGNS = tuple(
    (name, re.compile(sign, re.I))
    for name, sign in (
        (
            "transformers",
            rb"\{'(?:eval_)?loss': [^{}\r\n]{1,800}'epoch': |transformers/trainer\.py|step[ \t|]{1,9}training loss\b",
        ),
        ("lua", rb"\.lua\b"),
        ("torch", rb"\btorch\b|torch[./]|pytorch|grad_fn=|device='cuda"),
        (
            "tensorflow",
            rb"(?:info|warning|error):tensorflow|tensorflow[/.]python|basic_session_run_hooks|tf\.errors"
            rb"|keras/|keras\.|\dm?s/step - |^trainable params: [\d,]+\s*$",
        ),
        ("paddle", rb"\bppocr\b|\bppdet\b|paddle"),
        ("mxnet", rb"\bmxnet\b"),
        ("jax", rb"jax\.errors|jaxlib\.|jax/_src|xlaruntimeerror"),
        ("chainer", rb"chainer"),
        ("caffe", rb"\b(?:solver|net)\.cpp:\d"),
        ("darknet", rb"\d: -?[\w.]{1,20}, -?[\w.]{1,20} avg(?: loss)?, [\d.]{1,12} rate, |\bregion \d+ avg iou: "),
        ("mlx", rb"\bit/sec [\d.]+, tokens/sec |\bmlx[._-]"),
    )
)
_MOST = 4000


def programs(text: bytes) -> Iterator[str]:
    """Yield the names of frameworks that a piece of a log shows signs of."""
    for name, sign in _SIGNS:
        if sign.search(text, 0, _MOST):
            yield name
