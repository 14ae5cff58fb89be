"""Guard: puts the parts together so that a bad step never reaches the weights.

A step is taken in two moments. On the device, `Stepper` judges the gradients and the optimizer's kernel reads the verdict.
On the host, `lag` steps later, the verdict's numbers are consumed and become a record, or, when the step was refused, an
incident.

With `train_step` the guard holds the batches of the last `lag` steps. A bad step latches: the steps after it are refused
too until the host has seen it; then everything is put back to before the bad step and the good held batches are
trained on, in order. The result is the run that never saw the bad batch, bit for bit.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from nanproof.core.attempts import Attempt
from nanproof.core.caps import SkipCaps
from nanproof.core.checks import OwnLoop, check_arguments, check_scalar
from nanproof.core.context import RandomState, settings
from nanproof.core.evidence import bad_buffer, from_finding
from nanproof.core.inquest import Inquest
from nanproof.core.optimizers import bare_optimizer
from nanproof.core.runner import Runner
from nanproof.core.stats import Finding, SpikeWatch
from nanproof.core.stepper import Report, Stepper
from nanproof.core.telemetry import Journal
from nanproof.core.verdict import Reading
from nanproof.errors import TrainingHalted, UsageError
from nanproof.explain.examiner import Examiner
from nanproof.observe.lookout import Lookout
from nanproof.policy import Policy
from nanproof.records import Forecast, Incident, StepRecord
from nanproof.recover.heal import Healer
from nanproof.recover.recovery import Recovery
from nanproof.recover.salvage import Salvage
from nanproof.recover.state import Part
from nanproof.wording import listed

log = logging.getLogger("nanproof")


class Guard:
    """Replaces clip_grad_norm_ and optimizer.step() in a training loop, and refuses the steps that would do harm.

    In a loop of your own, `guard.step(loss)` stands where clipping and stepping stood. Or give it `loss_fn(model, batch)` and
    call `guard.train_step(batch)`: then a refused batch leaves no trace at all, not even in random numbers or the schedule.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
        max_norm: float | str | None = 1.0,
        scaler: Any = None,
        scheduler: Any = None,
        policy: Policy | None = None,
        run_dir: str | Path | None = None,
        checkpoints: Any = None,
        observe: Any = None,
    ) -> None:
        """
        Args:
            model: the module that is trained; wrapped in DistributedDataParallel, fully_shard or torch.compile is fine.
            optimizer: any optimizer over the model's parameters; torch's fused ones are guarded without a host read.
            loss_fn: `loss_fn(model, batch)` returns the scalar loss; needed for `train_step`.
            max_norm: clip the gradients to this norm; "auto" follows what is usual for the run; None does not clip.
            scaler: a GradScaler, if the loss is scaled. Do not call its `step`, `update` or `unscale_` yourself.
            scheduler: a learning-rate scheduler that `train_step` advances after every accepted step.
            policy: what to do when; see `Policy`.
            run_dir: folder for `steps.jsonl`, `incidents.jsonl`, the bundles of bad steps and the quarantine.
            checkpoints: `Checkpoints(folder)`: save the run's state now and then, for `resume` and for going back.
            observe: True or `Observe(...)`: activations, weights and attention in every record, and `forecasts`.
        """
        check_arguments(model, max_norm, policy, scheduler, checkpoints)
        run_dir = None if run_dir is None else Path(run_dir).absolute()
        self.model = model
        self.optimizer = bare_optimizer(optimizer)
        self.loss_fn, self.scheduler = loss_fn, scheduler
        self.policy = policy if policy is not None else Policy()
        self.incidents: list[Incident] = []
        """Everything that went wrong so far, in the order it was found."""
        self.forecasts: list[Forecast] = []
        """What was seen coming so far; with `observe` only."""
        self._stepper = Stepper(model, self.optimizer, max_norm, scaler, self.policy)
        self.counters = self._stepper.counters
        """Callables that return scalars on the device by name. Every record has their values, and no wait is added for them."""
        self._ranks = self._stepper.ranks
        self._watch = SpikeWatch()
        self._caps = SkipCaps(self.policy)
        self._lookout = Lookout.of(self._stepper, observe)
        with ExitStack() as undo:  # a guard that was not made, as its folder was refused, looks at nothing
            undo.callback(self._lookout.close)
            self._journal = Journal(run_dir if self._ranks.rank == 0 else None, self._stepper.about)
            self._runner = Runner(self._stepper, loss_fn, scheduler)
            self._history: deque[StepRecord] = deque(maxlen=self.policy.history)
            self._own_loop = OwnLoop(self.policy, scheduler)
            self._next, self._closed = 0, False
            self._inquest = Inquest(self._runner)
            self._examiner = Examiner(self._stepper, loss_fn, scheduler, self.policy, run_dir)
            self._healer = Healer.of(self._stepper, self._examiner, scheduler, settle=lambda: self._catch_up(0))
            self._runner.around = self._healer.living
            parts: dict[str, Part] = {"watch": self._watch, "caps": self._caps, "heal": self._healer}
            self._recovery = Recovery(self._runner, self.policy, checkpoints, run_dir, parts)
            self._salvage = Salvage(self._runner, self._recovery.supply, self.policy.salvage)
            self._examiner.keep_asking = self.policy.salvage
            self._runner.watchers += [self._examiner, self._recovery, self._lookout]
            self._runner.on_error = self._report_exception
            undo.pop_all()

    # -- what users call -------------------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """ "device", perhaps with a note, or "host: " and why the verdict has to be read on the host each step."""
        return self._stepper.path.description

    @property
    def history(self) -> list[StepRecord]:
        """Records of the last steps whose verdicts have reached the host, oldest first."""
        return list(self._history)

    @property
    def next_step(self) -> int:
        """The number of the step that comes next. It falls when the run goes back."""
        return self._next

    def backward(self, loss: Tensor) -> None:
        """Replaces `loss.backward()`, scaled if there is a scaler. Optional in a loop of your own; it is what names a bad
        micro-batch by its loss, and what tells the other ranks of a bad loss whose gradients are finite."""
        self._check_open("backward")
        check_scalar(loss, "backward")
        self._stepper.backward(loss)

    def step(self, loss: Tensor | None = None) -> None:
        """Replaces clip_grad_norm_ and optimizer.step() (and scaler.step/update). Call it after backward; zero_grad stays yours.

        Without a loss, the sum of those given to `backward` since the last step is taken. A refused step leaves weights,
        moments and buffers exactly as they were.
        """
        self._check_open("step")
        if loss is not None:
            check_scalar(loss, "step")
        elif not self._stepper.has_losses:
            raise UsageError("guard.step(): pass the loss, or use guard.backward(loss) instead of loss.backward()")
        self._own_loop.look(self._next)
        if self._runner.held or any(attempt.batches is not None for attempt in self._runner.pending):
            raise UsageError("guard.step(): a train_step is still under way; call guard.sync() before your own forward")
        attempt = self._new_attempt(None)
        self._runner.take(attempt, loss)
        self._after_step(attempt)

    def train_step(self, batch: Any, *micro_batches: Any) -> Tensor:
        """One whole step: zero_grad, forward, backward, guarded optimizer step, scheduler. Returns the loss, detached.

        More batches after the first are accumulated with it as micro-batches: the loss is the mean of theirs.
        """
        self._check_open("train_step")
        if self.loss_fn is None:
            raise UsageError(
                "guard.train_step() needs a loss function: Guard(model, optimizer, loss_fn=lambda model, batch: ...)"
            )
        self._runner.run_held()
        attempt = self._new_attempt((batch, *micro_batches))
        self._runner.run(attempt)
        self._after_step(attempt)
        assert attempt.report is not None
        return attempt.report.loss

    def wrap(self, data: Any) -> Any:
        """A dataset or loader that leaves out quarantined samples and, if it is a loader, knows its position: with it a resumed
        or rewound run goes on with exactly the batch that comes next. Iterate over what this returns, not over the original."""
        wrapped = self._recovery.supply.wrap(data, self._runner.devices)
        self._examiner.keep_asking = True
        return wrapped

    def resume(self) -> int:
        """Load the newest good checkpoint, if there is one, and return the step to go on from; 0 if there is none.

        Weights, optimizer, schedule, loss scale, random numbers, the guard's own state and the position of wrapped loaders are
        put back. What was passed over, and why, is logged.
        """
        self._check_open("resume")
        if not self._recovery.has_checkpoints:
            raise UsageError("guard.resume(): there are no checkpoints; make the guard with checkpoints=Checkpoints(folder)")
        self._next = self._recovery.resume()
        self._forget_since(self._next)
        return self._next

    def sync(self) -> None:
        """Wait for the verdicts still under way, and train again on batches they held up. For before saving anything, or before
        a loop of your own after `train_step`; matters on CUDA only, where verdicts come two steps late."""
        self._runner.run_held()
        backs = self._recovery.backs
        self._catch_up(0)
        if self._recovery.backs > backs:
            self._recovery.catch_up_schedule()
        self._recovery.complete()

    def close(self) -> None:
        """Take in the last records, look at weights and optimizer state once more, and let go of the model."""
        self._close(alone=False)

    def _close(self, alone: bool) -> None:
        """`alone`: other ranks may not be coming, so nothing that needs them is done."""
        if self._closed:
            return
        try:
            if alone:
                for attempt in self._runner.pending:
                    if attempt.report is not None:
                        self._record(attempt, attempt.report, attempt.report.read())
                self._runner.pending.clear()
            else:
                taken = self._next
                self.sync()
                if self._next < taken:
                    log.warning("nanproof: the last verdicts sent the run back: it ends at step %d of %d", self._next, taken)
        except TrainingHalted as halted:
            log.warning("nanproof: while closing: %s", halted)
        finally:
            self._closed = True
            broken = self._stepper.broken_state()
            if broken and not any(i.kind == "nonfinite-weight" for i in self.incidents):
                message = "found at close: " + listed(broken)
                incident = Incident(step=max(self._next - 1, 0), kind="nonfinite-weight", action="recorded", message=message)
                self._report(self._examiner.found_at_close(incident, self._history))
            self._stepper.close()
            self._lookout.close()
            self._journal.close()
            self._examiner.close()
            self._recovery.close(alone)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of the guard. Waits for the last verdicts (`sync`): take it before the states of model,
        optimizer and scheduler, so that all of them are of one moment."""
        self.sync()
        return {
            "version": 1,
            "step": self._next,
            "stats": self._stepper.stats.state_dict(),
            "watch": self._watch.state_dict(),
            "caps": self._caps.state_dict(),
            "heal": self._healer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Load model and optimizer first; steps still under way are forgotten."""
        if state.get("version") != 1:
            raise UsageError(
                f"guard.load_state_dict(): version {state.get('version')!r} is unknown; this nanproof reads version 1"
            )
        self._runner.forget()
        self._examiner.recorder.clear()
        self._lookout.rewound()
        self._next = state["step"]
        self._stepper.stats.load_state_dict(state["stats"])
        self._stepper.buffers.refresh()
        self._watch.load_state_dict(state["watch"])
        self._caps.load_state_dict(state["caps"])
        self._healer.load_state_dict(state.get("heal", {"applied": [], "tried": []}))

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._close(alone=error is not None and self._ranks.together)
        except Exception as failure:
            if error is None:
                raise
            log.warning("nanproof: while closing after %r: %r", error, failure)

    # -- records ---------------------------------------------------------------------------------------------------------------

    def _new_attempt(self, batches: tuple[Any, ...] | None) -> Attempt:
        """The next step begins. None: it cannot be run again."""
        self._follow_optimizer()
        attempt = Attempt(self._next, batches, None if batches is None else self._runner.mode())
        self._recovery.note_batches(attempt)
        self._next += 1
        return attempt

    def _after_step(self, attempt: Attempt) -> None:
        """A step was dispatched: take in the records that are due, and keep a copy of the state if one is."""
        own_loop = attempt.batches is None
        self._catch_up(self._stepper.lag)
        self._broken(self._recovery.stepped(self._next, own_loop, self._watch.settled))

    def _catch_up(self, lag: int) -> None:
        """Consume the records older than `lag` steps: at the same step on every rank."""
        while len(self._runner.pending) > lag:
            self._consume(self._runner.pending[0])

    def _record(self, attempt: Attempt, report: Report, reading: Reading) -> StepRecord:
        lr = tuple(float(x) for x in report.lr)
        record = reading.record(attempt.step, report.names, report.present, lr, self._stepper.weights is not None)
        record = self._lookout.observed(record)
        self._history.append(record)
        self._journal.step(record)
        return record

    def _consume(self, attempt: Attempt) -> None:
        report = attempt.report
        assert report is not None
        reading = report.read()
        if reading.held:
            # Held behind a bad step that is not there any more: nothing was taken, so it is run again.
            self._runner.put_back(attempt, RandomState.now(self._runner.devices), settings(self.optimizer))
            self._runner.held.appendleft(Attempt(attempt.step, attempt.batches, attempt.mode))
            self._runner.run_held()
            return
        record = self._record(attempt, report, reading)
        if reading.refused:
            self._recovery.refused()
            self._refuse(attempt, report, reading, record)
            return
        self._runner.pending.popleft()
        self._caps.accepted()
        self._healer.see(accepted=True)
        if attempt.batches is not None and attempt.schedule is None and self.scheduler is not None:
            self.scheduler.step()
        if reading.bad_buffer:
            self._report(bad_buffer(record, self._stepper.buffers.name_at(reading.bad_buffer)))
        for forecast in self._lookout.foresee(record):
            self._foretell(forecast)
        if self._found(self._watch.see(record, self._ranks.several)):
            return
        self._report(self._healer.treat(self._examiner.accepted(record, self._history)))
        self._broken(self._recovery.accepted(record.step, self._watch.settled))

    def _found(self, finding: Finding | None) -> bool:
        """A spike turned out to be something. Says whether the run went back because of it."""
        incident = from_finding(finding, self._history)
        if incident is None or finding is None:
            return False
        incident = self._examiner.finding(incident, finding.record, self._history)
        back = None
        if incident.kind == "divergence" and self.policy.on_divergence == "rollback":
            # Where it can be healed the data is not to blame, unless it happens again.
            blame = not self.policy.heal
            back = self._back(incident, incident.step, incident.step, self._history[-1].step, blame_data=blame, forget=False)
        if back is not None and self.policy.heal and (back.diagnosis is None or not back.diagnosis.verified):
            # On the weights of before, what would help can be tried; on those of a run that has diverged it hardly can.
            back = self._examiner.finding(back, finding.record, self._history)
        self._report(self._healer.treat(back or incident))
        if back is not None:
            self._forget_since(self._next)
        return back is not None

    def _refuse(self, attempt: Attempt, report: Report, reading: Reading, record: StepRecord) -> None:
        """A refused step: find out what it was, put everything back, and train on what was held."""
        again = attempt.batches is not None
        random_now, settings_now = RandomState.now(self._runner.devices), settings(self.optimizer)
        incident, inquest = None, self._inquest
        try:
            incident = inquest.hold(attempt, report, reading, self._caps.in_a_row)
            if incident is not None:
                incident = self._examiner.refused(
                    incident, attempt, reading, record, self._history, inquest.bad_buffer, one_rank=inquest.one_rank
                )
        finally:
            if again:
                self._runner.put_back(attempt, random_now, settings_now)
            else:
                self._runner.pending.popleft()
        if incident is None or not self._settle(attempt, incident, diverged=not math.isfinite(reading.total + reading.loss)):
            self._runner.run_held()

    def _settle(self, attempt: Attempt, incident: Incident, diverged: bool) -> bool:
        """What becomes of the run after a refused step. True where it went back: then nothing is held any more."""
        if diverged and self._found(self._watch.cut_short()):
            self._report(incident)
            return True
        broken, may_go_back = self._inquest.state_broken, self.policy.at_cap == "rollback"
        if broken and may_go_back:
            # What broke the state came before this step.
            back = self._back(incident, attempt.step - 1, attempt.step - 1, attempt.step, blame_data=False)
            if back is not None:
                self._report(back)
                return True
        incident = self._healer.treat(incident)
        if incident.action == "rewound":
            self._runner.held.appendleft(attempt)
            self._report(incident)
            return False
        if not broken:
            incident, taken = self._salvage.use_the_rest(attempt, incident, self._inquest.one_rank)
            if taken:
                self._report(incident)
                return False
        cap = self._caps.refused()
        if cap and may_go_back and not broken:
            since = attempt.step - (self._caps.in_a_row - 1)
            back = self._back(incident, since, since, attempt.step, blame_data=True)
            if back is not None:
                self._report(back)
                return True
        if cap:
            where = "" if self._recovery.on else ": Policy(snapshot_every=...) or Checkpoints(...) keep some"
            nowhere = f", and there was no good state to go back to{where}" if may_go_back and not broken else ""
            self._halt(incident, cap + nowhere)
        self._report(incident)
        return False

    def _back(
        self, incident: Incident, most: int, since: int, until: int, blame_data: bool, forget: bool = True
    ) -> Incident | None:
        """Go back to a good state of before step `most`; the incident that says so, or None where there is none to go to."""
        way = self._recovery.go_back(most, since, until, blame_data=blame_data)
        if way is None:
            if self._recovery.exhausted:
                self._halt(incident, f"the run went back {self.policy.max_rollbacks} times, and it came again (max_rollbacks)")
            return None
        self._next = way.step
        self._healer.rewound(way.healed)
        if forget:
            self._forget_since(way.step)
        action = "rewound" if way.in_memory else "rolled-back"
        return replace(incident, action=action, message=f"{incident.message}; {way}")

    def _halt(self, incident: Incident, why: str) -> NoReturn:
        incident = replace(incident, action="halted")
        self._report(incident)
        self._runner.drop_held()
        same = (i.diagnosis for i in self.incidents if i.kind == incident.kind and i.diagnosis is not None)
        cause = incident.diagnosis or next(same, None)
        raise TrainingHalted(f"{why}. Last: {incident}" + (f". {cause}" if cause is not None else ""), incident)

    def _broken(self, names: str | None) -> None:
        """A copy of the state was to be kept, and is not finite."""
        if names is None:
            return
        message = f"weights, buffers or optimizer state are non-finite: {names}"
        incident = Incident(step=max(self._next - 1, 0), kind="nonfinite-weight", action="recorded", message=message)
        back = None
        if self.policy.at_cap == "rollback":
            back = self._back(incident, incident.step, 0, incident.step, blame_data=False)
        elif self._recovery.has_good:
            self._halt(incident, "the run's state is broken")
        self._report(back or incident)

    def _forget_since(self, step: int) -> None:
        """The run is at an earlier step, or in a new process: what was known of later ones is not so any more."""
        self._examiner.rewound()
        self._lookout.rewound()
        while self._history and self._history[-1].step >= step:
            self._history.pop()

    # -- incidents -------------------------------------------------------------------------------------------------------------

    def _report(self, incident: Incident | None) -> None:
        if incident is None:
            return
        self.incidents.append(incident)
        self._journal.incident(incident)
        if self._ranks.rank == 0:
            why = f". {incident.diagnosis}" if incident.diagnosis is not None else ""
            log.warning("nanproof: %s%s%s", incident, why, f" Bundle: {incident.bundle}" if incident.bundle else "")

    def _foretell(self, forecast: Forecast) -> None:
        self.forecasts.append(forecast)
        self._journal.forecast(forecast)
        if self._ranks.rank == 0:
            log.warning("nanproof: %s", forecast)

    def _report_exception(self, attempt: Attempt, error: BaseException) -> bool:
        """Whether it was healed: then the step can be run again."""
        if isinstance(error, UsageError) or not isinstance(error, Exception):
            return False
        message = f"{type(error).__name__}: {error}"
        incident = Incident(step=attempt.step, kind="exception", action="recorded", message=message)
        incident = self._healer.treat(self._examiner.raised(incident, attempt, error, self._history))
        self._report(incident)
        note = f"nanproof: raised inside training step {attempt.step}"
        if incident.diagnosis is not None:
            note += f". {incident.diagnosis}"
        with suppress(AttributeError):  # Python 3.10 has no notes
            error.add_note(note)
        return incident.action == "rewound"

    def _follow_optimizer(self) -> None:
        if self._stepper.outdated:
            self.sync()
            self._stepper.follow_optimizer()

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise UsageError(f"guard.{call}(): this guard is closed; make a new one to go on")
