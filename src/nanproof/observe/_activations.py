"""Observer: hooks on chosen modules that look at each output, and at its gradient, without waiting for the device.

- Activation checkpointing runs a forward again inside backward: that one is not looked at, so everything is counted once.
- `torch.compile`: the hooks become part of the graph, without a graph break. There are two graphs. That of light looks has a
  reduction for each output, which the compiler fuses with what made it. That of full looks has one opaque operation for each.
- Torch does not notice hooks on a model whose code it has compiled already, for this instance or another one: `_OwnForward`.
- Replays, which the guard runs to find out what went wrong, are not looked at.
- Looking is never the reason a run dies: what goes wrong in it ends it, with a warning.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from nanproof._records import ABSENT
from nanproof.core._telemetry import Courier
from nanproof.core.support._context import rehearsal
from nanproof.core.support._hooks import OwnHook
from nanproof.observe._kernels import make_table
from nanproof.observe._settings import Observe
from nanproof.observe._sites import choose
from nanproof.observe._tables import Seen, largest

log = logging.getLogger("nanproof")

_interpreters = torch._C._functorch.peek_interpreter_stack
_backward = torch._C._current_graph_task_id
"""-1 where no backward is under way in this thread."""
_places: dict[int, tuple[weakref.ref[Observer], int]] = {}
"""By the address of a ticket: whose it is, and of which row."""


def _look(x: Tensor, ticket: Tensor) -> None:
    place = _places.get(ticket.data_ptr())
    observer = None if place is None else place[0]()
    if place is not None and observer is not None:
        observer.compiled(x, place[1])


_library = torch.library.Library("nanproof", "FRAGMENT")
_library.define("look(Tensor x, Tensor(a!) mark, Tensor ticket) -> ()")
_library.impl("look", lambda x, mark, ticket: _look(x, ticket), "CompositeExplicitAutograd")
torch.library.register_fake("nanproof::look", lambda x, mark, ticket: None, lib=_library)
_library.define("look_back(Tensor(a!) gradient, Tensor ticket) -> ()")
_library.impl("look_back", _look, "CompositeExplicitAutograd")
torch.library.register_fake("nanproof::look_back", lambda gradient, ticket: None, lib=_library)


class _Through(torch.autograd.Function):
    """For compiled code, which takes no hooks on tensors: the identity, whose backward looks at the gradient. A copy, because a
    view that comes out of a function could not be written in place by what follows; the compiler makes it part of that.

    What keeps the look at a gradient is the gradient, which it says it writes. A mark would be kept from the forward to the
    backward, and another forward in between (a model compiled in parts, two forwards and one backward) writes it: autograd
    refuses that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ticket: Tensor) -> Tensor:
        ctx.save_for_backward(ticket)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()  # what comes from outside of the graph may not be written
        torch.ops.nanproof.look_back(gradient, *ctx.saved_tensors)
        return gradient, None


