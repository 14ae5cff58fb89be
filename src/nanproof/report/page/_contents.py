"""What a report says of a run, as plain data: the page embeds it, a live page fetches it, the text for an issue uses parts."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from nanproof import __version__
from nanproof._records import Incident, encode
from nanproof._text import duration, number, one_line, shown, size
from nanproof.report.folder._beside import checkpoints, quarantine
from nanproof.report.folder._run import NEAR, Run
from nanproof.report.folder._samples import manifest_of
from nanproof.report.folder._series import METRICS
from nanproof.report.folder._tokens import Tokens
from nanproof.report.folder._troubles import Trouble, bundle_of, troubles
from nanproof.report.page._cards import cards, without_home
from nanproof.report.page._grids import grid
from nanproof.report.page._terms import chart

MOST_NEAR = 4000
"""Steps around incidents that are embedded one by one, where curves are made of buckets."""
MOST_MARKS = 3000
MOST_TURNS = 500
MOST_PARTS = 8
"""Optimizers of a run whose curves are shown; all are counted."""
MOST_LATE = 8
"""Steps that may have been recorded after an incident before the run went back."""
STATES = {
    "running": "is running",
    "halted": "was halted",
    "ended": "has ended",
    "stopped": "was stopped before it was closed",
    "waiting": "has not begun",
    "unknown": "may be running or not",
}
_LARGEST = 1e300
_FACTS = ("model", "parameters", "trainable", "dtypes", "device_name", "device", "ranks", "optimizer", "max_norm", "loss_scale",
          "path", "versions", "platform", "policy")  # fmt: skip


def contents(run: Run, tokens: Tokens) -> dict[str, Any]:
    """Everything, as strict JSON holds it: missing and non-finite numbers of curves are null."""
    made = datetime.now(timezone.utc)
    groups = troubles(run)
    return {
        "v": 1,
        "name": title(run),
        "folder": one_line(without_home(str(run.folder)), 400),
        "state": run.state,
        "made": made.isoformat(timespec="seconds"),
        "version": __version__,
        "broken": sum(part.broken for part in run.parts),
        "summary": summary(run),
        "numbers": numbers(run),
        "optimizers": optimizers(run),
        "causes": causes(run),
        **_drawn(run, groups),
        "parts": [_drawn(part, groups) for part in run.others[: MOST_PARTS - 1]],
        "incidents": cards(run, tokens),
        "all_incidents": run.total["incidents"],
        "tables": tables(run),
        "facts": facts(run),
    }


def _drawn(part: Run, groups: Iterable[Trouble]) -> dict[str, Any]:
    """The curves of one optimizer, and its marks on them."""
    close = _close(part)
    marks = [
        (number, trouble.numbers[0], incident.step)
        for trouble in groups
        if trouble.part is part
        for number, incident in zip(trouble.numbers, trouble.incidents, strict=True)
    ]
    return {
        "curves": _curves(part),
        "terms": chart(part, close),
        "near": _near(part, sorted(close)),
        "norms": grid(part.norms),
        "absmax": grid(part.absmax),
        "marks": [[card, step] for _, card, step in sorted(marks)][-MOST_MARKS:],
        "forecasts": _forecasts(part),
        "turns": _back(part)[-MOST_TURNS:],
    }


def optimizers(run: Run) -> list[dict[str, Any]]:
    """Each optimizer of a run that has several; empty for a run with one."""
    return [
        {
            "name": part.optimizer,
            "folder": one_line(without_home(str(part.folder)), 400),
            "state": part.state_alone,
            "steps": part.steps,
            "refused": part.counts["skipped"],
            "clipped": part.counts["clipped"],
            "incidents": len(part.incidents),
            "loss": encode(part.newest.loss) if part.newest is not None else None,
        }
        for part in run.parts
        if run.others
    ]


def title(run: Run) -> str:
    """The folder's name; trainers call it `nanproof`, which says nothing without the folder it is in."""
    parent = run.folder.absolute().parent.name
    return one_line(f"{parent}/{run.name}" if run.name == "nanproof" and parent else run.name, 200)


