"""Incidents as the page and the text for an issue show them: which ones, and all that is known of each.

Incidents that are the same trouble (`records.alike`) share one card.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanproof import _wording as wording
from nanproof._records import Group, Incident, alike, encode
from nanproof._text import one_line, shown
from nanproof._wording import place
from nanproof.report.folder._run import Brief, Run
from nanproof.report.folder._samples import samples_of
from nanproof.report.folder._tokens import Tokens
from nanproof.report.page._catalogue import sentences
from nanproof.report.page._terms import IN_A_LINE, of_incident

MOST_CARDS = 150
MOST_BYTES = 300_000
"""Of all cards together."""
FIRST = 5
"""Of every cause the first ones are shown before any other."""
AROUND = 3
"""Steps on either side of an incident that its card lists."""
ENTRY = "train:build"
"""Stands for the function that the reader has to name."""
_BUNDLE = re.compile(r"step-\d{6,}-[a-z-]+(?:-\d+)?")


def cause(incident: Incident) -> str:
    """What an incident is counted under: its cause if that is known, else its kind."""
    diagnosis = incident.diagnosis
    return diagnosis.cause if diagnosis is not None and diagnosis.cause != "unknown" else incident.kind


def causes_of(incidents: Sequence[Incident]) -> list[str]:
    """Return what each incident is counted under. One that is like an earlier incident has the cause of that one."""
    found = [""] * len(incidents)
    for group in alike(incidents):
        for i in group.members:
            found[i] = cause(incidents[group.origin])
    return found


def chosen(causes: Sequence[str], most: int = MOST_CARDS) -> list[int]:
    """Choose which of many incidents are shown, given their causes: the first of each cause, then the newest."""
    seen: Counter[str] = Counter()
    first = []
    for i, name in enumerate(causes):
        seen[name] += 1
        if seen[name] <= FIRST:
            first.append(i)
    shown_first = set(first)
    rest = [i for i in reversed(range(len(causes))) if i not in shown_first]
    return [*first, *rest][:most]


def cards(run: Run, tokens: Tokens, most_bytes: int = MOST_BYTES) -> list[dict[str, Any]]:
    """The incidents that are shown, oldest first. `number` counts all incidents from 1; `count` is how many share the card."""
    made: dict[int, dict[str, Any]] = {}
    left = most_bytes
    groups = alike(run.incidents)
    for i in chosen([cause(run.incidents[group.origin]) for group in groups]):
        group = groups[i]
        first = run.incidents[group.members[0]]
        card = {"number": group.members[0] + 1, **_card(run, first, tokens), **_likeness(run.incidents, group)}
        if not card["command"] and (bundle := bundle_of_any(run, group)) is not None:
            card |= {"command": command(bundle), "bundle": "there"}
        left -= len(json.dumps(card))
        if left < 0:
            break
        made[i] = card
    found = [made[i] for i in sorted(made)]
    numbers = {card["number"] for card in found}
    return [{**card, "like": card["like"] if card["like"] in numbers else None} for card in found]


def numbers_of_cards(incidents: Sequence[Incident]) -> list[int]:
    """Return the number of the card that tells of each incident."""
    found = [0] * len(incidents)
    for group in alike(incidents):
        for i in group.members:
            found[i] = group.members[0] + 1
    return found


def again(incidents: Sequence[Incident], group: Group) -> str:
    """How often the trouble of a group came again, in words."""
    first, *others = (incidents[i] for i in group.members)
    return wording.repeated(first.step if first.same_as is None else first.same_as, [other.step for other in others])


def around(run: Run, step: int, each: int) -> list[tuple[Brief, bool]]:
    """The steps on either side of one. That one itself as it was at first, and then, where it was taken again, as it became."""
    found = []
    for i in range(step - each, step + each + 1):
        first, last = run.given_up.get(i) if i == step else None, run.near.get(i)
        found += [(first, False)] if first is not None else []
        found += [(last, first is not None)] if last is not None else []
    return found


def bundle_of(run: Run, incident: Incident) -> Path | None:
    """The bundle of an incident, if it is still there. Only in the run's own folder, wherever the record says it was written: the
    run may have been moved since, and a record must not make anybody read other places."""
    name = re.split(r"[\\/]", incident.bundle or "")[-1]
    folder = run.folder / "incidents" / name
    return folder if _BUNDLE.fullmatch(name) and (folder / "manifest.json").is_file() else None


def command(bundle: Path) -> str:
    """What runs the step again, as it can be pasted into a shell."""
    path = without_home(str(bundle))
    quoted = f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)
    return f"nanproof replay {quoted} --entry {ENTRY}"


def without_home(text: str) -> str:
    """Paths of the home folder begin with ~: a report may be shown to others."""
    home = str(Path.home())
    return re.sub(rf"{re.escape(home)}(?=$|[\\/:\s'\"),;])", "~", text) if len(home) > 1 else text


def bundle_of_any(run: Run, group: Group) -> Path | None:
    """The bundle of any incident of a group: only the newest bundles are kept, and the first incident's may be gone."""
    named = (run.incidents[i] for i in group.members if run.incidents[i].bundle is not None)
    return next((bundle for incident in named if (bundle := bundle_of(run, incident)) is not None), None)


