"""Several optimizers, and optimizers that contain others: diagnosis, copies, bundle, replay and healing know each of them."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from typer.testing import CliRunner

import nanproof
from nanproof.cli import app
from nanproof.core.judge._optimizers import Several
from nanproof.explain._case import Case, Prescription
from nanproof.explain._diagnose import explain
from nanproof.explain.bundle._bundle import read_bundle
from nanproof.explain.replay._copies import step_on_copies
from nanproof.explain.replay._rehearse import adam_update, rehearse
from nanproof.explain.replay._replay import Replay
from nanproof.numerics import precision
from nanproof.observe._early import MomentWatch
from nanproof.recover._rewarm import Rewarm
from nanproof.recover.heal._healer import Healer, Treatment
from nanproof.recover.heal._remedies import Patient, Remedy
from toys import differences
from wrapped import CAUSE, Container, Lookahead, Sam, Words, muon_and_adamw, regress, trained, words


def gradients_of(model, batch):
    replay = Replay(model, regress, [batch])
    return {replay.parameters[name]: g for name, g in replay.gradients().items()}


def everything(model, optimizer):
    """All that a look at a step must leave as it is."""
    inside = [optimizer, *getattr(optimizer, "members", ()), *getattr(optimizer, "optimizers", ())]
    inside += [getattr(optimizer, name) for name in ("optimizer", "base_optimizer") if hasattr(optimizer, name)]
    facts = {
        f"{i}": {
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in each.param_groups],
            "state": [dict(each.state.get(p, {})) for group in each.param_groups for p in group["params"]],
            "count": getattr(each, "count", None),
        }
        for i, each in enumerate(inside)
    }
    return copy.deepcopy({"model": model.state_dict(), **facts})


CONTAINERS = {
    "several": lambda model: Several(muon_and_adamw(model)),
    "container": lambda model: Container(muon_and_adamw(model), lr=1e-2),
    "lookahead": lambda model: Lookahead(torch.optim.AdamW(model.parameters(), 1e-2)),
    "lookahead in several": lambda model: Several(
        [torch.optim.Muon([model.hidden.weight], lr=1e-2), Lookahead(torch.optim.AdamW(model.head.parameters(), 1e-2))]
    ),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_step_on_copies_is_the_step(name):
    """Bit for bit, with the state there is; and nothing of the run is touched."""
    model, data = Words(), words(4)
    optimizer = CONTAINERS[name](model)
    for batch in data[:3]:
        optimizer.zero_grad()
        regress(model, batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    gradients = gradients_of(model, data[3])
    before = everything(model, optimizer)
    found = step_on_copies(optimizer, gradients)
    assert list(differences("", everything(model, optimizer), before)) == []
    regress(model, data[3]).backward()
    optimizer.step()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert found is not None and {id(each.parameter) for each in found} == {id(p) for p in held}
    assert all(torch.equal(each.after, each.parameter) for each in found)


def test_settings_reach_the_optimizers_inside():
    """A container's own groups are read by no step: those of the optimizers inside are what counts."""
    model, data = Words(), words(1)
    optimizer = Container(muon_and_adamw(model, eps=0.0), lr=1e-2, eps=0.0)
    gradients = gradients_of(model, data[0])
    broken = [each for each in step_on_copies(optimizer, gradients) if not each.finite]
    assert [each.parameter for each in broken] == [model.embed.weight]
    assert all(each.finite for each in step_on_copies(optimizer, gradients, settings={"eps": 1e-8}))


def test_a_step_that_needs_a_closure_cannot_be_tried():
    """Never a crash, and never a claim."""
    model = Words()
    optimizer = Sam(model.parameters(), torch.optim.AdamW, lr=1e-2, eps=0.0)
    assert step_on_copies(optimizer, gradients_of(model, words(1)[0])) is None
    case = Case("nonfinite-weight", replay=Replay(model, regress, words(1)), optimizer=optimizer, weights_broke=True)
    told = explain(case)
    assert told.cause == CAUSE and not told.verified
    assert "cannot be tried on copies" in " ".join(told.evidence)
    replay = Replay(model, regress, words(1))
    assert rehearse(replay, optimizer, [], factor=0.1) is None


@pytest.mark.parametrize("name", ["several", "container", "lookahead"])
def test_a_rehearsal_leaves_every_optimizer_alone(name):
    """Hooks of members are not called; weights, states, settings and counters are bit-identical."""
    from nanproof.explain.replay._recorder import Recorder

    model, data = Words(), words(3)
    optimizer = CONTAINERS[name](model)
    replay = Replay(model, regress, [data[0]])
    recorder, calls = Recorder(), []
    for i, batch in enumerate(data):
        recorder.keep(i, (batch,), replay.random, replay.mode)
    for each in getattr(optimizer, "members", getattr(optimizer, "optimizers", [optimizer])):
        each.register_step_post_hook(lambda *_: calls.append(1))
    regress(model, data[0]).backward()
    optimizer.step()
    count, before = len(calls), everything(model, optimizer)
    losses = rehearse(replay, optimizer, list(recorder), factor=0.5, max_norm=1.0)
    assert losses is not None and losses[-1] < losses[-2] and len(calls) == count
    assert list(differences("", everything(model, optimizer), before)) == []