def summary(run: Run) -> str:
    """The run in a few sentences, for who cannot see the curves."""
    total = run.total
    of = f" of {len(run.parts)} optimizers" if run.others else ""
    said = [f"This run {_how(run)}: {_count(total['steps'], 'step')}{of} recorded"]
    if total["steps"]:
        said[0] += f", {total['skipped']:,} refused, {total['clipped']:,} clipped"
    means = [x for x in run.curves.mean("loss") if math.isfinite(x)]
    if means:
        of = f" of {run.optimizer}" if run.others else ""
        said.append(
            f"The loss{of} went from {means[0]:.4g} to {means[-1]:.4g}, the lowest was {min(run.curves.low('loss'), key=_up):.4g}"
        )
    found = causes(run)
    if found:
        named = ", ".join(f"{name} ({count} times)" if count > 1 else name for name, count in found[:6])
        said.append(f"{_count(total['incidents'], 'incident')}: {named}")
        said += _first_explained(run)
    elif total["steps"]:
        said.append("No incidents")
    for part in run.parts:
        if part.forecasts:
            newest, of = part.forecasts[-1], f" of {part.optimizer}" if run.others else ""
            said.append(f"{_count(len(part.forecasts), 'forecast')}{of}, the last at step {newest.step}: {newest.kind}")
    if went := _back(run):
        said.append("It went back once" if len(went) == 1 else f"It went back {len(went):,} times")
    for first, last, why in [gap for part in run.parts for gap in part.gaps][:3]:
        steps = f"Step {first} is" if first == last else f"Steps {first} to {last} are"
        said.append(f"{steps} not in the records: {one_line(why, 100)}")
    if run.earlier:
        said.append(f"Not shown: {_count(run.earlier, 'earlier run')} in this folder, not resumed but begun anew")
    return ". ".join(said) + "."


def _first_explained(run: Run) -> list[str]:
    """Where the first known cause is, and what to do about it."""
    for part, incident in ((trouble.part, one) for trouble in troubles(run) for one in trouble.incidents):
        found = incident.diagnosis
        if found is not None and found.named and found.fix:
            place = found.source or found.where
            where = f", {one_line(place, 80)}" if place else ""
            sure = "verified on the step itself" if found.verified else "not verified"
            of = f" of {part.optimizer}" if run.others else ""
            return [
                f"Step {incident.step:,}{of}: {one_line(found.cause, 80)}{where}; fix, {sure}: {one_line(found.fix, 300)}".rstrip(
                    ". "
                )
            ]
    return []


def _how(run: Run) -> str:
    """How it stands, with the halt if that was its end: nothing else about such a run is as important."""
    state = run.state
    for part in run.parts:
        if state == "halted" and part.halted is not None:
            return f"was halted at step {part.halted.step:,}" + (f" of {part.optimizer}" if run.others else "")
    return STATES.get(state, state)


def numbers(run: Run) -> list[dict[str, str]]:
    """The figures at the top: label, value, and what else there is to say."""
    last, total = run.last, run.total
    newest = f"{len(run.parts)} optimizers" if run.others else f"last {last.step:,}" if last is not None else ""
    found = [
        {"label": "state", "value": run.state, "more": ""},
        {"label": "steps", "value": f"{total['steps']:,}", "more": newest},
        {"label": "last loss", "value": number(last.loss) if last is not None else "none", "more": run.optimizer},
        {"label": "refused", "value": f"{total['skipped']:,}", "more": _share(total, "skipped")},
        {"label": "clipped", "value": f"{total['clipped']:,}", "more": _share(total, "clipped")},
        {"label": "incidents", "value": f"{total['incidents']:,}", "more": ", ".join(name for name, _ in causes(run)[:1])},
    ]
    coming = [forecast for part in run.parts for forecast in part.forecasts]
    if coming:
        found.append({"label": "forecasts", "value": f"{len(coming):,}", "more": coming[-1].kind})
    if run.seconds > 0:
        found.append({"label": "time", "value": duration(run.seconds), "more": ""})
    if run.rate is not None:
        found.append({"label": "steps/s", "value": f"{run.rate:.3g}", "more": "lately"})
    return found


def causes(run: Run) -> list[tuple[str, int]]:
    """Incidents by cause, most frequent first."""
    counts: Counter[str] = Counter()
    for trouble in troubles(run):
        counts[one_line(trouble.cause, 80)] += len(trouble.incidents)
    return counts.most_common(20)


