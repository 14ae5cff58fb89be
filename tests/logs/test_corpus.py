"""The corpus: logs that real tools wrote, with known faults. The first finding must be the right one, and at the right place;
about healthy runs there must be silence. `make_corpus.py` beside it says how each was made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanproof.logs._story import Story
from nanproof.logs.judge._findings import judge
from nanproof.logs.read._sources import find, read

CORPUS = Path(__file__).parent / "corpus"
MANIFEST = json.loads((CORPUS / "manifest.json").read_text())
HEALTHY = [name for name, truth in MANIFEST.items() if "kind" not in truth]
MISSED = pytest.mark.xfail(strict=True, reason="known not to be found")
OTHERS = [pytest.param(name, marks=MISSED if "missed" in truth else ()) for name, truth in MANIFEST.items() if "kind" in truth]


def told(name):
    (source,) = find([CORPUS / name])
    story = Story()
    for item in read(source):
        story.add(item)
    return story


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_wrong_and_where_it_began(name):
    truth = MANIFEST[name]
    found = judge(told(name))
    assert found
    first = found[0]
    assert (first.kind, first.severity) == (truth["kind"], truth["severity"]), first.said
    if "step" in truth:
        at = first.place.epoch if first.place.step is None else first.place.step  # some logs count nothing but epochs
        assert truth["step"][0] <= at <= truth["step"][1], first.said
    if "line" in truth:
        assert truth["line"][0] <= first.place.line <= truth["line"][1], first.said


@pytest.mark.parametrize("name", HEALTHY)
def test_silence_about_healthy_runs(name):
    story = told(name)
    assert story.points > 2 and [(f.kind, f.said) for f in judge(story)] == []


def test_the_corpus_is_large_small_and_private():
    """Enough of both kinds over the formats; no file is large; the manifest is complete."""
    files = [path for path in CORPUS.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert len(OTHERS) >= 40 and len(HEALTHY) >= 15 and sum("missed" in truth for truth in MANIFEST.values()) <= 1
    assert {path.relative_to(CORPUS).parts[0] for path in files} == set(MANIFEST)
    assert max(path.stat().st_size for path in files) <= 60_000 and sum(path.stat().st_size for path in files) <= 1_500_000
    for path in files:
        data = path.read_bytes()
        for private in (b"/home/", b"/root/", b"/opt/", b"/work/", b"/tmp/"):
            assert private not in data, f"{path.name} names {private!r}"
