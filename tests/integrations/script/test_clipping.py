"""`nanproof run` on loops that clip, with torch's functions and by hand: culprits are those from before clipping, and a healthy
run ends in the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import forked
from integrations.script.clipping_loops import BAD, CULPRIT, LOOPS, REPLACES

SCRIPT = Path(__file__).with_name("clipping_loops.py")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Return the weights of all loops by how they end, and what the guard reports."""
    folder = tmp_path_factory.mktemp("clipping")

    def run(bad, *options):
        done = forked.python("-W", "error", *options, SCRIPT, bad, "out.pt", cwd=folder)
        assert done.returncode == 0, done.stderr
        guarded = json.loads(done.stderr.strip().splitlines()[-1])["guarded"] if options else []
        return torch.load(folder / "out.pt"), dict(zip([*LOOPS, REPLACES], guarded, strict=False)), done.stderr

    protected = ("-m", "nanproof", "run", "--json", "--no-diagnose")
    found = {bad: run(bad, *protected) for bad in ("no", "nan", "inf")}
    return found | {"plain": run("no"), "never": run("never")}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", [*LOOPS, REPLACES])
def test_a_healthy_loop_ends_in_the_same_bits(outcome, name):
    weights, guarded, _ = outcome["no"]
    assert same(weights[name], outcome["plain"][0][name])
    assert guarded[name]["steps"] == 10 and guarded[name]["incidents"] == []


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("name", list(LOOPS))
def test_the_culprit_is_the_one_from_before_clipping(outcome, name, bad):
    weights, guarded, _ = outcome[bad]
    if name == "clamp_" and bad == "inf":
        assert guarded[name]["incidents"] == []  # an Inf that the script itself makes finite is its choice
        return
    (incident,) = guarded[name]["incidents"]
    assert (incident["step"], incident["kind"]) == (BAD, "nonfinite-gradient")
    assert [culprit for culprit, _ in incident["culprits"]] == [CULPRIT]
    assert same(weights[name], outcome["never"][0][name])


def test_gradients_that_the_script_replaces_itself_are_stepped_on_and_told_once(outcome):
    weights, guarded, said = outcome["nan"]
    assert guarded[REPLACES]["refused"] == 0 and guarded[REPLACES]["incidents"] == []
    assert said.count(f"step {BAD}: backward left non-finite gradients ({CULPRIT})") == 1
    assert all(bool(torch.isfinite(value).all()) for value in weights[REPLACES].values())