def _likeness(incidents: Sequence[Incident], group: Group) -> dict[str, Any]:
    """What a card says about incidents like its own: those that share it, and the earlier one that they are like."""
    first, origin = incidents[group.members[0]], incidents[group.origin]
    known = origin is not first and origin.diagnosis is not None and origin.diagnosis.named
    return {
        "count": len(group.members),
        "again": again(incidents, group),
        "same_as": first.same_as,
        "like": group.origin + 1 if origin is not first else None,
        "like_cause": one_line(cause(origin), 100) if known else "",
    }


def _card(run: Run, incident: Incident, tokens: Tokens) -> dict[str, Any]:
    bundle = bundle_of(run, incident)
    diagnosis, terms = incident.diagnosis, of_incident(incident)
    card: dict[str, Any] = {
        "step": incident.step,
        "kind": incident.kind,
        "action": incident.action,
        "message": _text(incident.message),
        "outcome": _text(incident.outcome),
        "loss": encode(incident.loss),
        "grad_norm": encode(incident.grad_norm),
        "terms": [[one_line(name, 80), encode(x)] for name, x in terms[:IN_A_LINE]],
        "more_terms": max(0, len(terms) - IN_A_LINE),
        "culprits": [[one_line(name, 160), encode(norm)] for name, norm in incident.culprits[:12]],
        "more_culprits": max(0, len(incident.culprits) - 12),
        "rank": incident.rank,
        "micro_batch": incident.micro_batch,
        "around": [
            [brief.step, encode(brief.loss), encode(brief.grad_norm), brief.action, again]
            for brief, again in around(run, incident.step, AROUND)
        ],
        "command": command(bundle) if bundle is not None else "",
        "bundle": "" if incident.bundle is None else "there" if bundle is not None else "gone",
        "samples": samples_of(bundle, incident, tokens) if bundle is not None else [],
    }
    if diagnosis is not None:
        card["diagnosis"] = {
            "cause": one_line(diagnosis.cause, 100),
            "why": sentences().get(diagnosis.cause, ""),
            "confidence": encode(float(diagnosis.confidence)),
            "place": _text(place(diagnosis), 400),
            "source": _text(diagnosis.source or "", 400),
            "evidence": [_text(said, 800) for said in diagnosis.evidence[:12]],
            "fix": _text(diagnosis.fix or "", 1000),
            "verified": bool(diagnosis.verified),
            "alternatives": [one_line(said, 100) for said in diagnosis.alternatives[:8]],
        }
    return card


def _text(text: str, most: int = 2000) -> str:
    return shown(without_home(str(text)[: most + 500]) if len(text) < 100_000 else text, most)
