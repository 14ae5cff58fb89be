"""Healing: a verified fix is applied to the run and exactly undone where it does not hold; a healthy run is left alone."""

from __future__ import annotations

import copy
import io
import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Distribution

import nanproof
from nanproof import Diagnosis, Incident, TrainingHalted, UsageError
from nanproof.explain._case import Case, Prescription
from nanproof.explain._examiner import Examiner
from nanproof.explain.replay._interventions import Intervention
from nanproof.explain.replay._replay import Replay
from nanproof.recover.heal._healer import MOST, PROVE, Healer, Treatment
from nanproof.recover.heal._remedies import Patient, Remedy
from toys import batches, differences, mse, net, whole_state
from zoo.two_ranks import two_ranks

HEAL = nanproof.Policy(heal=True)
STEPS, BAD = 14, 4


def masked_mean(safe: bool):
    """The mean over what counts; `safe` is how one would write it by hand after reading the diagnosis."""

    def loss_fn(model, batch):
        x, mask = batch
        each = model(x).squeeze(-1) * mask
        count = mask.sum(1)
        return (each.square().sum(1) / (torch.where(count == 0, 1.0, count) if safe else count)).mean()

    return loss_fn


def masked_batches(empty: bool = True):
    g = torch.Generator().manual_seed(3)
    made = [(torch.randn(6, 5, 8, generator=g), torch.ones(6, 5)) for _ in range(STEPS)]
    if empty:
        made[BAD][1][2] = 0
    return made


def dropout_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.2), nn.Tanh(), nn.Linear(12, 1))


def train(loss_fn, data, policy=None, model=None, make=torch.optim.AdamW, schedule=True, **options):
    """A guarded run, and everything it left."""
    model = dropout_net() if model is None else model
    optimizer = make(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98) if schedule else None
    torch.manual_seed(7)
    guard = nanproof.Guard(model, optimizer, loss_fn=loss_fn, scheduler=scheduler, policy=policy, **options)
    losses = [float(guard.train_step(batch)) for batch in data]
    guard.sync()
    state = whole_state(model, optimizer, scheduler, guard=guard)
    guard.close()
    return guard, state, losses


def test_a_healed_run_is_the_run_with_the_fix_written_by_hand():
    """Bit for bit: weights, moments, schedule, random numbers; the batch is not lost, and train_step returns its loss."""
    guard, state, losses = train(masked_mean(False), masked_batches(), HEAL)
    oracle, wanted, by_hand = train(masked_mean(True), masked_batches())
    assert list(differences("", state, wanted)) == []
    assert losses == by_hand
    (incident,) = guard.incidents
    assert (incident.step, incident.action, incident.remedy) == (BAD, "healed", "a divisor of 0 is taken as 1")
    assert incident.outcome == "healed: a divisor of 0 is taken as 1"
    assert incident.restored_step is None and incident.undone == ()
    assert oracle.incidents == []


@pytest.mark.parametrize("lag", [1, 2])
def test_verdicts_that_come_late_make_no_difference(lag):
    """Steps that were dispatched behind the bad one are run again after it, under the remedy."""
    _, state, _ = train(masked_mean(False), masked_batches(), nanproof.Policy(heal=True, lag=lag))
    _, wanted, _ = train(masked_mean(True), masked_batches(), nanproof.Policy(lag=lag))
    assert list(differences("", state, wanted)) == []


def test_off_and_healthy_runs_are_the_same():
    """heal=True over a healthy run, heal=False over a bad one: as if healing did not exist."""
    _, on, _ = train(masked_mean(False), masked_batches(empty=False), HEAL)
    _, off, _ = train(masked_mean(False), masked_batches(empty=False))
    assert list(differences("", on, off)) == []
    skipped, with_bad, _ = train(masked_mean(False), masked_batches(), nanproof.Policy(heal=False))
    without = masked_batches()
    del without[BAD]
    _, never_saw, _ = train(masked_mean(False), without)
    assert [i.action for i in skipped.incidents] == ["skipped"]
    assert list(differences("", with_bad, never_saw)) == []


def test_living_is_free_while_nothing_is_applied():
    healer = Healer(Patient(nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)), on=True)
    assert healer.living() is healer.living()
    with healer.living() as opened:
        assert opened is None


