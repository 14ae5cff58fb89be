"""What modules and loss objects keep in attributes (a counter, a hidden state): saved before a replay, put back after it."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

_SMALL = 1 << 20
"""Elements of a tensor in an attribute that is copied, at the most; a larger one is put back as an object only."""
_TORCHS = frozenset(nn.Module().__dict__)
"""What every module has: parameters, buffers, submodules, hooks."""
_UNCHANGING = frozenset((int, float, bool, str, type(None)))
_CONTAINERS = (list, dict, set, deque)


def saved_attributes(owner: Any) -> dict[str, tuple[Any, Any]]:
    """(the object, a copy of what is in it) of every attribute that is not torch's own."""
    own = owner.__dict__
    return {name: (own[name], _content(own[name])) for name in own.keys() - _TORCHS}


def _content(value: Any) -> Any:
    if type(value) in _UNCHANGING:
        return None
    if isinstance(value, Tensor):
        return (value._version, value.detach().clone()) if value.numel() <= _SMALL and not value.is_inference() else None
    return copy.copy(value) if type(value) in _CONTAINERS else None


def restore_attributes(owner: Any, saved: dict[str, tuple[Any, Any]]) -> None:
    for name in owner.__dict__.keys() - _TORCHS - saved.keys():
        del owner.__dict__[name]
    for name, (value, content) in saved.items():
        owner.__dict__[name] = value
        if type(value) in _UNCHANGING:
            continue
        if isinstance(value, Tensor):
            if content is not None and value._version != content[0]:
                with torch.no_grad():
                    value.detach_() if value.grad_fn is not None else None
                    value.copy_(content[1])
        elif content is not None:  # not only if it differs: containers of tensors cannot be compared
            _refill(value, content)


def _refill(value: Any, content: Any) -> None:
    value.clear()
    if isinstance(value, (dict, set)):
        value.update(content)
    else:
        value.extend(content)
