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
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.core.caps import SkipCaps
from nanproof.core.context import Hyperparameters, RandomState
from nanproof.core.evidence import Gradients, Witness, activation_gradients, largest, listed, make_incident
from nanproof.core.optimizers import bare_optimizer
from nanproof.core.stats import Finding, SpikeWatch
from nanproof.core.stepper import Report, Stepper
from nanproof.core.telemetry import Journal
from nanproof.core.verdict import Reading
from nanproof.errors import TrainingHalted, UnsupportedError, UsageError
from nanproof.policy import Policy
from nanproof.records import Diagnosis, Incident, StepRecord

log = logging.getLogger("nanproof")


@dataclass(slots=True)
class _Attempt:
    """One step on its way from dispatch to record."""

    step: int
    batches: tuple[Any, ...] | None
    """None for a step of the user's own loop, which cannot be run again."""
    random: RandomState | None = None
    random_after: RandomState | None = None
    hyper: Hyperparameters | None = None
    report: Report | None = None


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
            run_dir: folder for `steps.jsonl` and `incidents.jsonl`.
            checkpoints: not in this version.
        """
        if checkpoints is not None:
            raise UnsupportedError(
                "Guard(checkpoints=...) is not in this version: save guard.state_dict() with your own checkpoints"
            )
        if isinstance(max_norm, str) and max_norm != "auto":
            raise UsageError(f'Guard(max_norm={max_norm!r}): a number above 0, "auto" or None is needed')
        if isinstance(max_norm, (int, float)) and not max_norm > 0:
            raise UsageError(f"Guard(max_norm={max_norm!r}): the norm to clip to must be above 0; None turns clipping off")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UsageError("Guard(scheduler=ReduceLROnPlateau): it needs a metric; leave it out and call its step yourself")
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
        self._pending: deque[_Attempt] = deque()
        self._history: deque[StepRecord] = deque(maxlen=self.policy.history)
        self._next = 0
        self._closed = False
        self._report_foreign_parameters()

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
        _check_scalar(loss, "backward")
        self._stepper.backward(loss)

    def step(self, loss: Tensor | None = None) -> None:
        """Replaces clip_grad_norm_ and optimizer.step() (and scaler.step/update). Call it after backward; zero_grad stays yours.

        Without a loss, the sum of those given to `backward` since the last step is taken. A refused step leaves weights,
        moments and buffers exactly as they were.
        """
        self._check_open("step")
        if loss is not None:
            _check_scalar(loss, "step")
        elif not self._stepper.has_losses:
            raise UsageError("guard.step(): pass the loss, or use guard.backward(loss) instead of loss.backward()")
        self._follow_optimizer()
        if any(attempt.batches is not None for attempt in self._pending):
            self._catch_up(0)
        attempt = _Attempt(self._next, None, report=self._stepper.step(loss, again=False))
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
        self._follow_optimizer()
        attempt = _Attempt(self._next, (batch, *micro_batches))
        self._next += 1
        self._run(attempt)
        assert attempt.report is not None
        self._catch_up(self._stepper.lag)
        return attempt.report.loss

    def close(self) -> None:
        """Take in the last records, look at weights and optimizer state once more, and let go of the model."""
        if self._closed:
            return
        try:
            self._catch_up(0)
        except TrainingHalted as halted:
            log.warning("nanproof: while closing: %s", halted)
        finally:
            self._closed = True
            broken = self._stepper.broken_state()
            if broken and not any(i.kind == "nonfinite-weight" for i in self.incidents):
                message = "found at close: " + listed(broken)
                self._report(Incident(step=max(self._next - 1, 0), kind="nonfinite-weight", action="recorded", message=message))
            self._stepper.close()
            self._journal.close()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of the guard. Waits for the last verdicts, so that it fits the weights of this moment."""
        self._catch_up(0)
        return {
            "version": 1,
            "step": self._next,
            "stats": self._stepper.stats.state_dict(),
            "watch": self._watch.state_dict(),
            "caps": self._caps.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Load model and optimizer first."""
        if state.get("version") != 1:
            raise UsageError(
                f"guard.load_state_dict(): version {state.get('version')!r} is unknown; this nanproof reads version 1"
            )
        self._catch_up(0)
        self._next = state["step"]
        self._stepper.stats.load_state_dict(state["stats"])
        self._stepper.buffers.refresh()
        self._watch.load_state_dict(state["watch"])
        self._caps.load_state_dict(state["caps"])

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            log.warning("nanproof: while closing after %r: %r", error, failure)

    # -- a step that can be run again ------------------------------------------------------------------------------------------

    def _run(self, attempt: _Attempt) -> None:
        attempt.random = RandomState.now(self._devices)
        lag = self._stepper.lag
        if lag:
            attempt.hyper = Hyperparameters.now(self.optimizer, self.scheduler)
        try:
            self._forward_backward(attempt)
            attempt.report = self._stepper.step(None, again=True)
        except Exception as error:
            self._stepper.forget()
            self._stepper.buffers.restore()
            self._report_exception(attempt, error)
            raise
        if lag:
            attempt.random_after = RandomState.now(self._devices)
            if self.scheduler is not None:
                self.scheduler.step()
        self._pending.append(attempt)

    def _forward_backward(self, attempt: _Attempt, scaled: bool = True) -> None:
        assert self.loss_fn is not None and attempt.batches is not None
        self._stepper.forget()
        parts = len(attempt.batches)
        for i, batch in enumerate(attempt.batches):
            with self._ranks.accumulate(last=i == parts - 1):
                loss = self.loss_fn(self.model, batch)
                _check_scalar(loss, "loss_fn")
                self._stepper.backward(loss if parts == 1 else loss / parts, scaled)

    def _replay(self, attempt: _Attempt) -> Gradients:
        """Run forward and backward of a refused step again, from the same state and at a loss scale of 1."""
        assert attempt.random is not None
        attempt.random.restore()
        try:
            with activation_gradients() as flags:
                self._forward_backward(attempt, scaled=False)
            gradients = self._stepper.look_at_gradients(self._stepper.parameters.present())
            said = self._ranks.gather([any(flags)])
            guilty = next((rank for rank, bad in said.items() if bad[0] and self._ranks.together), None)
            return replace(gradients, rank=guilty)
        finally:
            self._stepper.forget()
            self._stepper.buffers.restore()

    # -- records ---------------------------------------------------------------------------------------------------------------

    def _catch_up(self, lag: int) -> None:
        """Consume the records older than `lag` steps: at the same step on every rank."""
        while len(self._pending) > lag:
            self._consume(self._pending.popleft())

    def _consume(self, attempt: _Attempt) -> None:
        report = attempt.report
        assert report is not None
        reading = report.read()
        lr = tuple(float(x) for x in report.lr)
        record = reading.record(attempt.step, report.names, report.present, lr, self._stepper.weights is not None)
        self._history.append(record)
        self._journal.step(record)
        if reading.refused:
            self._refuse(attempt, report, reading)
            return
        self._caps.accepted()
        if attempt.batches is not None and attempt.hyper is None and self.scheduler is not None:
            self.scheduler.step()
        self._report_finding(self._watch.see(record, self._ranks.several))

    def _refuse(self, attempt: _Attempt, report: Report, reading: Reading) -> None:
        """A refused step: find out what it was, put everything back, and train on what was held."""
        again = attempt.batches is not None
        held = list(self._pending) if again else []
        if again:
            self._pending.clear()
        random_now = RandomState.now(self._devices)
        hyper_now = Hyperparameters.now(self.optimizer, None) if held else None
        incident = self._explain(attempt, report, reading)
        if again:
            assert attempt.random is not None
            attempt.random.restore()
            if attempt.hyper is not None:
                attempt.hyper.restore(self.optimizer, self.scheduler)
            self._stepper.release()
        if incident is not None:
            if not reading.total < torch.inf or not math.isfinite(reading.loss):
                self._report_finding(self._watch.cut_short())
            cap = self._caps.refused()
            if cap:
                incident = replace(incident, action="halted")
            self._report(incident)
            if cap:
                raise TrainingHalted(f"{cap}. Last: {incident}", incident)
        if held:
            self._run_held(held, attempt, random_now, hyper_now)

    def _explain(self, attempt: _Attempt, report: Report, reading: Reading) -> Incident | None:
        """What a refused step was; None for an overflow that only calibrates the loss scale, which is healthy."""
        stepper, again = self._stepper, attempt.batches is not None
        # When refusals follow each other the weights stay as they were found the first time.
        broken = stepper.broken_state() if self._caps.in_a_row == 0 else []
        weights_bad = bool(broken)
        if reading.bad_buffer:
            broken.append(stepper.buffers.name_at(reading.bad_buffer))
        witness = Witness.hear(self._ranks, reading, report.losses, report.probes, weights_bad)
        gradients = None
        if witness.only_gradients and not reading.weights_bad and not reading.total < torch.inf:
            if again and (stepper.scale is not None or stepper.lag or (self._ranks.together and witness.rank is None)):
                gradients = self._replay(attempt)
                if stepper.scale is not None and gradients.all_finite:
                    stepper.scale.back_off()
                    return None
            elif not again and reading.scale is not None and reading.scale >= 1:
                return None
            elif not stepper.lag:
                gradients = stepper.look_at_gradients(report.present)
        norms = [(report.names[i], norm) for i, norm in zip(report.present, reading.norms, strict=True)]
        incident = make_incident(attempt.step, reading, norms, witness, gradients, broken)
        if reading.weights_bad and stepper.weights is not None and not stepper.weights.restore:
            return replace(incident, action="recorded", message=incident.message + "; no copy was kept to put back")
        if incident.kind == "nonfinite-gradient" and reading.scale is not None and not again:
            message = f"{incident.message}; the loss scale is down to {reading.scale:g}, so it is no range problem"
            return replace(incident, kind="loss-scale-collapse", message=message)
        return incident

    def _run_held(self, held: list[_Attempt], bad: _Attempt, random_now: RandomState, hyper_now: Hyperparameters | None) -> None:
        """Train on the good batches that were held behind a bad one. A generator that the user's own code drew from in
        between (a data loader, say) goes on where it was: rewinding that one would repeat data."""
        drawn: set[str] = set()
        for earlier, later in zip((bad, *held), (*(attempt.random for attempt in held), random_now), strict=True):
            assert earlier.random_after is not None and later is not None
            drawn |= later.moved_since(earlier.random_after)
        for attempt in held:
            if self.scheduler is None and attempt.hyper is not None:
                attempt.hyper.restore(self.optimizer, None)
            self._run(_Attempt(attempt.step, attempt.batches))
        random_now.only(drawn).restore()
        if self.scheduler is None and hyper_now is not None:
            hyper_now.restore(self.optimizer, None)

    # -- incidents -------------------------------------------------------------------------------------------------------------

    def _report(self, incident: Incident) -> None:
        self.incidents.append(incident)
        self._journal.incident(incident)
        if self._ranks.rank == 0:
            log.warning("nanproof: %s", incident)

    def _report_finding(self, finding: Finding | None) -> None:
        if finding is None:
            return
        seen = finding.record
        self._report(
            Incident(
                step=seen.step,
                kind=finding.kind,
                action="clipped" if seen.action == "clipped" else "recorded",
                loss=seen.loss,
                grad_norm=seen.grad_norm,
                culprits=largest(seen.by_parameter.items()),
                message=finding.message,
            )
        )

    def _report_exception(self, attempt: _Attempt, error: Exception) -> None:
        if isinstance(error, UsageError):
            return
        message = f"{type(error).__name__}: {error}"
        self._report(Incident(step=attempt.step, kind="exception", action="recorded", message=message))
        with suppress(AttributeError):  # Python 3.10 has no notes
            error.add_note(f"nanproof: raised inside training step {attempt.step}")

    def _report_foreign_parameters(self) -> None:
        """The optimizer holds tensors that the model does not have, and lacks some that it has: it was built before the
        model was changed, and nothing will be learned. Extra tensors alone (a loss with parameters) are healthy."""
        foreign, left_out = self._stepper.parameters.foreign, self._stepper.parameters.left_out
        if not (foreign and left_out):
            return
        sentence = f"the optimizer holds {len(foreign)} tensors that the model does not have, and lacks {listed(left_out)}"
        diagnosis = Diagnosis(
            cause="optimizer-foreign-parameters",
            confidence=1.0,
            phase="optimizer",
            where=left_out[0],
            evidence=(sentence,),
            fix="Build the optimizer after the last change to the model (resizing, moving, wrapping).",
        )
        self._report(Incident(step=0, kind="no-learning", action="recorded", message=sentence, diagnosis=diagnosis))

    def _follow_optimizer(self) -> None:
        if self._stepper.outdated:
            self._catch_up(0)
            self._stepper.follow_optimizer()

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise UsageError(f"guard.{call}(): this guard is closed; make a new one to go on")


def _check_scalar(loss: Any, where: str) -> None:
    if not isinstance(loss, Tensor):
        raise UsageError(f"guard.{where}: the loss must be a tensor, not {type(loss).__name__}")
    if loss.numel() != 1:
        raise UsageError(f"guard.{where}: the loss must be a scalar, not of shape {tuple(loss.shape)}; take its mean or sum")