def test_a_fault_that_does_not_come_back_costs_nothing():
    """The step is run once more, and the run ends as if the fault had not been."""

    def loss_fn(strikes):
        left = [strikes]

        def run(model, batch):
            loss = mse(model, batch)
            if left[0] and torch.equal(batch[0], data[3][0]):
                left[0] = 0
                return loss * float("nan")
            return loss

        return run

    data = batches(8)
    results = []
    for strikes in (1, 0):
        torch.manual_seed(0)
        results.append(train(loss_fn(strikes), data, HEAL, model=net()))
    (struck, state, _), (_, wanted, _) = results
    (incident,) = struck.incidents
    assert (incident.step, incident.action, incident.remedy) == (3, "healed", "the same step is run once more")
    assert list(differences("", state, wanted)) == []


def test_an_exception_with_a_verified_fix_does_not_end_the_run():
    """torch.normal raises for a negative scale; under the remedy the same step is taken, with verdicts under way or not."""

    def loss_fn(safe):
        def run(model, batch):
            scale = 0.5 + batch[0][:, 0]
            scale = scale.clamp(min=1e-3) if safe else scale
            return (model(batch[0]).squeeze(-1) - torch.normal(torch.zeros_like(scale), scale)).square().mean()

        return run

    def model():
        torch.manual_seed(0)
        return net()

    data = [[x.clamp(-0.4, 0.4), y] for x, y in batches(8)]
    data[3][0][2, 0] = -2.0
    with pytest.raises(RuntimeError, match="std"):
        train(loss_fn(False), data, model=model())
    for lag in (0, 2):
        guard, state, losses = train(loss_fn(False), data, nanproof.Policy(heal=True, lag=lag), model=model())
        _, wanted, by_hand = train(loss_fn(True), data, nanproof.Policy(lag=lag), model=model())
        (incident,) = guard.incidents
        assert (incident.step, incident.kind, incident.action) == (3, "exception", "healed") and incident.remedy
        assert losses == by_hand and list(differences("", state, wanted)) == []


def test_one_remedy_after_the_other_is_tried():
    """An LSTM has no autocast to fp16 on a CPU: weights in fp32 under autocast do not bear the step, without it they do."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"lstm": nn.LSTM(4, 8, batch_first=True), "head": nn.Linear(8, 1)}).half()

    def loss_fn(model, batch):
        return F.mse_loss(model["head"](model["lstm"](batch.to(model["head"].weight.dtype))[0][:, -1]).float(), batch[:, 0, :1])

    def autocast_off_is_needed(*args):
        raise RuntimeError("no autocast")

    model["lstm"].register_forward_pre_hook(lambda *a: autocast_off_is_needed() if torch.is_autocast_enabled("cpu") else None)
    data = [torch.randn(8, 5, 4) for _ in range(6)]
    guard, _, losses = train(loss_fn, data, HEAL, model=model, make=torch.optim.Adam, schedule=False)
    incident = guard.incidents[0]
    assert (incident.action, incident.remedy) == ("healed", "trainable half-precision weights are fp32")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert losses[-1] == losses[-1]


def test_where_no_remedy_is_left_the_guard_acts_as_without():
    """Weights that are NaN from the start have none: no zeros are put there, and the cap halts the run."""
    model = net(batch_norm=False)
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with pytest.raises(TrainingHalted):
        train(mse, batches(14), HEAL, model=model)
    assert torch.isnan(model[0].weight[0, 0])


@pytest.mark.parametrize("at_cap", ["rollback", "halt"])
def test_a_broken_state_is_healed_where_there_is_nothing_to_go_back_to(at_cap):
    """Rows of an embedding that nobody initialised: whatever the cap does, there is a fix, and it comes first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 1))
    with torch.no_grad():
        model[0].weight[9] = float("nan")
    data = [torch.tensor([[1, 2], [3, 9 if i >= 2 else 4]]) for i in range(8)]
    policy = nanproof.Policy(heal=True, at_cap=at_cap, max_consecutive_skips=3)
    guard, _, losses = train(lambda m, b: m(b).square().mean(), data, policy, model=model)
    (incident,) = guard.incidents
    assert (incident.step, incident.kind, incident.action) == (2, "nonfinite-weight", "healed")
    assert [t.remedy.name for t in guard.parts.healer.applied] == ["filled-rows"]
    assert all(loss == loss for loss in losses)


