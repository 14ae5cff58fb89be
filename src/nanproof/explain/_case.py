"""Case: everything that is known, or can be found out, about one thing that went wrong. Causes are matched against it.

What costs a replay is a cached property: it is paid when the first cause asks, and once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from nanproof._records import StepRecord
from nanproof.core.judge._parameters import clean_name, is_dtensor, local, unwrap
from nanproof.core.support._inner import bounds, nonfinite
from nanproof.core.support._members import BadSetting, bad_settings, groups_of, states_of
from nanproof.core.support._tree import map_tensors, positions, tensors_in
from nanproof.explain.locate._calls import Survey
from nanproof.explain.locate._locate import Birth, batch_shape, locate, survey, where_in_batch
from nanproof.explain.locate._trace import Trace
from nanproof.explain.locate._writes import Write, write_into_batch
from nanproof.explain.replay._interventions import Intervention
from nanproof.explain.replay._recorder import Moment
from nanproof.explain.replay._rehearse import Allowance, rehearse
from nanproof.explain.replay._replay import Outcome, Replay


@dataclass(frozen=True, slots=True)
class BadTensor:
    """A tensor of the batch that is non-finite."""

    name: str
    count: int
    first: tuple[int, ...]
    value: float
    samples: tuple[int, ...]
    only_negative: bool
    """Nothing but -inf: perhaps a mask, on purpose."""


@dataclass(frozen=True, slots=True)
class BadWeight:
    """A parameter or buffer that is non-finite."""

    name: str
    tensor: Tensor
    count: int
    rows: tuple[int, ...]
    whole_rows: bool
    module: nn.Module


def bad_in_batch(batch: Any, named: Iterable[tuple[str, Tensor]]) -> list[BadTensor]:
    samples, length = batch_shape(batch)
    items = positions(batch)
    found = []
    for name, tensor in named:
        if (
            not tensor.is_floating_point()
            or tensor.numel() == 0
            or tensor.layout is not torch.strided
            or tensor.element_size() < 2  # torch cannot tell whether an fp8 is finite
        ):
            continue
        bad = ~torch.isfinite(tensor)
        count = int(bad.sum())
        if not count:
            continue
        first = tuple(int(i) for i in torch.nonzero(bad)[0])
        hit = where_in_batch(bad, samples, length)[0] if tensor.dim() and samples else ()
        if tensor.dim() and tensor.shape[0] not in (samples, length) and tensor.shape[0] // max(samples, 1) not in (length, None):
            hit = ()  # rows of something else
        hit = (items[id(tensor)],) if id(tensor) in items else hit
        negative = bool((tensor[bad] == -torch.inf).all())
        found.append(BadTensor(name, count, first, float(tensor[first].detach()), hit, negative))
    return found


def refused(kind: str) -> bool:
    """Whether an incident of this kind is a step in which something was NaN or Inf, or raised an exception."""
    return kind.startswith("nonfinite") or kind in ("gradient-norm-overflow", "exception", "generation", "loss-scale-collapse")


class Case:
    """One thing that went wrong."""

    def __init__(
        self,
        kind: str,
        *,
        model: nn.Module | None = None,
        batches: Sequence[Any] | None = None,
        replay: Replay | None = None,
        optimizer: Any = None,
        record: StepRecord | None = None,
        history: Sequence[StepRecord] = (),
        moments: Sequence[Moment] = (),
        error: BaseException | None = None,
        signal: str = "",
        max_norm: float | None = None,
        weights_broke: bool = False,
        bad_buffer: str = "",
        uncleared: bool = False,
        calls: Sequence[Any] = (),
        scheduler: Any = None,
        details: dict[str, Any] | None = None,
        healing: bool = False,
        rehearsing: float = math.inf,
    ) -> None:
        self.kind = kind
        self.model = model if model is not None else replay.model if replay is not None else None
        self.replay = replay
        self.batches = batches if batches is not None else replay.batches if replay is not None else ()
        self.optimizer = optimizer
        self.record = record
        self.history = history
        self.moments = moments
        """Steps whose batches are still at hand, oldest first."""
        self.error = error
        self.signal = signal
        """For something silent: what was noticed."""
        self.max_norm = max_norm
        self.weights_broke = weights_broke
        """Loss and gradients were fine; the optimizer's step made weights or moments non-finite."""
        self.bad_buffer = bad_buffer
        """The buffer that the forward made non-finite."""
        self.uncleared = uncleared
        """The gradients of the step before were still there when backward began."""
        self.calls = calls
        """What the model was called with, where the step cannot be run again: {"args": ..., "kwargs": ...} each, and "of"
        which model where there are several."""
        self.scheduler = scheduler
        self.details = details or {}
        self.healing = healing
        """The run may go on with the fix, so it is worth a few more runs to find a mild one."""
        self._allowance = Allowance(rehearsing)
        """Seconds in which training steps may be rehearsed, all trials together."""
        self.remedies: tuple[Prescription, ...] = ()
        """Left by `explain`: how the run could go on with the fix that held, mildest first."""

    @property
    def nonfinite(self) -> bool:
        """Something was NaN or Inf, or an exception was raised."""
        return refused(self.kind)

    @property
    def error_is_about_sampling(self) -> bool:
        """The exception came from a random draw over what the model gave: generation, or a policy's action."""
        text = str(self.error or "")
        return "probability tensor" in text or "multinomial" in text or "invalid multinomial" in text or "Categorical" in text

    # -- before the forward ----------------------------------------------------------------------------------------------------

    @cached_property
    def bad_batch(self) -> list[BadTensor]:
        return [bad for batch in self.batches for bad in bad_in_batch(batch, tensors_in(batch))]

    @cached_property
    def bad_inputs(self) -> list[BadTensor]:
        """Of the first call that was given any. What another model computed is left out: it is no data."""
        for number, call in enumerate(self.calls):
            named = [pair for key in ("args", "kwargs") for pair in tensors_in(call[key], key)]
            given = [(name, t) for name, t in named if t.grad_fn is None and t.layout is torch.strided and not is_dtensor(t)]
            if found := bad_in_batch(call, given):
                which = call.get("of") or (f"call {number}" if number else "")
                return [replace(bad, name=f"{bad.name} of {which}") for bad in found] if which else found
        return []

    @cached_property
    def bad_weights(self) -> list[BadWeight]:
        return [] if self.model is None else _bad_tensors(self.model, buffers=False)

    @cached_property
    def bad_buffers(self) -> list[BadWeight]:
        as_at_start = self.details.get("unchanged_bounds", ())
        return [] if self.model is None else [b for b in _bad_tensors(self.model, buffers=True) if b.name not in as_at_start]

    @property
    def written(self) -> bool:
        """Whether the step writes into its batch."""
        # Running it once shows whether it does.
        return bool(self.details.get("written")) or (self.control is not None and self.replay is not None and self.replay.writes)

    @property
    def spoilt(self) -> bool:
        """Whether what the batch held before the step is gone, because the step wrote into it."""
        if not self.written or self.replay is None:
            return False
        return bool(self.details.get("written")) or not any(getattr(b, "written", False) for b in self.replay.batches)

    @cached_property
    def write(self) -> Write | None:
        """The operation that writes into the batch."""
        return write_into_batch(self.replay) if self.replay is not None and self.written else None

    # -- the optimizer ---------------------------------------------------------------------------------------------------------

    @cached_property
    def bad_settings(self) -> list[BadSetting]:
        """Settings of the optimizer that are NaN or Inf."""
        return [] if self.optimizer is None else bad_settings(self.optimizer)

    @property
    def refused_for_settings(self) -> bool:
        """The step was refused before it was taken: with these settings no weight would have stayed finite."""
        return self.kind == "nonfinite-weight" and bool(self.bad_settings) and not (self.bad_weights or self.bad_buffer)

    @property
    def can_look_at_the_step(self) -> bool:
        """Weights and state are those from before the step."""
        return bool(self.details.get("put_back", True))

    @cached_property
    def bad_state(self) -> list[tuple[str, str]]:
        """(parameter, key) of the optimizer's state that is non-finite."""
        kept: dict[str, tuple[Tensor, str, Tensor]] = {}
        for p, state in states_of(self.optimizer) if self.optimizer is not None else ():
            for key, value in state.items() if isinstance(p, Tensor) and isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    kept[str(len(kept))] = p, key, value
        bad = nonfinite((place, value) for place, (_, _, value) in kept.items())
        return [(self.name_of(kept[place][0]), kept[place][1]) for place in bad]

    def name_of(self, parameter: Tensor) -> str:
        """The name of a parameter in the model; its place in the optimizer where the model does not have it."""
        named = unwrap(self.model).named_parameters() if self.model is not None else ()
        own = next((clean_name(name) for name, p in named if p is parameter), None)
        if own is not None:
            return own
        places = ((i, j, p) for i, g in enumerate(groups_of(self.optimizer)) for j, p in enumerate(g["params"]))
        return next((f"param_groups[{i}].params[{j}]" for i, j, p in places if p is parameter), "a parameter")

    # -- the run ---------------------------------------------------------------------------------------------------------------

    @property
    def last_taken(self) -> StepRecord | None:
        """The last step that was taken before this one, as far as is known."""
        return next((record for record in reversed(list(self.history)) if record.action != "skipped"), None)

    def bad_since_start(self, names: Iterable[str]) -> bool:
        """Whether what is non-finite was so before the first step: no step was taken since, or it was seen to be."""
        if self.details.get("mid_run"):
            return False
        return self.last_taken is None or (self.details.get("largest_at_start") is not None and self._bad_at_start(names))

    def could_be_uninitialised(self, names: Iterable[str]) -> bool:
        """Whether one of them was non-finite when the run began, or nobody knows."""
        return not self.details.get("mid_run") and (self.details.get("largest_at_start") is None or self._bad_at_start(names))

    def _bad_at_start(self, names: Iterable[str]) -> bool:
        largest = self.details["largest_at_start"]
        return any(not math.isfinite(largest.get(name, math.nan)) for name in names)

    # -- the replay ------------------------------------------------------------------------------------------------------------

    @cached_property
    def _surveyed(self) -> tuple[Survey, Outcome] | None:
        gradients_only = self.kind in ("nonfinite-gradient", "gradient-norm-overflow", "loss-scale-collapse")
        return None if self.replay is None else survey(self.replay, forward=not gradients_only)

    @property
    def look(self) -> Survey | None:
        return self._surveyed[0] if self._surveyed is not None else None

    @property
    def control(self) -> Outcome | None:
        """The step run again as it was."""
        return self._surveyed[1] if self._surveyed is not None else None

    @cached_property
    def birth(self) -> Birth | None:
        if self.replay is None or self.look is None or self.control is None or self.control.finite:
            return None
        if self.control.error is None and math.isfinite(self.control.loss) and self.control.gradients_finite:
            return None  # the norm alone overflows
        return locate(self.replay, self.look, self.control)

    @cached_property
    def trace(self) -> Trace | None:
        """Every operation of the step, forward and backward."""
        if self.replay is None:
            return None
        trace = Trace(self.replay.model, None)
        self.replay.run(trace.recording(), before_backward=trace.backward_begins)
        return trace

    @cached_property
    def forward_trace(self) -> Trace | None:
        """Every operation of the forward: half the time of a whole trace, which serves too where there is one."""
        if self.replay is None or "trace" in self.__dict__:
            return self.trace
        trace = Trace(self.replay.model, None)
        self.replay.run(trace.recording(), before_backward=trace.backward_begins, backward=False)
        return trace

    def cured_by(self, *changes: AbstractContextManager[Any], **kwargs: Any) -> Trial:
        """Run the replay with something changed: is it finite now?"""
        assert self.replay is not None
        if self.control is not None and self.control.finite:
            return Trial(False, "the step is finite as it is")
        outcome = self.replay.run(*changes, **kwargs)
        acted = [c.acted for c in changes if hasattr(c, "acted")]
        held = outcome.finite and (not acted or any(acted))
        if held and "batches" not in kwargs and self.cured_by_a_finite_batch:
            return Trial(False, f"{outcome}; but with the NaN of the batch replaced by 0 it is finite without this, too")
        return Trial(held, str(outcome), living(*changes) if held else ())

    @cached_property
    def cured_by_a_finite_batch(self) -> bool:
        """The control of every other fix: the batch holds NaN or Inf, and the step is finite without them."""
        if self.replay is None or not any(not bad.only_negative for bad in self.bad_batch):
            return False
        return self.replay.run(batches=self.batches_with(finite)).finite

    def rehearse(self, **how: Any) -> list[float] | None:
        """The losses of a few training steps over the recent batches, which are undone again. Raises `TakesTooLong` where that
        takes more time than there is."""
        assert self.replay is not None
        return rehearse(self.replay, self.optimizer, self.moments, allowance=self._allowance, **how)

    def cured_by_either(self, *sets: tuple[AbstractContextManager[Any], ...]) -> Trial:
        """Try one set of changes after the other, until one helps."""
        trial = Trial(False, "nothing to try")
        for changes in sets:
            trial = self.cured_by(*changes)
            if trial.held:
                break
        return trial

    def batches_with(self, change: Any) -> list[Any]:
        assert self.replay is not None
        return [map_tensors(batch, change) for batch in self.replay.batches]


