"""Finite weights and gradients, and a step that makes them NaN: the optimizer, its settings or its state are to blame."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import nanproof
from nanproof.cli import app
from nanproof.core import _evidence
from nanproof.explain._case import Case
from nanproof.explain._diagnose import explain
from nanproof.explain.replay._replay import Replay
from toys import batches, mse, net
from wrapped import CAUSE, Words, reading, regress, trained, witness, words

MID_RUN, AT_START = "nonfinite-weights-mid-run", "nonfinite-weights-at-start"


def first(guard):
    assert guard.incidents, "no incident was reported"
    return guard.incidents[0], guard.incidents[0].diagnosis


class Ratio(torch.optim.Optimizer):
    """Divides each gradient by its own mean size, which is 0 where the gradient is."""

    def __init__(self, params, rate, unused):
        super().__init__(params, {"lr": rate})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad / p.grad.abs().mean()


class Counting(torch.optim.SGD):
    """Goes wrong in its fourth step, whatever it is given. It counts where no copy of it reaches."""

    def __init__(self, *args):
        super().__init__(*args)
        Counting.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        Counting.calls += 1
        super().step()
        if Counting.calls == 4:
            self.param_groups[0]["params"][0].fill_(math.nan)


class NarrowAdam(torch.optim.Optimizer):
    """Adam whose second moment is fp16 to save memory."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "eps": 1e-4})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["square"] = torch.zeros_like(p, dtype=torch.float16)
                state["square"].mul_(0.9).add_(p.grad.square() * 0.1)
                p -= group["lr"] * p.grad / (state["square"].float().sqrt() + group["eps"])


def test_an_eps_of_0_is_named_and_a_larger_one_is_verified(checked):
    """Rows without a gradient have a second moment of 0: 0/0. Nobody is told to load another checkpoint."""
    model = Words()
    guard = trained(model, torch.optim.AdamW(model.parameters(), 1e-2, eps=0.0), words(3), policy=checked)
    incident, told = first(guard)
    assert (incident.step, incident.kind, incident.action) == (0, "nonfinite-weight", "skipped")
    assert (told.cause, told.where, told.op, told.phase) == (CAUSE, "embed.weight", "AdamW", "optimizer")
    assert told.verified, told.evidence
    text = " ".join(told.evidence)
    assert "eps=0" in text and "exp_avg_sq" in text and "48 of 96 elements" in text
    assert "eps=1e-08" in told.fix and "checkpoint" not in told.fix


def test_bf16_weights_with_an_eps_of_0_are_not_an_underflow():
    """In fp32 it is 0/0 as well, so the more exact cause does not hold; the eps for bf16 is larger."""
    model = Words().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=0.0, foreach=True)
    _, told = first(trained(model, optimizer, words(2)))
    assert told.cause == CAUSE and told.verified and "eps=1e-06" in told.fix


def test_the_more_exact_cause_stays_first():
    """eps=1e-8 is 0 in fp16: that has an entry of its own."""
    model = Words().half()
    _, told = first(trained(model, torch.optim.Adam(model.parameters(), 1e-2), words(2)))
    assert told.cause == "fp16-optimizer-underflow" and told.verified and CAUSE in told.alternatives


def test_an_optimizer_that_divides_by_0_is_named_with_its_line(checked):
    """One that nanproof knows nothing about, with arguments that its groups do not hold."""
    model = net(dropout=0.0, batch_norm=False)
    model.append(nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model[-1].weight.zero_()
    guard = trained(model, Ratio(model.parameters(), 1e-3, "x"), batches(2), loss_fn=mse, policy=checked)
    _, told = first(guard)
    assert (told.cause, told.op) == (CAUSE, "Ratio") and told.verified, told.evidence
    assert "test_optimizer_made_nonfinite.py" in told.source
    text = " ".join(told.evidence)
    assert "div" in text and "p -= group" in text
    assert "divi" in told.fix and "checkpoint" not in told.fix


def test_a_loop_of_your_own_is_verified_too(checked):
    """The step cannot be run again, but its gradients are still there."""
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=0.0)
    with nanproof.Guard(model, optimizer, policy=nanproof.Policy(**checked)) as guard:
        loss = regress(model, words(1)[0])
        loss.backward()
        guard.step(loss)
    _, told = first(guard)
    assert told.cause == CAUSE and told.verified and told.where == "embed.weight", told.evidence


