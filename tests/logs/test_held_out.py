"""Logs that doctor was not written for (`zoo/logs`): excerpts in the forms of public threads, and simulated runs."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from zoo.logs.__main__ import EXCERPTS, examined, index, score, stress

EXPECTED = index()
FAILING = [name for name, want in EXPECTED.items() if want["failing"]]
HEALTHY = [name for name, want in EXPECTED.items() if not want["failing"]]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_excerpt_raises_no_alarm(name):
    assert score(name, EXPECTED[name])["quiet"], examined(EXCERPTS / name)[1]


def test_most_failures_are_seen_named_and_placed():
    """Missed are objectives that grow downwards, losses of 0 on a single line, and losses that no name calls so."""
    total = sum((score(name, EXPECTED[name]) for name in FAILING), Counter())
    assert total >= Counter(detected=127, kind=126, placed=117), total


def test_simulated_runs():
    """A slice of the 3,000 that `make reported` judges."""
    counts = {what: found["runs"] for what, found in stress(30, 30, first=40_000)["counts"].items()}
    assert counts.get("false alarm", 0) <= 1 and counts.get("missed", 0) <= 1, counts
    assert counts.get("wrong kind", 0) + counts.get("wrong line", 0) <= 2, counts


def test_excerpts_are_small_and_name_nobody():
    files = {path.name for path in EXCERPTS.iterdir()}
    assert files == set(EXPECTED) and len(FAILING) >= 139 and len(HEALTHY) >= 95
    for name in files:
        text = (EXCERPTS / name).read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 80 and not re.search(r"/home/|/root/|/Users/|C:\\Users", text), name
