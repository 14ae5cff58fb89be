"""Observer: hooks on chosen modules that look at each output, and at its gradient, without waiting for the device.

- Activation checkpointing runs a forward again inside backward: that one is not looked at, so everything is counted once.
- `torch.compile`: the hooks trace into one opaque operation a site, without a graph break. Hooks added to a model that was
  compiled already are ignored by torch without a word; then the compiled code is dropped, and compiled again with them.
- Replays, which the guard runs to find out what went wrong, are not looked at.
- Looking is never the reason a run dies: what goes wrong in it ends it, with a warning.
"""

from __future__ import annotations

import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.core.support._context import rehearsal
from nanproof.core.support._hooks import OwnHook
from nanproof.observe._kernels import make_table
from nanproof.observe._settings import Observe
from nanproof.observe._sites import choose
from nanproof.observe._tables import Rows

log = logging.getLogger("nanproof")

_observers: weakref.WeakValueDictionary[int, Observer] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _look(x: Tensor, mark: Tensor, number: int, row: int) -> None:
    observer = _observers.get(number)
    if observer is not None:
        observer.compiled(x, row)


_library = torch.library.Library("nanproof", "FRAGMENT")
_library.define("look(Tensor x, Tensor(a!) mark, int number, int row) -> ()")
_library.impl("look", _look, "CompositeExplicitAutograd")
torch.library.register_fake("nanproof::look", lambda x, mark, number, row: None, lib=_library)
_library.define("look_back(Tensor(a!) gradient, int number, int row) -> ()")
_library.impl("look_back", lambda gradient, number, row: _look(gradient, gradient, number, row), "CompositeExplicitAutograd")
torch.library.register_fake("nanproof::look_back", lambda gradient, number, row: None, lib=_library)


class _Through(torch.autograd.Function):
    """For compiled code, which takes no hooks on tensors: the identity, whose backward looks at the gradient. A copy, because a
    view that comes out of a function could not be written in place by what follows; the compiler makes it part of that.

    What keeps the look at a gradient is the gradient, which it says it writes. A mark would be kept from the forward to the
    backward, and another forward in between (a model compiled in parts, two forwards and one backward) writes it: autograd
    refuses that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, row: int) -> Tensor:
        ctx.number, ctx.row = number, row
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.clone()  # what comes from outside of the graph may not be written
        torch.ops.nanproof.look_back(gradient, ctx.number, ctx.row)
        return gradient, None, None


class Observer:
    """Looks at the outputs of some modules of a model. `rows` has two for each site: first all outputs, then all gradients."""

    def __init__(self, model: nn.Module, settings: Observe, device: torch.device) -> None:
        chosen = choose(model, settings.modules)
        self.sites = tuple(chosen)
        self.gradients = settings.gradients
        self.on = True
        self._left_out: set[int] = set()
        """Rows whose tensors cannot be looked at: nested ones, say."""
        self._table = make_table(2 * len(self.sites), device)
        self._mark = torch.zeros((), device=device)
        """Compiled code takes looks for writes to this, so it keeps them, and their order."""
        self._number = next(_numbers)
        _observers[self._number] = self
        self._forwards = _OwnForward(chosen.values())
        self._forwards.ensure()
        self._hooks = [m.register_forward_hook(_Hook(self, m, row)) for row, m in enumerate(chosen.values())]

    @property
    def dtypes(self) -> dict[int, torch.dtype]:
        """By row, of what was seen last."""
        return self._table.dtypes

    @property
    def full(self) -> bool:
        """Whether this step's looks are full ones."""
        return self._table.full

    def begin(self, full: bool) -> None:
        """A step begins. What was looked at since the last one belongs to no step."""
        self._forwards.ensure()
        self._table.clear()
        self._table.full = full

    def send(self) -> Callable[[], Rows]:
        """What was seen since the step began is on its way to the host: call this later to read it."""
        return self._table.send()

    def close(self) -> None:
        self.on = False
        for hook in self._hooks:
            hook.remove()
        self._forwards.remove()
        with suppress(Exception):  # on a device that has failed
            self._table.clear()  # outputs that wait hold the graph of their step

    def output(self, x: Tensor, row: int) -> None:
        """The output of a module in eager code."""
        if rehearsal or transformed() or x.is_inference():
            return
        if torch._C._current_graph_task_id() == -1:  # else a checkpoint runs its forward again
            self._look(x, row)
        if self._table.full and self.gradients and x.grad_fn is not None:
            # Also while a checkpoint runs its forward again: if that is what backward goes through, it is the one that fires.
            x.grad_fn.register_prehook(_Gradient(self, row + len(self.sites), x.output_nr))

    def gradient(self, gradient: Tensor, row: int) -> None:
        """The gradient of an output."""
        if self.on and self._table.full and not rehearsal:
            self._look(gradient, row)

    def compiled(self, x: Tensor, row: int) -> None:
        """An output or a gradient, while compiled code runs."""
        if row >= len(self.sites):
            self.gradient(x, row)
        elif self.on and not rehearsal and torch._C._current_graph_task_id() == -1:
            self._look(x, row)
        self._table.flush()  # compiled code may use the same memory for something else, without a word

    def _look(self, x: Tensor, row: int) -> None:
        if row in self._left_out:
            return
        try:
            self._table.look(x, row)
        except Exception as error:
            self._left_out.add(row)
            log.debug("nanproof: observing failed", exc_info=True)
            site, what = self.sites[row % len(self.sites)], type(error).__name__
            log.warning("nanproof: %s is not observed any more: %s: %s", site, what, str(error).partition("\n")[0])

    def compiled_output(self, x: Tensor, row: int, differentiable: bool) -> Tensor:
        """The same, while torch compiles the code."""
        torch.ops.nanproof.look(x.detach(), self._mark, self._number, row)
        if differentiable and self.gradients and x.requires_grad:
            through: Tensor = _Through.apply(x, self._number, row + len(self.sites))
            return through
        return x