@pytest.mark.parametrize("lag", [1, 2])
def test_a_verdict_that_comes_late_is_about_the_settings_of_its_step(checked, lag):
    """The rate is NaN in one step only, and finite again when the host reads the verdict."""
    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def between(step):
        optimizer.param_groups[0]["lr"] = math.nan if step == 3 else 1e-2

    guard = trained(model, optimizer, batches(8), mse, between, policy={**checked, "lag": lag})
    incident, told = first(guard)
    assert incident.step == 3 and told.cause == CAUSE and told.verified, told.evidence
    assert told.where == 'param_groups[0]["lr"]' and "0.01 at step 2" in " ".join(told.evidence)


@pytest.mark.parametrize(("rate", "eps"), [(1e-2, 0.0), (math.nan, 1e-8), (1e-2, 1e-8)])
def test_weights_that_are_not_checked_show_it_a_step_later(rate, eps):
    """What is known of the optimizer is reported, unverified; without a hint, something else may have done it."""
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=True, eps=eps)
    optimizer.param_groups[0]["lr"] = rate

    def between(step):
        if eps and math.isfinite(rate) and step == 1:
            model.embed.weight.data[8] = math.nan

    def loss_fn(model, batch):
        return regress(model, batch) + 0 * model.embed.weight.sum()

    guard = trained(model, optimizer, words(3), loss_fn, between, policy={"half_weights": "off"})
    incident, told = first(guard)
    hinted = eps == 0 or not math.isfinite(rate)
    if incident.step == 0:  # the judge refuses the setting, or the step
        assert told.cause == CAUSE
        return
    assert incident.step == 1 and not told.verified
    assert told.cause == (CAUSE if hinted else MID_RUN) and (hinted or CAUSE in told.alternatives)


def test_moments_that_were_loaded_non_finite(checked):
    """Before the first step of the run: the state as it was loaded is to blame."""
    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    mse(model, batches(1)[0]).backward()
    optimizer.step()
    optimizer.state[model[0].weight]["exp_avg_sq"][0, 0] = math.inf
    optimizer.state[model[0].weight]["exp_avg"][0, 0] = math.nan
    _, told = first(trained(model, optimizer, batches(3), mse, policy=checked))
    assert told.cause == AT_START and not told.verified and "exp_avg of 0.weight" in " ".join(told.evidence)


def test_what_copies_do_not_show_is_reported_unverified(checked):
    """The fault depends on something that a copy of the optimizer does not have any more."""
    model = net(dropout=0.0)
    guard = trained(model, Counting(model.parameters(), 1e-2), batches(5), loss_fn=mse, policy=checked)
    incident, told = first(guard)
    assert incident.step == 3 and told.cause == CAUSE and not told.verified
    assert "the same step on copies is finite" in " ".join(told.evidence)
    assert "checkpoint" not in told.fix and "Counting.step" in told.fix


def test_state_that_overflows_in_half_precision(checked):
    """Weights are fp32, the second moment is fp16 and passes 65504."""
    model = net(dropout=0.0, batch_norm=False)
    scale = [1.0]

    def loss_fn(model, batch):
        return mse(model, batch) * scale[0]

    def between(step):
        scale[0] = 1e4 if step == 3 else 1.0

    optimizer = NarrowAdam(model.parameters())
    incident, told = first(trained(model, optimizer, batches(5), loss_fn=loss_fn, between=between, policy=checked, max_norm=None))
    assert incident.step == 3 and told.cause == CAUSE and told.verified, told.evidence
    assert "square" in " ".join(told.evidence) and "float16" in " ".join(told.evidence) and "fp32" in told.fix


