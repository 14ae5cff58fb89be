"""A comparison as one HTML file, in the look of the report and as safe: text is escaped, scripts are allowed by checksum, nothing
is fetched. All but curves and incidents is there without scripts too."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nanproof import __version__
from nanproof_recipes.comparison.comparison import Arm, Check, Comparison
from nanproof_recipes.comparison.curves import charts
from nanproof_recipes.comparison.text import DASH, cell, ended, facts_of, is_bad, is_numeric
from nanproof_recipes.library import Run, asset, cards, document, find_tokens, one_line, runs_in, shown, summary, without_home

STYLES = ("uplot/uPlot.min.css", "style.css")
SCRIPTS = ("uplot/uPlot.iife.min.js", "base.js", "lines.js", "cards.js")
"""Of nanproof's report. `compare.css` and `compare.js` come after them."""
REPORT = "report.html"
CARDS_BYTES = 300_000
"""Of the incidents of all arms together."""
SAMPLES_BYTES = 200_000
"""Of the samples of all arms together."""
MOST_MARKS = 500
"""Incidents of one arm that are marked under the curves."""
MOST_SAMPLE = 1000
"""Characters of one text of a sample."""
MOST_STORY = 20
"""Sentences about one arm."""


@dataclass(frozen=True)
class Guarded:
    """What the folder of a guard's run holds."""

    folder: Path
    place: str
    """The same, as a link from the page names it."""
    run: Run


def page(comparison: Comparison, folder: Path) -> str:
    """The page, as it lies in `folder`: runs are read from there, and reports of theirs are linked to."""
    runs = [_guarded(arm, folder) for arm in comparison.arms]
    room = CARDS_BYTES // max(1, sum(one is not None for one in runs))
    told = {
        "v": 1,
        "arms": [one_line(arm.name, 60) for arm in comparison.arms],
        "incidents": [[] if one is None else cards(one.run, find_tokens(one.folder), room) for one in runs],
        "marks": [
            [] if one is None else [incident.step for part in one.run.parts for incident in part.incidents][:MOST_MARKS]
            for one in runs
        ],
        **charts(comparison.arms),
    }
    parts = {
        "title": _text(comparison.title, 200),
        "lead": _bdi(comparison.lead, 4000),
        "checks": _checks(comparison.checks),
        "table": _table(comparison),
        "arms": "".join(
            _arm(i, arm, one, SAMPLES_BYTES // len(runs)) for i, (arm, one) in enumerate(zip(comparison.arms, runs, strict=True))
        ),
        "facts": _facts("settings", "Settings", comparison.settings)
        + _facts("environment", "Environment", comparison.environment),
        "made": _text(_made(comparison)),
    }
    body = re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], _own("compare.html"))
    styles = [*map(asset, STYLES), _own("compare.css")]
    scripts = [*map(asset, SCRIPTS), _own("compare.js")]
    return document(f"{one_line(comparison.title, 200)}: nanproof", body, told, styles, scripts)


def _own(name: str) -> str:
    return (files("nanproof_recipes.comparison") / "assets" / name).read_text(encoding="utf-8")


def _text(said: Any, most: int = 1000) -> str:
    """Text from anywhere: shown, cut, escaped."""
    said = str(said)
    return html.escape(shown(without_home(said) if len(said) < 100_000 else said, most))


def _bdi(said: Any, most: int = 1000) -> str:
    return f"<bdi>{_text(said, most)}</bdi>"


def _made(comparison: Comparison) -> str:
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    return (
        f"Made by nanproof {__version__} on {when}, recipe {one_line(comparison.recipe, 80)}. The same as data: comparison.json."
    )


def _checks(checks: tuple[Check, ...]) -> str:
    if not checks:
        return ""
    held = sum(check.holds for check in checks)
    rows = "".join(
        f'<li><span class="tag {"yes" if check.holds else "bad"}">{"holds" if check.holds else "does not hold"}</span>'
        f'<div dir="auto">{_bdi(check.claim)}<div class="soft">{_bdi(check.measured)}</div></div></li>'
        for check in checks
    )
    count = f"{held} of {len(checks)} hold"
    return (
        f'<section id="checks" aria-labelledby="checks-title"><h2 id="checks-title">What was to be shown '
        f'<small>{count}</small></h2><ul class="checks">{rows}</ul></section>'
    )


