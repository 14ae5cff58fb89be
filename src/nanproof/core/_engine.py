"""Engine: everything that happens to a step, whoever runs the loop.

A step is taken in two moments. On the device, the judge reads the gradients and the optimizer acts
on its verdict. On the host, `lag` steps later, the verdict is consumed: it becomes a record, and
where something is wrong an incident, about which `decide` says what to do; this is the one place
that carries it out.

    begin(batch) ─► forward ─► loss(tensor) ─► backward ─► step() ─► end()          a loop that somebody runs
    train(batches)                                                                 the engine's own loop

With a lag, a bad step that can be run again latches: the steps after it are refused too until the
host has seen it. Then everything is put back to before the bad step and the good held batches are
trained on, in order. The result is the run that never saw the bad batch, bit for bit.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from nanproof import _wording as wording
from nanproof._errors import TrainingHalted, UsageError
from nanproof._policy import Policy
from nanproof._records import Incident, StepRecord
from nanproof._text import first_line
from nanproof.core._caps import SkipCaps
from nanproof.core._contracts import Explainer, Healer, Lookout, Observer, Recovery, Refusal
from nanproof.core._decide import Accept, Decision, GoBack, Halt, RunAgain, Salvage, Situation, Skip, Trouble, decide
from nanproof.core._evidence import bad_buffer, best_explained, from_finding
from nanproof.core._inquest import Inquest
from nanproof.core._stopping import Stopping
from nanproof.core._telemetry import Journal
from nanproof.core._tell import Account, ForkTeller, Teller
from nanproof.core._under_way import UNKNOWN, Again, Attempt, Begun, LossFn, Remark, UnderWay
from nanproof.core.judge._judge import Judge, Norms, Report
from nanproof.core.judge._optimizers import Evaluated, may_evaluate, members_of
from nanproof.core.judge._stats import Finding, SpikeWatch
from nanproof.core.judge._verdict import Reading
from nanproof.core.support._checks import check_scalar
from nanproof.core.support._context import RandomState, change_settings, settings
from nanproof.core.support._signals import shield, shielded
from nanproof.core.support._tree import gradients_now, own_copy

log = logging.getLogger("nanproof")

WHY_NOT_AGAIN = "nanproof cannot rerun a step of your own loop; guard.train_step(batch) or nanproof.diagnose(...) can say more"
_LOOKS = 3
"""Steps after which it is known whether a loop writes into its gradients between backward and step."""
SEVERAL_RANKS = "with several ranks a step is rerun only if its verdict is read at once and no loss scale is used: Policy(lag=0)"


def part_of(loss_fn: LossFn, loss: Tensor, parts: int) -> Tensor:
    """What a micro-batch adds to the loss of its step: its share of the mean, unless the loss
    function is `weighted`, which says that it has seen to that itself."""
    return loss if parts == 1 or getattr(loss_fn, "weighted", False) else loss / parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What an engine needs to know of the loop it serves."""

    begins: bool = False
    """It calls `begin` before a step. A loop that does not only calls `step`."""
    goes_back: bool = True
    """Its count of steps goes back when the state does; a trainer's goes on."""
    ranks_differ: bool = False
    """Ranks may differ in whether a step can be run again. The engine asks them once it was refused."""
    opens_fixes: bool = False
    """The fixes of a healed run are open from before a step's first forward to its `step`. Only for
    a loop in which nothing that is open as a forward begins (autocast) closes before the step is
    taken."""
    leaves: bool = True
    """When a signal asks the run to stop, the engine saves its state and ends the program. A trainer
    does that itself."""
    lines: bool = False
    """It has no loss function: a refused step is run again from the loop's own lines."""
    why_not_again: str = WHY_NOT_AGAIN
    """Why a refused step cannot be run again."""


@dataclass(slots=True)
class _Matter:
    """An incident that is being dealt with."""

    incident: Incident
    situation: Situation
    attempt: Attempt | None = None
    record: StepRecord | None = None
    case: Any = None
    """What the diagnosis knows, for the healer."""
    one_rank: bool = True
    went_back: bool = False
    looked: bool = False
    """Whether a fix was looked for: going back comes first where it repairs more."""