def test_weights_that_something_else_broke_during_the_run_were_not_bad_at_the_start():
    """Evidence: when it was first seen, and the last step that was fine. Zeros in their place prove nothing."""
    model = net(dropout=0.0)

    def between(step):
        if step == 4:
            model[0].weight.data[0, 0] = math.nan

    incident, told = first(trained(model, torch.optim.AdamW(model.parameters(), 1e-2), batches(6), mse, between))
    assert (incident.step, incident.kind) == (4, "nonfinite-weight")
    assert (told.cause, told.where, told.verified) == (MID_RUN, "0.weight", False)
    text = " ".join(told.evidence)
    assert "first seen at step 4" in text and "step 3" in text and "set to 0" not in text
    assert "writes into 0.weight" in told.fix


def test_rows_that_were_broken_during_the_run_were_not_uninitialised():
    model = Words()

    def between(step):
        if step == 3:
            model.embed.weight.data[2] = math.nan

    _, told = first(trained(model, torch.optim.AdamW(model.parameters(), 1e-2), words(5), between=between))
    assert told.cause == MID_RUN and not told.verified


def test_moments_that_something_else_broke(checked):
    """Weights and gradients are finite, the moments are not, so the step is bad."""
    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def between(step):
        if step == 3:
            optimizer.state[model[0].weight]["exp_avg"][0, 0] = math.nan

    incident, told = first(trained(model, optimizer, batches(5), mse, between, policy=checked))
    assert incident.step == 3 and "optimizer state exp_avg of 0.weight" in incident.message
    assert told.cause == MID_RUN and not told.verified and "exp_avg" in " ".join(told.evidence)


@pytest.mark.parametrize("used_at", [0, 3])
def test_weights_that_were_bad_before_the_first_step(used_at):
    """Also where the first steps did not use them."""
    model = nn.ModuleDict({"used": nn.Linear(6, 1), "rare": nn.Linear(6, 1)})
    with torch.no_grad():
        model["rare"].weight[0, 2] = math.inf
    step = [0]

    def loss_fn(model, batch):
        part = model["rare"] if step[0] >= used_at else model["used"]
        return nn.functional.mse_loss(part(batch[0]).squeeze(-1), batch[1])

    def between(now):
        step[0] = now

    incident, told = first(trained(model, torch.optim.SGD(model.parameters(), 1e-2), batches(5), loss_fn, between))
    assert incident.step == used_at and told.cause == AT_START and told.verified
    assert told.where == "rare.weight"


def test_a_learning_rate_of_nan_is_traced_to_its_schedule(checked):
    """Setting, value, the last finite rate and its step, and the scheduler that set it."""
    model = net(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: math.nan if step >= 3 else 1.0 - 0.1 * step)
    guard = trained(model, optimizer, batches(5), mse, scheduler=scheduler, policy=checked)
    incident, told = first(guard)
    assert incident.step == 3 and incident.kind == "nonfinite-weight"
    assert (told.cause, told.where) == (CAUSE, 'param_groups[0]["lr"]') and told.verified, told.evidence
    text = " ".join(told.evidence)
    assert 'param_groups[0]["lr"] is nan' in text and "0.008 at step 2" in text and "LambdaLR" in text
    assert "LambdaLR" in told.fix


@pytest.mark.parametrize(("key", "value"), [("weight_decay", math.inf), ("betas", (0.9, math.nan)), ("eps", math.nan)])
def test_other_settings_that_are_not_finite(checked, key, value):
    """The fix is tried with the value that the optimizer was built with."""
    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def between(step):
        if step == 2:
            optimizer.param_groups[0][key] = value

    _, told = first(trained(model, optimizer, batches(4), mse, between, policy=checked))
    assert told.cause == CAUSE and told.verified, told.evidence
    assert told.where == f'param_groups[0]["{key}"]' and key in told.fix


def test_the_incident_of_a_bad_setting():
    """Refused before the step, so it is about what the step would have done."""
    found = _evidence.make_incident(
        3, reading(), [("a", 1.0), ("b", 1.0)], witness(), None, [], settings=('param_groups[0]["lr"] is nan',), affected=2
    )
    assert (found.kind, found.action) == ("nonfinite-weight", "skipped")
    assert found.message == 'param_groups[0]["lr"] is nan: the step would have made 2 parameters non-finite'


