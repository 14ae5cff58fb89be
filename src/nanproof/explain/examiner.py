"""Examiner: what the guard asks when something went wrong, or when nothing seems to be learned.

It keeps the last steps, decides when a diagnosis is due, shares it between ranks, and never lets a failure of its own get out.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nanproof.core.attempts import Attempt
from nanproof.core.context import Schedule
from nanproof.core.runner import Watcher, harmless
from nanproof.core.stepper import Stepper
from nanproof.core.telemetry import Courier
from nanproof.core.verdict import Reading
from nanproof.explain.bundle import BundleWriter
from nanproof.explain.case import Case
from nanproof.explain.recorder import Moment, Recorder
from nanproof.explain.rehearse import adam_update
from nanproof.explain.replay import Deadline, LossFn, Replay
from nanproof.explain.silent import Signal, SilentWatch, WeightSample, is_shifted, shifted_pairs
from nanproof.policy import Policy
from nanproof.records import Diagnosis, Incident, StepRecord

log = logging.getLogger("nanproof")

_LEARN_WRITES = 3
"""Steps in which it is learned which parameters the forward writes."""
_PATIENCE = 3
"""Diagnoses of one kind that named no sample, after which no more are made for samples' sake."""
Reader = Callable[[], list[float]]
_WORTH_A_REPLAY = (RuntimeError, ValueError, ArithmeticError, AssertionError)
WHY_NOT_AGAIN = (
    "a step of a loop of one's own cannot be run again; guard.train_step(batch) or nanproof.diagnose(...) can say more"
)
_NOT_TO_BE_TOUCHED = ("out of memory", "CUDA error", "device-side assert", "NCCL", "CUBLAS", "cuDNN", "DataLoader worker")


