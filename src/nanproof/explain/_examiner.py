"""Examiner: runs steps again for the engine, names the cause of incidents, and notices when nothing
is learned.

It keeps the last steps, decides when a diagnosis is due, shares it between ranks, and never lets a
failure of its own get out.
"""

from __future__ import annotations

import json
import logging
import math
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanproof import _wording as wording
from nanproof._policy import Policy
from nanproof._records import Diagnosis, Incident, StepRecord
from nanproof._wording import listed
from nanproof.core._contracts import Explainer, Refusal, harmless
from nanproof.core._evidence import Gradients
from nanproof.core._telemetry import Courier
from nanproof.core._under_way import UNKNOWN, Attempt, LossFn
from nanproof.core.judge._stepper import Stepper
from nanproof.core.support._context import Schedule, change_settings
from nanproof.core.support._ranks import Ranks
from nanproof.core.support._tree import tensors_in
from nanproof.explain._case import Case, bad_in_batch, refused
from nanproof.explain._graph import Activated, Broadcast, applied_twice, broadcast_in, nodes_of, outputs_of, targets_of
from nanproof.explain._known import BadData, Fingerprint, Known, fingerprint
from nanproof.explain._pause import no_collections
from nanproof.explain._silent import Look, Signal, SilentWatch, WeightSample, is_shifted, moves_again, shifted_pairs
from nanproof.explain._start import WeightsAtStart, garbage_buffers
from nanproof.explain.bundle._bundle import BundleWriter
from nanproof.explain.causes._raised import device_is_lost, explain_lost_device
from nanproof.explain.lines._lines import Inputs
from nanproof.explain.replay._recorder import KEPT, Moment, Recorder
from nanproof.explain.replay._rehearse import REFUSED_STEP, adam_update, steps_seen
from nanproof.explain.replay._replay import ActivationGradients, CannotReplay, Deadline, Replay

log = logging.getLogger("nanproof")

_GRAPH_AT = 2
"""The step whose graph is read: what goes into the loss, and whether its labels are the inputs."""
DRAWS_ANEW = "the lines draw random numbers before they call the model; the replay drew others than the step"
_LEARN_WRITES = 3
"""Steps in which it is learned which parameters the forward writes."""
_SPIKES = 256
"""Spikes of which something is kept."""
_PATIENCE = 3
"""Diagnoses of one kind that named no sample, after which no more are made for samples' sake."""
_KIND = {
    "huge-gradients": "spike",
    "early-jump": "spike",
    "lost-state": "spike",
    "nonfinite-buffers": "nonfinite-weight",
}
"""Kinds of incidents that signals become, but for no-learning."""
_KNOWN_WITHOUT_A_REPLAY = ("foreign-parameters", "zero-learning-rate", "uncleared-gradients", "activation-twice", "broadcast")
_ONLY_VERIFIED = (
    *("huge-gradients", "dead-parameters", "stuck", "collapsed", "constant-loss", "loss-at-ln2", "heavy-clipping"),
    "garbage-buffers",
)
"""Signals that healthy runs show too."""
Reader = Callable[[], list[float]]
_WORTH_A_REPLAY = (RuntimeError, ValueError, ArithmeticError, AssertionError, LookupError)
_NOT_TO_BE_TOUCHED = ("out of memory", "CUDA error", "device-side assert", "NCCL", "CUBLAS", "cuDNN", "DataLoader worker")


@dataclass(slots=True)
class _Pending:
    """What one step showed, some of it still on its way to the host."""

    step: int = -1
    weights: Reader | None = None
    labels: tuple[list[tuple[str, str]], Reader] | None = None
    outputs: Reader | None = None
    activated: Activated | None = None
    broadcast: Broadcast | None = None
    uncleared: bool = False

    def read(self, record: StepRecord) -> Look:
        sample = None
        if self.weights is not None:
            share, size, kept = self.weights()
            sample = share, size, kept * record.clip * (record.scale or 1.0) if kept >= 0 else kept
        shifted = None if self.labels is None else _shifted_twice(self.labels[0], self.labels[1]())
        return Look(
            sample,
            shifted,
            tuple(self.outputs()) if self.outputs is not None else None,
            self.activated,
            self.broadcast,
            self.uncleared,
        )


def _outputs_due(step: int) -> bool:
    return step >= 20 and step % (10 if step <= 60 else 20 if step <= 200 else 100) == 0