@dataclass(frozen=True, slots=True)
class Prescription:
    """A fix that a run could go on with, as plain data: `nanproof.recover` knows how to apply it."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trial:
    """Whether a fix held on the replay, and what came out."""

    held: bool
    result: str
    remedies: tuple[Prescription, ...] = ()
    """How the run could go on with it, mildest first; none where that takes a person."""


def finite(x: Tensor) -> Tensor:
    """Return a tensor with 0 in the place of NaN and Inf."""
    plain = x.is_floating_point() and x.layout is torch.strided
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) if plain else x


def living(*changes: AbstractContextManager[Any]) -> tuple[Prescription, ...]:
    """These interventions open around every step; none if one of them is for replays only."""
    made = [(type(c).__name__.strip("_"), c.settings) for c in changes if isinstance(c, Intervention) and c.lived]
    if not made or len(made) != len(changes):
        return ()
    return (Prescription("interventions", {"changes": [{"name": name, **settings} for name, settings in made]}),)


def _bad_tensors(model: nn.Module, buffers: bool) -> list[BadWeight]:
    found = []
    inner = unwrap(model)
    own: dict[int, tuple[str, Tensor, nn.Module, Tensor]] = {}
    for path, module in inner.named_modules():
        for key, tensor in (module._buffers if buffers else module._parameters).items():
            if tensor is None or id(tensor) in own:
                continue
            value = local(tensor.detach())
            wide = value.element_size() > 1  # torch cannot tell whether an fp8 is finite
            if value.is_floating_point() and wide and value.numel() and value.layout is torch.strided and not value.is_meta:
                own[id(tensor)] = f"{path}.{key}" if path else key, tensor, module, value
    ends = bounds([value for *_, value in own.values()])
    for (name, tensor, module, value), (low, high) in zip(own.values(), ends, strict=True):
        if math.isfinite(low) and math.isfinite(high):
            continue
        if buffers and low == -math.inf and math.isfinite(high):
            continue  # a mask of -inf
        bad = ~torch.isfinite(value)
        if value.dim() >= 2:
            by_row = bad.reshape(len(value), -1)
            hit = by_row.any(1)
            rows = tuple(int(i) for i in torch.nonzero(hit).flatten()[:64])
            whole = bool(by_row[hit].all())
        else:
            rows, whole = (), False
        found.append(BadWeight(clean_name(name), tensor, int(bad.sum()), rows, whole, module))
    return found
