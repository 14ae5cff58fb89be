"""Replay: run forward and backward of a step again, exactly as it was, or with one thing changed.

The weights are those of the bad step (its update was refused), so the same batch, random numbers and mode give the same numbers
bit for bit. Every run leaves model, gradients, buffers and random numbers as it found them.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from nanproof.core._engine import part_of
from nanproof.core._under_way import LossFn
from nanproof.core.judge._keepers import BufferKeeper
from nanproof.core.judge._parameters import clean_name, has_compiled, local, unwrap
from nanproof.core.support._context import Mode, RandomState, rehearsal
from nanproof.core.support._ranks import Ranks
from nanproof.core.support._signals import shield
from nanproof.core.support._tree import map_tensors, own_copy, tensors_in
from nanproof.explain._pause import no_collections
from nanproof.explain.replay._attributes import restore_attributes, saved_attributes

_COPIED = 1 << 26
"""Parameters, in elements, that are copied before a run just in case the forward writes them, at the most."""


class CannotReplay(Exception):
    """There is no more to be found out by running the step again."""


class OutOfTime(CannotReplay):
    """The time a diagnosis may take is over."""

    def __str__(self) -> str:
        return "the time for the diagnosis was over before everything was looked at"


class NeedsOthers(CannotReplay):
    """The step itself waits for other ranks, which are not coming."""

    def __str__(self) -> str:
        return "the step waits for other ranks (a collective in the loss function), so one rank cannot run it again alone"


class _NoCollectives(TorchDispatchMode):
    """A collective inside a replay on one rank would wait for ever."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise NeedsOthers
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class Deadline:
    """The moment by which a diagnosis must be done."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.perf_counter() + seconds)

    @property
    def passed(self) -> bool:
        """Whether to stop now: the time is over, or somebody pressed Ctrl-C and waits."""
        return time.perf_counter() > self.at or shield.pending


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
    seconds: float
    last: float = math.nan
    """The loss of the last micro-batch."""

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
        written: Sequence[Tensor] | None = None,
        foreign: Mapping[str, Tensor] | None = None,
        ranks: Ranks | None = None,
        alone: bool = False,
        eagerly: bool = True,
        living: Callable[[], AbstractContextManager[Any]] = nullcontext,
        deadline: Deadline | None = None,
        writes: bool = False,
        beside: Sequence[nn.Module] = (),
        callables: Sequence[Any] = (),
    ) -> None:
        self.model, self.loss_fn, self.batches = model, loss_fn, tuple(batches)
        self.modules = list(model.modules())
        self.parameters: dict[str, Tensor] = {clean_name(name): p for name, p in unwrap(model).named_parameters()}
        self.parameters |= foreign or {}
        first = next(iter(self.parameters.values()), None)
        self.device = local(first).device if first is not None else torch.device("cpu")
        self.devices = sorted({local(p).device for p in self.parameters.values() if p.device.type == "cuda"}, key=str)
        self.random = random if random is not None else RandomState.now(self.devices)
        self.mode = mode if mode is not None else Mode.now(self.modules, self.device)
        self.scale = scale
        """The loss scale to run at; 1 where it does not matter, because an overflow that it causes is not the question."""
        self.deadline = deadline or Deadline.after(math.inf)
        self.runs = 0
        self.fastest = math.inf
        """Seconds of the shortest run so far that raised nothing."""
        self._buffers = buffers
        self._alone = alone
        """Other ranks train the same model, and do not take part in this."""
        self._ranks = ranks
        """The ranks that run this together, if they do."""
        self._eagerly = eagerly
        self._living = living
        """What the run itself is under by now: remedies that were applied."""
        self._learned_writes = written is not None
        if written is None:
            small = sum(p.numel() for p in model.parameters()) <= _COPIED
            written = list(model.parameters()) if small else [p for p in model.parameters() if not p.requires_grad]
        self._written = list(written)
        """Parameters that the forward itself may write (a momentum encoder, say)."""
        mine = {id(module) for module in self.modules}
        self._beside = [m for other in beside for m in other.modules() if id(m) not in mine]
        """Modules that the step runs and that are not part of the model."""
        self._callables = list(callables)
        """Other objects that it calls and that may keep something: a loss with a running mean."""
        self._own_batches = writes
        """The loss function writes into its batch: every run gets a copy."""

    @property
    def writes(self) -> bool:
        """Whether the loss function writes into its batch."""
        return self._own_batches

    @property
    def compiled(self) -> bool:
        return has_compiled(self.model)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While open, the step runs with every module in evaluation mode."""
        was = self.mode
        self.mode = replace(was, training=[False] * len(was.training))
        try:
            yield
        finally:
            self.mode = was

    def is_written(self, parameter: Tensor) -> bool:
        """Whether the forward was seen to write this parameter: a momentum encoder's."""
        return self._learned_writes and any(p is parameter for p in self._written)

    def run(
        self,
        *changes: AbstractContextManager[Any],
        batches: Sequence[Any] | None = None,
        scale: float | None = None,
        backward: bool = True,
        backward_of_bad: bool = True,
        before_backward: Callable[[Tensor], None] | None = None,
        after: Callable[[], None] | None = None,
        random: RandomState | None = None,
        spoil: bool = False,
    ) -> Outcome:
        """Run the step under the given contexts. An exception of the step itself is part of the outcome.

        `backward_of_bad=False` leaves the backward of a bad loss out: the trouble is in the forward then. `spoil`: the step may
        write into `batches`.
        """
        if self.deadline.passed:
            raise OutOfTime
        self.runs += 1
        scale = self.scale if scale is None else scale
        start = time.perf_counter()
        loss_value, last, error = math.nan, math.nan, None
        with no_collections(), rehearsal, self._undisturbed():
            with ExitStack() as stack:
                (random or self.random).restore()
                stack.enter_context(self.mode.again(self.modules, self.device))
                if self._eagerly:
                    stack.enter_context(eager())
                if self._ranks is None:
                    stack.enter_context(_local_gradients(self.model))
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")  # what the step warns of, it has warned of already
                if self._alone:
                    stack.enter_context(_NoCollectives())
                stack.enter_context(self._living())
                for change in changes:
                    stack.enter_context(change)
                parts = tuple(batches) if spoil and batches is not None else self._parts(batches)
                try:
                    total = 0.0
                    for i, batch in enumerate(parts):
                        with self._accumulated(last=i == len(parts) - 1):
                            loss = self.loss_fn(self.model, own_copy(batch))
                            loss = part_of(self.loss_fn, loss.reshape(()), len(parts))
                            last = float(loss.detach())
                            total += last
                            backward = backward and (backward_of_bad or math.isfinite(total))
                            if before_backward is not None:
                                before_backward(loss)
                            if backward:
                                (loss.float() * scale if scale != 1 else loss).backward(gradient=self._seed(loss))
                    loss_value = total
                except CannotReplay:
                    raise
                except Exception as raised:
                    error = raised
            # Here, before the gradients of before come back, and out of sight of what watched the run.
            norms, missing, finite = self._gradients(scale) if backward else ({}, (), True)
            if after is not None and error is None:
                after()
        seconds = time.perf_counter() - start
        self.fastest = min(self.fastest, seconds if error is None else math.inf)
        return Outcome(loss_value, error, norms, missing, finite, seconds, last)

    def _accumulated(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if self._ranks is None else self._ranks.accumulate(last)

    def _seed(self, loss: Tensor) -> Tensor | None:
        """What backward starts from: as in the step itself, where all ranks run it."""
        if self._ranks is None or not self._ranks.several or self._buffers is None:
            return None
        return self._ranks.seed(loss, self._buffers.look())

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
        groups: dict[Any, list[int]] = {}
        for i, (_, g) in enumerate(present):
            groups.setdefault((g.device, g.dtype), []).append(i)
        norms, finite = [0.0] * len(present), True
        for (_, dtype), places in groups.items():
            gradients = [present[i][1] for i in places]
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            found = torch.stack(torch._foreach_norm(gradients, 2, dtype=wide)).double() / scale
            if not bool(torch.isfinite(found).all()):  # the squares of finite numbers may overflow
                largest = torch.stack(
                    torch._foreach_norm([g for g in gradients if g.numel()] or gradients, torch.inf, dtype=wide)
                )
                finite = finite and bool(torch.isfinite(largest).all())
            for i, norm in zip(places, found.tolist(), strict=True):
                norms[i] = norm
        names = [name for name, _ in present]
        return dict(zip(names, norms, strict=True)), missing, finite

    def _parts(self, batches: Sequence[Any] | None) -> tuple[Any, ...]:
        parts = self.batches if batches is None else tuple(batches)
        return tuple(map_tensors(part, _copy) for part in parts) if self._own_batches else parts

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Afterwards all is as before: gradients, buffers, parameters that the forward writes, attributes of modules, random
        numbers, gradients of the batch."""
        others = [p for module in self._beside for p in module._parameters.values() if p is not None]
        everything = list({id(p): p for p in (*self.model.parameters(), *self.parameters.values(), *others)}.values())
        buffers = [(b, b.detach().clone()) for module in self._beside for b in module._buffers.values() if b is not None]
        leaves = [t for batch in self.batches for _, t in tensors_in(batch)]
        holders: list[Tensor] = [*everything, *(t for t in leaves if t.requires_grad and t.is_leaf)]
        gradients = [(t, t.grad) for t in holders]
        for p in everything:
            p.grad = None
        versions = _versions(leaves)
        written = [(p, p._version, p.detach().clone()) for p in self._written]
        owners = (*self.modules, *self._beside, *self._callables)
        attributes = [(owner, saved_attributes(owner)) for owner in owners]
        random_now = RandomState.now(self.devices)
        keeper = self._buffers or BufferKeeper(self.model)
        keeper.begin()
        try:
            yield
        finally:
            for owner, saved in attributes:
                restore_attributes(owner, saved)
            for buffer in self.model.buffers():
                if buffer.grad_fn is not None:
                    buffer.detach_()
            keeper.restore()
            if self._ranks is not None:
                self._ranks.forget_gradients()
            if self._buffers is None:
                keeper.close()
            with torch.no_grad():
                for parameter, version, value in written:
                    if parameter._version != version:
                        parameter.copy_(value)
                for buffer, value in buffers:
                    buffer.copy_(value)
            for leaf, gradient in gradients:
                leaf.grad = gradient
            self._own_batches = self._own_batches or versions != _versions(leaves)
            random_now.restore()


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if t.is_inference() else t._version for t in tensors]


def _copy(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def _dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    if type(gradient) is Tensor and gradient.layout is torch.strided and not gradient.is_complex():
        return gradient.detach()
    gradient = local(gradient.detach())
    gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def eager() -> AbstractContextManager[Any]:
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


class ActivationGradients:
    """While open, notes for every module's output whether its gradient is bad: a bool a tensor, of this rank alone. Sharded
    parameters show reduced gradients only, so this is what names the rank there. Costs a pass a tensor: for replays."""

    def __init__(self) -> None:
        self.flags: list[Tensor] = []
        self._handle: Any = None

    def _look(self, gradient: Tensor) -> None:
        self.flags.append(~torch.isfinite(gradient).all())

    def _on_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._look)

    def __enter__(self) -> ActivationGradients:
        self._handle = register_module_forward_hook(self._on_forward)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()
