"""Incidents as the page and the text for an issue show them: which ones, and all that is known of each.

Incidents that are the same trouble (`folder._troubles`) share one card.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanproof._records import Incident, encode
from nanproof._text import one_line, shown
from nanproof._wording import place
from nanproof.report.folder._run import Brief, Run
from nanproof.report.folder._samples import samples_of
from nanproof.report.folder._tokens import Tokens
from nanproof.report.folder._troubles import Trouble, bundle_of, troubles
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
    groups = troubles(run)
    for i in chosen([trouble.cause for trouble in groups]):
        trouble = groups[i]
        of = {"optimizer": trouble.part.optimizer, "part": run.parts.index(trouble.part)}
        card = {"number": trouble.numbers[0], **of, **_card(trouble.part, trouble.first, tokens), **_likeness(trouble)}
        if not card["command"] and (bundle := trouble.bundle) is not None:
            card |= {"command": command(bundle), "bundle": "there"}
        left -= len(json.dumps(card))
        if left < 0:
            break
        made[i] = card
    found = [made[i] for i in sorted(made)]
    numbers = {card["number"] for card in found}
    return [{**card, "like": card["like"] if card["like"] in numbers else None} for card in found]


def around(run: Run, step: int, each: int) -> list[tuple[Brief, bool]]:
    """The steps on either side of one. That one itself as it was at first, and then, where it was taken again, as it became."""
    found = []
    for i in range(step - each, step + each + 1):
        first, last = run.given_up.get(i) if i == step else None, run.near.get(i)
        found += [(first, False)] if first is not None else []
        found += [(last, first is not None)] if last is not None else []
    return found


def command(bundle: Path) -> str:
    """What runs the step again, as it can be pasted into a shell."""
    path = without_home(str(bundle))
    quoted = f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)
    return f"nanproof replay {quoted} --entry {ENTRY}"


def without_home(text: str) -> str:
    """Paths of the home folder begin with ~: a report may be shown to others."""
    home = str(Path.home())
    return re.sub(rf"{re.escape(home)}(?=$|[\\/:\s'\"),;])", "~", text) if len(home) > 1 else text


def _likeness(trouble: Trouble) -> dict[str, Any]:
    """What a card says about incidents like its own: those that share it, and the earlier one that they are like."""
    first, origin = trouble.first, trouble.origin
    known = origin is not first and origin.diagnosis is not None and origin.diagnosis.named
    return {
        "count": len(trouble.incidents),
        "again": trouble.again,
        "same_as": first.same_as,
        "like": trouble.origin_number if origin is not first else None,
        "like_cause": one_line(trouble.cause, 100) if known else "",
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
