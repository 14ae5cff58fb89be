"""LoopGuard: a guard for a loop that somebody else runs.

A trainer does forward and backward itself, in its own order, with its own contexts. The guard is told of every micro-batch and
of every loss, and takes the optimizer's step. Given a loss function that does again what the trainer did with a micro-batch, a
refused step can be run again: it is explained, and steps held behind it are taken later, as with `train_step`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn

from nanproof.core.attempts import Attempt
from nanproof.core.counters import Counters
from nanproof.core.runner import LossFn
from nanproof.core.stepper import Report
from nanproof.core.verdict import Reading
from nanproof.errors import UsageError
from nanproof.guard import Guard
from nanproof.observe.settings import Observe
from nanproof.policy import Policy
from nanproof.records import Forecast, Incident, StepRecord

UNKNOWN: Final = object()
"""A micro-batch that cannot be run again."""


class LoopGuard(Guard):
    """What `protect` returns. It begins with the trainer's loop; until then it has seen nothing."""

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        run_dir: str | Path | None = None,
        checkpoints: Any = None,
        observe: Any = None,
    ) -> None:
        if policy is not None and not isinstance(policy, Policy):
            raise UsageError(f"protect(policy=...): a nanproof.Policy is needed, not {type(policy).__name__}")
        self.policy = policy if policy is not None else Policy()
        self.incidents: list[Incident] = []
        self.forecasts: list[Forecast] = []
        self.counters: list[Counters] = []
        self.observe = Observe.of(observe)
        """What is looked at besides loss and gradients, from the next `start` on; None is nothing."""
        self.started = False
        self.refused_so_far = 0
        """Refused steps that the host knows of: on CUDA it learns of one two steps later."""
        self.refused_before = 0
        """Those of the run before it was resumed."""
        self.refused_for_good = 0
        """Those of them that could not be run again: after them no schedule went back."""
        self.accepted_so_far = 0
        """Steps that were taken, of those that the host knows of."""
        self.spoiled: deque[tuple[int, list[Tensor]]] = deque(maxlen=1024)
        """Steps whose loss was not finite, and the losses of their micro-batches: what a trainer's average must leave out."""
        self._run_dir, self._checkpoints = run_dir, checkpoints
        self._history: deque[StepRecord] = deque(maxlen=self.policy.history)
        self._next = 0
        self._closed = True
        self._open: Attempt | None = None
        self._taken: Attempt | None = None
        self._living: AbstractContextManager[Any] | None = None
        self.opens_remedies = False
        """Whether what a healed run lives under is open from before a step's first forward to its `take`. Only for a loop in
        which nothing that is open as a forward begins (autocast) closes before the step is taken."""
        self.why_not_again = ""
        """Said of a refused step that cannot be run again; set before `start`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LoopGuard:
        """For a copy of the trainer: one that has not begun, and knows what this one has seen."""
        other = type(self)(policy=self.policy, run_dir=self._run_dir, checkpoints=self._checkpoints, observe=self.observe)
        memo[id(self)] = other
        other.incidents.extend(self.incidents)
        other.forecasts.extend(self.forecasts)
        other._history.extend(self._history)
        other.refused_so_far, other.refused_for_good = self.refused_so_far, self.refused_for_good
        other.refused_before, other.accepted_so_far = self.refused_before, self.accepted_so_far
        other.opens_remedies = self.opens_remedies
        return other

    def start(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss_fn: LossFn | None = None,
        max_norm: float | str | None = 1.0,
        scaler: Any = None,
        scheduler: Any = None,
        step: int = 0,
    ) -> None:
        """The loop begins, at this step; a second time, if need be.

        Args:
            loss_fn: the loss of one micro-batch as backward gets it: divided for accumulation, not scaled. None: no step can be
                run again.
            scheduler: one that the guard advances after accepted steps; None where the loop does that.
        """
        self.close()
        incidents, forecasts, history, counters = self.incidents, self.forecasts, self._history, self.counters
        if loss_fn is not None:
            loss_fn = _Weighted(loss_fn)
        super().__init__(
            model,
            optimizer,
            loss_fn=loss_fn,
            max_norm=max_norm,
            scaler=scaler,
            scheduler=scheduler,
            policy=self.policy,
            run_dir=self._run_dir,
            checkpoints=self._checkpoints,
            observe=self.observe,
        )
        while history and history[-1].step >= step:
            history.pop()
        self.incidents, self.forecasts, self._history, self._next = incidents, forecasts, history, step
        self.counters += counters
        self._open = self._taken = None
        self._examiner.why_not_again = self.why_not_again or self._examiner.why_not_again
        self.started = True

    @property
    def path(self) -> str:
        """As of `Guard`; "not started" before the loop begins."""
        return super().path if self.started else "not started"

    @property
    def open(self) -> bool:
        """A step has begun and was not taken."""
        return self._open is not None

    @property
    def late(self) -> bool:
        """Verdicts come later than their steps: one behind a bad one is held, and run again."""
        return self._stepper.lag > 0

    @property
    def parameters(self) -> list[Tensor]:
        """What the optimizer trains."""
        return self._stepper.parameters.tensors

    @property
    def settled(self) -> bool:
        """No jump of the loss is being watched."""
        return self._watch.settled

    def micro_batch(self, batch: Any) -> None:
        """Just before a forward: a step begins with the first. `UNKNOWN`: the step cannot be run again."""
        self._check_open("micro_batch")
        self.finish()
        if self._open is None:
            self._runner.run_held()
            self._open = self._new_attempt(())
            self._runner.open(self._open, forward_ahead=batch is not UNKNOWN)
            if self.opens_remedies and batch is not UNKNOWN:
                self._living = self._healer.living()
        if batch is UNKNOWN or self.loss_fn is None:
            self._open.batches = None
        elif self._open.batches is not None:
            self._open.batches = (*self._open.batches, batch)

    def note_loss(self, loss: Tensor, calls: Iterable[Any] = ()) -> Tensor | None:
        """Just before backward, with the loss it gets. Returns what backward has to start from on several ranks, else None.
        `calls`: what the model was called with for it, if that is known; looked at if the step cannot be run again."""
        seed = self._stepper.note_loss(loss)
        if self._open is not None:
            if self._stepper.noted == 1:
                self._open.calls.clear()  # of backwards whose gradients were cleared
            self._open.calls.append(tuple(calls))
        return seed

    def drop_loss(self) -> None:
        """The backward whose loss was noted last was another optimizer's business."""
        self._stepper.drop_loss()
        if self._open is not None:
            del self._open.calls[-1:]

    def remark(self, say: Callable[[], str]) -> bool:
        """Of the micro-batch under way: what the incident should say if its step is refused; asked only then. False where no
        step is under way."""
        attempt = self._open if self._open is not None or not self.started else self._runner.running
        if attempt is not None:
            attempt.remarks.append(say)
        return attempt is not None

    def clip_to(self, max_norm: float | None) -> None:
        """The norm to clip to from now on; None or infinity does not clip."""
        if self._stepper.max_norm != "auto":
            self._stepper.max_norm = max_norm if max_norm is not None and 0 < max_norm < math.inf else None

    def take(self) -> Tensor:
        """In place of clipping and of the optimizer's step. Returns the norm of the gradients before clipping, on the device."""
        attempt = self._open
        if attempt is None or not self._stepper.has_losses:
            raise UsageError("the optimizer is to step, but the guard was told of no forward and backward since its last step")
        self._open = None
        self._close_remedies()
        if attempt.batches is not None:
            self._runner.begin(attempt)
        self._runner.take(attempt, None)
        self._taken = attempt
        assert attempt.report is not None
        return attempt.report.total

    def is_refused(self) -> bool:
        """Whether the step just taken was refused, where that is known already: not where verdicts come late."""
        report = None if self._taken is None else self._taken.report
        return report is not None and not self._stepper.lag and report.read().refused

    def finish(self) -> None:
        """After the loop's own business with a step: its schedule, and the verdicts that are due."""
        attempt, self._taken = self._taken, None
        if attempt is None:
            return
        if attempt.batches is not None:
            self._runner.done(attempt)
        self._runner.finishing = attempt if attempt.batches is None else None
        self._after_step(attempt)
        self._runner.finishing = None

    def abandon(self) -> None:
        """What was accumulated so far is dropped; the step that began is not taken."""
        self._close_remedies()
        if self._open is not None:
            self._open = None
            self._next -= 1
            self._runner.give_up()

    def withdraw(self, counts: bool = False) -> None:
        """The loop takes no step after all; gradients and buffers stay as they are. `counts`: it counts one all the same."""
        self._close_remedies()
        if self._open is not None:
            self._open = None
            self._next -= not counts
            self._stepper.forget_losses()

    def raised(self, error: BaseException) -> None:
        """The loop's forward or backward raised: note what it was, and drop the step."""
        self._close_remedies()  # finding out what it was opens them itself
        attempt = self._open
        if attempt is not None:
            if attempt.batches is not None:
                self._runner.begin(attempt)
            self._report_exception(attempt, error)
            self.abandon()

    def evaluating(self) -> AbstractContextManager[Any]:
        """Open around forwards between steps that are not training."""
        return self._healer.living(training=False) if self.started else nullcontext()

    def _close_remedies(self) -> None:
        living, self._living = self._living, None
        if living is not None:
            living.__exit__(None, None, None)

    def sync(self) -> None:
        """As of `Guard`. Between the micro-batches of a step it does not wait: running held steps would clear the gradients."""
        self.finish()
        if self._open is None and self.started:
            super().sync()

    def wrap(self, data: Any) -> Any:
        """As of `Guard`."""
        self._check_started("wrap")
        return super().wrap(data)

    def _check_open(self, call: str) -> None:
        self._check_started(call)
        super()._check_open(call)

    def _check_started(self, call: str) -> None:
        if not self.started:
            raise UsageError(
                f"guard.{call}(): this guard begins with the trainer's loop, which has not begun; "
                "to resume, use the trainer's own way"
            )

    def state_dict(self) -> dict[str, Any]:
        """As of `Guard`; a step that has begun does not count."""
        self._check_started("state_dict")
        return {**super().state_dict(), "step": self._next - self.open, "refused": self.refused_in_all}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As of `Guard`."""
        self._check_started("load_state_dict")
        super().load_state_dict(state)
        # Apart from what this loop counts itself: by that schedules and averages are put right.
        self.refused_before = int(state.get("refused", 0)) - self.refused_so_far

    @property
    def refused_in_all(self) -> int:
        """Refused steps of the run, also of before it was resumed."""
        return self.refused_before + self.refused_so_far

    def __repr__(self) -> str:
        taken, refused, found = self.accepted_so_far, self.refused_so_far, len(self.incidents)
        return f"<{type(self).__name__} ({self.path}): {taken} steps taken, {refused} refused, {found} incidents>"

    def _close(self, alone: bool) -> None:
        self.withdraw()  # the loop ended within a step; what came before it has its verdicts to come
        super()._close(alone)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.started:
            super().__exit__(kind, error, trace)

    def _record(self, attempt: Attempt, report: Report, reading: Reading) -> StepRecord:
        self.refused_so_far += reading.refused
        self.refused_for_good += reading.refused and attempt.batches is None
        self.accepted_so_far += not reading.refused
        if reading.refused and not math.isfinite(reading.loss):
            self.spoiled.append((attempt.step, report.losses))
        return super()._record(attempt, report, reading)

    def _back(
        self, incident: Incident, most: int, since: int, until: int, blame_data: bool, forget: bool = True
    ) -> Incident | None:
        """The state goes back. The loop cannot: its count of steps and its data go on."""
        at = self._next
        back = super()._back(incident, most, since, until, blame_data, forget)
        self._next = at
        return back


class _Weighted:
    """A loss function that returns what a micro-batch adds to its step, not the mean over it."""

    weighted = True

    def __init__(self, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self._loss_fn(model, batch)
