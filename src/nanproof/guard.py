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
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.core.attempts import Afterwards, Attempt, to_run_again
from nanproof.core.caps import SkipCaps
from nanproof.core.checks import check_arguments, check_scalar
from nanproof.core.context import Groups, Mode, RandomState, Schedule, change_settings, settings
from nanproof.core.evidence import (
    Gradients,
    Witness,
    activation_gradients,
    bad_buffer,
    from_finding,
    listed,
    make_incident,
)
from nanproof.core.optimizers import bare_optimizer
from nanproof.core.stats import Finding, SpikeWatch
from nanproof.core.stepper import Report, Stepper
from nanproof.core.telemetry import Journal
from nanproof.core.tree import own_copy
from nanproof.core.verdict import Reading
from nanproof.errors import TrainingHalted, UsageError
from nanproof.explain.examiner import Examiner
from nanproof.policy import Policy
from nanproof.records import Incident, StepRecord
from nanproof.recover.heal import Healer

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
            run_dir: folder for `steps.jsonl`, `incidents.jsonl` and the bundles of bad steps.
            checkpoints: not in this version.
        """
        check_arguments(model, max_norm, policy, scheduler, checkpoints)
        self.model = model
        self.optimizer = bare_optimizer(optimizer)
        self.loss_fn = loss_fn
        self.scheduler = scheduler
        self.policy = policy if policy is not None else Policy()
        self.incidents: list[Incident] = []
        """Everything that went wrong so far, in the order it was found."""
        self._stepper = Stepper(model, self.optimizer, max_norm, scaler, self.policy)
        self._ranks = self._stepper.ranks
        self._watch = SpikeWatch()
        self._caps = SkipCaps(self.policy)
        self._journal = Journal(run_dir if self._ranks.rank == 0 else None)
        self._devices = sorted({p.device for p in self._stepper.parameters.tensors if p.device.type == "cuda"}, key=str)
        self._pending: deque[Attempt] = deque()
        """Steps under way: dispatched, their records not consumed yet."""
        self._held: deque[Attempt] = deque()
        """Good batches that a bad one held up, to be trained on again before anything else."""
        self._afterwards: Afterwards | None = None
        self._modules = list(model.modules())
        self._history: deque[StepRecord] = deque(maxlen=self.policy.history)
        self._next = 0
        self._closed = False
        self._one_rank = False
        """The last refused step was bad on one rank only."""
        self._overflowed = -2
        """The last step of a loop of the user's own that overflowed."""
        self._examiner = Examiner(self._stepper, loss_fn, scheduler, self.policy, run_dir)
        self._healer = Healer.of(self._stepper, self._examiner, scheduler, settle=lambda: self._catch_up(0))

    # -- what users call -------------------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """ "device", perhaps with a note, or "host: " and why the verdict has to be read on the host each step."""
        return self._stepper.path.description

    @property
    def history(self) -> list[StepRecord]:
        """Records of the last steps whose verdicts have reached the host, oldest first."""
        return list(self._history)

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
        if self.scheduler is not None and self._next == 0:
            log.warning(
                "nanproof: guard.step does not advance Guard(scheduler=...), only train_step does: call its step yourself"
            )
        if self._held or any(attempt.batches is not None for attempt in self._pending):
            raise UsageError("guard.step(): a train_step is still under way; call guard.sync() before your own forward")
        self._follow_optimizer()
        attempt = Attempt(self._next, None)
        self._examiner.before_step(attempt.step)
        attempt.report = self._stepper.step(loss, again=False)
        self._examiner.after_step(attempt.step, None)
        self._next += 1
        self._pending.append(attempt)
        self._catch_up(self._stepper.lag)

    def train_step(self, batch: Any, *micro_batches: Any) -> Tensor:
        """One whole step: zero_grad, forward, backward, guarded optimizer step, scheduler. Returns the loss, detached.

        More batches after the first are accumulated with it as micro-batches: the loss is the mean of theirs.
        """
        self._check_open("train_step")
        if self.loss_fn is None:
            raise UsageError(
                "guard.train_step() needs a loss function: Guard(model, optimizer, loss_fn=lambda model, batch: ...)"
            )
        self._run_held()
        self._follow_optimizer()
        attempt = Attempt(self._next, (batch, *micro_batches))
        self._next += 1
        attempt.mode = Mode.now(self._modules, self._stepper.parameters.device)
        self._run(attempt)
        assert attempt.report is not None
        self._catch_up(self._stepper.lag)
        return attempt.report.loss

    def sync(self) -> None:
        """Wait for the verdicts still under way, and train again on batches they held up. For before saving anything, or before
        a loop of your own after `train_step`; matters on CUDA only, where verdicts come two steps late."""
        self._run_held()
        self._catch_up(0)

    def close(self) -> None:
        """Take in the last records, look at weights and optimizer state once more, and let go of the model."""
        self._close(alone=False)

    def _close(self, alone: bool) -> None:
        """`alone`: other ranks may not be coming, so nothing that needs them is done."""
        if self._closed:
            return
        try:
            if alone:
                for attempt in self._pending:
                    if attempt.report is not None:
                        self._record(attempt, attempt.report, attempt.report.read())
                self._pending.clear()
            else:
                self.sync()
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
            self._journal.close()
            self._examiner.close()

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
        self._pending.clear()
        self._held.clear()
        self._afterwards = None
        self._stepper.release()
        self._examiner.recorder.clear()
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

    # -- a step that can be run again ------------------------------------------------------------------------------------------

    def _run(self, attempt: Attempt) -> None:
        attempt.random = RandomState.now(self._devices)
        self._examiner.begin(attempt)
        lag = self._stepper.lag
        attempt.schedule = Schedule.now(self.optimizer, self.scheduler) if lag else None
        self._stepper.buffers.begin()
        try:
            self._forward_backward(attempt)
            self._examiner.before_step(attempt.step)
            attempt.report = self._stepper.step(None, again=True)
            self._examiner.after_step(attempt.step, attempt.batches)
        except BaseException as error:
            self._give_up()
            attempt.random.restore()
            if not self._report_exception(attempt, error):
                raise
            self._run(attempt)
            return
        self._pending.append(attempt)
        if lag:
            attempt.random_after = RandomState.now(self._devices)
            if self.scheduler is not None:
                self.scheduler.step()
            attempt.settings_after = settings(self.optimizer)

    def _forward_backward(self, attempt: Attempt, scaled: bool = True) -> None:
        assert self.loss_fn is not None and attempt.batches is not None
        self._stepper.forget()
        parts = len(attempt.batches)
        with self._healer.living():
            for i, batch in enumerate(attempt.batches):
                with self._ranks.accumulate(last=i == parts - 1):
                    loss = self.loss_fn(self.model, own_copy(batch))
                    check_scalar(loss, "loss_fn")
                    self._stepper.backward(loss if parts == 1 else loss / parts, scaled)

    def _replay(self, attempt: Attempt) -> Gradients | None:
        """Run forward and backward of a refused step again, from the same state and at a loss scale of 1. None if that raises:
        finding out more is never the reason a run dies."""
        assert attempt.random is not None and attempt.mode is not None
        attempt.random.restore()
        try:
            with attempt.mode.again(self._modules, self._stepper.parameters.device), activation_gradients() as flags:
                self._forward_backward(attempt, scaled=False)
            gradients = self._stepper.look_at_gradients(self._stepper.parameters.present())
            said = self._ranks.gather([any(flags)])
            guilty = next((rank for rank, bad in said.items() if bad[0] and self._ranks.together), None)
            return replace(gradients, rank=guilty)
        except Exception as error:
            log.warning("nanproof: step %d could not be run again to look at it: %r", attempt.step, error)
            return None
        finally:
            self._give_up()

    def _give_up(self) -> None:
        """Leave nothing behind of a step that was not taken: gradients, notes, buffers."""
        self._stepper.forget()
        self._ranks.forget_gradients()
        self._stepper.buffers.restore()

    # -- records ---------------------------------------------------------------------------------------------------------------

    def _catch_up(self, lag: int) -> None:
        """Consume the records older than `lag` steps: at the same step on every rank."""
        while len(self._pending) > lag:
            self._consume(self._pending[0])

    def _record(self, attempt: Attempt, report: Report, reading: Reading) -> StepRecord:
        lr = tuple(float(x) for x in report.lr)
        record = reading.record(attempt.step, report.names, report.present, lr, self._stepper.weights is not None)
        self._history.append(record)
        self._journal.step(record)
        return record

    def _consume(self, attempt: Attempt) -> None:
        report = attempt.report
        assert report is not None
        reading = report.read()
        if reading.held:
            # Held behind a bad step that is not there any more: nothing was taken, so it is run again.
            self._put_back(attempt, RandomState.now(self._devices), settings(self.optimizer))
            self._held.appendleft(Attempt(attempt.step, attempt.batches, attempt.mode))
            self._run_held()
            return
        record = self._record(attempt, report, reading)
        if reading.refused:
            self._refuse(attempt, report, reading, record)
            return
        self._pending.popleft()
        self._caps.accepted()
        self._healer.see(accepted=True)
        if attempt.batches is not None and attempt.schedule is None and self.scheduler is not None:
            self.scheduler.step()
        if reading.bad_buffer:
            self._report(bad_buffer(record, self._stepper.buffers.name_at(reading.bad_buffer)))
        self._found(self._watch.see(record, self._ranks.several))
        self._report(self._healer.treat(self._examiner.accepted(record, self._history)))

    def _found(self, finding: Finding | None) -> None:
        """A spike turned out to be something."""
        incident = from_finding(finding)
        if incident is not None and finding is not None:
            self._report(self._healer.treat(self._examiner.finding(incident, finding.record, self._history)))

    def _refuse(self, attempt: Attempt, report: Report, reading: Reading, record: StepRecord) -> None:
        """A refused step: find out what it was, put everything back, and train on what was held."""
        again = attempt.batches is not None
        random_now, settings_now = RandomState.now(self._devices), settings(self.optimizer)
        incident = None
        try:
            incident = self._explain(attempt, report, reading)
            if incident is not None:
                buffer = self._stepper.buffers.name_at(reading.bad_buffer) if reading.bad_buffer else ""
                incident = self._examiner.refused(
                    incident, attempt, reading, record, self._history, buffer, one_rank=self._one_rank
                )
        finally:
            if again:
                self._put_back(attempt, random_now, settings_now)
            else:
                self._pending.popleft()
        if incident is not None:
            if not reading.total < torch.inf or not math.isfinite(reading.loss):
                self._found(self._watch.cut_short())
            incident = self._healer.treat(incident)
            if incident.action == "rewound":
                self._held.appendleft(attempt)
            cap = self._caps.refused() if incident.action != "rewound" else None
            if cap:
                incident = replace(incident, action="halted")
            self._report(incident)
            if cap:
                self._held.clear()
                self._run_held()
                same = (i.diagnosis for i in self.incidents if i.kind == incident.kind and i.diagnosis is not None)
                why = incident.diagnosis or next(same, None)
                raise TrainingHalted(f"{cap}. Last: {incident}" + (f". {why}" if why is not None else ""), incident)
        self._run_held()

    def _put_back(self, bad: Attempt, random_now: RandomState, settings_now: Groups) -> None:
        """Back to before the bad step, and the batches behind it into `_held`."""
        self._pending.popleft()
        assert bad.random is not None
        bad.random.restore()
        if bad.schedule is not None:
            bad.schedule.restore(self.optimizer, self.scheduler)
        again, self._afterwards = to_run_again(bad, self._pending, random_now, settings_now)
        self._pending.clear()
        self._held.extend(again)
        self._stepper.release()

    def _run_held(self) -> None:
        """Train on the good batches that were held behind a bad one. One that raises is dropped, the others stay held."""
        while self._held:
            attempt = self._held.popleft()
            assert attempt.mode is not None
            change_settings(self.optimizer, attempt.take_changes())
            try:
                with attempt.mode.again(self._modules, self._stepper.parameters.device):
                    self._run(attempt)
            except BaseException:
                self._return_to_user()
                raise
        self._return_to_user()

    def _return_to_user(self) -> None:
        """Random numbers and settings that belong to the user's own code go on where they were."""
        if self._afterwards is not None:
            self._afterwards.apply(self.optimizer)
            self._afterwards = None

    def _explain(self, attempt: Attempt, report: Report, reading: Reading) -> Incident | None:
        """What a refused step was; None for an overflow that only calibrates the loss scale, which is healthy."""
        stepper, again = self._stepper, attempt.batches is not None
        # When refusals follow each other the weights stay as they were found the first time.
        broken = stepper.broken_state() if self._caps.in_a_row == 0 else []
        weights_bad = bool(broken)
        if reading.bad_buffer:
            broken.append(stepper.buffers.name_at(reading.bad_buffer))
        witness = Witness.hear(self._ranks, reading, report.losses, report.probes, weights_bad)
        gradients, self._one_rank = None, witness.guilty <= 1
        if witness.only_gradients and not reading.weights_bad and not reading.total < torch.inf:
            if again and (stepper.scale is not None or stepper.lag or (self._ranks.together and witness.rank is None)):
                gradients = self._replay(attempt)
                if stepper.scale is not None and not stepper.scale.fixed and gradients is not None and gradients.all_finite:
                    stepper.scale.back_off()
                    return None
            elif not again and reading.scale is not None and reading.scale >= 1:
                stays = stepper.uncleared and self._overflowed == attempt.step - 1
                self._overflowed = attempt.step
                if not stays:
                    return None
            elif not stepper.lag:
                gradients = stepper.look_at_gradients(report.present)
        norms = [(report.names[i], norm) for i, norm in zip(report.present, reading.norms, strict=True)]
        incident = make_incident(attempt.step, reading, norms, witness, gradients, broken)
        if reading.weights_bad and stepper.weights is not None and not stepper.weights.restore:
            return replace(incident, action="recorded", message=incident.message + "; no copy was kept to put back")
        if incident.kind == "nonfinite-gradient" and not again and self._caps.in_a_row:
            hint = "; the step before was refused too: was zero_grad called in between?"
            incident = replace(incident, message=incident.message + hint)
        if incident.kind == "nonfinite-gradient" and reading.scale is not None and reading.scale < 1 and not again:
            message = f"{incident.message}; the loss scale is down to {reading.scale:g}, so it is no range problem"
            return replace(incident, kind="loss-scale-collapse", message=message)
        return incident

    # -- incidents -------------------------------------------------------------------------------------------------------------

    def _report(self, incident: Incident | None) -> None:
        if incident is None:
            return
        self.incidents.append(incident)
        self._journal.incident(incident)
        if self._ranks.rank == 0:
            why = f". {incident.diagnosis}" if incident.diagnosis is not None else ""
            log.warning("nanproof: %s%s%s", incident, why, f" Bundle: {incident.bundle}" if incident.bundle else "")

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
