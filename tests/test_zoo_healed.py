"""Runs of the zoo that the guard alone cannot save: with heal=True they train to a healthy end, by the benchmark's own rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zoo.healing import Yardstick, guarded, unhealthy
from zoo.plain import load
from zoo.registry import CASES

load()

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "heal.json"
HEALED = [c["name"] for c in json.loads(RESULTS.read_text())["cases"] if c["heal"]["healthy"] and not c["guard"]["healthy"]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HEALED)
def test_it_ends_healthy(name):
    """Every step of the last third is taken, all is finite, and the weights are worth at least half of the twin's progress."""
    run = guarded(CASES[name], heal=True)
    assert unhealthy(run, Yardstick(CASES[name])) == ""
    assert any(incident.remedy is not None for incident in run.incidents)


def test_most_of_what_the_guard_cannot_save_is_healed():
    assert len(HEALED) >= 30