class _Gradient:
    """Looks at a gradient before the operation that made the output gets it. Returns nothing, so it stays what it is."""

    __slots__ = ("_index", "_observer", "_row")

    def __init__(self, observer: Observer, row: int, index: int) -> None:
        self._observer, self._row, self._index = observer, row, index

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[self._index]
        if gradient is not None:
            self._observer.gradient(gradient, self._row)


class _Hook(OwnHook):
    """A forward hook."""

    def __init__(self, observer: Observer, module: nn.Module, row: int) -> None:
        self._observer, self._module, self._row = observer, module, row

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        # A forward in evaluation is none of a step's business. A checkpoint's first one runs without gradients, but in training.
        if not (module.training or torch.is_grad_enabled()):
            return None
        if torch.compiler.is_compiling():  # or exporting: what is exported runs where there is no nanproof
            return self._compiled(output) if torch.compiler.is_dynamo_compiling() else None
        if module is self._module and self._observer.on:
            x = output if type(output) is Tensor else first_tensor(output)
            if x is not None:
                self._observer.output(x, self._row)
        return None

    def _compiled(self, output: Any) -> Any:
        x = first_tensor(output)
        if x is None:
            return None
        plain = isinstance(output, Tensor)
        can_be_exchanged = plain or (type(output) is tuple and any(part is x for part in output))
        y = self._observer.compiled_output(x, self._row, can_be_exchanged)
        if y is x:
            return None
        return y if plain else tuple(y if part is x else part for part in output)


def transformed() -> bool:
    """Inside of torch.func's vmap or grad: what is there has no values of its own, and is gone when they end."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def first_tensor(output: Any) -> Tensor | None:
    """The first floating-point tensor of what a module returned: the hidden states, by custom."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        for part in output:
            if isinstance(part, Tensor) and part.is_floating_point():
                return part
            found = first_tensor(part) if isinstance(part, (tuple, list)) else None  # a packed sequence, in a recurrent layer
            if found is not None:
                return found
    return None


class _OwnForward:
    """Makes torch compile the code of some modules for themselves.

    Dynamo shares compiled code between all instances of a class, and by default does not check whether they have hooks
    (`skip_nnmodule_hook_guards`). Code of an instance without hooks, compiled before or after the guard was made, would then run
    in the place of ours. It does check that nobody has put a `forward` of its own on an instance: so each module gets one, which
    is its class's. A copy of the module gets its own.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules: list[nn.Module] = list(modules)
        self._put: list[tuple[nn.Module, Any]] = []

    def ensure(self) -> None:
        """Once torch's compiler is loaded; nothing that runs eagerly is touched."""
        if self._modules and "torch._dynamo" in sys.modules:
            for module in self._modules:
                if "forward" not in vars(module):  # else torch compares that one
                    vars(module)["forward"] = forward = module.forward
                    self._put.append((module, forward))
            self._modules = []

    def remove(self) -> None:
        for module, forward in self._put:
            if vars(module).get("forward") is forward:
                del vars(module)["forward"]
        self._modules, self._put = [], []
