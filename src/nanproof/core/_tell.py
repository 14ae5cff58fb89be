"""Tell: what a run has to show. Records and incidents go into lists, to the journal and to the log;
nothing is decided here."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from nanproof import _wording as wording
from nanproof._policy import Policy
from nanproof._records import Forecast, Incident, StepRecord
from nanproof.core._telemetry import Journal
from nanproof.core._under_way import Attempt
from nanproof.core.judge._judge import Report
from nanproof.core.judge._verdict import Reading

log = logging.getLogger("nanproof")


@dataclass(slots=True)
class Account:
    """What happened so far. It outlives the engine, where a loop begins a second time."""

    history: deque[StepRecord]
    incidents: list[Incident] = field(default_factory=list)
    forecasts: list[Forecast] = field(default_factory=list)
    accepted: int = 0
    """Steps that were taken, of those that the host knows of: on CUDA it learns of one two steps
    later."""
    refused: int = 0
    refused_for_good: int = 0
    """Those of them that could not be run again: after them no schedule went back."""
    spoiled: deque[tuple[int, list[Tensor]]] = field(default_factory=lambda: deque(maxlen=1024))
    """Refused steps whose loss was not finite, and the losses of their micro-batches: what a
    trainer's average must skip."""

    @classmethod
    def of(cls, policy: Policy, incidents: list[Incident] | None = None) -> Account:
        """An empty account. `incidents`: a list that several runs share."""
        return cls(deque(maxlen=policy.history), incidents if incidents is not None else [])

    def forget_since(self, step: int) -> None:
        """The run is at an earlier step: later ones will be told again."""
        while self.history and self.history[-1].step >= step:
            self.history.pop()


class Face:
    """What `Guard` and `ProtectedRun` show of a run alike."""

    account: Account

    @property
    def incidents(self) -> list[Incident]:
        """Everything that went wrong so far, in the order it was found."""
        return self.account.incidents

    @property
    def forecasts(self) -> list[Forecast]:
        """What was predicted so far; with `observe` only."""
        return self.account.forecasts

    @property
    def history(self) -> list[StepRecord]:
        """Records of the last steps whose verdicts have reached the host, oldest first."""
        return list(self.account.history)


class Teller:
    """Writes an account, its journal and the log."""

    def __init__(self, account: Account, journal: Journal, first_rank: bool) -> None:
        self.account, self._journal, self._loud = account, journal, first_rank

    def step(self, attempt: Attempt, report: Report, reading: Reading, record: StepRecord) -> None:
        """The verdict on a step has come."""
        account = self.account
        account.refused += reading.refused
        account.refused_for_good += reading.refused and attempt.batches is None
        account.accepted += not reading.refused
        if reading.refused and not math.isfinite(reading.loss):
            account.spoiled.append((attempt.step, report.losses))
        account.history.append(record)
        self._journal.step(record)

    def incident(self, incident: Incident) -> None:
        self.account.incidents.append(incident)
        self._journal.incident(incident)
        if self._loud and incident.same_as is not None and incident.action in ("skipped", "salvaged", "recorded"):
            times = sum(i.same_as == incident.same_as for i in self.account.incidents)
            log.warning("nanproof: %s", wording.again(incident, times))
        elif self._loud:
            why = f". {incident.diagnosis}" if incident.diagnosis is not None else ""
            bundle = f" Bundle: {incident.bundle}" if incident.bundle else ""
            log.warning("nanproof: %s%s%s", incident, why, bundle)

    def forecast(self, forecast: Forecast) -> None:
        self.account.forecasts.append(forecast)
        self._journal.forecast(forecast)
        if self._loud:
            log.warning("nanproof: %s", forecast)

    def flush(self) -> None:
        """Wait until all that was told is in the files, as far as the disk has room."""
        self._journal.flush()

    def close(self) -> None:
        self._journal.close()


class ForkTeller(Teller):
    """Tells nothing, in a process that was forked from that of the run, and says so once."""

    def __init__(self, process: int) -> None:
        self._process, self._silent = process, False

    def step(self, attempt: Attempt, report: Report, reading: Reading, record: StepRecord) -> None:
        if not self._silent:
            self._silent = True
            log.warning(
                "nanproof: this guard belongs to process %d. In the forked process %d it refuses bad steps, but records, "
                "explains and saves nothing. hint: make a Guard in the process that trains",
                self._process,
                os.getpid(),
            )

    def incident(self, incident: Incident) -> None:
        pass

    def forecast(self, forecast: Forecast) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