class Examiner(Explainer):
    """Explains incidents to the engine."""

    def __init__(
        self,
        stepper: Stepper,
        loss_fn: LossFn | None,
        scheduler: Any,
        policy: Policy,
        run_dir: str | Path | None,
        living: Callable[[], AbstractContextManager[Any]],
        wants_samples: Callable[[], bool],
    ) -> None:
        """
        Args:
            living: what the run is under by now; replays are under it too.
            wants_samples: whether samples are wanted of every bad step, to salvage the rest or to quarantine them.
        """
        self._stepper, self._loss_fn, self._scheduler, self._policy = stepper, loss_fn, scheduler, policy
        self._living, self._wants_samples = living, wants_samples
        self._bundles = None
        if run_dir is not None and policy.bundles:
            self._bundles = BundleWriter(Path(run_dir) / "incidents", keep=policy.bundles, max_bytes=policy.bundle_bytes)
        self._bundled: dict[tuple[str, str], Path | None] = {}
        """(kind, cause) of the steps that were kept on disk, and where."""
        self._fruitless: dict[str, int] = {}
        self.recorder = Recorder()
        self._known = Known(policy)
        self._watched = stepper.parameters
        self._watch = SilentWatch(stepper.parameters, stepper.optimizer)
        self._sample = WeightSample(stepper.parameters, stepper.optimizer)
        self._courier = Courier(stepper.parameters.device)
        self._told: set[str] = set()
        """Causes that a signal was reported with."""
        self._kinds: set[str] = set()
        """Kinds of incidents that were diagnosed, or looked into."""
        self._looks: dict[int, _Pending] = {}
        self._seen = _Pending()
        """What the step under way has shown so far."""
        self._taking = False
        self._before_forward: list[tuple[Tensor, int]] = []
        self._written: list[Tensor] = []
        """Parameters that the forward itself writes, as a momentum encoder's."""
        self._bad_at_start = stepper.buffers.broken() if self.on else []
        self._garbage = [found.name for found in garbage_buffers(stepper.model)] if self.on else []
        self._start = WeightsAtStart(stepper.model) if self.on else None
        self._last: Case | None = None
        self._updates: dict[int, float | None] = {}
        """Adam's update over the learning rate, at the last spikes."""

    @property
    def on(self) -> bool:
        return self._policy.diagnose != "never" and not self.off

    @property
    def seconds(self) -> float:
        return self._known.spent

    def hand_over(self) -> Case | None:
        """The case of the last diagnosis, once: its replay holds a batch."""
        case, self._last = self._last, None
        return case

    def dealt_with(self, signal: str) -> None:
        if signal:
            self._told.clear()
            self._start_over(signal)

    def _start_over(self, dealt_with: str = "") -> None:
        """Count anew for silent failures: parameters changed, or a signal was dealt with and may be
        reported again."""
        self._watched = self._stepper.parameters
        self._watch = self._watch.renewed(self._stepper.parameters, self._stepper.optimizer, dealt_with)
        self._sample = WeightSample(self._stepper.parameters, self._stepper.optimizer)
        self._looks.clear()

    # -- while all is well -----------------------------------------------------------------------------------------------------

    @harmless("silent failures are not looked for")
    def open(self, attempt: Attempt) -> None:
        if not self.on:
            return
        if attempt.batches:
            self._keep(attempt)
        if attempt.step < _LEARN_WRITES:
            self._before_forward = [(p, p._version) for p in self._stepper.model.parameters() if not p.is_inference()]

    def _keep(self, attempt: Attempt) -> None:
        batches = _batches(attempt)
        if batches and attempt.random is not None and attempt.mode is not None:
            self.recorder.keep(attempt.step, batches, attempt.random, attempt.mode)

    @harmless("silent failures are not looked for")
    def noted(self, attempt: Attempt, loss: Tensor, spent: bool = False) -> None:
        """Read the graph of the loss: of one early step how it is made, now and then what the model gives."""
        if not self.on or loss.grad_fn is None or self._seen.step == attempt.step:
            return
        whole, outputs = attempt.step == _GRAPH_AT, _outputs_due(attempt.step) and not spent
        if not (whole or outputs):
            return
        self._seen = seen = _Pending(attempt.step)
        nodes = nodes_of(loss)
        if outputs and (found := outputs_of(nodes)) is not None:
            seen.outputs = self._courier.send(found)
        if whole:
            seen.activated = next((activated for activated, _ in applied_twice(nodes)), None)
            seen.broadcast = broadcast_in(nodes)
            seen.labels = self._compared(attempt, loss)

    def _compared(self, attempt: Attempt, loss: Tensor) -> tuple[list[tuple[str, str]], Reader] | None:
        """Compare labels with inputs, and with what the loss makes of them."""
        pairs = shifted_pairs(attempt.batches) if attempt.batches else None
        targets = targets_of(loss) if pairs is not None else []
        if pairs is None or not targets or not attempt.batches:
            return None
        tensors = dict(tensors_in(attempt.batches[0]))
        moved = [moves_again(tensors[labels], targets) for _, labels in pairs[0]]
        return pairs[0], self._courier.send(torch.cat((pairs[1], *moved)))

    @harmless("silent failures are not looked for")
    def before(self, attempt: Attempt) -> None:
        """The batches of the step are known: keep what it needs to be run again, by reference."""
        if not self.on:
            return
        if self._watched is not self._stepper.parameters:
            self._start_over()
        if self.recorder.last != attempt.step:
            self._keep(attempt)
        if self._before_forward:
            moved = [p for p, version in self._before_forward if p._version != version and all(p is not w for w in self._written)]
            self._written += moved
            self._before_forward = []
        self._taking = WeightSample.due(attempt.step)
        if self._taking:
            self._sample.before()

    @harmless("silent failures are not looked for")
    def after(self, attempt: Attempt) -> None:
        """Send what was seen on its way to the host."""
        if not self.on:
            return
        seen = self._seen if self._seen.step == attempt.step else _Pending(attempt.step)
        self._seen = _Pending()
        seen.weights = self._sample.after() if self._taking else None
        seen.uncleared = self._stepper.uncleared
        self._looks[attempt.step] = seen

    def dropped(self) -> None:
        self._taking, self._seen = False, _Pending()

    @harmless("silent failures are not looked for")
    def accepted(self, record: StepRecord, history: Sequence[StepRecord]) -> Incident | None:
        """An accepted step, in order: is something silently wrong?"""
        if not self.on:
            return None
        look = self._looks.pop(record.step, _Pending()).read(record)
        if record.spike:
            self._updates[record.step] = adam_update(self._stepper.optimizer)
            if len(self._updates) > _SPIKES:
                del self._updates[next(iter(self._updates))]
            done = steps_seen(self._stepper.optimizer)
            self._watch.notice(self._watch.lost_state(record, done) if done is not None else None)
        signal = self._watch.see(record, look)
        if self._bad_at_start and signal is None:
            seen = f"buffers were non-finite before the first step: {listed(self._bad_at_start)}"
            signal = Signal("nonfinite-buffers", seen, {}, record.step)
            self._bad_at_start = []
        elif self._garbage and signal is None and record.step >= KEPT - 1:
            seen = f"buffers held numbers before the first step that nobody wrote: {listed(self._garbage)}"
            signal, self._garbage = Signal("garbage-buffers", seen, {}, record.step), []
        incident = self._suspect(signal, record, history) if signal is not None else None
        if incident is None:
            self._last = None  # its replay holds a batch
        return incident

    def _suspect(self, signal: Signal, record: StepRecord, history: Sequence[StepRecord]) -> Incident | None:
        """An incident only if a replay and the catalogue agree: a suspicion alone would be a false
        alarm."""
        moment = self.recorder.at(record.step)
        kind = _KIND.get(signal.name, "no-learning")
        uncleared = self._stepper.uncleared  # a replay does backward passes too
        if signal.name == "early-jump" and "divergence" in self._kinds:
            return None
        if signal.name == "zero-learning-rate" and self._rises_again(record.step, max(record.lr)):
            return None
        if moment is None and signal.name not in _KNOWN_WITHOUT_A_REPLAY:
            return None
        with self._known.timed():
            diagnosis, _ = self._diagnosed(
                lambda: self._case(
                    kind,
                    moment,
                    record=signal.details.get("record", record),
                    history=history,
                    signal=signal.name,
                    uncleared=uncleared,
                    details={**signal.details, "every_step": self._watch.moves_every_step},
                )
            )
        if diagnosis is None:
            return None
        found = diagnosis.named and (diagnosis.verified or diagnosis.confidence >= 0.9)
        if signal.details.get("solved"):
            found = diagnosis.cause == "zero-advantage" and diagnosis.verified
        elif signal.name in _ONLY_VERIFIED:
            found = diagnosis.named and diagnosis.verified
        elif signal.name == "missing-gradients":
            found = diagnosis.cause == "no-gradient-path"
        elif signal.name in ("early-jump", "lost-state"):
            found = diagnosis.cause == "optimizer-state-reset"
        elif signal.name == "zero-gradients":
            found = diagnosis.cause == "zero-advantage" or (record.loss != 0)
        if not found or (diagnosis.named and diagnosis.cause in self._told and self._policy.diagnose != "always"):
            return None
        self._told.add(diagnosis.cause)
        self._kinds.add(kind)
        return Incident(
            step=record.step if signal.since is None else signal.since,
            kind=kind,
            action="recorded" if record.action != "clipped" else "clipped",
            loss=record.loss,
            grad_norm=record.grad_norm,
            message=signal.message,
            diagnosis=diagnosis,
        )

    def _rises_again(self, steps: int, rate: float) -> bool:
        """The schedule's learning rate is well above `rate` again within as many steps as there
        were, or 200."""
        if self._scheduler is None:
            return False
        optimizer = self._stepper.optimizer
        now = Schedule.now(optimizer, self._scheduler)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(max(200, steps)):
                    self._scheduler.step()
                    if any(float(group["lr"]) > 100 * rate for group in optimizer.param_groups):
                        return True
        except Exception:
            return False
        finally:
            now.restore(optimizer, self._scheduler)
        return False

    # -- incidents -------------------------------------------------------------------------------------------------------------

    def rehearse(self, attempt: Attempt) -> Gradients | None:
        stepper, ranks = self._stepper, self._stepper.ranks
        moment = _moment(attempt)
        if self._loss_fn is None or moment is None:
            return None
        replay = self._replay(moment, self._loss_fn, ranks=ranks, eagerly=False)
        found: list[Gradients] = []
        bad = ActivationGradients()
        try:
            outcome = replay.run(bad, after=lambda: found.append(stepper.look_at_gradients(stepper.parameters.present())))
            if outcome.error is not None:
                raise outcome.error
            said = ranks.gather([any(bad.flags)])
        except Exception as error:
            log.warning("nanproof: step %d could not be run again to look at it: %r", attempt.step, error)
            return None
        finally:
            stepper.forget_losses()
        guilty = next((rank for rank, flags in said.items() if flags[0] and ranks.together), None)
        return replace(found[0], rank=guilty)

    @no_collections()
    def refused(self, incident: Incident, refusal: Refusal) -> Incident:
        attempt, record = refusal.attempt, refusal.record
        kept = self.recorder.at(attempt.step)
        self.recorder.drop(attempt.step)
        self._looks.pop(attempt.step, None)
        moment = _moment(attempt)
        written = kept is not None and bool(kept.versions) and kept.changed
        ranks = self._stepper.ranks
        guilty = incident.rank if incident.rank is not None else 0
        mine = not ranks.together or ranks.rank == guilty
        if attempt.batches is not None and attempt.schedule is not None:
            # A late verdict is explained with the settings of its own step. The engine restores everything else next.
            change_settings(self._stepper.optimizer, attempt.schedule.groups)
        if mine and self._asked:
            try:
                incident = self._examined(incident, refusal, moment, written)
            except Exception:  # the other ranks wait below, and no examination is a reason for a run to die
                log.debug("nanproof: a refused step could not be examined", exc_info=True)
        if ranks.together and self._asked:  # whatever the guilty rank chose to do, the others wait for it here
            incident = shared(ranks, incident, guilty)
        if ranks.together and incident.diagnosis is not None and incident.rank is not None and refusal.one_rank:
            incident = replace(incident, diagnosis=_one_rank(incident.diagnosis, incident.rank))
        return self._bundle(incident, moment, record) if mine else incident

    @property
    def _asked(self) -> bool:
        return self._policy.diagnose != "never"

    def _examined(self, incident: Incident, refusal: Refusal, moment: Moment | None, written: bool) -> Incident:
        """The incident with its diagnosis, or with the step of an earlier one like it. `written`: the
        step wrote into its batch."""
        attempt = refusal.attempt
        calls = _calls(attempt, incident.micro_batch)
        uncleared = self._stepper.uncleared  # a replay does backward passes too
        self._find_random_numbers(moment)
        part = _part(moment, incident.micro_batch) or _forward_alone(attempt, incident)
        given = part.batches if moment is not None and part else tuple((call["args"], call["kwargs"]) for call in calls)
        weights_broke, again = refusal.reading.weights_bad, moment is not None
        data = BadData.of(given)
        incident = replace(incident, bad_samples=data.samples)
        like = fingerprint(incident, weights_broke, refusal.buffer, again, data.names)
        details: dict[str, Any] = {"part": incident.micro_batch is not None, "put_back": incident.action != "recorded"}
        details["written"] = written or any(again.written for again in attempt.again)
        if moment is None:
            details["why_not_again"] = attempt.why_not
            details["gradients_are_there"] = not self._stepper.lag

        checked = moment is None or not all(isinstance(batch, dict) and "args" in batch for batch in moment.batches)
        checked = checked and bool(attempt.again)

        def make() -> Case:
            case = made(part)
            why = self._unlike(case, refusal, whole=moment is not None) if checked else ""
            if why:
                details["why_not_again"], details["gradients_are_there"] = why, not self._stepper.lag
                case = made(None)
            elif case.replay is not None and any(getattr(batch, "draws_anew", False) for batch in case.replay.batches):
                case.details.setdefault("notes", []).append(DRAWS_ANEW)
            elif moment is None and case.replay is not None:
                case.details.setdefault("notes", []).append(f"only the model's forward was run again: {attempt.why_not}")
            return case

        def made(moment: Moment | None) -> Case:
            return self._case(
                incident.kind,
                moment,
                record=refusal.record,
                history=refusal.history,
                weights_broke=weights_broke,
                bad_buffer=refusal.buffer if incident.kind == "nonfinite-weight" else "",
                uncleared=uncleared,
                calls=calls,
                details=dict(details),
            )

        incident = self._diagnosed_if_new(incident, like, make, look=not data.names)
        if incident.diagnosis is not None:
            named = bool(incident.diagnosis.samples)
            self._fruitless[incident.kind] = 0 if named else self._fruitless.get(incident.kind, 0) + 1
        return incident

    def _find_random_numbers(self, moment: Moment | None) -> None:
        """Where the loop's lines draw random numbers before they call the model, it is not known where the generators stood when
        they began: find the state with which they call the model as they did."""
        for batch in moment.batches if moment is not None else ():
            if moment is None or self._loss_fn is None or not isinstance(batch, Inputs) or batch.called is None:
                continue
            noted, fits = batch.random, False
            # On several ranks the others are not here: whatever waits for them must not run.
            for random in () if self._stepper.ranks.several else (noted or moment.random, *batch.earlier):
                batch.random = random
                deadline = Deadline.after(self._policy.diagnose_seconds)
                with batch.called.watched() as same, suppress(CannotReplay):
                    self._replay(replace(moment, batches=(batch,)), self._loss_fn, deadline=deadline).run(backward=False)
                if fits := same():
                    break
            if not fits:
                batch.random, batch.draws_anew = noted, True

    def _unlike(self, case: Case, refusal: Refusal, whole: bool) -> str:
        """Return why a rerun of the loop's own lines, or of the model's forward alone, does not stand
        for the step; "" if it does."""
        control, reading = case.control, refusal.reading
        if control is None:
            return ""
        if not whole:
            reason = refusal.attempt.why_not
            if case.spoilt and not case.bad_batch:
                return reason  # the forward would write a second time
            if control.error is None and not math.isfinite(control.loss):
                return ""
            return reason if control.error is not None else f"{reason}; the model's own output is finite"
        if control.error is not None and case.kind != "exception":
            return f"the lines that make the loss raised when they were run again: {control}"
        if case.weights_broke or case.details.get("part"):
            return ""
        then, now = refusal.record.loss, control.loss
        late = bool(self._stepper.lag) or case.replay is None or case.replay.compiled
        same = then == now
        if len(refusal.attempt.again) > 1:  # a loop may give its step the last loss alone
            same = any(math.isclose(then, loss, rel_tol=1e-5) for loss in (now, control.last))
        if math.isfinite(then) != math.isfinite(now) or (math.isfinite(then) and not (same or late)):
            return f"the lines that make the loss gave {now:.6g} when they were run again, where the step had {then:.6g}"
        if case.kind == "nonfinite-gradient" and control.gradients_finite and not reading.scale:
            return "the gradients are finite when the lines that make the loss are run again"
        return ""

    def _diagnosed_if_new(self, incident: Incident, like: Fingerprint, make: Callable[[], Case], look: bool = False) -> Incident:
        """Return the incident with its diagnosis, or with the step of an earlier one like it.
        `look`: only where the trouble begins tells two of them apart."""
        if not self._asked:
            return incident
        self._kinds.add(incident.kind)
        origin = (lambda: self._origin(make)) if look else None
        return self._known.diagnose(
            incident, like, lambda: self._diagnosed(make), origin=origin, every=self._every(incident.kind)
        )

    def _origin(self, make: Callable[[], Case]) -> str:
        """Return where the trouble of a step begins."""
        try:
            return _origin(make())
        except Exception:
            log.debug("nanproof: the origin of an incident could not be found", exc_info=True)
            return "unknown"
        finally:
            self._stepper.forget_probes()

    def _every(self, kind: str) -> bool:
        """Whether every incident of this kind is diagnosed, whatever it costs: asked for, to be healed, or for its samples."""
        samples = self._wants_samples() and self._fruitless.get(kind, 0) < _PATIENCE
        return self._policy.diagnose == "always" or self._policy.heal or samples

    def found(self, incident: Incident, record: StepRecord, history: Sequence[StepRecord]) -> Incident:
        moments = list(self.recorder)
        moment = self.recorder.at(incident.step) or (moments[-1] if moments and incident.kind == "divergence" else None)
        near = [u for step, u in self._updates.items() if u is not None and 0 <= step - incident.step <= 20]
        details: dict[str, Any] = {"update": max(near)} if near else {}
        details["every_step"] = self._watch.moves_every_step
        uncleared = self._stepper.uncleared  # a replay does backward passes too
        return self._diagnosed_if_new(
            incident,
            fingerprint(incident),
            lambda: self._case(incident.kind, moment, record=record, history=history, uncleared=uncleared, details=details),
        )

    def raised(self, incident: Incident, attempt: Attempt, error: BaseException, history: Sequence[StepRecord]) -> Incident:
        if device_is_lost(error):
            return self._without_device(incident, attempt, error)
        calls = () if attempt.batches is not None else _calls(attempt, None)
        data = BadData.of(tuple((call["args"], call["kwargs"]) for call in calls))
        if data.names:
            named = [
                bad.name for call in calls for key in ("args", "kwargs") for bad in bad_in_batch(call, tensors_in(call[key], key))
            ]
            seen = wording.called_with(named, data.samples)
            incident = replace(incident, message=f"{incident.message}; {seen}", bad_samples=data.samples)
        if not self._asked or not isinstance(error, _WORTH_A_REPLAY) or any(text in str(error) for text in _NOT_TO_BE_TOUCHED):
            return incident
        self.recorder.drop(attempt.step)
        moment = _moment(attempt)
        self._find_random_numbers(moment)
        frames = traceback.extract_tb(error.__traceback__)[-1:]
        like = fingerprint(incident, type(error).__name__, *((frame.filename, frame.lineno) for frame in frames))

        def make() -> Case:
            case = made(moment)
            control = case.control
            if control is None or attempt.batches is not None or type(control.error) is type(error):
                return case
            if control.error is not None or control.finite:
                return made(None)
            # Raised by something that looks for NaN, such as anomaly mode: the NaN is there without it.
            case.kind = "nonfinite-gradient" if math.isfinite(control.loss) else "nonfinite-loss"
            return case

        def made(moment: Moment | None) -> Case:
            details = {"why_not_again": attempt.why_not}
            return self._case("exception", moment, history=history, error=error, calls=calls, details=details)

        incident = self._diagnosed_if_new(incident, like, make)
        return self._bundle(incident, moment, None) if incident.diagnosis is not None else incident

    def _without_device(self, incident: Incident, attempt: Attempt, error: BaseException) -> Incident:
        """A device-side assert ended the CUDA context: say what shapes and tensors on the CPU show."""
        self.recorder.drop(attempt.step)
        if not self._asked:
            return incident
        given = _batches(attempt) or tuple((call["args"], call["kwargs"]) for call in _calls(attempt, None))
        case = Case("exception", model=self._stepper.model, batches=given, error=error)
        try:
            return replace(incident, diagnosis=explain_lost_device(case))
        except Exception:
            log.debug("nanproof: a device-side assert could not be explained", exc_info=True)
            return incident

    def at_close(self, incident: Incident, history: Sequence[StepRecord]) -> Incident:
        moments = list(self.recorder)
        return self._diagnosed_if_new(
            incident,
            fingerprint(incident, "close"),
            lambda: self._case(incident.kind, moments[-1] if moments else None, history=history),
        )

    def rewound(self) -> None:
        self.recorder.clear()
        self._looks.clear()
        self._updates.clear()
        self._start = WeightsAtStart(self._stepper.model) if self.on else None

    def close(self, alone: bool = False) -> None:
        """Wait for the bundles on their way to the disk."""
        self._last = None
        self.recorder.clear()
        if self._bundles is not None:
            self._bundles.close()

    def _bundle(self, incident: Incident, moment: Moment | None, record: StepRecord | None) -> Incident:
        """Keep the step on disk: the first of each kind and cause, or all where all are
        diagnosed."""
        if self._bundles is None or moment is None:
            return incident
        cause = "" if incident.diagnosis is None else incident.diagnosis.cause
        bundles = self._bundles
        kept = [key for key, path in self._bundled.items() if path is None or not bundles.failed(path)]
        known = (incident.kind, cause) in kept if cause else any(kind == incident.kind for kind, _ in kept)
        if known and self._policy.diagnose != "always":
            return incident
        path = self._bundled[incident.kind, cause] = bundles.write(
            incident=incident,
            record=record,
            batches=moment.batches,
            random=moment.random,
            mode=moment.mode,
            model=self._stepper.model,
            optimizer=self._stepper.optimizer,
            policy=self._policy,
        )
        return incident if path is None else replace(incident, bundle=str(path))

    # -- a case ----------------------------------------------------------------------------------------------------------------

    def _case(self, kind: str, moment: Moment | None, **facts: Any) -> Case:
        stepper = self._stepper
        details = facts.pop("details", {})
        replay = None
        if moment is not None and self._loss_fn is not None and not self._needs_others():
            fixed = stepper.scale is not None and stepper.scale.fixed
            scale = float(stepper.scale.value()) if stepper.scale is not None and fixed else 1.0
            deadline = Deadline.after(self._policy.diagnose_seconds)
            replay = self._replay(moment, self._loss_fn, scale=scale, alone=stepper.ranks.several, deadline=deadline)
            if moment.versions and moment.changed:
                details.setdefault("notes", []).append("the batch was written in place after the step: the replay may differ")
        if kind == "nonfinite-gradient" and stepper.scale is not None and not stepper.scale.fixed:
            kind = "loss-scale-collapse"
        norm = stepper.max_norm if isinstance(stepper.max_norm, (int, float)) else None
        details["largest_at_start"] = self._start.largest(stepper.model) if self._start is not None else None
        details["unchanged_bounds"] = self._start.unchanged_bounds(stepper.model) if self._start is not None else ()
        return Case(
            kind,
            model=stepper.model,
            batches=moment.batches if moment is not None else None,
            replay=replay,
            optimizer=stepper.optimizer,
            moments=list(self.recorder),
            max_norm=norm,
            scheduler=self._scheduler,
            details=details,
            healing=self._policy.heal,
            rehearsing=REFUSED_STEP if refused(kind) and not self._policy.heal else math.inf,
            **facts,
        )

    def _needs_others(self) -> bool:
        """A forward that waits for other ranks cannot be run on one alone."""
        if not self._stepper.ranks.together:
            return False
        return self._stepper.ranks.sharded or any(isinstance(m, nn.SyncBatchNorm) for m in self._stepper.model.modules())

    def _replay(self, moment: Moment, loss_fn: LossFn, **how: Any) -> Replay:
        """The one way in which a step of this run is run again."""
        stepper = self._stepper
        named = zip(stepper.parameters.names, stepper.parameters.tensors, strict=True)
        lines = [batch for batch in moment.batches if isinstance(batch, Inputs)]
        return Replay(
            stepper.model,
            loss_fn,
            moment.batches,
            random=moment.random,
            mode=moment.mode,
            buffers=stepper.buffers,
            written=self._written,
            foreign={name: p for name, p in named if name in stepper.parameters.foreign},
            living=self._living,
            writes=any(getattr(batch, "written", False) for batch in moment.batches),
            beside=[m for batch in lines for m in batch.modules],
            callables=[f for batch in lines for f in batch.callables],
            **how,
        )

    def _diagnosed(self, make: Callable[[], Case]) -> tuple[Diagnosis | None, str]:
        """Diagnose; whatever goes wrong in there is reported, not raised. Returns where the trouble
        begins, too."""
        from nanproof.explain._diagnose import explain

        self._last, origin = None, ""
        try:
            case = make()
            diagnosis = explain(case)
            self._last = case if self._policy.heal else None
            origin = _origin(case)
        except Exception as error:
            log.debug("nanproof: a diagnosis failed", exc_info=True)
            text = f"the diagnosis itself failed: {type(error).__name__}: {error}"[:300]
            diagnosis = Diagnosis(cause="unknown", confidence=0.0, evidence=(text,))
        finally:
            self._stepper.forget_probes()
        return diagnosis, origin