def test_the_schedule_keeps_a_lowered_rate_down():
    """Base rates are lowered too: a closed form would put the rate back at the next step otherwise."""
    parameter = torch.zeros(1, requires_grad=True)
    rates = {}
    for factor in (1.0, 0.1):
        optimizer = torch.optim.SGD([parameter], 1.0)
        first = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
        second = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [4])
        if factor != 1:
            Remedy.known["learning-rate"](Patient(nn.Identity(), optimizer, scheduler), factor=factor).apply()
        rates[factor] = []
        for _ in range(8):
            rates[factor].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    assert rates[0.1] == pytest.approx([0.1 * x for x in rates[1.0]])


def everything(model, optimizer, scheduler):
    """All that a remedy could have touched, the library's own functions too."""
    groups = [
        {k: v for k, v in g.items() if k != "params"} | {"params": [id(p) for p in g["params"]]} for g in optimizer.param_groups
    ]
    return {
        "state": whole_state(model, optimizer, scheduler),
        "groups": copy.deepcopy(groups),
        "dtypes": [t.dtype for t in (*model.parameters(), *model.buffers())],
        "rates": copy.deepcopy(scheduler.base_lrs),
        "moments": [v.dtype for s in optimizer.state.values() for v in s.values()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "library": [
            torch.Tensor.backward,
            torch.autocast.__enter__,
            Distribution.__init__,
            F.has_torch_function,
            torch.utils.checkpoint.CheckpointFunction.apply.__qualname__,
        ],
    }


REMEDIES = [
    Prescription("again"),
    Prescription("interventions", {"changes": [{"name": name} for name in sorted(Intervention.livable)]}),
    Prescription("interventions", {"changes": [{"name": "SafeDivision", "floor": 0.01}]}),
    Prescription("fp32-weights"),
    Prescription("optimizer-settings", {"eps": 1e-4, "beta2": 0.95}),
    Prescription("learning-rate", {"factor": 0.1}),
    Prescription("learning-rate-floor", {"floor": 0.5}),
    Prescription("finite-settings", {"values": [[0, "lr", 0.01]]}),
    Prescription("gradient-factor", {"factor": 2.0**-20}),
    Prescription("smaller-backward", {"factor": 2.0**-12}),
    Prescription("own-parameters", {"names": ["2.bias"]}),
    Prescription("reset-buffers", {"names": ["1.running_mean", "1.running_var"]}),
    Prescription("filled-rows", {"rows": {"2.weight": [1]}}),
]


@pytest.mark.parametrize("prescription", REMEDIES, ids=lambda p: p.name)
def test_a_remedy_is_undone_exactly(prescription):
    """Applied, lived under for a backward, undone: settings, dtypes, values, hooks and torch itself are bit-identical."""
    torch.manual_seed(0)
    half = torch.bfloat16 if prescription.name == "fp32-weights" else torch.float32
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).to(half)
    optimizer = torch.optim.Adam([p for name, p in model.named_parameters() if name != "2.bias"], 1e-3, foreach=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    x = torch.randn(5, 4, dtype=half)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()  # no running statistics of the forward below
    if prescription.name == "reset-buffers":
        model[1].running_mean[1] = float("nan")
    if prescription.name == "filled-rows":
        with torch.no_grad():
            model[2].weight[1] = 7.0
    before = everything(model, optimizer, scheduler)
    followed = []
    remedy = Remedy.known[prescription.name](
        Patient(model, optimizer, scheduler, lambda: followed.append(1)), **copy.deepcopy(prescription.settings)
    )
    remedy.apply()
    assert remedy.description and "\n" not in remedy.description
    healer = Healer(remedy.patient, on=True)
    healer.applied.append(Treatment(remedy, "spike", "cause", 0))
    with healer.living():
        model(x).float().square().mean().backward()
    during = everything(model, optimizer, scheduler)
    if prescription.name == "fp32-weights":
        members = [p for group in optimizer.param_groups for p in group["params"]]
        assert {p.dtype for p in members} == set(during["moments"]) == {torch.float32}
    model.zero_grad()
    remedy.undo()
    after = everything(model, optimizer, scheduler)
    assert list(differences("", before["state"]["random"], after["state"]["random"])) == []
    same = repr(sorted(differences("", before, after)))
    if prescription.name == "reset-buffers":  # NaN is unequal to itself
        assert torch.isnan(model[1].running_mean[1]) and torch.isfinite(during["state"]["model"]["1.running_mean"]).all()
    else:
        assert same == "[]"
    lasting = {"fp32-weights", "optimizer-settings", "learning-rate", "learning-rate-floor", "own-parameters", "filled-rows"}
    assert (repr(sorted(differences("", before, during))) != "[]") == (
        prescription.name in lasting or "reset" in prescription.name
    )
    assert before["library"] == during["library"]


def test_gradients_are_scaled_and_nothing_else():
    """Against the plain gradient: a factor gives exactly that multiple, a smaller backward exactly the same."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    patient = Patient(model, torch.optim.SGD(model.parameters(), 0.1))
    model(x).square().mean().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    for name, settings, factor in (
        ("gradient-factor", {"factor": 2.0**-9}, 2.0**-9),
        ("smaller-backward", {"factor": 2.0**-12}, 1.0),
    ):
        model.zero_grad()
        with Remedy.known[name](patient, **settings).living():
            model(x).square().mean().backward()
        assert all(torch.equal(p.grad, g * factor) for p, g in zip(model.parameters(), plain, strict=True))


def incident_of(kind, cause, step=0):
    diagnosis = Diagnosis(cause=cause, confidence=1.0, verified=True)
    return Incident(step=step, kind=kind, action="skipped", diagnosis=diagnosis)


def case_of(kind, remedies):
    """A step that is finite, and what was prescribed for it."""
    case = Case(kind, replay=Replay(nn.Linear(2, 1), lambda model, x: model(x).square().mean(), [torch.ones(3, 2)]))
    case.remedies = tuple(remedies)
    return case


class _Healed:
    """A healer over a small optimizer, and two remedies for it."""

    kind, cause = "divergence", "learning-rate-too-high"

    def __init__(self):
        parameter = torch.zeros(1, requires_grad=True)
        self.optimizer = torch.optim.Adam([parameter], 1.0)
        self.healer = Healer(Patient(nn.Identity(), self.optimizer), on=True)
        self.wanted = [Prescription("learning-rate", {"factor": 0.1}), Prescription("learning-rate", {"factor": 0.01})]

    def heal(self):
        """The next remedy is put in force; returns its description, None where none is left."""
        incident, case = incident_of(self.kind, self.cause), case_of(self.kind, self.wanted)
        offered = self.healer.offer(incident, case)
        assert self.healer.offer(incident, case) == offered  # to offer is not to take
        assert self.healer.apply(incident, case) == (offered is not None)
        return offered

    def comes_back(self, step):
        return self.healer.undo_failed(incident_of(self.kind, self.cause, step))

    @property
    def rate(self):
        return self.optimizer.param_groups[0]["lr"]


def test_a_remedy_that_does_not_hold_makes_room_for_the_next():
    """The same incident on probation undoes it; each is offered once; then there is none."""
    patient = _Healed()
    mild = patient.heal()
    assert patient.rate == 0.1
    assert patient.healer.undo_failed(incident_of("nonfinite-loss", "log-of-zero", 3)) == ()  # another incident is no fault of it
    assert patient.comes_back(5) == (mild,)
    assert patient.rate == 1.0
    strong = patient.heal()
    assert patient.rate == 0.01 and strong != mild
    assert patient.comes_back(9) == (strong,)
    assert patient.heal() is None and patient.rate == 1.0 and patient.healer.applied == []


def test_the_same_step_going_bad_again_undoes_it_too():
    """Under another name, or under none: what was put in force at that step did not hold."""
    patient = _Healed()
    for cause in ("unknown", None):
        remedy = patient.heal()
        again = incident_of(patient.kind, cause) if cause else Incident(step=0, kind=patient.kind, action="skipped")
        assert patient.healer.undo_failed(again) == (remedy,) and patient.rate == 1.0


def test_a_remedy_that_has_proved_itself_stays():
    patient = _Healed()
    patient.heal()
    for _ in range(PROVE):
        assert not patient.healer.applied[0].proven
        patient.healer.accepted()
    assert patient.healer.applied[0].proven
    assert patient.comes_back(50) == ()
    assert patient.rate == 0.1


@pytest.mark.parametrize("prescription", REMEDIES, ids=lambda p: p.name)
def test_remedies_are_plain_data(prescription):
    """What is written down loads with weights_only, and makes the same remedy."""
    healer = Healer(Patient(nn.Identity(), torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)), on=True)
    remedy = Remedy.known[prescription.name](healer.patient, **prescription.settings)
    healer.applied.append(Treatment(remedy, "spike", "cause", 3, 7))
    file = io.BytesIO()
    torch.save(healer.state_dict(), file)
    file.seek(0)
    (saved,) = torch.load(file, weights_only=True)["applied"] or [None]
    if remedy.once:
        assert saved is None
    else:
        again = Remedy.known[saved["name"]](healer.patient, **saved["settings"])
        assert again.description == remedy.description and saved["healthy"] == 7


def test_a_resumed_run_has_its_remedies():
    """Saved after the healing, resumed in new objects: the same end as without the interruption, over a second bad batch too."""
    data = masked_batches()
    data[11][1][1] = 0
    _, wanted, _ = train(masked_mean(False), data, HEAL)
    model = dropout_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    torch.manual_seed(7)
    with nanproof.Guard(model, optimizer, loss_fn=masked_mean(False), scheduler=scheduler, policy=HEAL) as guard:
        for batch in data[:8]:
            guard.train_step(batch)
        file = io.BytesIO()
        saved = {"guard": guard.state_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**saved, "scheduler": scheduler.state_dict(), "random": torch.get_rng_state()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model = dropout_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    guard = nanproof.Guard(model, optimizer, loss_fn=masked_mean(False), scheduler=scheduler, policy=HEAL)
    guard.load_state_dict(saved["guard"])
    torch.set_rng_state(saved["random"])
    for batch in data[8:]:
        guard.train_step(batch)
    state = whole_state(model, optimizer, scheduler, guard=guard)
    guard.close()
    assert guard.incidents == []
    del state["random"][1], wanted["random"][1]  # Python's is not part of the checkpoint above
    assert list(differences("", state, wanted)) == []


def test_resuming_without_healing_says_so(caplog):
    """Switching it off was a choice; what that takes away is said once."""
    healed, _, _ = train(masked_mean(False), masked_batches(), HEAL)
    state = healed.parts.healer.state_dict()
    off = Healer(healed.parts.healer.patient, on=False)
    with caplog.at_level(logging.WARNING, "nanproof"):
        off.load_state_dict(state)
    assert off.applied == [] and "was healed (interventions)" in caplog.text


def bf16_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).bfloat16()


def bf16_run(data, model=None):
    """Weights that a step of this size does not change in bf16, and that move once they are fp32."""
    model = bf16_net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    return nanproof.Guard(model, optimizer, loss_fn=mse, policy=HEAL), model, optimizer


def test_weights_that_round_their_updates_away_become_fp32():
    """From the step it was noticed at they move; taken back, model, optimizer and path are what they were."""
    data = batches(16, dtype=torch.bfloat16)
    guard, model, optimizer = bf16_run(data)
    path, flags = guard.path, copy.deepcopy({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})
    before = [p.detach().clone() for p in model.parameters()]
    for batch in data:
        guard.train_step(batch)
    assert [i.diagnosis.cause for i in guard.incidents] == ["bf16-update-rounding"]
    assert all(
        p.dtype == torch.float32 and not torch.equal(p, b.float()) for p, b in zip(model.parameters(), before, strict=True)
    )
    (incident,), (treatment,) = guard.incidents, guard.parts.healer.applied
    assert (incident.kind, incident.action, incident.remedy) == ("no-learning", "healed", treatment.remedy.description)
    assert guard.parts.healer.undo_failed(replace(incident, step=99)) == (treatment.remedy.description,)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and guard.path == path
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == flags
    guard.train_step(data[0])
    guard.close()


def test_fp32_weights_survive_a_checkpoint():
    """The guard's state first, then model and optimizer, then the guard's again: as if there had been no interruption."""
    data = batches(24, dtype=torch.bfloat16)
    guard, model, optimizer = bf16_run(data)
    for batch in data[:16]:
        guard.train_step(batch)
    saved = copy.deepcopy((guard.state_dict(), model.state_dict(), optimizer.state_dict()))
    for batch in data[16:]:
        guard.train_step(batch)
    guard.close()
    resumed, other, its_optimizer = bf16_run(data)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    its_optimizer.load_state_dict(saved[2])
    resumed.load_state_dict(saved[0])
    for batch in data[16:]:
        resumed.train_step(batch)
    resumed.close()
    assert list(differences("", other.state_dict(), model.state_dict())) == [] and len(resumed.parts.healer.applied) == 1


def test_the_same_remedy_is_in_force_once():
    """With other settings it takes the place of the one before, where that has proved itself; there is a limit to how many."""
    patient = _Healed()
    patient.heal()
    for _ in range(PROVE):
        patient.healer.accepted()
    patient.heal()
    assert patient.rate == 0.01 and len(patient.healer.applied) == 1
    settings = Remedy.known["optimizer-settings"]
    for i in range(20):
        wanted = [Prescription("optimizer-settings", {"eps": 10.0**-i})]
        incident, case = incident_of("spike", f"cause {i}", i), case_of("spike", wanted)
        found = patient.healer.untried(f"cause {i}", "spike", wanted, i)
        assert (found is None) == (i >= MOST - 1)
        assert found is None or isinstance(found[1], settings)
        assert patient.healer.offer(incident, case) == (None if found is None else found[1].description)
        assert patient.healer.apply(incident, case) == (found is not None)
    assert len(patient.healer.applied) == MOST


def test_autocast_is_bf16_only_while_the_remedy_is_open():
    """Opened inside or outside, and with an object that is used again and again."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    half = torch.autocast("cpu", dtype=torch.float16)
    seen = []
    for _ in range(2):
        with Intervention.livable["Bf16Autocast"](), half:
            seen.append(layer(x).dtype)
        with half:
            seen.append(layer(x).dtype)
            with Intervention.livable["Bf16Autocast"]():
                seen.append(layer(x).dtype)
            seen.append(layer(x).dtype)
    assert seen == 2 * [torch.bfloat16, torch.float16, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_schedule_that_ended_too_early_is_healed_while_steps_are_under_way(lag):
    """Silent, so it is found on steps that were taken: those behind it are waited for, and the rate is up from then on."""
    torch.manual_seed(0)
    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 6))
    policy = nanproof.Policy(heal=True, lag=lag)
    with nanproof.Guard(model, optimizer, loss_fn=mse, scheduler=scheduler, policy=policy) as guard:
        for batch in batches(30):
            guard.train_step(batch)
    (incident,) = guard.incidents
    assert (incident.kind, incident.action) == ("no-learning", "healed")
    assert incident.remedy is not None and incident.remedy.startswith("the learning rate is at least")
    rates = {record.step: record.lr[0] for record in guard.history}
    floor = guard.parts.healer.applied[0].remedy.settings["floor"]
    assert floor == pytest.approx(sum(1e-2 * (1 - i / 6) for i in range(6)) / 6)
    assert rates[9] == 0 and all(rates[i] == floor for i in range(18, 30))


