"""The pages of causes, docs/causes/*.md: made from the classes, the cases of the zoo and what was recorded of them.

`python -m tools.tables` writes them; a test fails when they differ. What is recorded comes from tools/said.py,
tools/zoo_table.py and zoo/healing.py.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanproof import Diagnosis
from nanproof.explain import _diagnose as diagnose
from nanproof.explain import _examiner as examiner
from nanproof.explain import causes
from nanproof.explain._cause import Cause
from tools import tables
from tools.snippets import script, shown
from zoo.registry import CASES, Case

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "causes"
NOTE = "<!-- made by tools/tables.py; change the class, the case in zoo, or tools/cause_pages.py -->"
LONGEST = 360
"""Characters of one sentence that are shown: torch puts whole tensors into its errors."""
assert causes


@dataclass(frozen=True)
class Entry:
    """A cause as it is written about."""

    slug: str
    what: str
    fix: str
    family: str
    source: str


def entries() -> list[Entry]:
    """The catalogue by family, then the two causes that are said on top of another."""
    found = []
    for cause in Cause.catalogue:
        file = type(cause).__module__.rsplit(".", 1)[1]
        family = file.removeprefix("_")
        what = " ".join((type(cause).__doc__ or "").split())
        found.append(Entry(cause.slug, what, cause.fix, family, f"src/nanproof/explain/causes/{file}.py"))
    found.sort(key=lambda entry: entry.family)
    for slug, function, fix in (
        ("loss-scale-collapse", diagnose._checked, "It is no range problem: find the operation, and mend the cause under it."),
        ("one-rank-nonfinite", examiner._one_rank, "Mend the cause under it on the rank that is named; the others were fine."),
    ):
        file = Path(inspect.getfile(function)).name
        found.append(Entry(slug, " ".join((function.__doc__ or "").split()), fix, "on top", f"src/nanproof/explain/{file}"))
    return found


def pages() -> dict[Path, str]:
    """Every page, by its path."""
    said, zoo, heal = tables.load("said"), tables.load("zoo"), tables.load("heal")
    everything = entries()
    return {FOLDER / f"{entry.slug}.md": page(entry, everything, said, zoo, heal) for entry in everything}


def page(entry: Entry, everything: list[Entry], said: dict[str, Any], zoo: dict[str, Any], heal: dict[str, Any]) -> str:
    mine = [case for case in CASES.values() if case.cause == entry.slug]
    parts = [f"# {entry.slug}", entry.what, f"**Fix.** {entry.fix}"]
    example = shown(entry.slug)
    told = said["one_rank"] if example is None else said["cases"][example.name]["told"]
    if example is not None:
        parts += ["## How it looks without nanproof", *looks(example, mine, said)]
    parts += ["## What nanproof says", "```text\n" + incident(told) + "\n```"]
    parts += ["## What it takes to know", "\n".join(needs(mine, said, told)), *healed(entry.slug, heal)]
    if example is not None:
        parts += [
            "## A run that shows it",
            f"{doc(example)} Paste it and run it: it prints the diagnosis of the broken run and none of the healthy one.",
            "```python\n" + script(example) + "```",
            "## Cases, and what tools say of them",
            cases(mine, zoo),
        ]
    else:
        parts.append("It takes two processes: `tools/said.py` (`one_rank`) is the run this was recorded from.")
    parts += ["## See also", "\n".join(related(entry, everything, mine, said)), NOTE]
    return "\n\n".join(parts) + "\n"


def doc(case: Case) -> str:
    return " ".join((case.build.__doc__ or "").split())


def looks(example: Case, mine: list[Case], said: dict[str, Any]) -> list[str]:
    """The log of a plain loop, and in a sentence what the log of each other case shows."""
    plain = said["cases"][example.name]["plain"]
    log = [f"step {step}: loss {number(loss)}, grad_norm {number(norm)}" for step, loss, norm in plain["log"]]
    log += [plain["error"]] if plain["error"] else []
    found = [
        f"In the log of a plain loop, for the run that is shown below: {sentence(plain, said['cases'][example.name]['told'])}"
    ]
    found.append("```text\n" + "\n".join(log) + "\n```")
    others = {sentence(said["cases"][c.name]["plain"], said["cases"][c.name]["told"]) for c in mine if c is not example}
    if others:
        found.append("In other runs:\n\n" + "\n".join(f"- {text[0].upper()}{text[1:]}" for text in sorted(others)))
    return found


def number(x: Any) -> str:
    return x if isinstance(x, str) else f"{x:.4g}"


def sentence(plain: dict[str, Any], told: dict[str, Any]) -> str:
    """What a person sees who has only the log."""
    steps, loss, norm = plain["steps"], plain["bad_loss"], plain["bad_norm"]
    bad, tensors = plain["weights"]
    weights = f"{bad} of {tensors} weight tensors are non-finite at the end" if bad else "the weights stay finite"
    if plain["error"]:
        before = f"after {steps} steps that look normal" if steps else "in the first step"
        return f"the script stops {before}, with `{plain['error'][:90].rstrip()}`."
    if loss and norm:
        if norm[0] < loss[0]:
            first = f"the gradient norm is non-finite at step {norm[0]} while the loss is still finite"
            return f"{first}, the loss from step {loss[0]} on; {weights}."
        return f"loss and gradient norm are non-finite from step {loss[0]} on; {weights}."
    if loss:
        once = "one step" if len(loss) == 1 else "some steps"
        return f"the loss is non-finite at step {loss[0]}, {once} only, the gradient norm is finite; {weights}."
    if norm:
        often = "at" if len(norm) == 1 else "from"
        end = "" if len(norm) == 1 else " on"
        return f"the loss stays finite, the gradient norm is non-finite {often} step {norm[0]}{end}; {weights}."
    first, last = number(plain["first"]), number(plain["last"])
    buffers = plain["buffers"][0]
    if buffers:
        return f"it shows nothing: {buffers} of {plain['buffers'][1]} buffers are non-finite at the end, so evaluation is too."
    if told["kind"] == "spike":
        return f"every number is finite; the loss jumps at step {told['step']} (first {first}, last {last} after {steps} steps)."
    if told["kind"] == "divergence":
        return f"every number is finite; the loss goes from {first} to {last} in {steps} steps."
    learned = f"the loss goes from {first} to {last} in {steps} steps"
    return f"every number is finite: {learned}, and no line says that something is wrong."


def incident(told: dict[str, Any]) -> str:
    """The incident and its diagnosis, as text."""
    d = Diagnosis.from_json(told["diagnosis"])
    place = [f"op {d.op}" if d.op else "", f"in {d.where}" if d.where else ""]
    place += [f"{name} {', '.join(map(str, found[:8]))}" for name, found in (("sample", d.samples), ("token", d.tokens)) if found]
    rows = [("", told["said"]), ("cause", f"{d.cause} (confidence {d.confidence:.2f})")]
    rows += [("place", ", ".join(part for part in (d.phase or "", *place) if part)), ("source", d.source or "")]
    rows += [("evidence" if i == 0 else "", f"- {text}") for i, text in enumerate(d.evidence)]
    rows += [("fix", d.fix or ""), ("verified", "yes, on the step itself" if d.verified else "no")]
    rows += [("or else", ", ".join(d.alternatives))]
    lines = []
    for head, text in rows:
        if text:
            indent = 10 if head or lines else 0
            under = " " * (indent + 2 * text.startswith("- "))
            text = " ".join(text.split())
            text = text if len(text) <= LONGEST else text[: LONGEST - 4] + " ..."
            lines.append(
                textwrap.fill(text, 100, initial_indent=f"{head:{indent}}", subsequent_indent=under, break_on_hyphens=False)
            )
    return "\n".join(lines)


def needs(mine: list[Case], said: dict[str, Any], told: dict[str, Any]) -> Iterable[str]:
    """Which evidence it was named from, measured on the cases."""
    found = [said["cases"][case.name] for case in mine] or [{"told": told, "by_step": None}]
    kinds = sorted({row["told"]["kind"] for row in found})
    yield f"- Reported as {', '.join(f'`{kind}`' for kind in kinds)} ([kinds of incidents](../guard.md#what-is-refused))."
    places = sorted({row["told"]["diagnosis"]["phase"] for row in found})
    yield f"- Origin: {', '.join(places)}."
    tried = {}
    for row in found:
        for text in row["told"]["diagnosis"]["evidence"]:
            if " with " in text and ", it holds" in text:
                tried[text.split(" with ", 1)[1].split(", it holds")[0]] = None
    verified = sum(row["told"]["diagnosis"]["verified"] for row in found)
    how = f", with {'; '.join(tried)}" if tried else ""
    yield f"- Fix verified on the bad step itself in {verified} of {len(found)} runs{how}."
    if mine:
        slugs = {slug for case in mine for slug in (case.cause, *case.also)}
        named = sum(row["by_step"]["cause"] in slugs for row in found)
        seen = sum(row["by_step"]["kind"] is not None for row in found)
        if named == len(found):
            enough = "all runs are named there too, without running the step again"
            yield f"- `guard.step(loss)` in a loop of your own is enough: {enough}."
        else:
            yield (
                f"- By `guard.train_step`, `nanproof.protect` or `nanproof.diagnose`, which can run the step again. Under "
                f"`guard.step(loss)` alone {seen} of {len(found)} runs are noticed and {named} named."
            )


def healed(slug: str, heal: dict[str, Any]) -> list[str]:
    mine = [case for case in heal["cases"] if case["cause"] == slug]
    if not mine:
        return []
    said = dict.fromkeys(text for case in mine for way in ("heal", "all") for text in case[way]["remedies"])
    counts = {way: sum(case[way]["healthy"] for case in mine) for way in ("plain", "guard", "heal", "all")}
    applied = f" Applied: {'; '.join(said)}." if said else ""
    return [
        f"Of {len(mine)} {'run' if len(mine) == 1 else 'runs'} {counts['plain']} end healthy in a plain loop, "
        f"{counts['guard']} under the guard, "
        f"{counts['heal']} with [`Policy(heal=True)`](../heal.md), {counts['all']} with copies to go back to as well.{applied}"
    ]


def cases(mine: list[Case], zoo: dict[str, Any]) -> str:
    marks = {row["name"]: row["marks"] for row in zoo["cases"]}
    lines = ["| run | " + " | ".join(tables.TOOLS) + " |", "|---" * (len(tables.TOOLS) + 1) + "|"]
    for case in mine:
        file = Path(inspect.getfile(case.build)).name
        cells = [tables.marks(marks[case.name][tool], False) if case.name in marks else "" for tool in tables.TOOLS]
        text = doc(case).replace("|", "\\|")
        lines.append(f"| [`{case.name}`](../../zoo/{file}): {text} | " + " | ".join(cells) + " |")
    lines += ["", "[What the words mean](../zoo.md)."]
    reports = sorted({source for case in mine for source in case.sources})
    if reports:
        links = [f"[{r}](https://github.com/{r.replace('#', '/issues/')})" for r in reports]
        lines += ["", "The same mechanism, reported: " + ", ".join(links) + "."]
    return "\n".join(lines)


def related(entry: Entry, everything: list[Entry], mine: list[Case], said: dict[str, Any]) -> Iterable[str]:
    by_slug = {other.slug: other for other in everything}
    near = dict.fromkeys(slug for case in mine for slug in case.also)
    rows = [said["cases"][case.name] for case in mine] or [{"told": said["one_rank"]}]
    near.update(dict.fromkeys(slug for row in rows for slug in row["told"]["diagnosis"]["alternatives"]))
    for case in CASES.values():  # and the other way round
        if case.cause != "benign" and entry.slug in (*case.also, *said["cases"][case.name]["told"]["diagnosis"]["alternatives"]):
            near[case.cause] = None
    for slug in near:
        if slug in by_slug and slug != entry.slug:
            yield f"- [`{slug}`]({slug}.md), which can look the same: {by_slug[slug].what}"
    same = [other for other in everything if other.family == entry.family and other.slug not in (entry.slug, *near)]
    if same:
        yield f"- The same family, {entry.family}: " + ", ".join(f"[`{other.slug}`]({other.slug}.md)" for other in same) + "."
    source = f"[{Path(entry.source).name}](../../{entry.source})"
    yield f"- [The catalogue](../causes.md). [My run is NaN: what now](../nan.md). The class: {source}."
