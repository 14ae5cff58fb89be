"""Replay: run forward and backward of a step again, exactly as it was, or with one thing changed.

The weights are those of the bad step (its update was refused), so the same batch, random numbers and mode give the same numbers
bit for bit. Every run leaves model, gradients, buffers and random numbers as it found them.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.core.context import Mode, RandomState
from nanproof.core.keepers import BufferKeeper
from nanproof.core.parameters import clean_name, local, unwrap
from nanproof.core.tree import own_copy

LossFn = Callable[[nn.Module, Any], Tensor]


class OutOfTime(Exception):
    """The time a diagnosis may take is over."""


@dataclass(slots=True)
class Deadline:
    """The moment by which a diagnosis must be done."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.perf_counter() + seconds)

    @property
    def passed(self) -> bool:
        return time.perf_counter() > self.at


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of the step came to."""

    loss: float
    """NaN where it was not reached."""
    error: BaseException | None
    norms: dict[str, float]
    """Gradient norm of every trainable parameter that got a gradient."""
    missing: tuple[str, ...]
    """Trainable parameters that got none."""
    gradients_finite: bool
    """Every element of every gradient."""
    loss_has_gradient: bool
    seconds: float

    @property
    def total(self) -> float:
        squares = sum(n * n for n in self.norms.values())
        # In fp32, as the verdict has it: the sum of squares may overflow although each norm is finite.
        return float(torch.tensor(list(self.norms.values())).norm()) if squares == squares else math.nan

    @property
    def finite(self) -> bool:
        return self.error is None and math.isfinite(self.loss) and self.gradients_finite and math.isfinite(self.total)

    def same_as(self, other: Outcome) -> bool:
        """Bit for bit, NaN equal to NaN."""

        def alike(a: float, b: float) -> bool:
            return a == b or (a != a and b != b)

        return (
            alike(self.loss, other.loss)
            and self.norms.keys() == other.norms.keys()
            and all(alike(x, other.norms[name]) for name, x in self.norms.items())
            and type(self.error) is type(other.error)
        )

    def __str__(self) -> str:
        if self.error is not None:
            return f"{type(self.error).__name__}: {str(self.error).splitlines()[0][:120] if str(self.error) else ''}"
        return f"loss {self.loss:.4g}, gradient norm {self.total:.4g}"


class Replay:
    """A step that can be run again: its model, loss function and batches, and what else it depended on."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batches: Sequence[Any],
        *,
        random: RandomState | None = None,
        mode: Mode | None = None,
        scale: float = 1.0,
        buffers: BufferKeeper | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        self.model, self.loss_fn, self.batches = model, loss_fn, tuple(batches)
        self.modules = list(model.modules())
        self.parameters: dict[str, Tensor] = {clean_name(name): p for name, p in unwrap(model).named_parameters()}
        first = next(iter(self.parameters.values()), None)
        self.device = local(first).device if first is not None else torch.device("cpu")
        self.devices = sorted({local(p).device for p in self.parameters.values() if p.device.type == "cuda"}, key=str)
        self.random = random if random is not None else RandomState.now(self.devices)
        self.mode = mode if mode is not None else Mode.now(self.modules, self.device)
        self.scale = scale
        """The loss scale to run at; 1 where it does not matter, because an overflow that it causes is not the question."""
        self.deadline = deadline or Deadline.after(math.inf)
        self.runs = 0
        self._buffers = buffers

    @property
    def compiled(self) -> bool:
        return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in self.modules)

    def run(
        self,
        *changes: AbstractContextManager[Any],
        batches: Sequence[Any] | None = None,
        scale: float | None = None,
        backward: bool = True,
        before_backward: Callable[[Tensor], None] | None = None,
        after: Callable[[], None] | None = None,
        random: RandomState | None = None,
    ) -> Outcome:
        """Run the step under the given contexts. An exception of the step itself is part of the outcome."""
        if self.deadline.passed:
            raise OutOfTime
        self.runs += 1
        scale = self.scale if scale is None else scale
        start = time.perf_counter()
        loss_value, error, has_gradient = math.nan, None, True
        with self._undisturbed(), ExitStack() as stack:
            (random or self.random).restore()
            stack.enter_context(self.mode.again(self.modules, self.device))
            stack.enter_context(_eager())
            stack.enter_context(_local_gradients(self.model))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # what the step warns of, it has warned of already
            for change in changes:
                stack.enter_context(change)
            parts = self.batches if batches is None else tuple(batches)
            try:
                total = 0.0
                for batch in parts:
                    loss = self.loss_fn(self.model, own_copy(batch))
                    loss = loss.reshape(()) / len(parts) if len(parts) > 1 else loss.reshape(())
                    total += float(loss.detach())
                    has_gradient = loss.requires_grad
                    if before_backward is not None:
                        before_backward(loss)
                    if backward:
                        (loss.float() * scale if scale != 1 else loss).backward()
                loss_value = total
            except Exception as raised:
                error = raised
            # `grad` is read inside: the gradients of before come back on the way out.
            norms, missing, finite = self._gradients(scale) if backward else ({}, (), True)
            if after is not None and error is None:
                after()
        return Outcome(loss_value, error, norms, missing, finite, has_gradient, time.perf_counter() - start)

    def gradients(self, clip_to: float | None = None) -> dict[str, Tensor]:
        """The gradients of the step, by parameter; clipped as the run would have it."""
        found: dict[str, Tensor] = {}

        def take() -> None:
            found.update({name: p.grad.detach().clone() for name, p in self.parameters.items() if p.grad is not None})

        outcome = self.run(after=take)
        if clip_to is not None and outcome.total > clip_to:
            for gradient in found.values():
                gradient.mul_(clip_to / outcome.total)
        return found

    def _gradients(self, scale: float) -> tuple[dict[str, float], tuple[str, ...], bool]:
        named = [(name, p) for name, p in self.parameters.items() if p.requires_grad]
        missing = tuple(name for name, p in named if p.grad is None)
        present = [(name, _dense(p.grad)) for name, p in named if p.grad is not None]
        if not present:
            return {}, missing, True
        wide = [g if g.dtype == torch.float64 else g.float() for _, g in present]
        norms = torch.stack([torch.linalg.vector_norm(g).double().cpu() for g in wide]) / scale
        largest = torch.stack([g.abs().max().double().cpu() if g.numel() else torch.zeros((), dtype=torch.float64) for g in wide])
        names = [name for name, _ in present]
        return dict(zip(names, norms.tolist(), strict=True)), missing, bool(torch.isfinite(largest).all())

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Gradients, buffers and random numbers afterwards are those of before."""
        everything = list(self.model.parameters())
        gradients = [p.grad for p in everything]
        for p in everything:
            p.grad = None
        random_now = RandomState.now(self.devices)
        keeper = self._buffers or BufferKeeper(self.model)
        keeper.begin()
        try:
            yield
        finally:
            keeper.restore()
            if self._buffers is None:
                keeper.close()
            for p, gradient in zip(everything, gradients, strict=True):
                p.grad = gradient
            random_now.restore()


def _dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    gradient = local(gradient.detach())
    gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _eager() -> AbstractContextManager[Any]:
    """Compiled code is run eagerly, so that its operations can be seen. Does not import the compiler to find out."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _local_gradients(model: nn.Module) -> Iterator[None]:
    """A replay on one rank must not wait for the others: neither for gradients nor for buffers."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        yield
        return
    synced = model.require_forward_param_sync
    with model.no_sync():
        model.require_forward_param_sync = False
        try:
            yield
        finally:
            model.require_forward_param_sync = synced
