"""Torch's own attention functions, while someone looks at their arguments. One replacement for all who look at the same time:
were each to put back what it found, two forwards in two threads, or one that was interrupted, would put back each other's."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

PRODUCT = "scaled_dot_product_attention"
_FUNCTIONS: tuple[tuple[Any, str], ...] = ((F, PRODUCT), (F, "softmax"), (torch, "softmax"), (Tensor, "softmax"))


class Borrower(Protocol):
    """Who looks."""

    def called(self, frame: FrameType, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...


_borrowers: weakref.WeakSet[Any] = weakref.WeakSet()
_replaced: list[tuple[Any, str, Callable[..., Any] | None, Callable[..., Any]]] = []
"""What is to be put back (None where it is inherited), and what stands in its place."""
_lock = threading.Lock()


def borrow(borrower: Borrower) -> None:
    """From now on it is told of each call."""
    with _lock:
        _borrowers.add(borrower)
        if not _replaced:
            for home, name in _FUNCTIONS:
                own, stand_in = vars(home).get(name), _telling(getattr(home, name), name)
                setattr(home, name, stand_in)
                _replaced.append((home, name, own, stand_in))


def give_back(borrower: Borrower) -> None:
    """It looks no more. With the last one torch has its own functions again."""
    with _lock:
        _borrowers.discard(borrower)
        if not _borrowers:
            _put_back()


def give_all_back() -> None:
    """Whoever looks. Those who begin later are told again."""
    with _lock:
        _borrowers.clear()
        _put_back()


def _put_back() -> None:
    for home, name, own, stand_in in reversed(_replaced):
        if vars(home).get(name) is not stand_in:
            continue  # someone else has put theirs here since, and will put back what they found: it tells nobody
        if own is None:
            delattr(home, name)
        else:
            setattr(home, name, own)
    _replaced.clear()


def _telling(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(function)
    def telling(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for borrower in tuple(_borrowers):
                borrower.called(sys._getframe(1), name, args, kwargs)
        return function(*args, **kwargs)

    return telling