def test_the_update_of_adam_is_measured_wherever_it_is():
    model, data = Words(), words(3)
    muon, adamw = muon_and_adamw(model)
    for batch in data:
        regress(model, batch).backward()
        muon.step(), adamw.step()
    alone = adam_update(adamw)
    assert alone is not None and alone == adam_update(Several([muon, adamw])) == adam_update(Container([muon, adamw]))


def test_the_member_at_fault_is_named(checked):
    """Muon is well, AdamW divides 0 by 0: its class, its parameter, and its eps alone."""
    model = Words()
    guard = trained(model, muon_and_adamw(model, eps=0.0), words(3), policy=checked)
    told = guard.incidents[0].diagnosis
    assert (told.cause, told.op, told.where) == (CAUSE, "AdamW", "embed.weight") and told.verified, told.evidence
    assert "Several" not in " ".join((*told.evidence, told.fix))


def test_only_the_member_at_fault_is_healed(checked):
    """Muon has an eps as well, and keeps it."""
    model = Words()
    muon, adamw = muon_and_adamw(model, eps=0.0)
    eps = muon.param_groups[0]["eps"]
    guard = trained(model, [muon, adamw], words(6), policy={**checked, "heal": True})
    (incident,) = guard.incidents
    assert incident.action == "healed" and "eps=1e-08" in incident.remedy
    assert adamw.param_groups[0]["eps"] == 1e-8 and muon.param_groups[0]["eps"] == eps
    assert all(r.action != "skipped" for r in guard.history if r.step)


def test_half_precision_in_one_member():
    """fp16 weights under AdamW, fp32 under Muon: the cause and the class are those of AdamW."""
    model = Words()
    model.embed.half(), model.head.half()
    model.hidden.register_forward_pre_hook(lambda m, args: (args[0].float(),))
    model.head.register_forward_pre_hook(lambda m, args: (args[0].half(),))
    guard = trained(model, muon_and_adamw(model), words(4), policy={"heal": True})
    told = guard.incidents[0].diagnosis
    assert (told.cause, told.op) == ("fp16-optimizer-underflow", "AdamW") and told.verified, told.evidence
    assert guard.incidents[0].action == "healed"
    assert math.isfinite(guard.history[-1].loss)


def test_a_learning_rate_that_is_too_high_in_one_member():
    """The rehearsal divides the rates of all of them, and the loss comes down."""
    model = Words()
    model.embed.requires_grad_(False)
    optimizers = [torch.optim.SGD(model.head.parameters(), 0.5), torch.optim.Muon([model.hidden.weight], lr=1e-3)]
    guard = trained(model, optimizers, words(40), lambda m, b: regress(m, b) * 3, max_norm=None)
    told = guard.incidents[0].diagnosis
    assert guard.incidents[0].kind == "divergence"
    assert told.cause == "learning-rate-too-high" and told.verified, told.evidence


