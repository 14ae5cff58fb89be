"""Sparse gradients: a NaN in one is a bad gradient like any other, from the incident to the bundle."""

from __future__ import annotations

import json
import math

import torch
from torch import nn
from typer.testing import CliRunner

import nanproof
from nanproof.cli import app
from nanproof.core import _evidence
from nanproof.explain._case import Case
from nanproof.explain._diagnose import explain
from nanproof.explain.replay._replay import Replay
from wrapped import Words, reading, regress, rooted, sparse_and_dense, trained, witness, words


def with_a_row_of_0(sparse=True):
    model = Words(sparse=sparse)
    with torch.no_grad():
        model.embed.weight[4] = 0
    return model


def test_a_nan_in_a_sparse_gradient_is_a_bad_gradient():
    """Kind, culprit and cause are those of the dense gradient."""
    for sparse in (True, False):
        model = with_a_row_of_0(sparse)
        optimizer = sparse_and_dense(model) if sparse else torch.optim.AdamW(model.parameters(), 1e-2)
        guard = trained(model, optimizer, words(2), rooted)
        incident = guard.incidents[0]
        assert incident.kind == "nonfinite-gradient" and incident.culprits[0][0] == "embed.weight"
        assert incident.diagnosis.cause == "sqrt-at-zero" and incident.diagnosis.verified, incident.diagnosis.evidence


def test_a_norm_of_nan_is_never_an_overflow():
    """Squares of finite numbers add up to Inf, not to NaN: whatever was found by looking at the elements."""
    seen = reading(bad_setting=False)
    seen.total = math.nan
    looked = _evidence.Gradients([("a", math.nan), ("b", 1.0)], all_finite=True)
    found = _evidence.make_incident(0, seen, [], witness(), looked, [])
    assert found.kind == "nonfinite-gradient" and [name for name, _ in found.culprits] == ["a"]


def test_a_replay_decides_what_an_overflow_is():
    """The incident was taken for an overflow of the norm; run again, a gradient itself is non-finite."""
    model = with_a_row_of_0()
    told = explain(Case("gradient-norm-overflow", replay=Replay(model, rooted, words(1))))
    assert told.cause == "sqrt-at-zero"


def test_an_overflow_of_the_norm_of_sparse_gradients_is_still_one():
    model = Words(sparse=True)
    guard = trained(model, sparse_and_dense(model), words(2), lambda m, b: regress(m, b) * 1e30)
    incident = guard.incidents[0]
    assert incident.kind == "gradient-norm-overflow"
    assert incident.diagnosis.cause == "gradient-norm-overflow" and incident.diagnosis.verified, incident.diagnosis.evidence


def test_steps_with_sparse_gradients_can_be_rehearsed():
    """A learning rate that is too high, with clipping: the trial takes whole steps."""
    model = Words(sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=40.0)

    def loss_fn(model, batch):
        return nn.functional.mse_loss(model.head(model.hidden(model.embed(batch[0]).mean(1))).squeeze(-1), batch[1]) * 10

    guard = trained(model, optimizer, words(20), loss_fn, max_norm=5.0)
    told = next(i.diagnosis for i in guard.incidents if i.kind == "divergence")
    assert told.cause == "learning-rate-too-high" and told.verified, told.evidence


ENTRY = """
import torch
from wrapped import Words, rooted, sparse_and_dense

def build():
    model = Words(sparse=True)
    return {"model": model, "loss_fn": rooted, "optimizer": sparse_and_dense(model)}
"""


def test_a_bundle_with_sparse_gradients_is_run_again(tmp_path, monkeypatch):
    (tmp_path / "sparse_project.py").write_text(ENTRY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = Words(sparse=True)

    def between(step):
        if step == 2:
            model.embed.weight.data[4] = 0

    guard = trained(model, sparse_and_dense(model), words(4), rooted, between, run_dir=tmp_path / "run")
    result = CliRunner().invoke(app, ["replay", guard.incidents[0].bundle, "--entry", "sparse_project:build", "--json"])
    assert result.exit_code == 1, result.output
    data = json.loads(result.stdout)
    assert data["same_as_recorded"] is True and data["diagnosis"]["cause"] == "sqrt-at-zero"
    assert not any("optimizer" in note for note in data["notes"])


def test_diagnose_names_an_inf_in_a_sparse_gradient():
    """Without a guard, from a batch in hand."""
    model = Words(sparse=True)
    model.embed.weight.data[4] = 1.0

    def loss_fn(model, batch):
        return (model.embed(batch[0]) - 1).square().sum(-1).sqrt().mean() + regress(model, batch)

    told = nanproof.diagnose(model, loss_fn, words(1)[0], optimizer=torch.optim.SGD(model.parameters(), 0.1))
    assert told.cause == "sqrt-at-zero" and told.verified