def _batches(attempt: Attempt) -> tuple[Any, ...] | None:
    """What a step was run on, one entry a micro-batch; None where it cannot be run again."""
    if attempt.batches is None and attempt.whole:
        return tuple(again.batch for again in attempt.again)
    return attempt.batches


def _origin(case: Case) -> str:
    """Where the trouble begins, from a run or two of the step: the data, a module, or, inside of a module that is made of
    others and in the loss function, the operation and its line. Empty where that cannot be told."""
    if case.kind not in ("nonfinite-loss", "nonfinite-gradient") or case.replay is None or case.look is None:
        return ""
    if case.bad_batch:
        return "batch"
    bad = case.look.newly_bad()
    if bad and not any(True for _ in bad[0].module.children()):
        return bad[0].path
    birth = case.birth
    return "" if birth is None else f"{birth.op.path}: {birth.op.name} at {birth.op.source}"


def _shifted_twice(names: list[tuple[str, str]], shares: list[float]) -> tuple[str, str] | None:
    """Return inputs and labels that the data has moved by one and the loss has moved again."""
    pair = is_shifted(names, shares[: 3 * len(names)])
    if pair is None:
        return None
    again, as_they_are = shares[3 * len(names) + 2 * names.index(pair) :][:2]
    return pair if again > 0.9 > as_they_are else None


