"""Silence the messages that other packages print on every load, sample and training run. Any other warning is shown."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

EXPECTED = (
    r"You are using 'rollout_func', which is an experimental feature",  # TRL, of every trainer with a judge
    r"std\(\): degrees of freedom is <= 0",  # torch, of groups of one: that they end in NaN is what the arm shows
)
_NO_ACCELERATOR = "Setting accelerator to CPU"


class _NotNews(logging.Filter):
    """Drops what DeepSpeed logs on import if there is no GPU. It sets its own level, so a filter is needed."""

    def filter(self, record: logging.LogRecord) -> bool:
        return _NO_ACCELERATOR not in str(record.msg)


_not_news = _NotNews()


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore the expected warnings inside, and silence transformers and accelerate."""
    logging.getLogger("DeepSpeed").addFilter(_not_news)  # once: a logger takes a filter one time
    _transformers()
    with warnings.catch_warnings():
        for message in EXPECTED:
            warnings.filterwarnings("ignore", message=message)
        yield


def _transformers() -> None:
    from importlib.util import find_spec

    if find_spec("transformers") is not None:
        from transformers.utils import logging as own

        own.set_verbosity_error()
        own.disable_progress_bar()
        logging.getLogger("accelerate").setLevel(logging.ERROR)
