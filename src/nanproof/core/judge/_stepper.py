"""The device side of a step: from gradients to a verdict, through the optimizer, to the vector that
reports it.

Nothing here waits for the device on the device path. What the host makes of the report is the
guard's business.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from nanproof._errors import UsageError
from nanproof._policy import Policy
from nanproof._text import size
from nanproof._wording import listed
from nanproof.core._counters import Counters, counted
from nanproof.core._evidence import Gradients
from nanproof.core._telemetry import Courier
from nanproof.core.fast._captured import Body, Captures, CudaGraph
from nanproof.core.fast._kernels import Kernels
from nanproof.core.fast._scalars import Scalars
from nanproof.core.judge._copies import WeightKeeper, state_tensors
from nanproof.core.judge._judge import Judge, MaxNorm, Norms, Report
from nanproof.core.judge._keepers import BufferKeeper
from nanproof.core.judge._optimizers import (
    EVALUATES,
    CopyPath,
    DevicePath,
    HostPath,
    Path,
    Several,
    choose_path,
    divide,
    evaluates,
    holders_of,
    inside_of,
    may_evaluate,
    members_of,
    name_of,
)
from nanproof.core.judge._parameters import Parameters, Present, is_dtensor, is_plain, moved, picked
from nanproof.core.judge._scaling import LossScale
from nanproof.core.judge._stats import RunningStats
from nanproof.core.judge._structure import Structure
from nanproof.core.judge._terms import Terms, mean_of, terms_of, with_terms
from nanproof.core.judge._verdict import Learned, Reading, Verdict, judge
from nanproof.core.support._context import learning_rates, rehearsal
from nanproof.core.support._hooks import Hook
from nanproof.core.support._inner import is_opaque, nonfinite
from nanproof.core.support._members import Settings, bad_settings
from nanproof.core.support._ranks import Ranks

log = logging.getLogger("nanproof")

_data_ptr = Tensor.data_ptr
guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that have a guard: nobody else should put another one around them."""


IN_BACKWARD = "optimizers step inside backward"


@dataclass(slots=True)
class _Acts:
    """A verdict, and what the optimizers make of it."""

    verdict: Verdict
    divisors: list[Tensor | None]
    """What the gradients of each are divided by."""
    present: Present
    gradients: list[list[Tensor]]
    closure: Any
    limits: Mapping[Any, float | None] | None
    clipped: bool
    places: list[list[int]]
    """Which of the norms are whose."""
    refused: Tensor
    captured: bool = False
    """The optimizers have acted: it was all one graph."""
    reading: Reading | None = None
    """On the host path."""
    late: list[Callable[[], list[float]]] = field(default_factory=list)
    """Whether weights broke in an act that came after the verdict was sent."""
    sent: bool = False

    def after(self, reading: Reading) -> Reading:
        broke = not reading.refused and any(parcel()[0] for parcel in self.late)
        self.late.clear()
        return replace(reading, weights_bad=True) if broke else reading

    def on_host(self, i: int, member: Any) -> float:
        """What one optimizer's gradients are divided by."""
        assert self.reading is not None
        scale = self.reading.scale or 1.0
        if self.clipped:
            return scale
        if self.limits is None:
            return self.reading.clip * scale
        limit = self.limits.get(member)
        total = sum(self.reading.norms[k] ** 2 for k in self.places[i]) ** 0.5
        return scale if limit is None else scale * max((total + 1e-6) / limit, 1.0)


@dataclass(slots=True)
class _Given:
    """What a verdict depends on besides norms and loss."""

    max_norm: float | str | None
    limits: Mapping[Any, float | None] | None
    """Norms to clip each optimizer to."""
    bad_setting: Tensor | None
    latch: Tensor | None