def _moment(attempt: Attempt) -> Moment | None:
    """What a step was run on; None where it cannot be run again."""
    batches = _batches(attempt)
    if batches is None or attempt.random is None or attempt.mode is None:
        return None
    return Moment(attempt.step, batches, (), attempt.random, attempt.mode)


def _forward_alone(attempt: Attempt, incident: Incident) -> Moment | None:
    """The model's call in a step whose loss cannot be computed again: enough where its output is bad already."""
    place = incident.micro_batch if incident.micro_batch is not None else 0 if len(attempt.again) == 1 else None
    if place is None or place >= len(attempt.again) or attempt.random is None or attempt.mode is None:
        return None
    again = attempt.again[place]
    if again.whole or again.batch is UNKNOWN or incident.kind != "nonfinite-loss":
        return None
    return Moment(attempt.step, (again.batch,), (), attempt.random, attempt.mode)


def _calls(attempt: Attempt, micro_batch: int | None) -> tuple[Any, ...]:
    """What the model was called with; of an accumulated step, in the micro-batch that was bad."""
    if micro_batch is not None and micro_batch < len(attempt.calls):
        return attempt.calls[micro_batch]
    return tuple(call for calls in attempt.calls for call in calls)


def _part(moment: Moment | None, micro_batch: int | None) -> Moment | None:
    """Of an accumulated step, the micro-batch that was bad."""
    if moment is None or micro_batch is None or micro_batch >= len(moment.batches):
        return moment
    return replace(moment, batches=(moment.batches[micro_batch],))


def _one_rank(diagnosis: Diagnosis, rank: int) -> Diagnosis:
    """One rank's step spoiled that of all: that is the cause, with the rank's own under it."""
    said = (
        f"rank {rank} alone was bad before the gradients were reduced; the others' were fine. The cause there: {diagnosis.cause}"
    )
    return replace(
        diagnosis,
        cause="one-rank-nonfinite",
        rank=rank,
        evidence=(said, *diagnosis.evidence),
        fix=f"Rank {rank}: {diagnosis.fix}",
        alternatives=(diagnosis.cause, *diagnosis.alternatives),
    )


def shared(ranks: Ranks, incident: Incident, source: int) -> Incident:
    """What one rank found out about an incident, on all of them."""
    found = incident.diagnosis
    text = json.dumps([found and found.to_json(), incident.same_as, incident.bad_samples]) if ranks.rank == source else ""
    told, same_as, samples = json.loads(ranks.share_text(text, source))
    diagnosis = None if told is None else Diagnosis.from_json(told)
    return replace(incident, diagnosis=diagnosis, same_as=same_as, bad_samples=tuple(samples))