ENTRY = """
import torch
from wrapped import CAUSE, Container, Lookahead, Words, muon_and_adamw, regress

def build():
    torch.manual_seed(9)
    model = Words()
    return {"model": model, "loss_fn": regress, "optimizer": muon_and_adamw(model, eps=0.0)}

def contained():
    made = build()
    return {**made, "optimizer": Container(made["optimizer"], lr=1e-2)}

def other():
    made = build()
    return {**made, "optimizer": torch.optim.AdamW(made["model"].parameters())}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    name = f"several_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(ENTRY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def broken_at_3(model, optimizers):
    """From step 3 on, AdamW has an eps of 0."""

    def between(step):
        if step == 3:
            optimizers[1].param_groups[0]["eps"] = 0.0
            optimizers[1].state[model.embed.weight]["exp_avg_sq"][8] = 0.0

    return between


@pytest.mark.parametrize("how", ["build", "contained"])
def test_a_bundle_of_several_is_run_again(checked, project, tmp_path, how):
    """Classes, groups and states of each are in the bundle and come back; the diagnosis is the same."""
    model = Words()
    optimizers = muon_and_adamw(model)
    optimizer = optimizers if how == "build" else Container(optimizers, lr=1e-2)
    guard = trained(model, optimizer, words(5), between=broken_at_3(model, optimizers), policy=checked, run_dir=tmp_path / "run")
    incident = guard.incidents[0]
    facts = read_bundle(incident.bundle).optimizer
    if how == "build":
        assert facts.kind.split(", ")[0].endswith("Muon") and facts.kind.split(", ")[1].endswith("AdamW")
        assert "momentum_buffer" in facts.state["hidden.weight"] and "exp_avg_sq" in facts.state["embed.weight"]
    else:
        assert [each.kind.rpartition(".")[2] for each in facts.inside] == ["Muon", "AdamW"]
        assert "exp_avg_sq" in facts.inside[1].state["embed.weight"]
    result = CliRunner().invoke(app, ["replay", incident.bundle, "--entry", f"{project}:{how}", "--json"])
    assert result.exit_code == 1, result.output
    data = json.loads(result.stdout)
    assert data["notes"] == [] and data["same_as_recorded"] is True
    told = data["diagnosis"]
    assert (told["cause"], told["verified"], told["op"]) == (CAUSE, True, "AdamW")
    assert incident.diagnosis.cause == CAUSE and incident.diagnosis.verified, incident.diagnosis.evidence


def test_another_optimizer_than_the_recorded_ones_is_said(checked, project, tmp_path):
    model = Words()
    optimizers = muon_and_adamw(model)
    between = broken_at_3(model, optimizers)
    guard = trained(model, optimizers, words(5), between=between, policy=checked, run_dir=tmp_path / "run")
    result = CliRunner().invoke(app, ["replay", guard.incidents[0].bundle, "--entry", f"{project}:other", "--json"])
    (note,) = json.loads(result.stdout)["notes"]
    assert "AdamW" in note and "Muon" in note and "taken as the entry built it" in note


REMEDIES = [
    Prescription("learning-rate", {"factor": 0.1}),
    Prescription("optimizer-settings", {"eps": 1e-4}),
    Prescription("optimizer-settings", {"eps": 1e-4, "groups": [1]}),
    Prescription("learning-rate-floor", {"floor": [1e-1, 2e-2]}),
    Prescription("finite-settings", {"values": [[1, "betas", [0.9, 0.95]]]}),
    Prescription("fp32-weights"),
]


@pytest.mark.parametrize("prescription", REMEDIES, ids=lambda p: f"{p.name}-{p.settings}")
def test_a_remedy_over_several_is_undone_exactly(prescription):
    """Flags and settings of each member, and of its defaults, are what they were."""
    model = Words().bfloat16()
    members = muon_and_adamw(model)
    optimizer = Several(members)
    with nanproof.Guard(model, members, loss_fn=regress) as guard:
        for batch in words(2):
            guard.train_step(batch)
        facts = lambda: [  # noqa: E731
            everything(model, optimizer),
            [dict(member.defaults) for member in members],
            [getattr(member, "_step_supports_amp_scaling", None) for member in members],
        ]
        before = facts()
        healer = Healer(Patient(model, guard.optimizer), on=True)
        remedy = Remedy.known[prescription.name](healer.patient, **prescription.settings)
        assert healer.treat(Treatment(remedy, "nonfinite-weight", "", 0))
        with healer.living():
            regress(model, words(1)[0]).backward()
        assert list(differences("", facts(), before)) != [] or prescription.name in ("learning-rate-floor", "finite-settings")
        healer._undo(healer.applied[0])
        assert list(differences("", facts(), before)) == []


def test_a_floor_for_each_rate():
    """Rates of two optimizers differ by orders of magnitude: one floor for both would be a blow to one of them."""
    model = Words()
    muon, adamw = muon_and_adamw(model)
    patient = Patient(model, Several([muon, adamw]))
    remedy = Remedy.known["learning-rate-floor"](patient, floor=[0.02, 3e-4])
    for group in patient.optimizer.param_groups:
        group["lr"] = 0.0
    with remedy.living():
        assert [muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]] == [0.02, 3e-4]


def test_adam_behind_another_optimizer_is_watched():
    """Second moments that go stale are those of AdamW, wherever it stands in the list; Muon's parameters are not looked at."""
    model = Words()
    several = Several(muon_and_adamw(model))
    watch = MomentWatch(several, set())
    assert watch.watches and watch.places == [False, True, True, True]
    assert not MomentWatch(several.members[0], set()).watches
    assert MomentWatch(several.members[1], set()).places == [True, True, True]


def test_the_rate_climbs_again_in_every_optimizer():
    """Also in those inside a container, whose own groups no step reads."""
    model = Words()
    muon, adamw = muon_and_adamw(model)
    rewarm = Rewarm(Container([muon, adamw], lr=1e-2), 3)
    rewarm.start(5)
    rewarm.before_step(5)
    assert [muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]] == pytest.approx([2.5e-3, 2.5e-3])
    rewarm.restore()
    assert [muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]] == [1e-2, 1e-2]


def test_problems_of_precision_are_found_in_every_optimizer():
    model = Words().half()
    optimizers = muon_and_adamw(model)
    slugs = [problem.slug for problem in precision.problems(model, optimizers)]
    assert slugs[0] == "fp16-optimizer-underflow"
    assert "under AdamW" in precision.problems(model, optimizers)[0].sentence
    for batch in words(1):
        regress(model, batch).backward()
        optimizers[0].step()
    assert len(precision.cast_trainable(model, optimizer=optimizers)) == 4
    assert optimizers[0].state[model.hidden.weight]["momentum_buffer"].dtype == torch.float32
    assert precision.problems(model, optimizers) == []


def test_preflight_of_several():
    """The first step of each, on copies."""
    model = Words()
    assert nanproof.preflight(model, muon_and_adamw(model), words(1)[0], regress) == []
    (found,) = nanproof.preflight(model, muon_and_adamw(model, eps=0.0), words(1)[0], regress)
    assert (found.cause, found.op, found.verified) == (CAUSE, "AdamW", True)
