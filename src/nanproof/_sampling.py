"""Sampling under a guard: rows of logits from which nothing can be drawn are incidents of the run, as bad steps are.

`GuardedSampling` is for loops of your own. The adapter for TRL's GRPOTrainer has the same incidents, and does the masking itself.

    sampling = GuardedSampling(guard)
    ids = model.generate(**prompt, logits_processor=[sampling.processor])
    valid = sampling.settle()                  # bool a row, on the device; False: the row ended early, do not train on it
    guard.train_step({..., "valid": valid})
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from nanproof import _wording as wording
from nanproof._errors import UsageError
from nanproof._records import Diagnosis, Incident
from nanproof.core._caps import SkipCaps
from nanproof.explain import causes
from nanproof.numerics.generation import BadRow, NumericalStabilityLogitsProcessor

if TYPE_CHECKING:
    from nanproof._guard import Guard
    from nanproof.integrations._protected import ProtectedRun

ENDED = "these rows end there"
UNTRAINED = ", are masked from the loss and have no part in their group's advantages"


class GuardedSampling:
    """A processor for `generate`, whose bad rows the guard reports, counts and caps."""

    def __init__(
        self, guard: Guard | ProtectedRun, *, eos_token_id: int | Sequence[int] | None = None, verbose: bool = False
    ) -> None:
        """`eos_token_id`: what ends a row; None: that of the guard's model."""
        self._guard = guard
        self.processor = NumericalStabilityLogitsProcessor(
            on_bad="end", eos_token_id=eos_token_id, model=guard.model, verbose=verbose
        )
        self._caps = SkipCaps(guard.policy)
        self._told = -1
        """The last generation whose bad rows are known."""
        self._settled: tuple[int, Tensor] | None = None
        """The last generation that was settled, and its answer."""
        self.went_back = False
        """Whether the last `settle` sent the run back, on all ranks: sample again, from weights that are good."""
        guard.counters.append(self.counters)

    def counters(self) -> dict[str, Tensor]:
        """What was sampled so far, on the device: every step's record has it."""
        found = {name: value for name, value in self.processor.counters().items() if name != "clipped"}
        return {f"generation/{name}": value for name, value in found.items()}

    def settle(self) -> Tensor:
        """Which rows of the last generation may be trained on. To be called after each one, before the weights change, and on
        all ranks alike. Waits for the device once.

        A bad row is an incident of the kind "generation". Too many in a row, or a generation without a healthy row, is the end
        of it: the run goes back to a good state, if there is one, `went_back` is True and no row is valid; else it halts.
        """
        found = self.processor.bad_rows
        if found is None:
            raise UsageError("settle(): nothing was sampled yet. Give `processor` to generate first")
        if self._settled is not None and self._settled[0] == self.processor.generations:
            return self._settled[1]
        self.went_back = False
        if _on_any_rank(found):
            births = [birth for birth in self.processor.read() if birth.generation > self._told]
            self._told = max((birth.generation for birth in births), default=self._told)
            self.went_back = self._goes_back(*_from_all_ranks(found.tolist(), births))
        else:
            self._caps.accepted()
        self._settled = self.processor.generations, torch.zeros_like(found) if self.went_back else ~found
        return self._settled[1]

    def close(self) -> None:
        """Take the hook off the model, and the counters off the guard."""
        self.processor.close()
        if self.counters in self._guard.counters:
            self._guard.counters.remove(self.counters)

    def __enter__(self) -> GuardedSampling:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _goes_back(self, everyone: list[bool], births: list[BadRow]) -> bool:
        guard, (cap, count) = self._guard, reached(self._caps, everyone)
        incident = incident_of(guard, guard.next_step, everyone, births, ended="" if cap else ENDED)
        went_back = guard.engine.sampled(replace(incident, cap_count=count), cap)
        if went_back:
            self._caps = SkipCaps(guard.policy)
        return went_back


# -- shared with TRL's adapter -------------------------------------------------------------------------------------------------


def reached(caps: SkipCaps, everyone: Sequence[bool]) -> tuple[str | None, int]:
    """Count a generation with bad rows. Returns the limit that is reached by it, if any, and what it counts."""
    cap = "no-healthy-row" if all(everyone) else caps.if_refused()
    caps.refused()
    return cap, 0 if cap is None else caps.count(cap)


def incident_of(
    guard: Guard | ProtectedRun,
    step: int,
    everyone: Sequence[bool],
    births: Sequence[BadRow],
    where: str = "",
    ended: str = "",
) -> Incident:
    """Rows that could not be sampled, of all ranks. `ended`: what became of them."""
    rows = [row for row, bad in enumerate(everyone) if bad]
    seen = wording.rows_not_sampled(rows, len(everyone), where, births[0] if births else None)
    message = f"{seen}; {ended}" if ended else seen
    diagnosis = _diagnosis(guard, rows, births)
    return Incident(step=step, kind="generation", action="recorded", message=message, diagnosis=diagnosis)


def _diagnosis(guard: Guard | ProtectedRun, rows: Sequence[int], births: Sequence[BadRow]) -> Diagnosis:
    first = births[0] if births else None
    cause, confidence, where = "unknown", 0.0, first.where if first is not None else None
    broken, fix = guard.engine.judge.broken_state(), None
    if broken:
        cause, confidence, where = "nonfinite-weights-at-start", 0.96, broken[0]
        if any(record.action != "skipped" for record in guard.history):
            cause, confidence = "nonfinite-weights-mid-run", 0.9
            fix = f"Find what writes into {where} between steps. Snapshots or checkpoints let the run go back by itself."
    elif first is not None and first.kind == "all-banned":
        cause, confidence = "all-tokens-banned", 0.9
    return Diagnosis(
        cause=cause,
        confidence=confidence,
        phase="weights" if broken else "forward",
        where=where,
        op=first.op if first is not None and not broken else None,
        samples=tuple(rows),
        evidence=tuple([f"not finite: {', '.join(broken[:3])}"] * bool(broken) + [str(birth) for birth in births[:3]]),
        fix=fix or causes.fix_of(cause),
    )


def _alone() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def _on_any_rank(found: Tensor) -> bool:
    """Whether a row was bad, here or elsewhere: one number is all that healthy ranks have to share."""
    some = found.any().to(torch.int32)
    if not _alone():
        dist.all_reduce(some, dist.ReduceOp.MAX)
    return bool(some)


def _from_all_ranks(flags: list[bool], births: list[BadRow]) -> tuple[list[bool], list[BadRow]]:
    """Rows of all ranks, one after the other."""
    if _alone():
        return flags, births
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (flags, births))
    everyone: list[bool] = []
    all_births: list[BadRow] = []
    for its_flags, its_births in gathered:
        all_births += [replace(birth, row=len(everyone) + birth.row) for birth in its_births]
        everyone += its_flags
    return everyone, all_births
