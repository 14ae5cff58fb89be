"""Score doctor on logs that it was not written for: is what went wrong seen, named and placed, and are the others left in peace?

python -m zoo.logs [--save] [--misses] [--healthy 2000 --failing 1000 --first 20000]

Seen: a failure or a warning. Quiet: no failure, and no warning that the index does not allow. Parsed: a point or a finding.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from nanproof.logs._story import Story
from nanproof.logs.judge._findings import judge
from nanproof.logs.read._sources import find, read
from tools.results import cpu_name, save
from zoo.logs import simulated

HERE = Path(__file__).parent
EXCERPTS = HERE / "excerpts"
SETS = {"abcd": "2026-11-18", "e": "2026-11-19", "f": "2026-11-19"}
"""Excerpts that were written together, by the first letter of their names, and when."""


def index() -> dict[str, dict[str, Any]]:
    """Return what is expected of each excerpt, by the name of its file."""
    expected: dict[str, dict[str, Any]] = json.loads((HERE / "index.json").read_text(encoding="utf-8"))
    return expected


def examined(path: Path) -> tuple[Story, list[dict[str, Any]]]:
    """Return what a log holds, and what doctor finds in it."""
    story = Story()
    for item in read(find([path])[0]):
        story.add(item)
    return story, [finding.to_json() for finding in judge(story)]


def score(name: str, want: dict[str, Any]) -> Counter[str]:
    """Return what was right about one excerpt."""
    story, findings = examined(EXCERPTS / name)
    loud = [finding for finding in findings if finding["severity"] in ("failure", "warning")]
    marks = Counter(logs=1, parsed=int(bool(story.points or findings)))
    if not want["failing"]:
        quiet = not any(f["severity"] == "failure" or f["kind"] not in want["allow"] for f in loud)
        return marks + Counter(healthy=1, quiet=int(quiet))
    right = [finding for finding in loud if finding["kind"] in want["accept"]]
    placed = any(f["line"] is not None and abs(f["line"] - want["first_line"]) <= 1 for f in right)
    return marks + Counter(failing=1, detected=int(bool(loud)), kind=int(bool(right)), placed=int(placed))


def stress(healthy: int, failing: int, first: int) -> dict[str, Any]:
    """Return how many simulated runs were judged wrongly, and which."""
    with tempfile.TemporaryDirectory() as folder:

        def judged(name: str, text: str) -> list[dict[str, Any]]:
            path = Path(folder) / name
            path.write_bytes(text.encode())
            return examined(path)[1]

        return simulated.run(judged, healthy, failing, first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/logs.json")
    parser.add_argument("--misses", action="store_true", help="a line for each excerpt that is not as wanted")
    parser.add_argument("--healthy", type=int, default=2000)
    parser.add_argument("--failing", type=int, default=1000)
    parser.add_argument("--first", type=int, default=20_000, help="the first seed: those below were used to mend doctor")
    options = parser.parse_args()
    totals = {letters: Counter[str]() for letters in SETS}
    for name, want in index().items():
        marks = score(name, want)
        next(total for letters, total in totals.items() if name[0] in letters).update(marks)
        if options.misses and not (marks["placed"] if want["failing"] else marks["quiet"] and marks["parsed"]):
            print(f"{name}: {dict(marks)}; wanted {want['expect']!r}")
    runs = stress(options.healthy, options.failing, options.first)
    counts = {what: of["runs"] for what, of in runs["counts"].items()}
    for letters, total in totals.items():
        print(f"excerpts {letters}: {dict(total)}")
    print(f"simulated, from seed {options.first}: {counts} of {options.healthy} + {options.failing}")
    if options.save:
        simulated_runs = {"healthy": options.healthy, "failing": options.failing, "first seed": options.first, **counts}
        excerpts = {letters: dict(total) for letters, total in totals.items()}
        save("logs", cpu_name(), {"excerpts": excerpts, "simulated": simulated_runs})


if __name__ == "__main__":
    main()
