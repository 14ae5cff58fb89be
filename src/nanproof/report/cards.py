"""Incidents as the page and the text for an issue show them: which ones, and all that is known of each."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from nanproof.records import Incident, encode
from nanproof.report.catalogue import sentences
from nanproof.report.run import Brief, Run
from nanproof.report.samples import samples_of
from nanproof.report.shown import one_line, shown
from nanproof.report.terms import IN_A_LINE, of_incident
from nanproof.report.text import place
from nanproof.report.tokens import Tokens

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


def chosen(incidents: list[Incident], most: int = MOST_CARDS) -> list[int]:
    """Which of many incidents are shown, in the order in which they get room: the first of each cause, then the newest."""
    seen: Counter[str] = Counter()
    first = []
    for i, incident in enumerate(incidents):
        seen[cause(incident)] += 1
        if seen[cause(incident)] <= FIRST:
            first.append(i)
    shown_first = set(first)
    rest = [i for i in reversed(range(len(incidents))) if i not in shown_first]
    return [*first, *rest][:most]


def cards(run: Run, tokens: Tokens, most_bytes: int = MOST_BYTES) -> list[dict[str, Any]]:
    """The incidents that are shown, oldest first. `number` counts all of them from 1."""
    made: dict[int, dict[str, Any]] = {}
    left = most_bytes
    order = chosen(run.incidents)
    for i in order:
        card = {"number": i + 1, **_card(run, run.incidents[i], tokens)}
        left -= len(json.dumps(card))
        if left < 0:
            break
        made[i] = card
    found = [made[i] for i in sorted(made)]
    examined = {card["kind"]: card["number"] for card in reversed(found) if "diagnosis" in card}
    return [card if "diagnosis" in card else {**card, "like": examined.get(card["kind"])} for card in found]


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


def _card(run: Run, incident: Incident, tokens: Tokens) -> dict[str, Any]:
    bundle = bundle_of(run, incident)
    diagnosis, terms = incident.diagnosis, of_incident(incident)
    card: dict[str, Any] = {
        "step": incident.step,
        "kind": incident.kind,
        "action": incident.action,
        "message": _text(incident.message),
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