def recoveries(run: Run) -> list[dict[str, Any]]:
    """Every time the run went back, was healed, or took a step without a part of its batch, and why."""
    groups = troubles(run)
    found = [one for part in run.parts for one in _recoveries(part, [trouble for trouble in groups if trouble.part is part])]
    return sorted(found, key=lambda one: int(one["step"]))[-200:]


def _recoveries(part: Run, groups: Sequence[Trouble]) -> list[dict[str, Any]]:
    """The same for one optimizer."""
    turns = Counter(_back(part))
    by_step: dict[int, deque[tuple[int, int]]] = {}
    for one in _back(part):
        by_step.setdefault(one[0], deque()).append(one)
    causes = {i: trouble.cause for trouble in groups for i in trouble.numbers}
    found: list[dict[str, Any]] = []
    for incident, name in zip(part.incidents, (causes[i] for i in sorted(causes)), strict=True):
        if not _recovered(incident):
            continue
        to, turn = incident.restored_step, None
        if to is not None:
            turn = _turn_of(incident.step, to, turns)
        elif _went_back(incident) and by_step.get(incident.step):  # version 1 did not store where it went
            turn = by_step[incident.step].popleft()
            to = turn[1]
        if turn is not None:
            turns[turn] -= 1
        what = incident.outcome or incident.message
        found.append({"step": incident.step, "to": to, "how": incident.action, "why": one_line(name, 80),
                      "what": shown(_of(part, without_home(what[:3000])), 400)})  # fmt: skip
    other = "resumed after it had been stopped, or gone back by the program itself"
    more = [{"step": step, "to": to, "how": "went back", "why": "", "what": _of(part, other)} for step, to in turns.elements()]
    return [*found, *more]


def _of(part: Run, text: str) -> str:
    """A text about one optimizer of several."""
    return f"{part.optimizer}: {text}" if part.optimizer else text


def _recovered(incident: Incident) -> bool:
    kept = incident.remedy is not None or bool(incident.undone or incident.quarantined)
    return kept or incident.action in ("healed", "salvaged") or _went_back(incident)


def _went_back(incident: Incident) -> bool:
    return incident.restored_step is not None or incident.action in ("rewound", "rolled-back")


def _turn_of(step: int, to: int, turns: Mapping[tuple[int, int], int]) -> tuple[int, int] | None:
    """The turn in the recorded steps that belongs to an incident. Verdicts can reach the host a few steps late."""
    return next(((last, to) for last in range(step, step + MOST_LATE + 1) if turns.get((last, to), 0) > 0), None)


def tables(run: Run) -> list[dict[str, Any]]:
    """What is told in rows: those of the tables that have any."""
    each = [[one["name"], f"{one['steps']:,}", f"{one['refused']:,}", f"{one['incidents']:,}", str(one["loss"]), one["state"],
             one["folder"]] for one in optimizers(run)]  # fmt: skip
    coming = [[f"{one['step']:,}", one["kind"], _of(part, one["message"])] for part in run.parts for one in _forecasts(part)]
    went = [[f"{one['step']:,}", "" if one["to"] is None else f"{one['to']:,}", one["how"], one["why"], one["what"]]
            for one in recoveries(run)]  # fmt: skip
    out = [[str(one["index"]), one["cause"], f"{one['step']:,}", one["hash"]] for part in run.parts
           for one in quarantine(part.folder)]  # fmt: skip
    kept = [
        [f"{one.step:,}", {"tag": one.state, "text": one.why}, size(one.size), one.at[:19].replace("T", " "), one.name]
        for one in checkpoints(run.folder)
    ]
    found = [
        {"title": "Optimizers", "heads": ["optimizer", "#steps", "#refused", "#incidents", "#last loss", "state", "folder"],
         "rows": each, "note": "Each has verdicts of its own, and counts its own steps."},
        {"title": "Forecasts", "heads": ["#step", "kind", "what was coming"], "rows": coming, "note": ""},
        {"title": "Recoveries", "heads": ["#step", "#back to", "how", "cause", "what was done"], "rows": went, "note": ""},
        {"title": "Samples in quarantine", "heads": ["#sample", "cause", "#step", "content hash"], "rows": out,
         "note": "They are left out of every later epoch and run with this run_dir."},
        {"title": "Checkpoints", "heads": ["#step", "state", "#size", "written (UTC)", "name"], "rows": kept,
         "note": "Sizes were compared with what was written, checksums were not."},
    ]  # fmt: skip
    return [table for table in found if table["rows"]]