class Engine:
    """Runs, judges, decides, carries out and tells."""

    def __init__(
        self,
        judge: Judge,
        under_way: UnderWay,
        *,
        policy: Policy,
        journal: Journal,
        account: Account,
        watch: SpikeWatch,
        caps: SkipCaps,
        loss_fn: LossFn | None = None,
        loop: Loop | None = None,
        explainer: Explainer | None = None,
        recovery: Recovery | None = None,
        healer: Healer | None = None,
        lookout: Lookout | None = None,
        stopping: Stopping | None = None,
        first: int = 0,
    ) -> None:
        self.judge, self.under_way, self.policy, self.loss_fn, self.loop = judge, under_way, policy, loss_fn, loop or Loop()
        self.explainer = explainer or Explainer()
        self.recovery = recovery or Recovery()
        self.healer = healer or Healer()
        self.lookout = lookout or Lookout()
        self.observers: tuple[Observer, ...] = (self.explainer, self.recovery, self.lookout, self.healer)
        self._opened, self._before, self._after_it = (self._who(moment) for moment in ("open", "before", "after"))
        self.account, self.tell = account, Teller(account, journal, judge.ranks.rank == 0)
        self.watch, self.caps, self.stopping = watch, caps, stopping
        self.next_step = first
        """The number of the step that comes next. It falls when the run goes back."""
        self.closed = False
        self._inquest = Inquest(judge, self.explainer)
        self._waiting: deque[_Matter] = deque()
        """Matters that can be healed once no step is under way."""
        self._open: Attempt | None = None
        """A step that has begun and was not taken."""
        self._taken: Attempt | None = None
        """A step that was taken and has not ended."""
        self._in_parts = False
        """Whether its optimizers act one by one."""
        self._running: Attempt | None = None
        """A step whose forwards and backwards the engine does itself."""
        self._fixes: AbstractContextManager[Any] | None = None
        self._gradients: list[tuple[int, int]] | None = None
        """The gradients as the last backward left them, where verdicts come late."""
        self._unclipped: Norms | None = None
        """Their norms, where verdicts are read at once."""
        self._rewrites, self._looks = False, 0
        """Whether the loop has written into gradients between backward and step, and in how many steps that was looked at."""
        self._replaced = False
        """Whether it has replaced non-finite ones."""
        self._leaving = False
        """A signal asked the run to stop, and its state was copied: the loop has its schedule to advance first."""
        self._pid = os.getpid()
        _engines.add(self)

    def _who(self, moment: str) -> tuple[Observer, ...]:
        """The observers that do anything at a moment of every step."""
        return tuple(o for o in self.observers if getattr(type(o), moment) is not getattr(Observer, moment))

    # -- a loop that somebody runs -----------------------------------------------------------------

    @property
    def trained(self) -> list[Tensor]:
        """What the optimizer trains."""
        return self.judge.parameters.tensors

    @property
    def open(self) -> bool:
        """A step has begun and was not taken."""
        return self._open is not None

    @property
    def taken(self) -> bool:
        """A step was taken and has not ended."""
        return self._taken is not None

    @shielded
    def begin(self, batch: Any, why_not_again: str = "", random: RandomState | None = None, again: Again | None = None) -> None:
        """Just before a forward: a step begins with the first. `UNKNOWN`: the step cannot be run
        again. `random`: the random numbers that it began with, if it began earlier. `again`: what can
        be run again of it all the same."""
        if self.closed:
            raise UsageError("engine.begin(): this run is closed; protect the trainer anew to go on")
        self.end()
        if self._open is None:
            self.run_held()
            self._open = self._new_attempt(())
            self._prepare(self._open, ahead=batch is not UNKNOWN)
            if self.loop.opens_fixes and batch is not UNKNOWN:
                self._fixes = self.healer.living()
            self._open.random = random or self._open.random
        attempt = self._open
        if why_not_again:
            attempt.why_not_again = why_not_again
        if again is not None:
            attempt.again = [again]
        if self.loop.ranks_differ and self.judge.ranks.together:
            attempt.aside.append(batch)
            attempt.batches = None
        elif batch is UNKNOWN or self.loss_fn is None:
            attempt.batches = None
        elif attempt.batches is not None:
            attempt.batches = (*attempt.batches, batch)

    @shielded
    def loss(self, loss: Tensor, calls: Iterable[Any] = (), again: Again | None = None) -> Tensor | None:
        """Just before backward, with the loss it gets. Returns what backward has to start from on
        several ranks, else None. `calls`: what the model was called with for it, if that is known;
        looked at if the step cannot be run again. `again`: how to compute the loss once more, if the
        loop made it."""
        self._notice_written_gradients()
        seed = self.judge.note_loss(loss)
        if self._open is not None:
            if len(self.judge.noted) == 1:
                self._open.calls.clear()  # of backwards whose gradients were cleared
                self._open.again = [known for known in self._open.again if known.written]
            self._open.calls.append(tuple(calls))
            if len(self._open.again) < len(self._open.calls):
                self._open.again.append(again or Again(UNKNOWN, whole=False))
            self.explainer.noted(self._open, loss)
        return seed

    def note_graph(self, loss: Tensor) -> None:
        """Show the explainer the loss of a loop that does not call `begin`, just before its backward."""
        self.explainer.noted(Attempt(self.next_step, None), loss, True)

    def backward_ended(self) -> None:
        """A backward pass is over. Whatever writes into the gradients from now on is not part of a replay."""
        self._gradients = gradients_now(self.trained) if self.judge.lag and self.open else None

    def note_gradients(self) -> None:
        """Read the norms of the gradients as backward leaves them, if the loop writes into them before its step: clipping by
        hand with a NaN makes all of them NaN. Whether it does shows in its first steps. Not where verdicts come late: there a
        replay names the culprits."""
        judge = self.judge
        follows = self._rewrites or self._looks < _LOOKS
        self._unclipped = judge.norms() if follows and not (judge.lag or judge.scaled or judge.ranks.several) else None

    def drop_loss(self) -> None:
        """The backward whose loss was noted last was another optimizer's business."""
        self.judge.drop_loss()
        if self._open is not None:
            del self._open.calls[-1:]
            del self._open.again[-1:]

    def remark(self, read: Callable[[], Remark]) -> bool:
        """Add a sentence about the micro-batch under way, read only if its step is refused. Return
        False if no step is under way."""
        attempt = self._open or self._running
        if attempt is not None:
            attempt.remarks.append(read)
        return attempt is not None

    @shielded
    def step(
        self,
        norms: Norms | None = None,
        *,
        loss: Tensor | None = None,
        acting: Sequence[Any] | None = None,
        closure: Any = None,
        begun: Begun | None = None,
    ) -> Tensor:
        """In place of clipping and of the optimizer's step. Returns the norm of the gradients
        before clipping, on the device.

        `norms`: those of the gradients, where they were read already. `loss`: where none was noted.
        `acting`: of several optimizers, those that act now; the verdict is about all. Call `act` for
        each of the others, then `end`. `closure`: how an optimizer evaluates the loss again. `begun`:
        what is known of the step in a loop that does not call `begin`.
        """
        if self._leaving:
            self._leave()
        self._notice_written_gradients()
        if self.loop.begins and (self._open is None or not self.judge.noted):
            raise UsageError(
                "optimizer.step() was called, but the guard has seen no forward and backward pass since the last step"
            )
        opened = self._open is not None
        attempt = self._open or self._new_attempt(None)
        if loss is not None and not opened:
            self.explainer.noted(attempt, loss, True)
        if begun is not None:
            attempt.again, attempt.calls, attempt.random, attempt.mode = begun.again, begun.calls, begun.random, begun.mode
        self._open = None
        attempt.unclipped, self._unclipped = self._unclipped, None
        if attempt.unclipped is not None:
            self._looks += 1
            held = norms is not None or attempt.unclipped.hold_for(self.judge.parameters.present_gradients()[1])
            self._rewrites = self._rewrites or not held
        self._close_fixes()
        if opened:
            self._follow()
        how = {name: given for name, given in (("acting", acting), ("closure", closure)) if given is not None}
        self._take(attempt, loss, norms, **how)
        self._taken = attempt
        assert attempt.report is not None
        return attempt.report.total

    @shielded
    def act(self, member: Any) -> None:
        """Let another one of several optimizers act on the verdict of the step just taken."""
        self.judge.act(member)

    def refused_at_once(self) -> bool:
        """Return whether the step just taken was refused. False if its verdict has not arrived."""
        report = None if self._taken is None else self._taken.report
        return report is not None and not self.judge.lag and report.read().refused

    @shielded
    def end(self) -> None:
        """After the loop's own business with a step: its schedule, and the verdicts that are
        due."""
        attempt, self._taken = self._taken, None
        if attempt is None:
            return
        if self._in_parts:
            self._acted(attempt)
        if attempt.batches is not None:
            self.under_way.note_end(attempt)
        else:
            self.under_way.finishing = attempt
        self._after(attempt)
        self.under_way.finishing = None
        self._stop_if_asked(own_loop=True)

    @shielded
    def abandon(self, *, keep_gradients: bool = False, counts: bool = False) -> None:
        """The step that began is not taken. `keep_gradients`: gradients and buffers stay as they
        are; `counts`: the loop counts a step all the same."""
        self._close_fixes()
        if self._open is None:
            return
        self._open = None
        self.next_step -= not counts
        if keep_gradients:
            self.judge.forget_losses()
        else:
            self._give_up()

    @shielded
    def raised(self, error: BaseException, calls: Iterable[Any] = (), again: Again | None = None) -> None:
        """The loop's forward or backward raised: report it and drop the step. `calls`, `again`: what
        the model was called with, and how what raised can be run again."""
        self._close_fixes()  # the replay opens them itself
        attempt = self._open
        if attempt is not None:
            attempt.mode = attempt.mode or self.under_way.mode()
            if again is not None and not self.judge.noted:
                attempt.calls, attempt.again, attempt.batches = [tuple(calls)], [again], None
            self._exception(attempt, error)
            self.abandon()

    def _notice_written_gradients(self) -> None:
        left, self._gradients = self._gradients, None
        if left is not None and left != gradients_now(self.trained):
            self.begin(UNKNOWN)

    def _close_fixes(self) -> None:
        fixes, self._fixes = self._fixes, None
        if fixes is not None:
            fixes.__exit__(None, None, None)

    # -- the engine's own loop ---------------------------------------------------------------------

    @shielded
    def train(self, batches: tuple[Any, ...]) -> Tensor:
        """One whole step over these micro-batches. Returns its loss."""
        self.run_held()
        attempt = self._new_attempt(batches)
        try:
            self._run(attempt, interruptible=True)
        except BaseException as error:
            if not isinstance(error, Exception):
                self.next_step = attempt.step  # interrupted: it did not happen, so its number is free again
            raise
        self._after(attempt)
        self._stop_if_asked(own_loop=False)
        assert attempt.report is not None
        return attempt.report.loss

    def run_held(self) -> None:
        """Train on the good batches that were held behind a bad one. One that raises is dropped,
        the others stay held."""
        under_way = self.under_way
        if under_way.held:
            while under_way.held:
                attempt = under_way.held.popleft()
                assert attempt.mode is not None
                change_settings(self.judge.optimizer, attempt.take_changes())
                try:
                    with attempt.mode.again(under_way.modules, self.judge.parameters.device):
                        self._run(attempt)
                except BaseException:
                    under_way.return_to_user()
                    raise
            self.judge.forget()  # a loop that clears its gradients after a step has done so already
        under_way.return_to_user()

    def _run(self, attempt: Attempt, interruptible: bool = False) -> None:
        """Take a step; its record comes later. It is run again where an exception was healed."""
        while True:
            self._prepare(attempt)
            self._running = attempt
            attempt.remarks.clear()
            try:
                self._forward_backward(attempt, interruptible)
                self._follow()
                self._take(attempt, None, None, **self._closure(attempt))
                break
            except BaseException as error:
                self._give_up()
                assert attempt.random is not None
                attempt.random.restore()
                if not self._exception(attempt, error):
                    raise
            finally:
                self._running = None
        self.under_way.note_end(attempt)

    def _closure(self, attempt: Attempt) -> dict[str, Any]:
        """How an optimizer that asks for it evaluates the loss of the step again. Its first evaluation is the one that was
        judged."""
        if not any(may_evaluate(member) for member in members_of(self.judge.optimizer)):
            return {}

        def evaluate() -> Tensor:
            with torch.enable_grad():
                self._forward_backward(attempt)
            losses = [loss for loss, _ in self.judge.noted]
            self.judge.forget_losses()
            return torch.stack(losses).sum()

        return {"closure": Evaluated(self.judge.parameters.tensors, evaluate, [loss for loss, _ in self.judge.noted])}

    def _forward_backward(self, attempt: Attempt, interruptible: bool = False) -> None:
        assert self.loss_fn is not None and attempt.batches is not None
        self.judge.forget()
        parts = len(attempt.batches)
        with self.healer.living() if self.healer.on else nullcontext():
            for i, batch in enumerate(attempt.batches):
                mine = own_copy(batch)
                with self.judge.ranks.accumulate(last=i == parts - 1), shield.lifted() if interruptible else nullcontext():
                    loss = self.loss_fn(self.judge.model, mine)
                    check_scalar(loss, "loss_fn")
                    self.explainer.noted(attempt, loss)
                    self.judge.backward(part_of(self.loss_fn, loss, parts))

    # -- a step on the device ----------------------------------------------------------------------

    def _new_attempt(self, batches: tuple[Any, ...] | None) -> Attempt:
        """The next step begins. None: it cannot be run again."""
        if self.judge.outdated:
            self.sync()
            self._follow()
        mode = None if batches is None else self.under_way.mode()
        attempt = Attempt(self.next_step, batches, mode, why_not_again=self.loop.why_not_again)
        self.recovery.begun(attempt)
        self.next_step += 1
        return attempt

    def _follow(self) -> None:
        """Take in what model and optimizer are made of, if that is not what it was."""
        if not self.judge.outdated:
            return
        said = [self.judge.follow(), self.recovery.followed()]
        self.under_way.refresh()
        if any(said):
            seen = "; ".join(filter(None, said))
            log.info("nanproof: step %d: the model has changed, and the guard follows: %s", self.next_step, seen)

    def _prepare(self, attempt: Attempt, ahead: bool = True) -> None:
        """Before the forward: note what the step depends on. Not `ahead`: a loop that says so only
        afterwards."""
        self.under_way.note_start(attempt)
        if ahead or not self.judge.buffers.in_step:
            self.judge.begin()
        if ahead:
            for observer in self._opened:
                observer.open(attempt)

    def _take(self, attempt: Attempt, loss: Tensor | None, norms: Norms | None, **how: Any) -> None:
        """The optimizer's part of a step, from the gradients that are there."""
        self._in_parts = how.get("acting") is not None
        attempt.put_back_attributes = self.judge.buffers.attributes.taken()
        for observer in self._before:
            observer.before(attempt)
        try:
            attempt.report = self.judge.step(loss, attempt.batches is not None, norms, **how)
        except BaseException:
            for observer in self.observers:
                observer.dropped()
            raise
        if not self._in_parts:
            self._acted(attempt)
        self.under_way.pending.append(attempt)

    def _acted(self, attempt: Attempt) -> None:
        self._in_parts = False
        for observer in self._after_it:
            observer.after(attempt)

    def _give_up(self) -> None:
        """Leave nothing behind of a step that was not taken: gradients, notes, buffers."""
        self.judge.forget()
        self.judge.ranks.forget_gradients()
        self.judge.restore()

    def _after(self, attempt: Attempt) -> None:
        """A step was dispatched: take in the records that are due, and keep a copy of the state if
        one is."""
        own_loop = attempt.batches is None
        self._catch_up(self.judge.lag)
        self._broken_copy(self.recovery.stepped(self.next_step, own_loop, self.watch.settled))

    # -- verdicts ----------------------------------------------------------------------------------

    def _catch_up(self, lag: int) -> None:
        """Consume the records older than `lag` steps, at the same step on every rank; run what they
        held up; heal what waited."""
        pending = self.under_way.pending
        while True:
            if len(pending) > (0 if self._waiting else lag):
                self._consume(pending[0])
                self.run_held()
            elif self._waiting:
                self._resolve(self._waiting.popleft())
            else:
                return

    def _consume(self, attempt: Attempt) -> None:
        report = attempt.report
        assert report is not None
        reading = report.read()
        if reading.held:
            # Held behind a bad step that is not there any more: nothing was taken, so it is run again.
            if attempt.put_back_attributes is not None:
                attempt.put_back_attributes()
            self.under_way.put_back(attempt, RandomState.now(self.under_way.devices), settings(self.judge.optimizer))
            self.under_way.held.appendleft(Attempt(attempt.step, attempt.batches, attempt.mode))
            return
        record = self._record(attempt, report, reading)
        if attempt.unclipped is not None and len(attempt.unclipped.values) == len(reading.norms):
            self._compare(attempt.unclipped, record, reading)
        if reading.refused:
            self.recovery.refused()
            self._refused(attempt, report, reading, record)
        else:
            self._accepted(attempt, reading, record)

    def _compare(self, unclipped: Norms, record: StepRecord, reading: Reading) -> None:
        """Learn whether the loop writes into gradients in a way that torch does not count, through `.data`. It may replace
        non-finite ones: log that once."""
        self._rewrites = self._rewrites or unclipped.rewritten(reading.norms)
        if self._rewrites and not self._replaced and not reading.refused:
            before = zip(record.by_parameter, unclipped.values.tolist(), strict=True)
            bad = [name for name, norm in before if not math.isfinite(norm)]
            self._replaced = bool(bad)
            if bad:
                log.warning("nanproof: %s", wording.replaced_gradients(record.step, bad))

    def _record(self, attempt: Attempt, report: Report, reading: Reading) -> StepRecord:
        lr = tuple(float(x) for x in report.lr)
        record = reading.record(attempt.step, report.names, report.present, lr, self.judge.weights is not None)
        record = self.lookout.observed(record)
        self.tell.step(attempt, report, reading, record)
        return record

    def _accepted(self, attempt: Attempt, reading: Reading, record: StepRecord) -> None:
        self.under_way.pending.popleft()
        self.caps.accepted()
        if self.healer.on:
            self.healer.accepted()
        if attempt.batches is not None and attempt.schedule is None and self.under_way.scheduler is not None:
            self.under_way.scheduler.step()
        if reading.bad_buffer:
            self.tell.incident(bad_buffer(record, self.judge.buffers.name_at(reading.bad_buffer)))
        for forecast in self.lookout.foresee(record):
            self.tell.forecast(forecast)
        if self._found(self.watch.see(record, self.judge.ranks.several)):
            return
        incident = self.explainer.accepted(record, self.account.history)
        if incident is not None:
            self._resolve(self._matter("signal", incident, record=record))
        self._broken_copy(self.recovery.accepted(record.step, self.watch.settled))

    def _refused(self, attempt: Attempt, report: Report, reading: Reading, record: StepRecord) -> None:
        """Find out what a refused step was, put everything back to before it, and decide what
        becomes of it."""
        random_now, settings_now = RandomState.now(self.under_way.devices), settings(self.judge.optimizer)
        incident, inquest, history = None, self._inquest, self.account.history
        if attempt.put_back_attributes is not None and (attempt.batches is not None or not self.judge.lag):
            attempt.put_back_attributes()
        self._ask_ranks(attempt)
        try:
            incident = inquest.hold(attempt, report, reading, self.caps.in_a_row)
            if incident is not None:
                self._take_lines(attempt)
                refusal = Refusal(attempt, reading, record, history, inquest.bad_buffer, inquest.one_rank)
                incident = self.explainer.refused(incident, refusal)
        finally:
            if attempt.batches is not None:
                self.under_way.put_back(attempt, random_now, settings_now)
            else:
                self.under_way.pending.popleft()
        if incident is None:
            return
        matter = self._matter("step", incident, attempt=attempt, record=record)
        if not math.isfinite(reading.total + reading.loss) and self._found(self.watch.cut_short()):
            self.tell.incident(incident)  # the run has gone back, and this step with it
            return
        self._resolve(matter)

    def _ask_ranks(self, attempt: Attempt) -> None:
        """Where ranks may differ in whether a step can be run again, all of them must be able
        to."""
        if not attempt.aside:
            return
        known = self.loss_fn is not None and all(batch is not UNKNOWN for batch in attempt.aside)
        whole = self.loss_fn is not None and attempt.whole
        if self.judge.lag or self.judge.scaled:
            attempt.again.clear()
            if known or whole:
                attempt.why_not_again = SEVERAL_RANKS
            return
        answers = self.judge.ranks.gather([known, whole]).values()
        if all(answer[0] for answer in answers):
            attempt.batches = tuple(attempt.aside)
        elif not all(answer[1] for answer in answers):
            attempt.again.clear()

    def _take_lines(self, attempt: Attempt) -> None:
        """A refused step whose loss the loop itself made can be run again as any other, as long as
        the weights are still those that it was taken on."""
        if attempt.batches is not None or not attempt.again:
            return
        if self.judge.ranks.together and not attempt.aside:
            attempt.again.clear()  # the ranks were not asked whether all of them can
            return
        attempt.mode = attempt.mode or self.under_way.mode()
        if attempt.whole and not self.judge.lag and self.loss_fn is not None and attempt.random is not None:
            attempt.batches, attempt.keeps_random = tuple(again.batch for again in attempt.again), True

    def _found(self, finding: Finding | None) -> bool:
        """Handle a spike that turned out to be an incident. Return whether the run went back."""
        if finding is None:
            return False
        incident = from_finding(finding, self.account.history)
        incident = self.explainer.found(incident, finding.record, self.account.history)
        trouble: Trouble = "divergence" if incident.kind == "divergence" else "finding"
        return self._resolve(self._matter(trouble, incident, record=finding.record))

    def _broken_copy(self, names: list[str] | None) -> None:
        """A copy of the state was to be kept, and is not finite."""
        if names is not None:
            step, seen = max(self.next_step - 1, 0), wording.broken_state(names)
            incident = Incident(step=step, kind="nonfinite-weight", action="recorded", message=seen)
            self._resolve(self._matter("state", incident))

    def _exception(self, attempt: Attempt, error: BaseException) -> bool:
        """Report an exception raised inside a step. Return whether it was healed, so that the step
        can be run again."""
        if isinstance(error, UsageError) or not isinstance(error, Exception):
            return False
        seen = f"{type(error).__name__}: {first_line(str(error))}"
        incident = Incident(step=attempt.step, kind="exception", action="recorded", message=seen)
        incident = self.explainer.raised(incident, attempt, error, self.account.history)
        matter = self._matter("exception", incident)
        if self.healer.on and self.under_way.pending and self.healer.offer(incident, matter.case) is not None:
            self._settle(matter)
        self._resolve(matter)
        note = f"nanproof: raised inside training step {attempt.step}"
        if incident.diagnosis is not None:
            note += f". {incident.diagnosis}"
        with suppress(AttributeError):  # Python 3.10 has no notes
            error.add_note(note)
        return matter.incident.action == "healed"

    def _settle(self, matter: _Matter) -> None:
        """Consume the steps under way before a fix, which may change their weights. If they send the
        run back or halt it, there is nothing left to fix."""
        backs = self.recovery.backs
        try:
            while self.under_way.pending:
                self._consume(self.under_way.pending[0])
                self.run_held()
        except TrainingHalted:
            matter.case = None
        if self.recovery.backs > backs:
            matter.case = None

    @shielded
    def sampled(self, incident: Incident, cap: str | None) -> bool:
        """Handle rows of a generation that could not be sampled. `cap`: the limit that this
        reached, if any. Return whether the run went back, alike on all ranks."""
        if cap is not None:
            self.abandon()
            self.sync()
        matter = self._matter("generation", incident)
        matter.situation = replace(matter.situation, cap=cap)
        return self._resolve(matter)

    # -- decisions ---------------------------------------------------------------------------------

    def _matter(self, trouble: Trouble, incident: Incident, attempt: Attempt | None = None, record: Any = None) -> _Matter:
        """What is known of an incident when it has to be decided upon."""
        broken = trouble == "step" and self._inquest.state_broken
        step = self.account.history[-1].step if trouble == "divergence" and self.account.history else incident.step
        since = incident.step - self.caps.in_a_row if trouble == "step" else incident.step
        situation = Situation(
            trouble=trouble,
            step=step,
            since=since,
            state_broken=broken,
            cap=self.caps.if_refused() if trouble == "step" else None,
            may_go_back=True,
            has_good=self.recovery.has_good,
        )
        matter = _Matter(incident, situation, attempt, record, self.explainer.hand_over(), self._inquest.one_rank)
        if attempt is not None:
            matter.situation = replace(situation, samples=self._separable(matter))
        return matter

    def _resolve(self, matter: _Matter) -> bool:
        """Decide about an incident and carry it out, until a decision holds. Return whether the run
        went back."""
        while True:
            decision = decide(matter.situation, self.policy)
            first_back = matter.situation.state_broken or matter.situation.trouble == "divergence"
            if not (matter.looked or matter.situation.exhausted or (first_back and isinstance(decision, GoBack))):
                self._look_for_a_fix(matter)
                continue
            if isinstance(decision, RunAgain) and self.under_way.pending and matter.attempt is None:
                self._waiting.append(matter)  # a fix may change what steps under way are made of
                return matter.went_back
            if self._carry_out(decision, matter):
                break
        if matter.went_back:
            self._forget_since(self.next_step)
            while self._waiting:  # the state they were about to heal is gone
                self.tell.incident(self._waiting.popleft().incident)
        self.tell.incident(matter.incident)
        return matter.went_back

    def _carry_out(self, decision: Decision, matter: _Matter) -> bool:
        """Carry out a decision. Return False, and update the situation, if that is not possible."""
        match decision:
            case Accept():
                return True
            case Skip():
                self.caps.refused()
                return True
            case RunAgain(remedy):
                return self._run_again(remedy, matter)
            case Salvage(samples):
                return self._salvage(samples, matter)
            case GoBack():
                return self._go_back(decision, matter)
            case Halt(cap):
                self._halt(cap, matter)
        return True

    def _look_for_a_fix(self, matter: _Matter) -> None:
        matter.looked = True
        if not self.healer.on or matter.situation.trouble in ("state", "generation"):
            return
        undone = self.healer.undo_failed(matter.incident)
        matter.incident = replace(matter.incident, undone=(*matter.incident.undone, *undone))
        matter.situation = replace(matter.situation, remedy=self.healer.offer(matter.incident, matter.case))

    def _run_again(self, remedy: str, matter: _Matter) -> bool:
        if not self.healer.apply(matter.incident, matter.case):
            matter.situation = replace(matter.situation, remedy=self.healer.offer(matter.incident, matter.case))
            return False
        self.explainer.dealt_with(getattr(matter.case, "signal", ""))
        again = matter.attempt is not None and matter.attempt.batches is not None
        if again and matter.attempt is not None and matter.incident.action == "skipped":
            self.under_way.held.appendleft(matter.attempt)
        action = matter.incident.action if matter.went_back else "healed"
        matter.incident = replace(matter.incident, action=action, remedy=remedy)
        return True

    def _separable(self, matter: _Matter) -> tuple[int, ...] | None:
        """Return the samples that may be to blame on their own, if the step could be salvaged or they
        could be quarantined."""
        attempt, incident, ranks = matter.attempt, matter.incident, self.judge.ranks
        if attempt is None or attempt.batches is None or self.loss_fn is None:
            return None
        if ranks.together and (incident.rank is None or not matter.one_rank):
            return None
        rows = incident.diagnosis.samples if incident.diagnosis is not None else ()
        # Whether the samples are known is asked of all ranks later: none of them may stay away from that.
        separable = self.policy.salvage or (rows and (ranks.together or self.recovery.knows_samples(attempt)))
        return rows if separable else None

    def _salvage(self, samples: tuple[int, ...], matter: _Matter) -> bool:
        """Quarantine the samples if the step is good without them; with `Policy.salvage`, take it
        without them."""
        attempt, incident, ranks = matter.attempt, matter.incident, self.judge.ranks
        assert attempt is not None
        matter.situation = replace(matter.situation, samples=None)
        guilty = not ranks.together or incident.rank == ranks.rank
        rest: Attempt | None = replace(attempt, parted=True, report=None)
        if guilty:
            rest = self.recovery.rest_of(attempt, incident.micro_batch, samples)
        known = self.recovery.knows_samples(attempt) and bool(samples)
        if ranks.together:
            said = ranks.gather([rest is not None, known]).values()
            rest, known = rest if all(s[0] for s in said) else None, all(s[1] for s in said)
        if rest is None or not (self.policy.salvage or known):
            return False
        gradients = self.explainer.rehearse(rest)
        assert attempt.random is not None
        attempt.random.restore()
        if gradients is None or not gradients.all_finite:
            return False
        if known and guilty:
            matter.incident = replace(matter.incident, quarantined=self.recovery.quarantine(attempt, incident))
        if self.policy.salvage:
            self.under_way.held.appendleft(rest)
            matter.incident = replace(matter.incident, action="salvaged", left_out=samples)
        return self.policy.salvage

    def _go_back(self, decision: GoBack, matter: _Matter) -> bool:
        refusals = self.caps.count(matter.situation.cap or "")
        way = self.recovery.go_back(decision)
        if way is None:
            matter.situation = replace(matter.situation, may_go_back=False, exhausted=self.recovery.exhausted)
            return False
        if self.loop.goes_back:
            self.next_step = way.step
        self.healer.restored(way.remedies)
        matter.went_back = True
        if matter.situation.cap is not None and not matter.situation.state_broken:
            count = refusals + 1 if matter.situation.trouble == "step" else matter.incident.cap_count
            matter.incident = self._capped(matter.incident, matter.situation.cap, count)
        matter.incident = replace(
            matter.incident,
            action="rewound" if way.place == "memory" else "rolled-back",
            restored_step=way.step,
            restored_from=way.place,
            stepped_over=way.stepped_over,
            attempt=way.attempt,
        )
        if matter.situation.trouble != "divergence" or not self.healer.on:
            return True
        if matter.record is not None and (matter.incident.diagnosis is None or not matter.incident.diagnosis.verified):
            # A fix can be tried on the good weights. On those of a run that has diverged, it hardly can.
            matter.incident = self.explainer.found(matter.incident, matter.record, self.account.history)
            matter.case = self.explainer.hand_over()
        matter.situation = replace(matter.situation, may_go_back=False)
        return False

    def _halt(self, cap: str, matter: _Matter) -> NoReturn:
        """Report the incident and raise `TrainingHalted`."""
        situation, incident = matter.situation, matter.incident
        if situation.trouble == "step":
            self.caps.refused()
        rollbacks = cap == "max_rollbacks"
        count = self.caps.count(cap) if situation.trouble == "step" else incident.cap_count
        count = self.policy.max_rollbacks if rollbacks else count
        incident = replace(self._capped(incident, cap, count), action="halted")
        self.tell.incident(incident)
        self.under_way.drop_held()
        wanted = situation.trouble == "step" and self.policy.at_cap == "rollback" and not rollbacks
        nowhere = wanted and not situation.state_broken and self.recovery.possible
        steps = count if cap == "max_consecutive_skips" else self.policy.skip_window
        explained = best_explained(self.account.incidents, incident, steps)
        raise TrainingHalted(wording.halted(incident, explained, nowhere, keeps=self.recovery.on), incident)

    def _capped(self, incident: Incident, cap: str, count: int) -> Incident:
        limit = getattr(self.policy, cap, None)
        return replace(incident, cap=cap, cap_count=count, cap_limit=limit)

    def _forget_since(self, step: int) -> None:
        """The run is at an earlier step, or in a new process: what was known of later ones is not
        so any more."""
        for observer in self.observers:
            observer.rewound()
        self.account.forget_since(step)

    # -- signals and processes ---------------------------------------------------------------------

    def _stop_if_asked(self, own_loop: bool) -> None:
        """If a signal asked the run to stop: copy the state that the next process goes on from, write
        it and leave. In a loop of the user's own the last two wait for the next step: by then the
        loop has advanced its schedule."""
        if self.stopping is None or not self.loop.leaves or self._leaving or not self.stopping.asked(self.next_step):
            return
        self.sync()
        self.recovery.keep_last(self.next_step, own_loop)
        self._leaving = True
        if not own_loop:
            self._leave()

    def _leave(self) -> NoReturn:
        assert self.stopping is not None
        signal, status = self.stopping.requested or "a signal to another rank", self.stopping.preemption.status
        self.close()
        log.warning("nanproof: stopped by %s: the program ends with exit status %d", signal, status)
        self.stopping.preemption.leave()

    @property
    def preempted(self) -> str:
        """The name of the signal that asked this process to stop, or ""."""
        return "" if self.stopping is None else self.stopping.requested

    def forked(self) -> None:
        """This process was forked from that of the run. Here, bad steps are still refused, but nothing
        is recorded, explained or saved: the run's files and threads belong to the other process."""
        self.explainer, self.recovery, self.healer, self.lookout = Explainer(), Recovery(), Healer(), Lookout()
        self.observers = self._opened = self._before = self._after_it = ()
        self._inquest = Inquest(self.judge, self.explainer)
        self.tell, self.stopping = ForkTeller(self._pid), None

    @property
    def is_forked(self) -> bool:
        """Whether this process is not the one that the run belongs to."""
        return isinstance(self.tell, ForkTeller)

    # -- the run -----------------------------------------------------------------------------------

    def evaluating(self) -> AbstractContextManager[Any]:
        """Open this around forwards between steps that are not training."""
        return self.healer.living(training=False) if not self.closed else nullcontext()

    @shielded
    def sync(self) -> None:
        """Wait for the verdicts still under way, and train again on batches they held up. Between
        the micro-batches of a step it does not wait: running held steps would clear the
        gradients."""
        self.end()
        if self._open is not None:
            return
        self.run_held()
        backs = self.recovery.backs
        self._catch_up(0)
        self.recovery.catch_up(backs)

    @shielded
    def resumed(self, step: int) -> None:
        """A checkpoint was loaded: the run goes on from this step."""
        self.next_step = step
        self._forget_since(step)

    @shielded
    def close(self, alone: bool = False) -> None:
        """Take in the last records, look at weights and optimizer state once more, and let go of
        the model. `alone`: other ranks may not be coming, so nothing that needs them is done."""
        if self.closed:
            return
        self.abandon(keep_gradients=True)  # the loop ended within a step; what came before it has its verdicts to come
        try:
            if self._leaving:
                self.recovery.write_last()
            if alone:
                for attempt in self.under_way.pending:
                    if attempt.report is not None:
                        self._record(attempt, attempt.report, attempt.report.read())
                self.under_way.pending.clear()
            else:
                taken = self.next_step
                self.sync()
                if self.next_step < taken:
                    log.warning("nanproof: the last verdicts sent the run back: it ends at step %d of %d", self.next_step, taken)
        except TrainingHalted as halted:
            log.warning("nanproof: while closing: %s", halted)
        finally:
            self.closed = True
            self._look_at_the_end(alone)
            self.judge.close()
            self.lookout.close(alone)
            self.tell.close()
            self.explainer.close(alone)
            self.recovery.close(alone)
            if self.stopping is not None:
                self.stopping.preemption.close()

    def _look_at_the_end(self, alone: bool) -> None:
        """What is non-finite now would be saved as the result: a good state takes its place, if there
        is one."""
        broken = self.judge.broken_state()
        back = self.recovery.has_good and not alone
        if not broken or (not back and any(i.kind == "nonfinite-weight" for i in self.account.incidents)):
            return
        step, seen = max(self.next_step - 1, 0), wording.found_at_close(broken)
        incident = Incident(step=step, kind="nonfinite-weight", action="recorded", message=seen)
        incident = self.explainer.at_close(incident, self.account.history)
        if not back:
            self.tell.incident(incident)
            return
        with suppress(TrainingHalted):  # it is told, and the run is over
            self._resolve(self._matter("state", incident))

    @shielded
    def leave(self, error: BaseException | None) -> None:
        """Close at the end of a `with`, or of a loop that may have raised. A signal to a group of processes
        ends the data workers too, which raises here: the run stops as if it had reached its next step."""
        ended = isinstance(error, Exception) and not isinstance(error, TrainingHalted) and not self.closed
        if ended and self.preempted and self.loss_fn is not None and not (self.loop.lines or self.judge.ranks.together):
            self._stop_if_asked(own_loop=False)
        if error is not None:
            self.abandon()  # the loop ended within a step: its buffers go back too
        try:
            self.close(alone=error is not None and self.judge.ranks.together)
        except Exception as failure:
            if error is None:
                raise
            log.warning("nanproof: while closing after %r: %r", error, failure)

    @shielded
    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs. Waits for the last verdicts; a step that has begun does not
        count."""
        self.sync()
        return {
            "version": 1,
            "step": self.next_step - self.open,
            "stats": self.judge.stats.state_dict(),
            "watch": self.watch.state_dict(),
            "caps": self.caps.state_dict(),
            **{observer.name: observer.state_dict() for observer in self.observers if observer.name},
        }

    @shielded
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Load model and optimizer first; steps still under way
        are forgotten."""
        if state.get("version") != 1:
            raise UsageError(
                f"guard.load_state_dict(): version {state.get('version')!r} is unknown; this nanproof reads version 1"
            )
        self.under_way.forget()
        self._waiting.clear()
        for observer in self.observers:
            observer.rewound()
        self.next_step = state["step"]
        self.judge.stats.load_state_dict(state["stats"])
        self.judge.buffers.refresh()
        self.watch.load_state_dict(state["watch"])
        self.caps.load_state_dict(state["caps"])
        for observer in self.observers:
            if observer.name in state:
                observer.load_state_dict(state[observer.name])


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_engines):
        engine.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