class Observer:
    """Looks at the outputs of some modules of a model. Tables have two rows for each site: first all outputs, then all
    gradients."""

    def __init__(self, model: nn.Module, settings: Observe, device: torch.device) -> None:
        chosen = choose(model, settings.modules)
        self.sites = tuple(chosen)
        self.gradients = settings.gradients
        self.on = True
        self.full = False
        """Whether this step's looks are full ones."""
        self._left_out: set[int] = set()
        """Rows whose tensors cannot be looked at: nested ones, say."""
        self._table = make_table(2 * len(self.sites), device)
        self._compiled = CompiledLooks(self, len(self.sites), device)
        self._eager = bytearray(len(self.sites))
        """By site, whether eager code has called it in this step."""
        self._part_compiled = True
        """Whether some site was not called by eager code in the last step: then compiled code may have called it."""
        self._forwards = _OwnForward(chosen.values(), self._compiled)
        self._forwards.ensure()
        sites = zip(chosen.values(), self._compiled.sites, strict=True)
        self._hooks = [m.register_forward_hook(_Hook(self, m, row, site)) for row, (m, site) in enumerate(sites)]

    @property
    def dtypes(self) -> list[torch.dtype | None]:
        """Of what was seen last: by site of outputs, then of gradients."""
        return self._table.dtypes

    def begin(self, full: bool) -> None:
        """A step begins. What was looked at since the last one belongs to no step."""
        self._table.clear()
        self._table.full = self.full = full
        if self._part_compiled and self._forwards.ensure():
            self._compiled.clear()

    def send(self) -> Callable[[], Seen]:
        """What was seen since the step began is on its way to the host: call this later to read it."""
        eager, self._eager = self._eager, bytearray(len(self.sites))
        self._part_compiled = 0 in eager
        table = self._table.send()
        if not self._part_compiled or not self._forwards.ensure():
            return table
        compiled = self._compiled.send()

        def read() -> Seen:
            seen, count = table(), len(self.sites)
            seen.absmax[:count] = map(largest, seen.absmax, compiled())
            return seen

        return read

    def close(self) -> None:
        self.on = False
        for hook in self._hooks:
            hook.remove()
        self._forwards.remove()
        self._compiled.close()
        with suppress(Exception):  # on a device that has failed
            self._table.clear()  # outputs that wait hold the graph of their step

    def output(self, x: Tensor, row: int) -> None:
        """The output of a module in eager code."""
        if rehearsal or _interpreters() is not None or x.is_inference():
            return
        self._eager[row] = 1
        if _backward() == -1 and row not in self._left_out:  # else a checkpoint runs its forward again
            try:
                self._table.look(x, row)
            except Exception as error:
                self._leave_out(row, error)
        if self.full and self.gradients and x.grad_fn is not None:
            # Also while a checkpoint runs its forward again: if that is what backward goes through, it is the one that fires.
            x.grad_fn.register_prehook(_Gradient(self, row + len(self.sites), x.output_nr))

    def gradient(self, gradient: Tensor, row: int) -> None:
        """The gradient of an output."""
        if self.on and self.full and not rehearsal:
            self._look(gradient, row)

    def compiled(self, x: Tensor, row: int) -> None:
        """An output or a gradient, while compiled code runs."""
        if row >= len(self.sites):
            self.gradient(x, row)
        elif self.on and not rehearsal and _backward() == -1:
            self._look(x, row)
        self._table.flush()  # compiled code may use the same memory for something else, without a word

    def _look(self, x: Tensor, row: int) -> None:
        if row in self._left_out:
            return
        try:
            self._table.look(x, row)
        except Exception as error:
            self._leave_out(row, error)

    def _leave_out(self, row: int, error: Exception) -> None:
        self._left_out.add(row)
        log.debug("nanproof: observing failed", exc_info=error)
        site, what = self.sites[row % len(self.sites)], type(error).__name__
        log.warning("nanproof: %s is not observed any more: %s: %s", site, what, str(error).partition("\n")[0])

    def compiled_output(self, x: Tensor, site: CompiledSite, differentiable: bool) -> Tensor:
        """The same, while torch compiles the code. No number that differs between sites is in it: torch would compile it for each
        of the blocks of a model that are compiled one by one, and gives up after eight."""
        if not self.full and type(x) is Tensor and x.dtype in site.tops and x.device == site.mark.device and x.numel():
            top = site.tops[x.dtype]
            top.copy_(torch.maximum(top, x.detach().abs().amax()))
            return x
        torch.ops.nanproof.look(x.detach(), site.mark, site.ticket)
        if self.full and differentiable and self.gradients and x.requires_grad:
            through: Tensor = _Through.apply(x, site.ticket_back)
            return through
        return x


IN_GRAPH = (torch.float32, torch.bfloat16, torch.float16)
"""Outputs of other dtypes are looked at by the operation, in light looks too."""


@dataclass(slots=True, frozen=True)
class CompiledSite:
    """The tensors of one site that compiled code gets. They stay where they are, and are the site's only difference to others."""

    tops: dict[torch.dtype, Tensor]
    """The largest absolute value in this step: light looks write it. Of the output's dtype: the compiler computes in float32, and
    only what it writes is rounded as the output is, to Inf perhaps."""
    mark: Tensor
    """An operation that looks says that it writes this, so the compiler keeps it, and its place."""
    ticket: Tensor
    """Tells that operation which site it is, by its address. Nobody reads or writes it."""
    ticket_back: Tensor


