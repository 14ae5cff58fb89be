"""Trouble: the incidents of a run in groups, for `report`, `watch` and `doctor`, so that the three show and count the same."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from nanproof import _wording as wording
from nanproof._records import Incident, alike
from nanproof.report.folder._run import Run

_BUNDLE = re.compile(r"step-\d{6,}-[a-z-]+(?:-\d+)?")


@dataclass(frozen=True, slots=True)
class Trouble:
    """Incidents of one optimizer that are the same trouble and were dealt with in the same way (`records.alike`)."""

    part: Run
    """The optimizer."""
    incidents: tuple[Incident, ...]
    """Oldest first."""
    numbers: tuple[int, ...]
    """Of each, among all incidents of the run: from 1, one optimizer after the other."""
    origin: Incident
    """The incident that they are like: the first of them, or an earlier one."""
    origin_number: int

    @property
    def first(self) -> Incident:
        return self.incidents[0]

    @property
    def cause(self) -> str:
        """What it is counted under: the cause if that is known, else the kind."""
        found = self.origin.diagnosis
        return found.cause if found is not None and found.cause != "unknown" else self.origin.kind

    @property
    def again(self) -> str:
        """How often it came again, in words."""
        return wording.repeated(self.first, [incident.step for incident in self.incidents[1:]])

    @property
    def bundle(self) -> Path | None:
        """The bundle of any of the incidents: only the newest bundles are kept, and that of the first may be gone."""
        bundles = (bundle_of(self.part, incident) for incident in self.incidents if incident.bundle is not None)
        return next((bundle for bundle in bundles if bundle is not None), None)


def troubles(run: Run) -> list[Trouble]:
    """Group the incidents of a run, in the order of the first of each; one optimizer after the other."""
    found: list[Trouble] = []
    before = 1
    for part in run.parts:
        for group in alike(part.incidents):
            incidents = tuple(part.incidents[i] for i in group.members)
            numbers = tuple(before + i for i in group.members)
            found.append(Trouble(part, incidents, numbers, part.incidents[group.origin], before + group.origin))
        before += len(part.incidents)
    return found


def bundle_of(part: Run, incident: Incident) -> Path | None:
    """The bundle of an incident, if it is still there. Only in the optimizer's own folder, wherever the record says it was
    written: the run may have been moved since, and a record must not make anybody read other places."""
    name = re.split(r"[\\/]", incident.bundle or "")[-1]
    folder = part.folder / "incidents" / name
    return folder if _BUNDLE.fullmatch(name) and (folder / "manifest.json").is_file() else None