@pytest.mark.parametrize(("max_norm", "action"), [(None, "skipped"), (1.0, "healed")])
def test_finite_and_huge_is_no_cure(max_norm, action):
    """The input of exp clamped to 20 leaves a gradient 1e8 times the usual: unclipped, skipping the batch does less harm."""

    def loss_fn(model, batch):
        return (model(batch[0]).squeeze(-1).square() * batch[0][:, 0].exp()).mean()

    data = [[x.clamp(-1, 1), y] for x, y in batches(8)]
    data[4][0][2, 0] = 100.0
    guard, _, _ = train(loss_fn, data, HEAL, model=net(batch_norm=False), max_norm=max_norm)
    assert [(i.diagnosis.cause, i.diagnosis.verified, i.action) for i in guard.incidents] == [("exp-overflow", True, action)]
    assert len(guard.parts.healer.applied) == (action == "healed")
    assert (guard.incidents[0].remedy is not None) == (action == "healed")


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_steps_under_way_come_first(lag, monkeypatch):
    """A remedy may change what they are made of, so their verdicts are taken in before it acts."""
    seen = []

    def note(what, method):
        def noted(self, *args):
            result = method(self, *args)
            if what == "applied" or result is not None:
                pending = guard.parts.engine.under_way.pending
                seen.append((what, len(pending), guard.history[-1].step))
            return result

        return noted

    monkeypatch.setattr(Examiner, "accepted", note("found", Examiner.accepted))
    monkeypatch.setattr(Healer, "apply", note("applied", Healer.apply))
    torch.manual_seed(0)
    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 6))
    policy = nanproof.Policy(heal=True, lag=lag)
    with nanproof.Guard(model, optimizer, loss_fn=mse, scheduler=scheduler, policy=policy) as guard:
        for batch in batches(30):
            guard.train_step(batch)
    (_, waiting, found_at), (_, left, applied_at) = seen
    assert [what for what, *_ in seen] == ["found", "applied"]
    assert (waiting, left) == (lag, 0) and applied_at == found_at + lag
    rates = {record.step: record.lr[0] for record in guard.history}
    assert rates[applied_at] == 0 and rates[applied_at + 1] > 0