class CompiledLooks:
    """What compiled code writes to."""

    def __init__(self, observer: Observer, count: int, device: torch.device) -> None:
        # With one dimension: scalar tensors on a CPU are turned into Python numbers by some passes, and writes to them are lost.
        def tensor(dtype: torch.dtype) -> Tensor:
            return torch.full((1,), ABSENT, dtype=dtype, device=device)

        mark = tensor(torch.float32)
        self.sites = [
            CompiledSite({dtype: tensor(dtype) for dtype in IN_GRAPH}, mark, tensor(torch.float32), tensor(torch.float32))
            for _ in range(count)
        ]
        self._tops = [[site.tops[dtype] for site in self.sites] for dtype in IN_GRAPH]
        self._absent = [[tensor(dtype)] * count for dtype in IN_GRAPH]
        self._courier = Courier(device)
        whose = weakref.ref(observer)
        tickets = [site.ticket for site in self.sites] + [site.ticket_back for site in self.sites]
        self._places = {ticket.data_ptr(): (whose, row) for row, ticket in enumerate(tickets)}
        _places.update(self._places)

    def stay(self) -> None:
        """Tell torch's compiler that they stay. A graph that writes them could not be a CUDA graph (`mode="reduce-overhead"`)
        otherwise."""
        with suppress(AttributeError):  # while another thread imports it
            for site in self.sites:
                for tensor in (*site.tops.values(), site.mark, site.ticket, site.ticket_back):
                    sys.modules["torch._dynamo"].mark_static_address(tensor, guard=False)

    def clear(self) -> None:
        for tops, absent in zip(self._tops, self._absent, strict=True):
            if tops:
                torch._foreach_copy_(tops, absent)

    def send(self) -> Callable[[], list[float]]:
        return self._courier.send(torch.stack([torch.cat(tops).float() for tops in self._tops]).amax(0))

    def close(self) -> None:
        for address, place in self._places.items():
            if _places.get(address) is place:
                del _places[address]


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

    def __init__(self, observer: Observer, module: nn.Module, row: int, site: CompiledSite) -> None:
        self._observer, self._module, self._row, self._site = observer, module, row, site

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
        y = self._observer.compiled_output(x, self._site, can_be_exchanged)
        if y is x:
            return None
        return y if plain else tuple(y if part is x else part for part in output)


def transformed() -> bool:
    """Inside of torch.func's vmap or grad: what is there has no values of its own, and is gone when they end."""
    return _interpreters() is not None


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
    is its class's. A copy of the module gets its own, and a replica of `nn.DataParallel` none: it has its own weights.
    """

    def __init__(self, modules: Iterable[nn.Module], compiled: CompiledLooks) -> None:
        self._modules: list[nn.Module] = list(modules)
        self._compiled = compiled
        self._put: list[tuple[nn.Module, str, Any]] = []

    def ensure(self) -> bool:
        """Once torch's compiler is loaded; nothing that runs eagerly is touched. Returns whether it is."""
        if "torch._dynamo" not in sys.modules:
            return False
        if self._modules:
            self._compiled.stay()
            for module in self._modules:
                if "forward" not in vars(module):  # else torch compares that one
                    vars(module)["forward"] = forward = module.forward
                    self._put.append((module, "forward", forward))
                    vars(module)["_replicate_for_data_parallel"] = replicate = MethodType(_replicate_for_data_parallel, module)
                    self._put.append((module, "_replicate_for_data_parallel", replicate))
            self._modules = []
        return True

    def remove(self) -> None:
        for module, name, method in self._put:
            if vars(module).get(name) is method:
                del vars(module)[name]
        self._modules, self._put = [], []


def _replicate_for_data_parallel(module: nn.Module) -> Any:
    """As torch does it, which copies what is on the instance: the replica's forward would be that of this module, with this
    module's weights. Named as what it replaces, by which a pickle finds that again."""
    replica: Any = type(module)._replicate_for_data_parallel(module)
    forward = vars(replica).get("forward")
    if getattr(forward, "__self__", None) is module and forward.__func__ is type(module).forward:
        del vars(replica)["forward"]
    vars(replica).pop("_replicate_for_data_parallel", None)
    return replica
