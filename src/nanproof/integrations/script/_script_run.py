"""ScriptRun: the face of the engine for the optimizers of a script that one loss feeds. The script
knows nothing of nanproof.

They are guarded from the first backward that reaches them.

Until then there may be no model yet. What cannot be guarded is left alone, with one line that says
why: nanproof is never the reason a script fails.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from operator import attrgetter, is_
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nanproof._errors import NanproofError
from nanproof._records import Forecast, Incident
from nanproof.core._engine import Engine
from nanproof.core._under_way import UNKNOWN
from nanproof.core.judge._judge import Norms
from nanproof.core.judge._parameters import Parameters, is_compiled, is_dtensor, local, unwrap
from nanproof.core.judge._stepper import Stepper, guarded
from nanproof.core.support._context import RandomState
from nanproof.core.support._hooks import Hook
from nanproof.core.support._tree import gradients_now
from nanproof.explain.lines._recorded import NUMERICAL, OUTSIDE, RECORDED, RootRecorder
from nanproof.integrations._groups import Group, gradients_of, name_of, parameters_of, referents
from nanproof.integrations._protected import ProtectedRun
from nanproof.integrations.script._first_calls import FirstCalls
from nanproof.integrations.script._owners import called, model_of, owning
from nanproof.integrations.script._session import Session

_NUMBERS = itertools.count()
version_of = attrgetter("_version")


@dataclass(slots=True)
class Tally:
    """What is told at the end. It outlives the optimizer."""

    name: str
    model: str = ""
    """Class of the model that it trains; of several, all of them."""
    path: str = "never stepped"
    verdicts: str = ""
    """Where verdicts are read, in words."""
    guarded: bool = False
    calls: int = 0
    """Of `optimizer.step()` that were judged."""
    steps: int = 0
    newest: int | None = None
    """The newest step on record: where verdicts come late, not the last one."""
    refused: int = 0
    overflows: int = 0
    """Steps that a GradScaler left out while it looked for its scale."""
    incidents: list[Incident] = field(default_factory=list)
    forecasts: list[Forecast] = field(default_factory=list)
    run_dir: Path | None = None
    own: float = 0.0
    """Seconds in nanproof's own code, on the host, from the end of the first step to that of the last, without `trouble` and
    without looking for the model."""
    trouble: float = 0.0
    """Seconds in which bad steps and suspicions were looked into."""
    first: float = 0.0
    last: float = 0.0
    """When the first step ended, before any trouble with it was looked into, and the last."""

    @property
    def title(self) -> str:
        return f"{self.name} of {self.model}" if self.model else self.name


class Clipped(NamedTuple):
    """A gradient that the script has clipped."""

    gradient: Tensor | None
    before: int
    """How often it had been written before clipping."""
    norm: Tensor
    """Its norm then."""
    after: int
    """How often it had been written after clipping."""


class ScriptRun(Group):
    """Optimizers of a script that step together: their run, and what is known since the last step."""

    def __init__(self, members: Iterable[Optimizer], session: Session, known: bool = False) -> None:
        """`known`: nanproof has guarded them already."""
        super().__init__(members)
        self.number = next(_NUMBERS)
        self.reached = 0
        """The last backward that reached its parameters, or came before a step of it."""
        self._session, self._known = session, known
        self.tally = Tally(name_of(self.members))
        self.guard: ProtectedRun | None = None
        self.changed = False
        """Whether the guard has still to follow a change of members."""
        self._recorder = RootRecorder([], self._begin)
        self._norms: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        """By parameter: its gradient, how often that had been written after clipping, and its norm
        before."""
        self._whole_norms: tuple[list[weakref.ref[Tensor]], list[int], Tensor] | None = None
        """The same of all gradients, where they were clipped together."""
        self._max_norm: float | None = None
        self._scaled: tuple[set[int], float] = set(), 1.0
        """Parameters whose gradients still have the loss scale in them, and the scale."""
        self._unclaimed: list[Tensor] = []
        self._left: list[tuple[int, int]] = []
        """The gradients as backward left them: which, and how often they had been written."""
        self._clean: bool | None = None
        """Clipping found them so; None before clipping."""
        self._partly = False
        """Whether some step ended before all members had acted."""
        self._busy = False
        self._trouble = self._starting = 0.0
        """Seconds since they were last taken out of nanproof's own time."""

    @property
    def started(self) -> bool:
        return self.guard is not None

    # -- beginning and end -----------------------------------------------------------------------------------------------------

    def can_start(self, at_step: bool) -> bool:
        """Whether there is something to guard. What cannot be guarded is left alone."""
        for optimizer in self.members:
            if not getattr(optimizer, "param_groups", None):
                return False
            if optimizer in guarded and not self._known:
                self.leave_alone("the script guards it itself")
        if self.left_alone:
            self._session.tallies.append(self.tally)
            return False
        if not at_step and any(is_dtensor(p) for p in self.parameters):
            return False  # during backward, modules under fully_shard hold other tensors
        return any(p.requires_grad for p in self.parameters)

    def start(self, run_dir: Path | None, loss: Tensor | None, seen: FirstCalls | None = None) -> None:
        """Look for the model and put the guard around it. `loss`: it is at a step already, and this
        was the last. `seen`: what the script has called so far."""
        options, members, parameters = self._session.options, self.members, self.parameters
        was_called = [] if seen is None else seen.modules
        model = model_of(members, was_called)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and not _together(model, parameters):
            self.leave_alone(
                "there are several ranks, and its model is neither in DistributedDataParallel nor in fully_shard, so it is not "
                "known whether all ranks would decide alike"
            )
            return
        policy, fused = options.policy, options.optimizer
        if fused == "own" or (fused == "auto" and all(p.device.type == "cpu" for p in parameters)):
            policy = replace(policy, switch_to_fused=False)
        places = {id(p): i for i, p in enumerate(parameters)}
        roots = sorted(called(model), key=lambda root: min(places.get(id(p), len(places)) for p in root.parameters()))
        # Where the script calls parts of the model by themselves, their calls are those of the model.
        parts = [] if any(root in was_called for root in roots) else owning(was_called, model, parameters)
        self.tally.name = name_of(members)
        self.tally.model = " and ".join(dict.fromkeys(type(unwrap(root)).__name__ for root in roots))
        loop = replace(RECORDED, why_not_again=_why_not_again(roots))
        guard = self.guard or ProtectedRun(policy=policy, run_dir=run_dir, observe=options.observe)
        guard.loop = loop
        self._stop_recording()
        # Not on a compiled model itself: hooks become part of what is compiled.
        self._recorder = RootRecorder([root for root in (parts or roots) if not is_compiled(root)], self._begin)
        try:
            guard.start(
                model,
                members if len(members) > 1 else members[0],
                loss_fn=self._recorder.loss_fn,
                max_norm=None,
                step=guard.next_step - guard.open,
            )
        except NanproofError as error:
            self.leave_alone(str(error))
            return
        self._unclaimed = [] if loss is None else [local(loss)]
        weakref.finalize(guard, guard.engine.tell.close)
        self.guard, self.tally.guarded = guard, True
        self.tally.path, self.tally.verdicts, self.tally.run_dir = guard.path, guard.verdicts, run_dir
        self.tally.incidents, self.tally.forecasts = guard.incidents, guard.forecasts
        if seen is not None and loss is None:
            self.adopt(seen)
        if guard.late:
            for root in roots:
                root.register_state_dict_pre_hook(Hook(self, self.settle))

    def adopt(self, seen: FirstCalls) -> None:
        """The step under way began before it was guarded."""
        if self.guard is not None and not self.guard.open:
            self._recorder.lines, random = seen.hand_over()
            self.guard.engine.begin(UNKNOWN, random=random)

    def raised(self, error: BaseException) -> None:
        """The script ends with an exception: an incident, where a step had begun."""
        guard = self.guard
        if guard is None or guard.engine.closed:
            return
        if not guard.open:
            if not (isinstance(error, NUMERICAL) and self._recorder.lines.runs(error)):
                return
            guard.engine.begin(UNKNOWN)
        with self._inside():
            guard.engine.raised(error, self._recorder.calls_now, self._recorder.source_of_error(error))
        self._note()

    def follow(self, loss: Tensor | None = None) -> None:
        """Guard the members that there are now. `loss`: they are at a step already, and this was
        the last."""
        if not self.changed or self.guard is None or self.left_alone:
            return
        self._end()
        self.changed = False
        began = time.perf_counter()
        with self._inside():
            self.start(self.tally.run_dir, loss)
        self._starting += time.perf_counter() - began

    def _inside(self) -> AbstractContextManager[None]:
        return self._session.inside(self.members)

    def leave_alone(self, why: str) -> None:
        self._stop_recording()
        self.left_alone, self.tally.guarded = True, False
        self.tally.path = f"not guarded: {why}"
        self._session.say_once(f"{self.tally.name} is not guarded: {why}")

    def close(self, error: BaseException | None) -> None:
        self._stop_recording()
        if self.guard is not None:
            self._end()
            self._note()
            alone = error is not None and not isinstance(error, SystemExit)
            ranks = self.guard.engine.judge.ranks
            gone = ranks.together and not dist.is_initialized()
            with self._inside():
                self.guard.close(alone=(alone or gone) and ranks.several)
            self._note()

    def _stop_recording(self) -> None:
        self._recorder.close()

    def settle(self, *_: Any) -> None:
        """Wait for the verdicts under way: the state is about to be saved."""
        if self.guard is not None and not self.guard.open and not self._busy:
            self._end()
            self._busy = True
            try:
                with self._inside():
                    self.guard.sync()
            finally:
                self._busy = False

    @property
    def _stepper(self) -> Stepper:
        assert self.guard is not None and self.guard.parts is not None
        return self.guard.parts.stepper

    # -- a step ----------------------------------------------------------------------------------------------------------------

    def _begin(self, call: Any) -> None:
        if self.guard is not None:
            self._end()
            engine = self.guard.engine
            self._recorder.random = RandomState.now(engine.under_way.devices) if engine.open else None
            engine.begin(call)

    def before_backward(self, loss: Tensor, alone: bool, backwards: int, frame: FrameType | None) -> Tensor | None:
        """Note the loss. Return the gradient that backward has to start from on several ranks.
        `backwards`: so far, this one included. `alone`: this is the only run. With another one and
        late verdicts, running the step again would add to gradients that belong to the other.
        `frame`: of whoever called backward."""
        guard = self.guard
        if guard is None:
            return None
        self._end()
        if self.under_way(backwards - 1):
            self._forget_clipping()  # it belonged to the last step
        recorder = self._recorder
        again = recorder.source_of(loss, frame=frame, late=guard.late)
        if not recorder.recognised or not guard.open:
            guard.engine.begin(UNKNOWN)
        elif guard.late and not alone:
            self._cannot_again(guard, "there are several optimizers, and verdicts come late, so the step cannot be run again")
        return guard.engine.loss(local(loss), recorder.calls, again)

    def after_backward(self, before: int, loss: Tensor, alone: bool, late: bool) -> None:
        """Where there are several optimizers, the loss is this one's if backward reached its
        parameters. `late`: it was not expected to, so nothing was noted before."""
        if self.guard is None or self.left_alone:
            return
        stepper = self._stepper
        if late:
            if stepper.backwards != before:
                self.guard.engine.begin(UNKNOWN)
                self.guard.engine.loss(local(loss))
            return
        if stepper.lag:
            self._left, self._clean = self._gradients_now(), None
        if stepper.backwards != before or self.feeds:
            self.guard.engine.note_gradients()
        if alone and self.feeds is not False:
            return
        if stepper.backwards == before and not self.feeds:
            self.guard.engine.drop_loss()
            self._unclaimed = [*self._unclaimed[-15:], local(loss.detach())]

    @property
    def backwards(self) -> int:
        """Since the last step."""
        return 0 if self.guard is None else self._stepper.backwards

    def pause(self) -> int:
        """Ignore what the guard of another optimizer runs again while that one takes its step. Return what
        `go_on` needs."""
        self._recorder.paused = True
        return self.backwards

    def go_on(self, backwards: int) -> None:
        self._recorder.paused = False
        if self.guard is not None:
            self._stepper.only_backwards(backwards)

    def before_clipping(self) -> list[tuple[int, int]]:
        """The gradients as clipping finds them, where that is of interest."""
        return self._gradients_now() if self.guard is not None and self.guard.late else []

    def clipped(self, norms: dict[int, Clipped], max_norm: float | None, before: list[tuple[int, int]]) -> None:
        """The script clipped, by parameter, and these were the gradients before. `max_norm`: what it clipped all of them to, if
        it was one norm over them."""
        if self.guard is not None and self.guard.late:
            self._clean = before == self._left
        mine = {id(p) for p in self.parameters if p.grad is not None}
        there = mine & norms.keys()
        if there:
            self._part_norms()
            whole = there == mine and not self._norms
            self._max_norm = max_norm if whole and len(norms) == len(mine) else None
            for key in there:
                gradient, written, norm, after = norms[key]
                earlier = self._norms.get(key)
                if earlier is not None and earlier[0]() is gradient and earlier[1] == written:
                    norm = earlier[2]  # clipped twice
                if gradient is not None:
                    self._norms[key] = weakref.ref(gradient), after, norm

    @property
    def unclipped(self) -> bool:
        """Whether nothing was clipped since the last step."""
        return not self._norms and self._whole_norms is None

    def clipped_whole(
        self, gradients: list[Tensor], versions: list[int], norms: Tensor, max_norm: float, before: list[tuple[int, int]]
    ) -> None:
        """The script clipped all of these gradients to one norm; `versions`: how often each had been written before."""
        if self.guard is not None and self.guard.late:
            self._clean = before == self._left
        self._whole_norms = list(map(weakref.ref, gradients)), list(map(version_of, gradients)), norms
        self._max_norm = max_norm

    def _part_norms(self) -> None:
        """Keep the norms of gradients that were clipped together by parameter: some are clipped once more."""
        whole, self._whole_norms = self._whole_norms, None
        if whole is not None:
            references, versions, norms = whole
            known = dict(zip(map(id, referents(references)), zip(references, versions, norms.unbind(), strict=True), strict=True))
            self._norms = {id(p): known[id(p.grad)] for p in self.parameters if p.grad is not None and id(p.grad) in known}

    def _forget_clipping(self) -> None:
        self._norms, self._whole_norms, self._max_norm = {}, None, None

    def take(self, member: Optimizer, backwards: int) -> None:
        """In place of the optimizer's step. `backwards`: so far."""
        guard = self.guard
        assert guard is not None
        self.tally.calls += 1
        self._busy = True
        try:
            if not (self.goes_on(member, backwards) and self._act(guard.engine, member)):
                self._judge(guard, member, backwards)
            if self.complete:
                self._busy = False
                self._end()
        finally:
            self._busy = False
            self._note()

    def _act(self, engine: Engine, member: Optimizer) -> bool:
        self._part_norms()
        return self.act(engine, member, self._norms)

    def mark(self) -> None:
        """The script is between two forwards, and may draw random numbers for the next."""
        if self.guard is not None:
            self._recorder.lines.mark(self.guard.engine.under_way.devices)

    def _judge(self, guard: ProtectedRun, member: Optimizer, backwards: int) -> None:
        """The first of the members steps."""
        self.follow(None if self._session.runs is None else self._session.runs.last_loss)
        stepper = self._stepper
        if not guard.open:
            self._end()
            guard.engine.begin(UNKNOWN)
        if not stepper.noted:
            if not self._unclaimed:
                self._session.say_once(f"no backward was seen before a step of {self.tally.name}: its loss is taken to be 0")
            for loss in self._unclaimed or [torch.zeros((), device=stepper.parameters.device)]:
                guard.engine.loss(loss)
        self._unclaimed = []
        norms = self._before_clipping(stepper.parameters.present())
        self._prepare_to_hold(guard, norms)
        self._forget_clipping()
        self.judge(guard.engine, member, backwards, norms)

    def timed(self, began: float, others: float) -> None:
        """After a step: what of its time was nanproof's."""
        tally, now, trouble = self.tally, time.perf_counter(), self._trouble
        own = now - began - others - self.extraordinary()
        tally.own = tally.own + own if tally.first else 0.0
        tally.first, tally.last = tally.first or now - trouble, now

    def extraordinary(self) -> float:
        """Return the seconds of nanproof's time since the last call that no healthy step has: looking into trouble, and for the
        model."""
        seconds = self._trouble + self._starting
        self.tally.trouble += self._trouble
        self._trouble = self._starting = 0.0
        return seconds

    def left_out(self, member: Optimizer, scale: float, backwards: int) -> None:
        """A GradScaler does not call an optimizer, because of gradients that are non-finite. While
        it looks for its scale that is healthy; with a bad loss, or at a scale below 1, it is not,
        and becomes an incident."""
        guard = self.guard
        assert guard is not None
        if scale < 1 or guard.engine.judge.loss_is_bad():
            self.take(member, backwards)
            return
        self.tally.overflows += 1
        self._forget_clipping()
        self._unclaimed = []
        guard.engine.abandon(keep_gradients=True, counts=True)
        self.leave_out(backwards)
        self._note()

    def scaled_by(self, scaler: Any, member: Optimizer) -> None:
        """A GradScaler is about to step a member: which gradients of the others it has not unscaled
        yet."""
        stages = {key: state["stage"].name for key, state in scaler._per_optimizer_states.items()}
        others = [other for other in self.members if other is not member and stages.get(id(other), "READY") == "READY"]
        self._scaled = {id(p) for other in others for p in parameters_of(other)}, float(scaler.get_scale())

    def _end(self) -> None:
        """Deal with the verdict on the step under way, if it was not dealt with. What a refused
        step is examined with must not show: random numbers and gradients are the script's, whose
        next batch may have been drawn already, and whose other optimizers have still to step."""
        guard = self.guard
        if guard is None or self._busy or not guard.engine.taken:
            return
        self._partly |= not self.complete
        self._forget_clipping()
        self._busy = True
        began, incidents, explainer = time.perf_counter(), len(guard.incidents), guard.engine.explainer
        diagnosed = explainer.seconds
        bad = self.refused or (len(self.members) > 1 and guard.engine.refused_at_once())
        try:
            with self._inside() if self._session.taking is None else nullcontext(), self._unseen(guard) if bad else nullcontext():
                guard.engine.end()
        finally:
            self._busy = False
            looked_into = bad or len(guard.incidents) > incidents
            self._trouble += time.perf_counter() - began if looked_into else explainer.seconds - diagnosed

    @contextmanager
    def _unseen(self, guard: ProtectedRun) -> Iterator[None]:
        random = RandomState.now(guard.engine.under_way.devices)
        holders = {id(p): p for p in (*guard.model.parameters(), *guard.engine.trained)}
        gradients = [(p, p.grad) for p in holders.values()]
        mine = {id(p) for p in guard.engine.trained}
        for p in holders.values():
            if id(p) not in mine:
                p.grad = None
        try:
            yield
        finally:
            random.restore()
            for p, gradient in gradients:
                p.grad = gradient

    def _before_clipping(self, present: list[int]) -> Norms | None:
        """The norms that were read when the script clipped, if every gradient is still what
        clipping left."""
        assert self.guard is not None
        parameters = self._stepper.parameters
        norms: list[Tensor] = []
        (scaled, scale), self._scaled = self._scaled, (set(), 1.0)
        if self._whole_norms is not None and not scaled:
            whole = self._of_whole(parameters, *self._whole_norms)
            if whole is not None:
                return whole
        self._part_norms()
        if not self._norms and not scaled:
            return None
        missing: list[tuple[int, Tensor]] = []
        for i in present:
            p = parameters.tensors[i]
            ref, version, norm = self._norms.get(id(p), (None, 0, None))
            if ref is None or norm is None or p.grad is None:
                missing.append((len(norms), p.grad))  # type: ignore[arg-type]
                norms.append(torch.zeros(()))
            elif p.grad is not ref() or p.grad._version != version:
                return None
            else:
                norms.append(norm.to(parameters.device, parameters.dtype, non_blocking=True))
        if missing:
            more = parameters.norms([g for _, g in missing])
            for (place, _), norm in zip(missing, more.unbind(), strict=True):
                norms[place] = norm / scale if id(parameters.tensors[present[place]]) in scaled else norm
        gradients = [g for i in present if (g := parameters.tensors[i].grad) is not None]
        return Norms.of(torch.stack(norms), gradients, clipped=True, max_norm=self._max_norm)

    def _of_whole(
        self, parameters: Parameters, references: list[weakref.ref[Tensor]], versions: list[int], norms: Tensor
    ) -> Norms | None:
        """The norms of gradients that were clipped together, in the order of the parameters. None if those
        are not all that there are."""
        gradients, clipped = gradients_of(parameters.tensors), referents(references)
        if len(gradients) != len(clipped):
            return None
        if not all(map(is_, gradients, clipped)):  # clipped in another order
            places = dict(zip(map(id, clipped), itertools.count()))
            order = list(map(places.get, map(id, gradients)))
            if None in order:
                return None
            versions, norms = [versions[i] for i in order if i is not None], norms[order]
        if list(map(version_of, gradients)) != versions:
            return None
        norms = norms.to(parameters.device, parameters.dtype, non_blocking=True)
        return Norms(norms, gradients, versions, clipped=True, max_norm=self._max_norm)

    def _prepare_to_hold(self, guard: ProtectedRun, clipped: Norms | None) -> None:
        """Where verdicts come late, a step may be held and taken again by the guard: then it has to
        be clipped as the script does. What else the script does to gradients cannot be done again,
        so such a step is judged by itself."""
        if not guard.late:
            return
        guard.clip_to(None if clipped is None else clipped.max_norm)
        if self._partly:
            self._cannot_again(guard, "the optimizers do not all step each time, so the step cannot be run again")
        elif (clipped is not None and clipped.max_norm is None) or self._touched(after_clipping=clipped is not None):
            self._cannot_again(guard, "the script changes gradients in its own way, so the step cannot be run again")

    def _cannot_again(self, guard: ProtectedRun, why: str) -> None:
        guard.engine.begin(UNKNOWN, why)

    def _touched(self, after_clipping: bool) -> bool:
        """Somebody wrote into gradients between backward and clipping, or the step."""
        left, self._left = self._left, []
        return self._clean is False or (not after_clipping and left != self._gradients_now())

    def _gradients_now(self) -> list[tuple[int, int]]:
        assert self.guard is not None
        return gradients_now(self.guard.engine.trained)

    def _note(self) -> None:
        if self.guard is not None:
            self.tally.steps = self.guard.next_step - self.guard.open
            records = self.guard.account.history
            self.tally.newest = records[-1].step if records else None
            self.tally.refused = self.guard.refused_so_far


def _why_not_again(roots: list[nn.Module]) -> str:
    if any(is_compiled(root) for root in roots):
        return "the calls of a compiled model are not followed, so the step cannot be run again; run it without torch.compile"
    if len(roots) > 1:
        return f"the optimizer trains {len(roots)} models, so the step cannot be run again; use guard.train_step"
    return OUTSIDE


def _together(model: nn.Module, parameters: Iterable[Tensor]) -> bool:
    """Every gradient is reduced over the ranks before the step."""
    if all(is_dtensor(p) for p in parameters):
        return True
    reduced = {id(p) for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel) for p in m.parameters()}
    return all(id(p) in reduced for p in parameters if p.requires_grad)