def test_a_remedy_that_raises_is_undone_and_the_run_goes_on(caplog):
    """Healing is never the reason a run dies."""
    patient = _Healed()
    broken = Remedy.known["own-parameters"](patient.healer.patient, names=["no such parameter"])
    with caplog.at_level(logging.WARNING, "nanproof"):
        assert not patient.healer.treat(Treatment(broken, "no-learning", "cause", 0))
    assert patient.healer.applied == [] and "could not heal" in caplog.text


def test_the_run_is_diagnosed_each_time_while_healing():
    """Two faults of one kind: each is explained, and each has a fix of its own in force from then on."""

    def loss_fn(model, batch):
        x, y = batch
        out = model(x).squeeze(-1)
        ratio = (x[:, 0].clamp(max=200.0)).exp().mean() if bool((x[:, 0] > 90).any()) else 1.0
        return (
            F.mse_loss(out, y) * ratio / (0.0 if bool((y == 5.0).any()) else 1.0)
            if isinstance(ratio, float)
            else out.mean() * ratio
        )

    data = batches(10)
    data[3][1][0] = 5.0
    data[6][0][0, 0] = 100.0
    guard, _, _ = train(loss_fn, data, HEAL, model=net(batch_norm=False))
    assert [i.diagnosis.cause for i in guard.incidents] == ["zero-denominator", "exp-overflow"]
    assert [(i.step, i.action, i.same_as) for i in guard.incidents] == [(3, "healed", None), (6, "healed", None)]
    assert [i.remedy for i in guard.incidents] == [t.remedy.description for t in guard.parts.healer.applied]