def _back(run: Run) -> list[tuple[int, int]]:
    """Where the run went back, without the steps that were only taken again with a part of their batch."""
    return [turn for turn in run.turns if turn[1] < turn[0]]


def facts(run: Run) -> list[tuple[str, str]]:
    """What the run was made of: from its own first line, else from its newest bundle. Of several optimizers, what they share."""
    about: Mapping[str, Any] = run.about
    if run.others:
        own = ("model", "parameters", "trainable", "dtypes", "path", "max_norm")
        about = {
            **{key: value for key, value in about.items() if key not in own},
            "optimizer": "; ".join(p.optimizer for p in run.parts),
        }
    if not about:
        bundles = (bundle_of(run, incident) for incident in reversed(run.incidents))
        manifest = next((manifest_of(folder) for folder in bundles if folder is not None), {})
        optimizer = manifest.get("optimizer")
        about = {**manifest, "optimizer": optimizer.get("class") if isinstance(optimizer, dict) else None}
    found = []
    if run.opened is not None and 0 <= run.opened < 1e11:
        found.append(("started", datetime.fromtimestamp(run.opened, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")))
    return found + [(key.replace("_", " "), text) for key in _FACTS if (text := fact(about.get(key)))]


def fact(value: Any) -> str:
    """A setting, or a few of them, as a text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{one_line(key, 60)} {fact(item) or item}" for key, item in list(value.items())[:40])[:2000]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else one_line(without_home(str(value)[:2000]), 400)


def _curves(run: Run) -> dict[str, Any]:
    curves = run.curves
    found: dict[str, Any] = {"width": curves.width, "steps": curves.steps, "skipped": curves.skipped, "clipped": curves.clipped}
    for metric in METRICS:
        mean = curves.mean(metric)
        bad = curves.bad(metric)
        if any(map(math.isfinite, mean)) or any(bad):
            found[metric] = {"mean": _plain(mean), "bad": bad if any(bad) else []}
            if curves.width > 1:
                found[metric] |= {"low": _plain(curves.low(metric)), "high": _plain(curves.high(metric))}
    return found


def _close(run: Run) -> list[int]:
    """The steps around incidents that are told one by one, those of the first incidents first."""
    wanted: dict[int, None] = {}
    steps = dict.fromkeys(incident.step for incident in [*run.incidents[:20], *reversed(run.incidents[20:])])
    for middle in steps:
        around = dict.fromkeys(step for step in range(middle - NEAR, middle + NEAR + 1) if step in run.near)
        if len({**wanted, **around}) > MOST_NEAR:
            break
        wanted |= around
    return list(wanted)


def _near(run: Run, steps: Sequence[int]) -> dict[str, Any] | None:
    """The steps around incidents one by one; nothing where the curves show every step already."""
    if run.curves.width == 1 or not steps:
        return None
    briefs = [run.near[step] for step in steps]
    found: dict[str, Any] = {"steps": [brief.step for brief in briefs]}
    for metric in METRICS:
        values = [getattr(brief, metric) for brief in briefs]
        found[metric] = _plain([math.nan if x is None else x for x in values])
        found[f"{metric}_bad"] = [i for i, x in enumerate(values) if x is not None and not math.isfinite(x)]
    for action in ("skipped", "clipped"):
        found[action] = [int(brief.action == action) for brief in briefs]
    return found


def _forecasts(run: Run) -> list[dict[str, Any]]:
    return [
        {"step": one.step, "kind": one.kind, "message": shown(one.message, 600), "where": one_line(one.where or "", 160)}
        for one in run.forecasts[-300:]
    ]


def _plain(values: Sequence[float]) -> list[float | None]:
    """Five digits, which is more than a screen shows. The largest of all would round to Inf."""
    return [float(f"{min(max(x, -_LARGEST), _LARGEST):.5g}") if math.isfinite(x) else None for x in values]


def _share(total: Mapping[str, int], action: str) -> str:
    share = total[action] / total["steps"] if total["steps"] else 0.0
    return f"{100 * share:.{0 if share >= 0.1 else 2}{'f' if share >= 0.1 else 'g'}} %" if share else ""


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _up(x: float) -> float:
    return x if math.isfinite(x) else math.inf
