"""How sharp attention is: the largest logit and the entropy, from a sample of queries, where the model calls torch's own
attention or a softmax over it.

Only on full looks, and only while the model's own forward runs: a function mode sees the arguments of each call. Compiled
code, and kernels from other packages, are not seen.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nanproof.core.context import rehearsal
from nanproof.core.parameters import unwrap
from nanproof.core.telemetry import Courier
from nanproof.observe.hooks import OwnHook
from nanproof.observe.sites import named

log = logging.getLogger("nanproof")

SAMPLES, QUERIES = 2, 16
"""Of the batch, and of each sequence."""
Sharpness = tuple[float, float, float]
"""The largest logit; the entropy over its possible maximum, as a mean over all heads and of the sharpest head: 0 is one key, 1
all alike."""
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


class AttentionWatch:
    """Samples each attention once a step."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.due = False
        """Whether this step is looked at."""
        self.off = False
        self._names = {id(module): name for name, module in named(model).items()}
        self._courier = Courier(device)
        self._device = device
        self._seen: dict[str, Tensor] = {}
        self._mode: _Mode | None = None
        root = unwrap(model)
        self._hooks = [
            root.register_forward_pre_hook(_Enter(self), prepend=True),
            root.register_forward_hook(_Leave(self), always_call=True),
        ]

    def begin(self, due: bool) -> None:
        self.due = due
        self._seen.clear()

    def enter(self) -> None:
        if self.due and not self.off and self._mode is None and not rehearsal and torch._C._current_graph_task_id() == -1:
            self._mode = _Mode(self)
            self._mode.__enter__()

    def leave(self) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)

    def send(self) -> Callable[[], dict[str, Sharpness]]:
        names, values = list(self._seen), list(self._seen.values())
        self._seen.clear()
        if not names:
            return dict
        parcel = self._courier.send(torch.cat([v.to(self._device, non_blocking=True) for v in values]))

        def read() -> dict[str, Sharpness]:
            numbers = parcel()
            return {name: (numbers[3 * i], numbers[3 * i + 1], numbers[3 * i + 2]) for i, name in enumerate(names)}

        return read

    def close(self) -> None:
        self.due = False
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def tried(self, look: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Looking is never the reason a run dies."""
        try:
            look(*args, **kwargs)
        except Exception as error:
            log.debug("nanproof: looking at attention failed", exc_info=True)
            log.warning("nanproof: attention is not observed any more: %s: %s", type(error).__name__, error)
            self.off = True

    def place(self) -> str | None:
        """The module that is calling: from the frames, since hooks on every module would cost more."""
        frame: FrameType | None = sys._getframe(4)
        for _ in range(16):
            if frame is None:
                return None
            for key in ("self", "module"):
                name = self._names.get(id(frame.f_locals.get(key)))
                if name is not None:
                    return name
            frame = frame.f_back
        return None

    def product(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> None:  # fmt: skip
        """A call of scaled_dot_product_attention."""
        name = self.place()
        if name is None or name in self._seen or query.dim() != 4 or not query.is_floating_point():
            return
        length, keys = query.shape[-2], key.shape[-2]
        every = max(1, length // QUERIES)
        q, k = query[:SAMPLES, :, ::every].float(), key[:SAMPLES].float()
        if k.shape[1] != q.shape[1]:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        logits = q @ k.transpose(-2, -1) * (scale if scale is not None else query.shape[-1] ** -0.5)
        allowed = None
        if is_causal:
            at = torch.arange(0, length, every, device=q.device)
            allowed = torch.arange(keys, device=q.device) <= at[:, None]
        elif attn_mask is not None:
            mask = attn_mask.expand(*attn_mask.shape[:-2], length, keys)[..., ::every, :]
            mask = mask[:SAMPLES] if mask.dim() == 4 and mask.shape[0] > 1 else mask
            if mask.dtype == torch.bool:
                allowed = mask
            else:
                logits, allowed = logits + mask.float(), mask > torch.finfo(mask.dtype).min / 2
        self._seen[name] = sharpness(logits, allowed)

    def softmax(self, logits: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> None:
        """A call of softmax over the last of four dimensions, inside something that is called attention."""
        if dim not in (-1, 3) or logits.dim() != 4:
            return
        name = self.place()
        if name is None or name in self._seen or not _ATTENTION.search(name):
            return
        every = max(1, logits.shape[-2] // QUERIES)
        sample = logits.detach()[:SAMPLES, :, ::every].float()
        self._seen[name] = sharpness(sample, sample > torch.finfo(logits.dtype).min / 2)


def sharpness(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Largest allowed logit, mean entropy over heads, entropy of the sharpest head. Logits are (sample, head, query, key);
    entropies are over their maximum, the logarithm of how many keys are allowed, and queries with one key only do not count."""
    if allowed is None:
        allowed = torch.ones((), dtype=torch.bool, device=logits.device)
    allowed = allowed.expand(logits.shape)
    hidden = logits.masked_fill(~allowed, -torch.inf)
    logs = torch.log_softmax(hidden, -1)
    entropy = -torch.where(allowed, logs.exp() * logs, 0).sum(-1)
    keys = allowed.sum(-1)
    counts = (keys > 1).float()
    share = torch.where(keys > 1, entropy / keys.clamp(min=2).float().log(), 0)
    heads = share.sum((0, 2)) / counts.sum((0, 2)).clamp(min=1)
    return torch.stack((hidden.amax(), heads.mean(), heads.amin()))


class _Mode(TorchFunctionMode):
    def __init__(self, watch: AttentionWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._watch.tried(self._watch.product, *args, **kwargs)
        elif func in _SOFTMAX:
            self._watch.tried(self._watch.softmax, *args, **kwargs)
        elif func is F.multi_head_attention_forward:
            with self:  # it calls one of the others
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class _Enter(OwnHook):
    def __init__(self, watch: AttentionWatch) -> None:
        self._watch = watch

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and (module.training or torch.is_grad_enabled()):
            self._watch.enter()


class _Leave(_Enter):
    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if not torch.compiler.is_compiling():
            self._watch.leave()