@pytest.mark.parametrize(
    "name", ["PositiveLog", "SafeRoot", "SpreadOfOne", "BoundedExp", "SafeDivision", "SafeSoftmax", "OneMask"]
)
def test_a_remedy_hides_no_nan(name):
    """What was NaN before the operation is NaN after it: a later fault must stay visible."""
    x = torch.tensor([[1.0, float("nan"), 2.0]])
    operation = {
        "PositiveLog": torch.log,
        "SafeRoot": torch.sqrt,
        "SpreadOfOne": torch.std,
        "BoundedExp": torch.exp,
        "SafeDivision": lambda t: 1 / t,
        "SafeSoftmax": lambda t: t.softmax(-1),
        "OneMask": lambda t: t + t,
    }[name]
    with Intervention.livable[name]():
        assert bool(torch.isnan(operation(x)).any())


def test_healing_needs_diagnoses():
    with pytest.raises(UsageError, match="only what was diagnosed"):
        nanproof.Policy(heal=True, diagnose="never")
    with pytest.raises(UsageError, match="heal"):
        nanproof.Policy(heal="yes")


def on_two_ranks(rank: int):
    """One rank's batch has nothing that counts; healing is asked for."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("nanproof").addHandler(handler)
    model = nn.parallel.DistributedDataParallel(dropout_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = masked_batches(empty=rank == 1)
    with nanproof.Guard(model, optimizer, loss_fn=masked_mean(False), policy=HEAL) as guard:
        for batch in data[:8]:
            guard.train_step(batch)
    weights = [p.detach().sum().item() for p in model.parameters()]
    return weights, [i.action for i in guard.incidents], [text for text in said if "heal=True" in text]


def test_on_several_ranks_healing_is_off_and_says_so():
    """A remedy on one rank alone would part them: the step is skipped on all, alike."""
    ((zero, one),) = two_ranks(("recover.heal.test_heal:on_two_ranks", (), {}))
    assert zero[:2] == one[:2] and zero[1] == ["skipped"]
    assert len(zero[2]) == 1 and "is off" in zero[2][0]
