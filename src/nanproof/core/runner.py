"""Runner: takes steps that can be taken again. It holds the batches whose verdicts have not come yet, and goes back before a bad
one without undoing what the user's own code did meanwhile.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any

from torch import Tensor, nn

from nanproof.core.attempts import Afterwards, Attempt, to_run_again
from nanproof.core.checks import check_scalar
from nanproof.core.context import Groups, Mode, RandomState, Schedule, change_settings, rehearsal, settings
from nanproof.core.evidence import Gradients, activation_gradients
from nanproof.core.stepper import Stepper
from nanproof.core.tree import own_copy

log = logging.getLogger("nanproof")

LossFn = Callable[[nn.Module, Any], Tensor]


def part_of(loss_fn: LossFn, loss: Tensor, parts: int) -> Tensor:
    """What a micro-batch adds to the loss of its step: its share of the mean, unless the loss function is `weighted`, which says
    that it has seen to that itself."""
    return loss if parts == 1 or getattr(loss_fn, "weighted", False) else loss / parts


def harmless(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For methods of a watcher: looking is never the reason a run dies. Whatever goes wrong in it ends it, with a warning that
    says what is not done any more."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def tried(self: Watcher, *args: Any) -> Any:
            if self.off:
                return None
            try:
                return method(self, *args)
            except Exception as error:
                log.debug("nanproof: %s failed", method.__name__, exc_info=True)
                log.warning("nanproof: %s any more: %s: %s", what, type(error).__name__, error)
                self.stop()
                return None

        return tried

    return decorate


class Watcher:
    """Looks on while steps are taken; each moment can be left alone."""

    off = False
    """It has stopped looking."""

    def stop(self) -> None:
        self.off = True

    def open(self, attempt: Attempt) -> None:
        """Before the first forward of a step that may be run again."""

    def begin(self, attempt: Attempt) -> None:
        """The batches of such a step are known."""

    def before_step(self, step: int) -> None:
        """The gradients are there."""

    def after_step(self, step: int, batches: tuple[Any, ...] | None) -> None:
        """The optimizer has acted, on the device."""

    def gave_up(self) -> None:
        """It raised instead."""


class Runner:
    """The steps of `train_step`, from their batches to the optimizer."""

    def __init__(self, stepper: Stepper, loss_fn: LossFn | None, scheduler: Any) -> None:
        self.stepper, self.loss_fn, self.scheduler = stepper, loss_fn, scheduler
        self.model, self.optimizer = stepper.model, stepper.optimizer
        self.watchers: list[Watcher] = []
        self.on_error: Callable[[Attempt, BaseException], bool] = lambda attempt, error: False
        """Told of an exception inside a step; says whether the step can be run again. Else it goes on to the user."""
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Opened around the forwards and backwards of a step."""
        self.pending: deque[Attempt] = deque()
        """Steps under way: dispatched, their records not consumed yet."""
        self.held: deque[Attempt] = deque()
        """Good batches that a bad one held up, to be trained on again before anything else."""
        self.devices = sorted({p.device for p in stepper.parameters.tensors if p.device.type == "cuda"}, key=str)
        self.finishing: Attempt | None = None
        """A step after which the loop has not advanced its schedule yet."""
        self.running: Attempt | None = None
        """A step whose forwards and backwards this runner does."""
        self._afterwards: Afterwards | None = None
        self._modules = list(self.model.modules())

    def mode(self) -> Mode:
        """How a step that begins now is called."""
        return Mode.now(self._modules, self.stepper.parameters.device)

    def run(self, attempt: Attempt) -> None:
        """Take a step; its record comes later."""
        self.open(attempt)
        self.begin(attempt)
        self.running = attempt
        attempt.remarks.clear()
        try:
            self._forward_backward(attempt)
            self.take(attempt, None)
        except BaseException as error:
            self.give_up()
            assert attempt.random is not None
            attempt.random.restore()
            if not self.on_error(attempt, error):
                raise
            self.run(attempt)
            return
        finally:
            self.running = None
        self.done(attempt)

    def open(self, attempt: Attempt, forward_ahead: bool = True) -> None:
        """Before the forward: note what the step depends on. Not `forward_ahead`: a loop that says so only afterwards."""
        attempt.random = RandomState.now(self.devices)
        attempt.schedule = Schedule.now(self.optimizer, self.scheduler) if self.stepper.lag else None
        self.stepper.buffers.begin()
        if forward_ahead:
            for watcher in self.watchers:
                watcher.open(attempt)

    def begin(self, attempt: Attempt) -> None:
        """The batches of the step are known."""
        for watcher in self.watchers:
            watcher.begin(attempt)

    def done(self, attempt: Attempt) -> None:
        """After the optimizer: with a lag the step counts as accepted until its verdict comes."""
        if self.stepper.lag:
            attempt.random_after = RandomState.now(self.devices)
            if self.scheduler is not None:
                self.scheduler.step()
            attempt.settings_after = settings(self.optimizer)

    def take(self, attempt: Attempt, loss: Tensor | None) -> None:
        """The optimizer's part of a step, from the gradients that are there."""
        for watcher in self.watchers:
            watcher.before_step(attempt.step)
        try:
            attempt.report = self.stepper.step(loss, again=attempt.batches is not None)
        except BaseException:
            for watcher in self.watchers:
                watcher.gave_up()
            raise
        for watcher in self.watchers:
            watcher.after_step(attempt.step, attempt.batches)
        self.pending.append(attempt)

    def _forward_backward(self, attempt: Attempt, scaled: bool = True) -> None:
        assert self.loss_fn is not None and attempt.batches is not None
        self.stepper.forget()
        parts = len(attempt.batches)
        with self.around():
            for i, batch in enumerate(attempt.batches):
                with self.stepper.ranks.accumulate(last=i == parts - 1):
                    loss = self.loss_fn(self.model, own_copy(batch))
                    check_scalar(loss, "loss_fn")
                    self.stepper.backward(part_of(self.loss_fn, loss, parts), scaled)

    def replay(self, attempt: Attempt) -> Gradients | None:
        """Run forward and backward of a refused step again, from the same state and at a loss scale of 1. None if that raises:
        finding out more is never the reason a run dies."""
        assert attempt.random is not None and attempt.mode is not None
        stepper, ranks = self.stepper, self.stepper.ranks
        attempt.random.restore()
        try:
            with rehearsal, attempt.mode.again(self._modules, stepper.parameters.device), activation_gradients() as flags:
                self._forward_backward(attempt, scaled=False)
            gradients = stepper.look_at_gradients(stepper.parameters.present())
            said = ranks.gather([any(flags)])
            guilty = next((rank for rank, bad in said.items() if bad[0] and ranks.together), None)
            return replace(gradients, rank=guilty)
        except Exception as error:
            log.warning("nanproof: step %d could not be run again to look at it: %r", attempt.step, error)
            return None
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Leave nothing behind of a step that was not taken: gradients, notes, buffers."""
        self.stepper.forget()
        self.stepper.ranks.forget_gradients()
        self.stepper.buffers.restore()

    def put_back(self, bad: Attempt, random_now: RandomState, settings_now: Groups) -> None:
        """Back to before the bad step, and the batches behind it into `held`. Steps behind it that cannot be run again were not
        held: the optimizer has taken them, and their records are still to come."""
        self.pending.popleft()
        assert bad.random is not None
        bad.random.restore()
        if bad.schedule is not None:
            bad.schedule.restore(self.optimizer, self.scheduler)
        again, self._afterwards = to_run_again(bad, self.pending, random_now, settings_now, self.scheduler is not None)
        taken = [attempt for attempt in self.pending if attempt.batches is None]
        self.pending.clear()
        self.pending.extend(taken)
        for attempt in taken:
            if self.scheduler is not None and attempt is not self.finishing and not attempt.refused():
                self.scheduler.step()
        self.held.extend(again)
        self.stepper.release()

    def run_held(self) -> None:
        """Train on the good batches that were held behind a bad one. One that raises is dropped, the others stay held."""
        if not self.held:
            self._return_to_user()
            return
        while self.held:
            attempt = self.held.popleft()
            assert attempt.mode is not None
            change_settings(self.optimizer, attempt.take_changes())
            try:
                with attempt.mode.again(self._modules, self.stepper.parameters.device):
                    self.run(attempt)
            except BaseException:
                self._return_to_user()
                raise
        self.stepper.forget()  # a loop that clears its gradients after a step has done so already
        self._return_to_user()

    def drop_held(self) -> None:
        """What was held up is not trained on any more."""
        self.held.clear()
        self._return_to_user()

    def forget(self, keep_random: bool = False) -> None:
        """Steps under way are no longer of interest: other weights have been loaded. `keep_random`: generators that the user's
        own code drew from in between stay where it left them."""
        self.pending.clear()
        self.held.clear()
        if keep_random and self._afterwards is not None:
            self._afterwards.random.restore()
        self._afterwards = None
        self.stepper.forget()
        self.stepper.ranks.forget_gradients()
        self.stepper.release()

    def _return_to_user(self) -> None:
        """Random numbers and settings that belong to the user's own code go on where they were."""
        if self._afterwards is not None:
            self._afterwards.apply(self.optimizer)
            self._afterwards = None