class Examiner(Watcher):
    """Explains incidents to the guard."""

    def __init__(
        self, stepper: Stepper, loss_fn: LossFn | None, scheduler: Any, policy: Policy, run_dir: str | Path | None
    ) -> None:
        self._stepper, self._loss_fn, self._scheduler, self._policy = stepper, loss_fn, scheduler, policy
        self._bundles = None
        if run_dir is not None and policy.bundles:
            self._bundles = BundleWriter(Path(run_dir) / "incidents", keep=policy.bundles, max_bytes=policy.bundle_bytes)
        self._bundled: set[str] = set()
        self.keep_asking = False
        """Samples are wanted of every bad step, to salvage the rest or to leave them out: not only of the first of its kind."""
        self._fruitless: dict[str, int] = {}
        self.recorder = Recorder()
        self._watch = SilentWatch(stepper.parameters, stepper.optimizer)
        self._sample = WeightSample(stepper.parameters, stepper.optimizer)
        self._courier = Courier(stepper.parameters.device)
        self._explained: set[str] = set()
        self._causes: dict[str, str] = {}
        """By kind: what the last diagnosis said."""
        self._looks: dict[int, tuple[Reader | None, tuple[list[tuple[str, str]], Reader] | None]] = {}
        self._taking = False
        self._before_forward: list[tuple[Tensor, int]] = []
        self._written: list[Tensor] = []
        """Parameters that the forward itself writes, as a momentum encoder's."""
        self._bad_at_start = stepper.buffers.broken() if self.on else []
        self.living: Callable[[], AbstractContextManager[Any]] = nullcontext
        """What the run is under by now; replays are under it too."""
        self.why_not_again = WHY_NOT_AGAIN
        """Said of a refused step that cannot be run again and is not explained: why, and what would help."""
        self._last: Case | None = None
        self._updates: dict[int, float | None] = {}
        """Adam's update over the learning rate, at spikes."""

    @property
    def on(self) -> bool:
        return self._policy.diagnose != "never" and not self.off

    def hand_over(self) -> Case | None:
        """The case of the last diagnosis, once: its replay holds a batch."""
        case, self._last = self._last, None
        return case

    def start_over(self, dealt_with: str = "") -> None:
        """Count anew for silent failures: parameters changed, or a signal was dealt with and may be said again."""
        self._watch = self._watch.renewed(self._stepper.parameters, self._stepper.optimizer, dealt_with)
        self._sample = WeightSample(self._stepper.parameters, self._stepper.optimizer)
        self._looks.clear()

    # -- while all is well -----------------------------------------------------------------------------------------------------

    @harmless("silent failures are not looked for")
    def begin(self, attempt: Attempt) -> None:
        """A step that can be run again begins: keep what it needs, by reference."""
        if not self.on:
            return
        assert attempt.batches is not None and attempt.random is not None and attempt.mode is not None
        self.recorder.keep(attempt.step, attempt.batches, attempt.random, attempt.mode)
        if attempt.step < _LEARN_WRITES:
            self._before_forward = [(p, p._version) for p in self._stepper.model.parameters() if not p.is_inference()]

    @harmless("silent failures are not looked for")
    def before_step(self, step: int) -> None:
        if self._before_forward:
            moved = [p for p, version in self._before_forward if p._version != version and all(p is not w for w in self._written)]
            self._written += moved
            self._before_forward = []
        self._taking = self.on and WeightSample.due(step)
        if self._taking:
            self._sample.before()

    @harmless("silent failures are not looked for")
    def after_step(self, step: int, batches: Sequence[Any] | None) -> None:
        """Send what was seen on its way to the host."""
        if not self.on:
            return
        weights = self._sample.after() if self._taking else None
        pair = None
        if step == 2 and batches is not None and (found := shifted_pairs(batches)) is not None:
            pair = (found[0], self._courier.send(found[1]))
        if weights is not None or pair is not None:
            self._looks[step] = weights, pair

    def gave_up(self) -> None:
        """The step raised instead."""
        self._taking = False

    @harmless("silent failures are not looked for")
    def accepted(self, record: StepRecord, history: Sequence[StepRecord]) -> Incident | None:
        """An accepted step, in order: is something silently wrong?"""
        if not self.on:
            return None
        weights, pair = self._looks.pop(record.step, (None, None))
        sample = None
        if weights is not None:
            share, size, kept = weights()
            sample = share, size, kept * record.clip * (record.scale or 1.0) if kept >= 0 else kept
        shifted = None
        if pair is not None:
            shifted = is_shifted(pair[0], pair[1]())
        if record.spike:
            self._updates[record.step] = adam_update(self._stepper.optimizer)
        signal = self._watch.see(record, sample, shifted)
        if self._bad_at_start and signal is None:
            named = ", ".join(self._bad_at_start[:3])
            signal = Signal("nonfinite-buffers", f"buffers were non-finite before the first step: {named}", {}, record.step)
            self._bad_at_start = []
        return self._suspect(signal, record, history) if signal is not None else None

    def _suspect(self, signal: Signal, record: StepRecord, history: Sequence[StepRecord]) -> Incident | None:
        """An incident only if a replay and the catalogue agree: a suspicion alone would be a false alarm."""
        moment = self.recorder.at(record.step)
        kind = {"huge-gradients": "spike", "early-jump": "spike", "nonfinite-buffers": "nonfinite-weight"}.get(
            signal.name, "no-learning"
        )
        if signal.name == "early-jump" and "divergence" in self._explained:
            return None
        if signal.name == "zero-learning-rate" and self._rises_again(record.step):
            return None
        if moment is None and signal.name not in ("foreign-parameters", "zero-learning-rate"):
            return None
        diagnosis = self._guarded(
            lambda: self._case(
                kind,
                moment,
                record=signal.details.get("record", record),
                history=history,
                signal=signal.name,
                details=dict(signal.details),
            )
        )
        if diagnosis is None:
            return None
        found = diagnosis.cause != "unknown" and (diagnosis.verified or diagnosis.confidence >= 0.9)
        if signal.details.get("solved"):
            found = diagnosis.cause == "zero-advantage" and diagnosis.verified
        elif signal.name in ("huge-gradients", "dead-parameters"):
            found = diagnosis.verified
        elif signal.name == "missing-gradients":
            found = diagnosis.cause == "no-gradient-path"
        elif signal.name == "early-jump":
            found = diagnosis.cause == "optimizer-state-reset"
        elif signal.name == "zero-gradients":
            found = diagnosis.cause == "zero-advantage" or (record.loss != 0)
        if not found:
            return None
        self._explained.add(kind)
        return Incident(
            step=record.step if signal.since is None else signal.since,
            kind=kind,
            action="recorded" if record.action != "clipped" else "clipped",
            loss=record.loss,
            grad_norm=record.grad_norm,
            message=signal.message,
            diagnosis=diagnosis,
        )

    def _rises_again(self, steps: int) -> bool:
        """The schedule's learning rate is above 0 again within as many steps as there were, or 200."""
        if self._scheduler is None:
            return False
        optimizer = self._stepper.optimizer
        now = Schedule.now(optimizer, self._scheduler)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(max(200, steps)):
                    self._scheduler.step()
                    if any(float(group["lr"]) > 0 for group in optimizer.param_groups):
                        return True
        except Exception:
            return False
        finally:
            now.restore(optimizer, self._scheduler)
        return False

    # -- incidents -------------------------------------------------------------------------------------------------------------

    def due(self, kind: str) -> bool:
        """Whether an incident of this kind is to be diagnosed; each kind once, by default, and all where they may be healed."""
        if self._policy.diagnose == "never":
            return False
        if self._policy.diagnose == "first" and kind in self._explained and not self._policy.heal:
            return self.keep_asking and self._fruitless.get(kind, 0) < _PATIENCE
        self._explained.add(kind)
        return True

    def refused(
        self,
        incident: Incident,
        attempt: Attempt,
        reading: Reading,
        record: StepRecord,
        history: Sequence[StepRecord],
        buffer: str,
        one_rank: bool,
    ) -> Incident:
        """The incident of a refused step, with its diagnosis. Every rank comes here at the same step."""
        self.recorder.drop(attempt.step)
        self._looks.pop(attempt.step, None)
        moment = None
        if attempt.batches is not None and attempt.random is not None and attempt.mode is not None:
            moment = Moment(attempt.step, attempt.batches, (), attempt.random, attempt.mode)
        ranks = self._stepper.ranks
        guilty = incident.rank if incident.rank is not None else 0
        mine = not ranks.together or ranks.rank == guilty
        calls = () if moment is not None else _calls(attempt, incident.micro_batch)
        due = self.due(incident.kind)
        # What a model was called with is looked at each time: that takes no replay.
        if not due and (not calls or ranks.together or not self.on):
            return self._bundle(incident, moment, record) if mine else incident
        details: dict[str, Any] = {"part": incident.micro_batch is not None}
        if moment is None:
            details["why_not_again"] = self.why_not_again
        diagnosis = None
        if mine:
            diagnosis = self._guarded(
                lambda: self._case(
                    incident.kind,
                    _part(moment, incident.micro_batch),
                    record=record,
                    history=history,
                    weights_broke=reading.weights_bad,
                    bad_buffer=buffer if incident.kind == "nonfinite-weight" else "",
                    uncleared=self._stepper.uncleared,
                    calls=calls,
                    details=details,
                )
            )
        if ranks.together:
            diagnosis = _shared(ranks, diagnosis, guilty)
        cause = "unknown" if diagnosis is None else diagnosis.cause
        before, self._causes[incident.kind] = self._causes.get(incident.kind), cause
        if not due:
            return incident if cause == before == "unknown" else replace(incident, diagnosis=diagnosis)
        named = diagnosis is not None and bool(diagnosis.samples)
        self._fruitless[incident.kind] = 0 if named else self._fruitless.get(incident.kind, 0) + 1
        if ranks.together and diagnosis is not None and incident.rank is not None and one_rank:
            diagnosis = _one_rank(diagnosis, incident.rank)
        incident = replace(incident, diagnosis=diagnosis)
        return self._bundle(incident, moment, record) if mine else incident

    def finding(self, incident: Incident, record: StepRecord, history: Sequence[StepRecord]) -> Incident:
        """A spike or divergence that was found some steps later."""
        if not self.due(incident.kind):
            return incident
        moments = list(self.recorder)
        moment = self.recorder.at(incident.step) or (moments[-1] if moments and incident.kind == "divergence" else None)
        near = [u for step, u in self._updates.items() if u is not None and 0 <= step - incident.step <= 20]
        details = {"update": max(near)} if near else {}
        diagnosis = self._guarded(lambda: self._case(incident.kind, moment, record=record, history=history, details=details))
        return replace(incident, diagnosis=diagnosis)

    def raised(self, incident: Incident, attempt: Attempt, error: BaseException, history: Sequence[StepRecord]) -> Incident:
        """An exception inside a step. Other ranks may not be coming, so nothing here needs them."""
        touchable = isinstance(error, _WORTH_A_REPLAY) and not any(text in str(error) for text in _NOT_TO_BE_TOUCHED)
        if not touchable or not self.due("exception"):
            return incident
        moment = None
        if attempt.batches is not None and attempt.random is not None and attempt.mode is not None:
            moment = Moment(attempt.step, attempt.batches, (), attempt.random, attempt.mode)
        diagnosis = self._guarded(lambda: self._case("exception", moment, history=history, error=error))
        return self._bundle(replace(incident, diagnosis=diagnosis), moment, None)

    def rewound(self) -> None:
        """The run went back: what was kept of the way it came is of no use."""
        self.recorder.clear()
        self._looks.clear()
        self._updates.clear()

    def close(self) -> None:
        """Wait for the bundles on their way to the disk."""
        self.recorder.clear()
        if self._bundles is not None:
            self._bundles.close()

    def _bundle(self, incident: Incident, moment: Moment | None, record: StepRecord | None) -> Incident:
        """Keep the step on disk: the first of each kind, or all where all are diagnosed."""
        if self._bundles is None or moment is None:
            return incident
        if incident.kind in self._bundled and self._policy.diagnose != "always":
            return incident
        self._bundled.add(incident.kind)
        path = self._bundles.write(
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

    def found_at_close(self, incident: Incident, history: Sequence[StepRecord]) -> Incident:
        """Weights or buffers that are non-finite at the end."""
        if not self.due(incident.kind):
            return incident
        moments = list(self.recorder)
        diagnosis = self._guarded(lambda: self._case(incident.kind, moments[-1] if moments else None, history=history))
        return replace(incident, diagnosis=diagnosis)

    # -- a case ----------------------------------------------------------------------------------------------------------------

    def _case(self, kind: str, moment: Moment | None, **facts: Any) -> Case:
        stepper = self._stepper
        details = facts.pop("details", {})
        replay = None
        if moment is not None and self._loss_fn is not None and not self._needs_others():
            fixed = stepper.scale is not None and stepper.scale.fixed
            scale = float(stepper.scale.value()) if stepper.scale is not None and fixed else 1.0
            replay = Replay(
                stepper.model,
                self._loss_fn,
                moment.batches,
                random=moment.random,
                mode=moment.mode,
                scale=scale,
                buffers=stepper.buffers,
                written=self._written,
                alone=stepper.ranks.several,
                living=self.living,
                deadline=Deadline.after(self._policy.diagnose_seconds),
            )
            if moment.versions and moment.changed:
                details.setdefault("notes", []).append("the batch was written in place after the step: the replay may differ")
        if kind == "nonfinite-gradient" and stepper.scale is not None and not stepper.scale.fixed:
            kind = "loss-scale-collapse"
        norm = stepper.max_norm if isinstance(stepper.max_norm, (int, float)) else None
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
            **facts,
        )

    def _needs_others(self) -> bool:
        """A forward that waits for other ranks cannot be run on one alone."""
        if not self._stepper.ranks.together:
            return False
        return self._stepper.ranks.sharded or any(isinstance(m, nn.SyncBatchNorm) for m in self._stepper.model.modules())

    def _guarded(self, make: Callable[[], Case]) -> Diagnosis | None:
        """Diagnose; whatever goes wrong in there is reported, not raised."""
        from nanproof.explain.diagnose import explain

        start = time.perf_counter()
        stepper = self._stepper
        self._last = None
        try:
            case = make()
            diagnosis = explain(case)
            self._last = case if self._policy.heal else None
        except Exception as error:
            log.debug("nanproof: a diagnosis failed", exc_info=True)
            text = f"the diagnosis itself failed: {type(error).__name__}: {error}"[:300]
            diagnosis = Diagnosis(cause="unknown", confidence=0.0, evidence=(text,))
        finally:
            stepper.forget_probes()
        log.debug("nanproof: diagnosed in %.2f s", time.perf_counter() - start)
        return diagnosis


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


def _shared(ranks: Any, diagnosis: Diagnosis | None, source: int) -> Diagnosis | None:
    """The diagnosis of one rank, on all of them."""
    text = json.dumps(diagnosis.to_json()) if diagnosis is not None else ""
    text = ranks.share_text(text, source)
    if not text:
        return None
    return Diagnosis.from_json(json.loads(text))