class Stepper(Judge):
    """Judges the steps of an optimizer of torch, on the device where that is exact."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: MaxNorm,
        scaler: Any,
        policy: Policy,
        counters: list[Counters] | None = None,
    ) -> None:
        super().__init__(model, optimizer, max_norm, policy, counters)
        self.parameters = Parameters(model, optimizer)
        self._check_trainable()
        device, dtype = self.parameters.device, self.parameters.dtype
        self.ranks = Ranks(model, device)
        self.scale = LossScale(scaler, device) if scaler is not None and scaler.is_enabled() else None
        self.stats = RunningStats(device, dtype, policy.warmup_steps, policy.spike_sensitivity)
        self.courier = Courier(device)
        """How reports get to the host."""
        self._settings = Settings()
        self._latch = torch.zeros((), device=device)
        """1 after a bad step, until the host has dealt with it."""
        self._acting: Any = None
        """The optimizer whose step the guard is taking."""
        self._stepped: set[int] = set()
        """Optimizers that have stepped inside backward, since the last step."""
        self._inside: dict[int, Tensor] = {}
        """By parameter: norms of gradients that optimizers stepped on inside backward, since the last step."""
        self._modules_seen = False
        """Whether the modules were compared at the beginning of this step, and have not changed."""
        self._parted: _Acts | None = None
        """A verdict on which some of the optimizers may have yet to act."""
        self._unvetoed = ""
        """Why a step cannot be vetoed, where that showed only later."""
        self._choose_path()
        self.buffers = BufferKeeper(model, self.parameters.tensors, self.begin)
        self.structure = Structure(model, optimizer, self.parameters)
        self._watching = self._watch_steps()
        self._probes: deque[Tensor] = deque(maxlen=1024)
        self._probe_of: Tensor | None = None
        self._left: tuple[Any, int] | None = None
        """The watched gradient as the last step or backward left it, and how often it had been
        written."""
        self._by_step = False
        """It was a step that left it so."""
        guarded.update(member for member in members_of(optimizer) if isinstance(member, torch.optim.Optimizer))
        self._probe = self._watch_one_gradient()
        self._note_left()
        self._unreduced = self.ranks.unreduced(self.parameters)

    def _choose_path(self) -> None:
        aside = None if self._on_cpu else Kernels.aside
        if self._unvetoed:
            self._path: Path = CopyPath(self._unvetoed, clips=self._unvetoed != IN_BACKWARD)
        else:
            self._path = choose_path(self.model, self.optimizer, self.policy.switch_to_fused, aside)
        self._keep_copies()
        self.kernels: Kernels | Scalars | None = None
        """What makes a verdict faster than plain torch."""
        if self._on_cpu:
            self.kernels = Scalars()
        elif self.on_device:
            self.kernels = Kernels.available(self.parameters.device, self.parameters.dtype)
        self.captures = self._capturing()
        members = members_of(self.optimizer)
        families = [{id(p) for h in (m, *inside_of(m)) for g in h.param_groups for p in g["params"]} for m in members]
        self._owner = [next((i for i, f in enumerate(families) if id(p) in f), 0) for p in self.parameters.tensors]
        """Of each parameter, the place of the optimizer that steps on it."""
        self._shares: tuple[Present, list[list[int]]] | None = None

    def _capturing(self) -> Captures | None:
        """Graphs of the optimizer's part, where the policy asks for them."""
        if not self.policy.capture:
            return None
        device, paths = self.parameters.device, getattr(self._path, "paths", ())
        captures = Captures(lambda: CudaGraph(device))
        captures.why_not = self._uncapturable()
        for path in paths if not captures.why_not else ():
            path.captured = True
        return captures

    def _uncapturable(self) -> str:
        """Why the optimizer's part of a step cannot be one graph; empty where it can."""
        device, paths = self.parameters.device, getattr(self._path, "paths", ())
        if device.type != "cuda" or not all(is_plain(p) and p.device == device for p in self.parameters.tensors):
            return "weights are not whole tensors on one CUDA device"
        if not paths or not all(isinstance(path, DevicePath) for path in paths):
            return "the optimizer is not one of torch's fused ones"
        if self.scale is not None or self.weights is not None:
            return "a loss scale is used, or weights are looked at after each step"
        return "several ranks decide together" if self.ranks.several else ""

    def _watch_steps(self) -> list[Any]:
        watched = [holder for holder in holders_of(self.optimizer) if hasattr(holder, "_optimizer_step_pre_hooks")]
        hooks = [holder.register_step_pre_hook(Hook(self, self._before_a_step)) for holder in watched]
        for path in getattr(self._path, "paths", ()):
            if isinstance(path, DevicePath):
                path.own_hooks = {hook.id for hook in hooks}  # they look at steps that the guard does not take
        return hooks

    def _before_a_step(self, optimizer: Any, *_: Any) -> None:
        """An optimizer that steps inside backward cannot be vetoed: what it writes is copied first, and judged with the loss."""
        if self._acting is not None or torch._C._current_graph_task_id() == -1:
            return
        if rehearsal:  # a step that is only run again to look at it moves nothing: one without a gradient does not
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                p.grad = None
            return
        self._cannot_veto(IN_BACKWARD)
        self._stepped.add(id(optimizer))
        if self.weights is not None:
            self.weights.save()
        mine = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if mine:
            for p, norm in zip(mine, self.parameters.norms([p.grad for p in mine]).unbind(), strict=True):
                self._inside[id(p)] = torch.maximum(norm, self._inside.get(id(p), norm))

    def _cannot_veto(self, why: str) -> None:
        if not self._unvetoed and not isinstance(self._path, CopyPath):
            self._unvetoed = why
            for path in getattr(self._path, "paths", ()):
                if isinstance(path, DevicePath):
                    path.unswitch()
            self._path.close()
            self._choose_path()

    def begin(self) -> None:
        """With copies that must be there before anything can write."""
        self._modules_seen = not self.structure.has_other_modules
        if not self._modules_seen:
            self.buffers.follow(self.parameters.tensors)
        self.buffers.begin()
        if self._parted is not None:
            self._forget_copy()  # of a step that some of the optimizers have taken
        if self.weights is not None and (self.policy.copy is True or self._unvetoed == IN_BACKWARD):
            self.weights.save()

    def restore(self) -> None:
        super().restore()
        self._inside.clear()
        self._stepped.clear()
        if self.weights is not None:
            self.weights.put_back_now()

    def _keep_copies(self) -> None:
        must = isinstance(self._path, CopyPath)
        self.weights = WeightKeeper.of(self.parameters, self.optimizer, self.on_device, must, self.policy, self.ranks)

    @property
    def _on_cpu(self) -> bool:
        return self.parameters.device.type == "cpu"

    @property
    def path(self) -> str:
        said = self._path.description
        if self.weights is not None and self.weights.restore and (isinstance(self._path, CopyPath) or self.policy.copy is True):
            said += f"; {size(self.weights.bytes)} are copied before each step"
        if self.captures is not None:
            said += f"; {self.captures.description}"
        opaque = self._opaque()
        return f"{said}; not looked into, copied whole: {listed(opaque)}" if opaque else said

    def _opaque(self) -> list[str]:
        """Kinds of tensors that do not say what they are made of."""
        tensors = (t for _, t in state_tensors(self.model, self.parameters, self.optimizer))
        return sorted({type(t).__name__ for t in tensors if is_opaque(t)})

    @property
    def path_note(self) -> str:
        return self._path.note

    @property
    def on_device(self) -> bool:
        return self._path.on_device

    @property
    def lag(self) -> int:
        """None where the host reads the verdict anyway."""
        if not self.on_device:
            return 0
        default = 2 if self.parameters.device.type == "cuda" else 0
        return default if self.policy.lag is None else self.policy.lag

    def backward(self, loss: Tensor, scaled: bool = True) -> None:
        self._notice_cleared_gradients()
        loss = loss.reshape(())
        noted = loss.detach(), terms_of(loss)
        seed = self._seed(loss)
        if self.scale is not None and scaled:
            scale = self.scale.value().to(loss.device, non_blocking=True)
            seed = scale if seed is None else seed * scale
            loss = loss.float()
        loss.backward(gradient=seed)
        self.noted.append(noted)

    def note_loss(self, loss: Tensor) -> Tensor | None:
        self._notice_cleared_gradients()
        super().note_loss(loss)
        return self._seed(loss)

    @property
    def backwards(self) -> int:
        """Backwards that reached the watched gradient since the last step."""
        return len(self._probes)

    def only_backwards(self, count: int) -> None:
        """Later backwards were none of the loop's."""
        while len(self._probes) > count:
            self._probes.pop()

    def _seed(self, loss: Tensor) -> Tensor | None:
        return self.ranks.seed(loss, self.buffers.look()) if self.ranks.several else None

    def forget(self) -> None:
        self.forget_losses()
        self.optimizer.zero_grad()

    def norms(self) -> Norms:
        """Read the norms of the gradients now, for a loop that asks for them before its step."""
        found, gradients = self.parameters.present_gradients()
        return Norms.of(self.parameters.norms(gradients, self.kernels, found), gradients)

    def unscaled(self, norm: Tensor) -> Tensor:
        """Return a norm without the loss scale."""
        return norm if self.scale is None else norm / self.scale.value()

    def step(
        self,
        loss: Tensor | None,
        again: bool,
        norms: Norms | None = None,
        acting: Sequence[Any] | None = None,
        closure: Any = None,
    ) -> Report:
        """A bad step that can be run again latches, and whether an overflow is the loss scale's
        fault can wait for a replay."""
        parameters = self.parameters
        self._notice_cleared_gradients()
        noted, self.noted = self.noted, []
        losses, terms = [own for own, _ in noted], [found for _, found in noted]
        if loss is not None and not any(terms):
            terms = [terms_of(loss)]
        probes = list(self._probes)
        self._probes.clear()
        found, gradients = parameters.present_gradients()
        present = found.indices
        if not present and not again and not parameters.foreign and not self._inside and self.policy.copy is not True:
            raise UsageError(
                "guard.step(): no parameter of the optimizer has a gradient; call backward before it, and zero_grad only after. "
                "An optimizer that moves weights inside backward by itself needs Policy(copy=True)"
            )
        if self.scale is not None and not losses and self.scale.untouched:
            raise UsageError(
                "guard.step(): Guard(scaler=...) was given but the loss was not scaled: call guard.backward(loss), or "
                "scaler.scale(loss).backward()"
            )
        if self.scale is not None and torch.float16 in found.dtypes:
            # What GradScaler.unscale_ says; going on would train fp16 weights without a master copy.
            raise ValueError("Attempting to unscale FP16 gradients.")
        inside, self._inside = self._inside, {}
        stepped, self._stepped = self._stepped, set()
        # The optimizers have acted already.
        acted = bool(inside) or (not present and self.policy.copy is True)
        if inside:
            present, gradients = [i for i, p in enumerate(parameters.tensors) if id(p) in inside], []
        lr = learning_rates(self.optimizer)
        has_bad, tensors = self._settings.look(self.optimizer)
        settings = tuple(map(str, bad_settings(self.optimizer))) if has_bad else ()
        latching = again and self.lag > 0
        summed = self._sum(losses)
        own = self._scalar(loss) if loss is not None else summed
        assert own is not None
        known = norms if norms is not None and norms.hold_for(gradients) else None
        clipped = bool(inside) or (known is not None and known.clipped) or not self._path.clips
        limits = self.max_norm if isinstance(self.max_norm, Mapping) and not clipped else None
        max_norm = None if clipped or isinstance(self.max_norm, Mapping) else self.max_norm
        if known is not None and clipped:
            max_norm = known.max_norm
        also = summed if loss is not None and len(losses) > 1 else None
        bad_buffer = self.buffers.look()
        if bad_buffer is not None:
            bad_buffer = moved(bad_buffer, parameters.device)
        bad_setting = self._bad_setting(settings, tensors) if settings or tensors else None
        given = _Given(max_norm, limits, bad_setting, self._latch if latching else None)
        seen = own, also, bad_buffer
        verdict = None
        if known is None and not inside and acting is None and closure is None:
            verdict = self._replayed(found, gradients, given, seen)
        captured = verdict is not None
        if verdict is None:
            if inside:
                values = torch.stack([inside[id(parameters.tensors[i])].to(parameters.device, parameters.dtype) for i in present])
            else:
                values = parameters.norms(gradients, self.kernels, found) if known is None else known.values
            if self._unreduced:
                values = self.ranks.share_norms(values, present, self._unreduced)
            verdict = self._judged(values, given, *seen)
        members = members_of(self.optimizer)
        places = self._places(found) if gradients or limits is not None else [[] for _ in members]
        divisors = [verdict.divisor] * len(members)
        if clipped:
            divisors = [None if self.scale is None else self.scale.value().float()] * len(members)
        elif limits is not None:
            divisors = self._own_divisors(limits, verdict, places)
        shared = [picked(gradients, own) for own in places] if len(members) > 1 else [gradients]
        acts = _Acts(verdict, divisors, found, shared, closure, limits, clipped, places, verdict.skip > 0, captured)
        if self._parted is not None:
            self._forget_copy()  # of a step whose other optimizers never acted
        self._parted = acts if acting is not None else None
        if acted:  # the others may be containers, whose step is part of the loop
            acting = [member for member in members if stepped and id(member) not in stepped]
        read = self._apply(acts, acting, mean_of(terms))
        if closure is not None or not self._path.clips:
            self.forget_losses()  # of evaluations inside the step
            if closure is not None and closure.again:
                self._cannot_veto(f"{name_of(self.optimizer)} {EVALUATES}")
        self.buffers.settle(acts.refused)
        if verdict.learned is not None:
            self._learn(verdict.learned, acts.refused, again, given.latch)
        self._note_left()
        total = verdict.packed[Verdict.TOTAL]
        if captured:
            total = total.clone()  # the next replay writes there
        return Report(own, total, losses, probes, parameters.names, present, lr, read, terms, settings)

    def _judged(self, values: Tensor, given: _Given, own: Tensor, also: Tensor | None, bad_buffer: Tensor | None) -> Verdict:
        """The verdict on gradients with these norms. `own`: the loss. `also`: what else must be finite."""
        alone, skip_spikes = not self.ranks.several, self.policy.on_spike == "skip"
        plain = self.scale is None and self.weights is None and given.bad_setting is None and given.limits is None
        if self.kernels is not None and plain:
            return self.kernels.judge(own, values, also, bad_buffer, alone, given.max_norm, self.stats, skip_spikes, given.latch)
        return judge(
            own,
            values,
            also_finite=also,
            bad_buffer=bad_buffer,
            loss_decides=alone,
            scale=None if self.scale is None else self.scale.value(),
            max_norm=given.max_norm,
            stats=self.stats,
            skip_spikes=skip_spikes,
            held=None if given.latch is None else given.latch > 0,
            bad_setting=given.bad_setting,
        )

    def _replayed(
        self, found: Present, gradients: list[Tensor], given: _Given, seen: tuple[Tensor, Tensor | None, Tensor | None]
    ) -> Verdict | None:
        """Judge and step by replaying a graph. None where that is not wanted, or not possible in this step."""
        captures, paths = self.captures, getattr(self._path, "paths", ())
        if captures is None or given.bad_setting is not None or given.limits is not None or captures.why_not:
            return None
        shares = [picked(gradients, own) for own in self._places(found)] if len(paths) > 1 else [gradients]
        steps = [path.fused(found) for path, mine in zip(paths, shares, strict=True) if mine]
        settings = [None if step is None else step.ready() for step in steps]
        if None in settings:
            return None
        acts = [*zip(steps, settings, [mine for mine in shares if mine], strict=True)]
        fixed = [tuple((k, v) for k, v in each.items() if k != "lr") for found_ in settings for each in found_ or ()]
        places = [address for step in steps if step is not None for address in step.addresses()]
        key = (
            found.number,
            *(step.number for step in steps if step is not None),
            *map(_data_ptr, gradients),
            *places,
            *fixed,
            given.max_norm,
            given.latch is None,
        )

        def prepare() -> tuple[Body, object]:
            kernels = self.kernels.over(gradients, self.parameters, found) if isinstance(self.kernels, Kernels) else None

            def body(inputs: Sequence[Tensor | None]) -> Verdict:
                own, also, bad_buffer = inputs
                assert own is not None
                verdict = self._judged(self.parameters.norms(gradients, kernels, found), given, own, also, bad_buffer)
                if verdict.learned is not None:
                    self._learn(verdict.learned, verdict.skip > 0, True, given.latch)
                for step, each, mine in acts:
                    step.call(each, verdict.skip, verdict.divisor, mine)
                return replace(verdict, learned=None)

            return body, kernels

        verdict = captures.take((*key, *(x is None for x in seen)), seen, prepare)
        for step in steps if verdict is not None else ():
            step.taken()
        return verdict

    def _places(self, present: Present) -> list[list[int]]:
        """Which of the gradients are whose, of several optimizers."""
        if self._shares is None or self._shares[0] is not present:
            places: list[list[int]] = [[] for _ in members_of(self.optimizer)]
            for k, i in enumerate(present.indices):
                places[self._owner[i]].append(k)
            self._shares = present, places
        return self._shares[1]

    def act(self, member: Any) -> None:
        """On the verdict that is already there. If it breaks a weight, the optimizers that have acted are put back too."""
        acts, i = self._parted, members_of(self.optimizer).index(member)
        assert acts is not None
        self._let(i, member, acts)
        self._look(acts)

    def _bad_setting(self, settings: tuple[str, ...], tensors: list[Tensor]) -> Tensor:
        """Whether a setting is non-finite, on the device."""
        device = self.parameters.device
        if settings:
            return torch.ones((), dtype=torch.bool, device=device)
        vectors = [moved(t.detach(), device, torch.float32).reshape(-1) for t in tensors]
        return ~torch.isfinite(torch.cat(vectors)).all()

    def _own_divisors(self, limits: Mapping[Any, float | None], verdict: Verdict, places: list[list[int]]) -> list[Tensor | None]:
        """What each optimizer's gradients are divided by, where each is clipped to a norm of its own. The record has the
        largest."""
        norms, clips = verdict.packed[Verdict.HEAD :], []
        for member, own in zip(members_of(self.optimizer), places, strict=True):
            limit = limits.get(member)
            total = torch.linalg.vector_norm(norms[own])
            clips.append(torch.ones_like(total) if limit is None else ((total + 1e-6) / limit).clamp(min=1))
        verdict.packed[Verdict.CLIP] = torch.stack(clips).max()
        return [clip.float() if self.scale is None else (clip * self.scale.value()).float() for clip in clips]

    def _apply(self, acts: _Acts, acting: Sequence[Any] | None, terms: Terms | None) -> Callable[[], Reading]:
        """Let the optimizers act. Returns how to read the verdict later. The terms of the loss, and what the loop counts, travel
        with it."""
        counts = counted(self.counters, self.parameters.device) if self.counters else None
        names = [() if found is None else found.names for found in (terms, counts)]
        packed, scaled = acts.verdict.packed, self.scale is not None
        if isinstance(self._path, HostPath):
            acts.reading = Reading.of(with_terms(packed, terms, counts).tolist(), scaled, *names)
            may_act = not acts.reading.bad and acting is None and isinstance(self._path, CopyPath)
            if may_act and self.weights is not None and (broken := self.weights.broken()):  # LBFGS would go around it silently
                acts.reading, acts.refused = replace(acts.reading, bad=True), acts.refused | broken
        for i, member in enumerate(() if acts.captured else members_of(self.optimizer)):
            if acting is None or any(member is each for each in acting):
                self._let(i, member, acts)
        self._look(acts)
        if self._parted is None:
            self._forget_copy()
        if acts.reading is not None:
            return lambda: acts.reading  # type: ignore[return-value]
        acts.sent = True
        parcel = self.courier.send(with_terms(packed, terms, counts))
        return lambda: acts.after(Reading.of(parcel(), scaled, *names))

    def _let(self, i: int, member: Any, acts: _Acts) -> None:
        """Let one optimizer act on the verdict."""
        if acts.reading is not None and acts.reading.refused:
            return
        if self.weights is not None:
            self.weights.save()
        before, self._acting = self._acting, member
        try:
            if acts.reading is not None:
                divide(acts.gradients[i], acts.on_host(i, member))
                self._step(member, acts)
            elif not isinstance(self._path, HostPath) and acts.gradients[i]:
                skip = acts.refused.float() if acts.sent else acts.verdict.skip
                self._path.paths[i].step(skip, acts.divisors[i], acts.gradients[i], acts.present)
        finally:
            self._acting = before

    def _step(self, member: Any, acts: _Acts) -> None:
        """The optimizer's own step, on the host path. One that is not known to want a closure is given one only if it will not
        step without. If it raises because what it holds is non-finite already, the step counts as refused for that."""
        closure = acts.closure
        versions = [p._version for p in self.parameters.tensors] if closure is not None else []
        try:
            if closure is None or not evaluates(member):
                try:
                    member.step()
                except Exception:
                    if closure is None or not may_evaluate(member) or versions != [p._version for p in self.parameters.tensors]:
                        raise
                    member.step(closure)
            else:
                member.step(closure)
        except Exception as error:
            assert acts.reading is not None
            if not self.broken_state():
                raise
            log.warning("nanproof: %s.step() raised %s: %s", type(member).__name__, type(error).__name__, error)
            acts.reading, acts.refused = replace(acts.reading, bad=True), torch.ones_like(acts.refused)

    def _look(self, acts: _Acts) -> None:
        """After an optimizer acted: look at what it made of the weights, and put them back where they broke."""
        keeper = self.weights
        if keeper is None:
            return
        if acts.reading is not None:
            if acts.reading.bad:
                keeper.put_back_now()  # what was written before the step: inside backward
            elif not acts.reading.weights_bad and (broken := keeper.broken()):
                keeper.put_back_now()
                acts.reading = replace(acts.reading, weights_bad=True)
                acts.refused = acts.refused | broken
            return
        broken = keeper.broken() & ~acts.refused
        keeper.put_back(broken)
        acts.refused = acts.refused | broken
        if acts.sent:
            acts.late.append(self.courier.send(broken.float().reshape(1)))
        else:
            place = acts.verdict.packed[Verdict.OPTIMIZER]
            acts.verdict.packed[Verdict.OPTIMIZER] = torch.where(broken, float(Verdict.WEIGHTS_BAD), place)

    def _forget_copy(self) -> None:
        if self.weights is not None:
            self.weights.forget()

    def _learn(self, learned: Learned, refused: Tensor, again: bool, latch: Tensor | None) -> None:
        self.stats.take(learned.point, learned.loss, learned.spike, ~refused)
        if self.scale is not None:
            # Whether an overflow is the scale's fault shows in a replay; without one it is taken to be.
            overflow = torch.zeros_like(learned.overflow) if again else learned.overflow & refused
            self.scale.update(overflow, frozen=refused & ~overflow)
        if latch is not None:
            latch.copy_(torch.maximum(latch, refused.to(latch.dtype)))

    def release(self) -> None:
        self._latch.zero_()

    def look_at_gradients(self, present: Sequence[int]) -> Gradients:
        names, tensors = self.parameters.names, self.parameters.tensors
        there = [(names[i], g) for i in present if (g := tensors[i].grad) is not None]
        norms = self.parameters.norms([g for _, g in there], None).tolist()
        said = self.ranks.gather([bool(nonfinite(there))])
        return Gradients(
            [(name, norm) for (name, _), norm in zip(there, norms, strict=True)], not any(s[0] for s in said.values())
        )

    def broken_state(self) -> list[str]:
        return nonfinite(state_tensors(self.model, self.parameters, self.optimizer)) + self.buffers.broken()

    def close(self) -> None:
        if self._probe is not None:
            self._probe.remove()
        for hook in self._watching:
            hook.remove()
        super().close()
        self._path.close()
        if self.captures is not None:
            self.captures.close()

    @property
    def outdated(self) -> bool:
        if self._modules_seen:
            self._modules_seen = False
            return self.structure.trains_others
        return self.structure.changed

    def follow(self) -> str:
        if isinstance(self.optimizer, Several):
            self.optimizer.reopen()
        before, was = self.structure, (self.parameters.device, self.parameters.dtype)
        self.parameters = Parameters(self.model, self.optimizer)
        self._check_trainable()
        if (self.parameters.device, self.parameters.dtype) != was:
            self._move()
        self._path.close()
        self._choose_path()
        self._unreduced = self.ranks.unreduced(self.parameters)
        self.buffers.follow(self.parameters.tensors)
        for hook in (*self._watching, *([] if self._probe is None else [self._probe])):
            hook.remove()
        self._watching, self._probe = self._watch_steps(), self._watch_one_gradient()
        guarded.update(member for member in members_of(self.optimizer) if isinstance(member, torch.optim.Optimizer))
        self.structure = Structure(self.model, self.optimizer, self.parameters)
        return self.structure.since(before)

    def _move(self) -> None:
        """Weights are on another device, or wider: so are verdicts."""
        device, dtype = self.parameters.device, self.parameters.dtype
        stats = RunningStats(device, dtype, self.policy.warmup_steps, self.policy.spike_sensitivity)
        stats.load_state_dict(self.stats.state_dict())
        self.stats, self.courier, self._latch = stats, Courier(device), torch.zeros((), device=device)
        self.ranks = Ranks(self.model, device)

    def _check_trainable(self) -> None:
        if not any(p.requires_grad for p in self.parameters.tensors):
            raise UsageError(
                "Guard: the optimizer has no trainable parameter; set requires_grad on those to train, then build the optimizer"
            )

    def _notice_cleared_gradients(self) -> None:
        """The loop gave up the micro-batches so far (zero_grad after a backward): what was noted of
        them goes too."""
        if self._probes and self._probe_of is not None and self._probe_of.grad is None:
            self.noted = []
            self._probes.clear()

    def forget_losses(self) -> None:
        self.noted = []
        self._probes.clear()

    def forget_probes(self) -> None:
        self._probes.clear()

    def _note_left(self) -> None:
        gradient = None if self._probe_of is None else self._probe_of.grad
        self._left = None if gradient is None else (weakref.ref(gradient), gradient._version)
        self._by_step = True

    def _note_added(self, gradient: Tensor) -> None:
        """A backward reached the watched gradient. Clearing makes a new tensor, or writes zeros:
        one more version than adding to it. It may come after a backward too: that of a generator
        adds to gradients that its discriminator clears later."""
        if rehearsal:
            return
        left, version = self._left if self._left is not None else (None, 0)
        added = left is not None and left() is gradient and gradient._version == version + 1
        self.uncleared = added and (self._by_step or self.uncleared)
        self._left, self._by_step = (weakref.ref(gradient), gradient._version), False

    def _watch_one_gradient(self) -> Any:
        """A scalar a backward from one early, small parameter, before any reduction over ranks: bad
        gradients flow back to it from almost everywhere, so it names the micro-batch and the
        rank."""
        trainable = [p for p in self.parameters.tensors if p.requires_grad and not is_dtensor(p)]
        if not trainable:
            return None
        chosen = next((p for p in trainable if p.numel() <= 1 << 16), trainable[0])
        self._probe_of = chosen

        probes = self._probes  # not self: the hook would keep everything alive as long as the parameter
        stepper = weakref.ref(self)

        def look(p: Tensor) -> None:
            if p.grad is not None and p.grad.layout is torch.strided:
                probes.append(torch.linalg.vector_norm(p.grad.detach()))
                owner = stepper()
                if owner is not None:
                    owner._note_added(p.grad)

        return chosen.register_post_accumulate_grad_hook(look)

    def _sum(self, losses: list[Tensor]) -> Tensor | None:
        total = None
        for loss in losses:
            total = self._scalar(loss) if total is None else total + self._scalar(loss)
        return total

    def _scalar(self, loss: Tensor) -> Tensor:
        if loss.dtype is self.parameters.dtype and not loss.dim() and loss.device == self.parameters.device:
            return loss.detach()
        return moved(loss.detach().reshape(()), self.parameters.device, self.parameters.dtype)
