"""The calls of a script's model, noted so that a refused step can be run again.

A script's loss is its own affair, except where the model computes it: `model(**batch).loss`, or `logits, loss = model(x, y)`.
There the call is all that it takes. Whether backward got that loss, perhaps divided for accumulation, is read from autograd's
graph, at every backward; where it did not, the step cannot be run again, and is only refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.integrations.loop import UNKNOWN

_FAR = 6
"""Operations between the model's loss and backward that are looked through."""


class Followed:
    """The training calls of one model."""

    def __init__(self, model: nn.Module, begin: Callable[[Any], None], busy: Callable[[], bool]) -> None:
        """`begin` is told of every micro-batch: a dictionary that `loss_of` understands, or UNKNOWN. While `busy`, the model is
        called by nanproof itself."""
        self._begin, self._busy = begin, busy
        self._calls = 0
        """Since the last backward."""
        self._call: dict[str, Any] | None = None
        self._output: Any = None
        self._handles = [
            model.register_forward_pre_hook(Hook(self, "_on_call"), with_kwargs=True),
            model.register_forward_hook(Hook(self, "_on_output")),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._call = self._output = None

    def backward(self, loss: Tensor) -> bool:
        """Just before it. Whether the step so far can be run again."""
        calls, call, output = self._calls, self._call, self._output
        self._calls, self._call, self._output = 0, None, None
        if calls != 1 or call is None:
            return False
        for place, inner in _scalars(output):
            weights = _between(loss, inner)
            if weights is not None:
                call["loss"], call["weights"] = place, weights
                return True
        return False

    def _on_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled() or self._busy():
            return
        self._calls += 1
        self._output = None  # and with it the graph of a call that no backward followed
        self._call = {"args": args, "kwargs": kwargs, "loss": None, "weights": []}
        self._begin(self._call if self._calls == 1 else UNKNOWN)

    def _on_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._calls == 1 and module.training and torch.is_grad_enabled() and not self._busy():
            self._output = output


class Hook:
    """Calls a method of its owner, as long as there is one. A copy of the model, or one that was pickled, carries a hook that
    does nothing: it is another model's."""

    def __init__(self, owner: Any, method: str) -> None:
        self._owner, self._method = weakref.ref(owner), method

    def __call__(self, *args: Any) -> None:
        owner = self._owner()
        if owner is not None:
            getattr(owner, self._method)(*args)

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _nothing(*_: Any) -> None:
    """What a hook becomes in a copy."""


def _no_hook() -> Any:
    return _nothing


def loss_of(model: nn.Module, call: Mapping[str, Any]) -> Tensor:
    """The loss of a noted call, as backward got it."""
    output = model(*call["args"], **call["kwargs"])
    loss = next(inner for place, inner in _scalars(output) if place == call["loss"])
    for name, other in call["weights"]:
        loss = loss / other if name == "div" else loss * other if name == "mul" else loss.to(other)
    return loss


def _scalars(output: Any) -> list[tuple[str, Tensor]]:
    """The numbers in what a model returned that could be its loss, and where they are."""
    if isinstance(output, Tensor):
        found: list[tuple[str, Any]] = [("", output)]
    elif isinstance(output, Mapping):
        found = [(str(key), value) for key, value in output.items()]
    elif isinstance(output, (tuple, list)):
        found = [(str(i), value) for i, value in enumerate(output)]
    else:
        found = [("loss", getattr(output, "loss", None))]
    return [(place, x) for place, x in found if isinstance(x, Tensor) and x.numel() == 1 and x.requires_grad]


def _between(loss: Tensor, inner: Tensor) -> list[tuple[str, Any]] | None:
    """What was done with the model's loss before backward: divisions and products with one number. None: something else."""
    if loss is inner:
        return []
    found: list[tuple[str, Any]] = []
    node: Any = loss.grad_fn
    for _ in range(_FAR):
        if node is None:
            return None
        if node is inner.grad_fn:
            return found[::-1]
        name = node.name()
        if name in ("DivBackward0", "MulBackward0"):
            other = getattr(node, "_saved_other", None)
            if other is None or other.numel() != 1 or (len(node.next_functions) > 1 and node.next_functions[1][0] is not None):
                return None
            found.append((name[:3].lower(), other.item() if other.device.type == "cpu" else other.detach()))
        elif name not in ("AliasBackward0", "ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0"):
            return None
        node = node.next_functions[0][0]
    return None