def test_a_bad_setting_beside_a_bad_loss_is_reported_with_it():
    """What is bad before the optimizer comes first."""
    bad = reading(loss=math.nan)
    found = _evidence.make_incident(
        3, bad, [("a", 1.0)], witness(loss_bad=True), None, [], settings=('param_groups[0]["lr"] is nan',), affected=1
    )
    assert found.kind == "nonfinite-loss" and 'param_groups[0]["lr"] is nan' in found.message


def test_a_bad_setting_that_was_refused_before_the_step_has_the_same_cause():
    """As the judge refuses it: the weights never broke."""
    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    optimizer.param_groups[0]["lr"] = math.inf
    case = Case("nonfinite-weight", replay=Replay(model, mse, batches(1)), optimizer=optimizer)
    told = explain(case)
    assert told.cause == CAUSE and told.verified and 'param_groups[0]["lr"] is inf' in told.evidence[0]


ENTRY = """
import sys
import torch
from wrapped import Words, regress, muon_and_adamw

def build():
    torch.manual_seed(9)
    model = Words()
    return {"model": model, "loss_fn": regress, "optimizer": torch.optim.AdamW(model.parameters(), 1e-2, eps=0.0)}
"""


def test_the_bundle_of_such_a_step_gives_the_same_diagnosis(checked, tmp_path, monkeypatch):
    (tmp_path / "eps_project.py").write_text(ENTRY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=0.0)
    incident, _ = first(trained(model, optimizer, words(2), policy=checked, run_dir=tmp_path / "run"))
    result = CliRunner().invoke(app, ["replay", incident.bundle, "--entry", "eps_project:build", "--json"])
    assert result.exit_code == 1, result.output
    told = json.loads(result.stdout)["diagnosis"]
    assert (told["cause"], told["verified"]) == (CAUSE, True)


def test_the_bundle_of_weights_broken_during_the_run_does_not_call_it_the_start(tmp_path, monkeypatch):
    (tmp_path / "mid_project.py").write_text(ENTRY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = Words()

    def between(step):
        if step == 3:
            model.head.weight.data[0, 0] = math.nan

    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    incident, _ = first(trained(model, optimizer, words(5), between=between, run_dir=tmp_path / "run"))
    result = CliRunner().invoke(app, ["replay", incident.bundle, "--entry", "mid_project:build", "--json"])
    told = json.loads(result.stdout)["diagnosis"]
    assert (told["cause"], told["verified"]) == (MID_RUN, False)


def test_a_run_goes_on_with_the_eps_that_was_verified(checked):
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=0.0)
    guard = trained(model, optimizer, words(6), policy={**checked, "heal": True})
    (incident,) = guard.incidents
    assert (incident.action, incident.remedy) == ("healed", "the optimizer has eps=1e-08")
    assert [r.action != "skipped" for r in guard.history].count(True) == 6
    assert optimizer.param_groups[0]["eps"] == 1e-8


def test_a_run_goes_on_at_its_last_finite_rate(checked):
    """The schedule goes on giving NaN, and every step is taken."""
    model = net(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: math.nan if step >= 3 else 1.0 - 0.1 * step)
    guard = trained(model, optimizer, batches(8), mse, scheduler=scheduler, policy={**checked, "heal": True})
    (incident,) = guard.incidents
    assert incident.action == "healed" and "lr=0.008" in incident.remedy
    taken = [r for r in guard.history if r.action != "skipped"]
    assert len(taken) == 8 and taken[-1].lr == (pytest.approx(0.008),)


def test_preflight_finds_it_before_the_first_step():
    model = Words()
    (found,) = nanproof.preflight(model, torch.optim.AdamW(model.parameters(), 1e-2, eps=0.0), words(1)[0], regress)
    assert found.cause == CAUSE and found.verified
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    optimizer.param_groups[0]["lr"] = math.nan
    (found,) = nanproof.preflight(model, optimizer, words(1)[0], regress)
    assert found.cause == CAUSE and found.where == 'param_groups[0]["lr"]'