def _table(comparison: Comparison) -> str:
    """A row an arm. A column's note is a title on its head, and is told below as well."""
    if not comparison.arms:
        return '<p class="soft">No arm was run.</p>'
    heads = "".join(
        f'<th scope="col"{_number_class(is_numeric(column))}'
        + (f' title="{_text(column.note)}"' if column.note else "")
        + f">{_bdi(column.title, 80)}</th>"
        for column in comparison.columns
    )
    lines = []
    for i, arm in enumerate(comparison.arms):
        name = f'<th scope="row">{_swatch(i)}<a href="#arm-{i}">{_bdi(arm.name, 60)}</a></th>'
        cells = "".join(
            f"<td{_number_class(is_numeric(column), is_bad(value))}>{_bdi(cell(value, column), 200)}</td>"
            for column in comparison.columns
            for value in (arm.values.get(column.key),)
        )
        lines.append(f'<tr>{name}{cells}<td class="ending">{_bdi(ended(arm))}</td></tr>')
    notes = "".join(f"<dt>{_bdi(c.title, 80)}</dt><dd>{_bdi(c.note)}</dd>" for c in comparison.columns if c.note)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of the arms"><table class="compared">'
        f'<thead><tr><th scope="col">arm</th>{heads}<th scope="col">ended</th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>" + (f'<dl class="facts notes">{notes}</dl>' if notes else "")
    )


def _swatch(arm: int) -> str:
    """A piece of its line."""
    return f'<span class="swatch arm-{arm % 6} turn-{arm // 6 % 3}"></span>'


def _number_class(numeric: bool, bad: bool = False) -> str:
    names = " ".join(name for name, wanted in (("num", numeric), ("nonfinite", bad)) if wanted)
    return f' class="{names}"' if names else ""


def _arm(number: int, arm: Arm, guarded: Guarded | None, room: int) -> str:
    story = "".join(f'<li dir="auto">{_bdi(said, 1500)}</li>' for said in arm.story[:MOST_STORY])
    more = len(arm.story) - MOST_STORY
    parts = [
        f'<h2 id="arm-{number}-title">{_swatch(number)}{_bdi(arm.name, 60)}</h2>',
        f'<p dir="auto">{_bdi(arm.setting)}</p>' if arm.setting else "",
        f'<p dir="auto"><span class="soft">Ended:</span> {_bdi(arm.ending)}</p>',
        f'<ul class="story">{story}</ul>' if story else "",
        f'<p class="soft">{more} more in comparison.json.</p>' if more > 0 else "",
        _of_the_run(number, arm, guarded),
        _samples(arm.samples, room),
    ]
    return f'<section class="arm" id="arm-{number}" tabindex="-1" aria-labelledby="arm-{number}-title">{"".join(parts)}</section>'


def _of_the_run(number: int, arm: Arm, guarded: Guarded | None) -> str:
    """What its guard recorded; the scripts put the incidents there."""
    if guarded is None:
        return "" if arm.run is None else '<h3>Its guard</h3><p class="soft">The folder of its run is not here.</p>'
    told = f'<h3>Its guard</h3><p dir="auto">{_bdi(summary(guarded.run), 2000)}</p>'
    if (guarded.folder / REPORT).is_file():
        told += f'<p><a href="./{guarded.place}/{REPORT}">Its own report</a>: every step, layer by layer</p>'
    there = f'<h3>Incidents</h3><div id="arm-{number}-cards" data-all="{guarded.run.total["incidents"]}"></div>'
    return told + (there if guarded.run.total["incidents"] else "")


def _samples(samples: tuple[Mapping[str, str], ...], room: int) -> str:
    """As many as there is room for."""
    if not samples:
        return ""
    keys = list(dict.fromkeys(key for sample in samples for key in sample))[:8]
    lines = []
    for sample in samples:
        line = "".join(f"<td>{_bdi(sample[key], MOST_SAMPLE) if key in sample else DASH}</td>" for key in keys)
        room -= len(line.encode())
        if room < 0:
            break
        lines.append(f"<tr>{line}</tr>")
    heads = "".join(f'<th scope="col">{_bdi(key, 40)}</th>' for key in keys)
    left = len(samples) - len(lines)
    more = f'<p class="soft">{left:,} more in comparison.json.</p>' if left else ""
    return (
        '<h3>Samples</h3><div class="scroll" tabindex="0" role="region" aria-label="Samples"><table class="samples"><thead><tr>'
        f"{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>{more}"
    )


def _facts(name: str, title: str, found: Mapping[str, Any]) -> str:
    pairs: Iterable[tuple[str, str]] = facts_of(found)
    told = "".join(f"<dt>{_bdi(key, 80)}</dt><dd>{_bdi(text, 2000)}</dd>" for key, text in pairs)
    head = f'<h2 id="{name}-title">{title}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{head}<dl class="facts">{told}</dl></section>' if told else ""


def _guarded(arm: Arm, folder: Path) -> Guarded | None:
    """The run of an arm, if there is one below the comparison's own folder, and only one."""
    if arm.run is None or "\0" in arm.run:
        return None
    place = folder / arm.run
    try:
        if not place.resolve().is_relative_to(folder.resolve()) or not place.is_dir():
            return None
        found = runs_in(place)
        if len(found) != 1:
            return None
        parts = found[0].resolve().relative_to(folder.resolve()).parts
        return Guarded(found[0], "/".join(quote(part, safe="") for part in parts), Run(found[0]).read())
    except (OSError, ValueError):  # a name that no file system takes
        return None
