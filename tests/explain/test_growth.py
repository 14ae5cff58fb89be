"""A learning rate that blows the weights up is named from the records of the run, and nothing else is taken for it."""

from __future__ import annotations

import math
from array import array
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanproof
from nanproof import StepRecord
from nanproof.explain._growth import growth

CAUSE = "learning-rate-too-high"


def tokens(i):
    ids = torch.randint(0, 30, (8, 8), generator=torch.Generator().manual_seed(i))
    return ids, ids[:, 0]


def numbers(i):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(i))
    return x, x[:, 0] - x[:, 1]


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def regress(model, batch):
    return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])


def reader():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(30, 16), nn.Flatten(), nn.Linear(128, 30)), classify, tokens


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)), regress, numbers


def train(parts, optimizer, own_loop, *, steps=16, before=None, loss_fn=None, batch=None, policy=None):
    """Return the incidents of a run. `before`: called with the step, the model and the optimizer."""
    model, usual_loss, usual_batch = parts
    loss_fn, batch = loss_fn or usual_loss, batch or usual_batch
    optimizer = optimizer(model.parameters())
    guard = nanproof.Guard(
        model, optimizer, loss_fn=None if own_loop else loss_fn, max_norm=None, policy=policy or nanproof.Policy()
    )
    with guard:
        for i in range(steps):
            if before is not None:
                before(i, model, optimizer)
            if own_loop:
                optimizer.zero_grad()
                loss = loss_fn(model, batch(i))
                loss.backward()
                try:
                    guard.step(loss)
                except nanproof.TrainingHalted:
                    break
            else:
                try:
                    guard.train_step(batch(i))
                except nanproof.TrainingHalted:
                    break
    return guard.incidents


def causes(incidents):
    return [i.diagnosis.cause for i in incidents if i.diagnosis is not None]


def set_rate(step, rate):
    def change(i, model, optimizer):
        if i == step:
            optimizer.param_groups[0]["lr"] = rate

    return change


ADAMW = torch.optim.AdamW
SGD = torch.optim.SGD
OPTIMIZERS = {
    "adamw": ADAMW,
    "sgd": SGD,
    "momentum": lambda p, lr: SGD(p, lr, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
}


@pytest.mark.parametrize("own_loop", [False, True], ids=["train_step", "step"])
@pytest.mark.parametrize("parts", [reader, mlp])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("rate", [1e5, 1e12, 1e18, 1e30])
def test_a_rate_that_blows_the_weights_up_is_the_cause(own_loop, parts, name, rate):
    """Whatever the optimizer, and whether or not the step can be run again."""
    incidents = train(parts(), lambda p: OPTIMIZERS[name](p, rate), own_loop)
    assert causes(incidents) and set(causes(incidents)) == {CAUSE}
    first = incidents[0].diagnosis
    assert f"{rate:g}" in first.fix
    assert first.confidence >= 0.75


@pytest.mark.parametrize("parts", [reader, mlp])
def test_the_fix_is_verified_if_the_step_can_be_run_again(parts):
    (first, *_) = train(parts(), lambda p: ADAMW(p, 1e18), own_loop=False)
    assert first.diagnosis.verified and first.diagnosis.cause == CAUSE


@pytest.mark.parametrize("own_loop", [False, True], ids=["train_step", "step"])
@pytest.mark.parametrize("optimizer", [lambda p: ADAMW(p, 1e-3), lambda p: SGD(p, 1e-2)], ids=["adamw", "sgd"])
def test_a_rate_that_is_raised_in_the_run_is_named_with_its_step(own_loop, optimizer):
    incidents = train(reader(), optimizer, own_loop, steps=24, before=set_rate(10, 1e18))
    assert set(causes(incidents)) == {CAUSE}
    assert "at step 10" in incidents[0].diagnosis.fix


def test_a_schedule_that_multiplies_the_rate_is_named():
    def grows(i, model, optimizer):
        if i >= 5:
            optimizer.param_groups[0]["lr"] *= 1e4

    incidents = train(reader(), lambda p: ADAMW(p, 1e-3), own_loop=True, steps=24, before=grows)
    assert set(causes(incidents)) == {CAUSE}


@pytest.mark.parametrize("own_loop", [False, True], ids=["train_step", "step"])
@pytest.mark.parametrize("parts", [reader, mlp])
def test_a_rate_that_makes_the_weights_infinite(own_loop, parts):
    """The step that the next one finds broken is one of the optimizer's own."""
    incidents = train(parts(), lambda p: ADAMW(p, 1e39), own_loop)
    assert causes(incidents)[0] == CAUSE


def test_half_precision_weights_that_one_update_overflows():
    """The weights are put back, and the step is tried on copies with a smaller rate."""
    model, loss_fn, batch = mlp()
    model.half()

    def in_half(model, b):
        return 100 * loss_fn(model, (b[0].half(), b[1].half())).float()

    incidents = train((model, in_half, batch), lambda p: SGD(p, 6e4), own_loop=False, steps=4)
    assert causes(incidents)[0] == CAUSE and incidents[0].diagnosis.verified


# -- what is not the rate's doing ----------------------------------------------------------------------------------------------


def nan_at(step, of=numbers):
    def batch(i):
        x, y = of(i)
        if i == step:
            x[2, 1] = math.nan
        return x, y

    return batch


@pytest.mark.parametrize("own_loop", [False, True], ids=["train_step", "step"])
@pytest.mark.parametrize("rate", [1e-2, 3.0])
def test_a_nan_in_the_batch_is_not(own_loop, rate):
    incidents = train(mlp(), lambda p: ADAMW(p, rate), own_loop, batch=nan_at(8), steps=9)
    assert CAUSE not in causes(i for i in incidents if i.kind != "divergence")


@pytest.mark.parametrize("own_loop", [False, True], ids=["train_step", "step"])
@pytest.mark.parametrize("value", [1e30, math.inf, math.nan])
@pytest.mark.parametrize("optimizer", [lambda p: ADAMW(p, 1e-2), lambda p: SGD(p, 1e-1)], ids=["adamw", "sgd"])
def test_a_weight_set_by_hand_is_not(own_loop, value, optimizer):
    def spoil(i, model, optimizer):
        if i == 6:
            with torch.no_grad():
                model[0].weight[0, 0] = value

    incidents = train(mlp(), optimizer, own_loop, before=spoil, steps=12)
    assert incidents and CAUSE not in causes(incidents)


def test_a_weight_set_by_hand_that_plain_descent_then_blows_up_is_not():
    """The first large update follows from a gradient far above those before it, at the same rate."""

    def spoil(i, model, optimizer):
        if i == 6:
            with torch.no_grad():
                model[2].weight.fill_(1e9)

    incidents = train(mlp(), lambda p: SGD(p, 1e-1), own_loop=True, before=spoil, steps=14)
    assert incidents and CAUSE not in causes(incidents)


def test_an_outlier_batch_under_plain_descent_is_not():
    def batch(i):
        x, y = numbers(i)
        return (x * 1e12, y) if i == 8 else (x, y)

    incidents = train(mlp(), lambda p: SGD(p, 1e-2), own_loop=True, batch=batch, steps=14)
    assert incidents and CAUSE not in causes(incidents)


@pytest.mark.parametrize("own_loop", [False, True], ids=["train_step", "step"])
def test_an_exponential_that_overflows_at_an_ordinary_rate_is_not(own_loop):
    def loss_fn(model, b):
        return (model(b[0] * (200 if b[0][0, 0] > 1.5 else 1)) * 20).exp().mean()

    incidents = train(mlp(), lambda p: ADAMW(p, 1e-3), own_loop, loss_fn=loss_fn, steps=40)
    assert incidents and CAUSE not in causes(incidents)


def test_an_overflow_of_half_precision_is_not():
    def loss_fn(model, b):
        return (model(b[0]).half() * 60000 * 4).float().square().mean()

    incidents = train(mlp(), lambda p: ADAMW(p, 1e-3), own_loop=False, loss_fn=loss_fn, steps=4)
    assert incidents and CAUSE not in causes(incidents)


def test_a_warm_up_to_an_ordinary_rate_leaves_no_incident():
    def warm(i, model, optimizer):
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1, (i + 1) / 10)

    assert train(mlp(), lambda p: ADAMW(p, 1e-6), own_loop=False, before=warm, steps=30) == []


def test_the_trial_fails_if_the_step_is_bad_at_any_size_of_the_weights():
    """The rate has blown the weights up, and the loss of this batch is NaN for a reason of its own."""

    def batch(i):
        ids, labels = tokens(i)
        return ids, labels, torch.tensor(1.0 if i < 2 else -1.0)

    def loss_fn(model, b):
        return classify(model, b) + b[2].log()

    incidents = train(reader(), lambda p: ADAMW(p, 1e4), own_loop=False, loss_fn=loss_fn, batch=batch, steps=3)
    (refused,) = (i for i in incidents if i.kind == "nonfinite-loss")
    assert refused.diagnosis.cause != CAUSE
    assert CAUSE in refused.diagnosis.alternatives


def record(step, rate, norm, action="stepped", clip=1.0):
    return StepRecord(
        step=step,
        loss=1.0,
        grad_norm=norm,
        action=action,
        clip=clip,
        lr=(rate,),
        scale=None,
        spike=False,
        typical=(0.0, 0.0),
        spread=(0.0, 0.0),
        loss_size=1.0,
        weights_checked=False,
        names=("weight",),
        norms=array("d", [norm]),
    )


def grown(records, now, **settings):
    """What the records of a run say about a weight that was 1 at its start."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(now)
    case = SimpleNamespace(
        details={"largest_at_start": {"weight": 1.0}},
        model=model,
        history=records,
        record=None,
        optimizer=torch.optim.SGD(model.parameters(), 0.1, **settings),
        weights_broke=False,
        can_look_at_the_step=False,
    )
    return growth(case)


LARGE = record(0, 1e3, 1.0)


@pytest.mark.parametrize(
    ("records", "now", "settings", "found"),
    [
        pytest.param([LARGE], 500.0, {}, True, id="the update explains the weight"),
        pytest.param([LARGE], 1e9, {}, False, id="something else wrote it"),
        pytest.param([LARGE], 5.0, {}, False, id="it is not large"),
        pytest.param([record(0, 1e3, 1.0, "skipped")], 500.0, {}, False, id="the step was refused"),
        pytest.param([record(0, 1.0, 1e3, "clipped", clip=1e5)], 500.0, {}, False, id="the gradient was clipped"),
        pytest.param([LARGE], 5e3, {"momentum": 0.9}, True, id="momentum"),
        pytest.param([LARGE, record(1, 1e3, 1.0)], 1e5, {"weight_decay": 1.0}, True, id="decay"),
        pytest.param([record(0, 1e-3, 1.0), record(1, 1.0, 1e3)], 500.0, {}, True, id="rate and gradient rose together"),
    ],
)
def test_only_what_the_updates_can_have_made_is_put_down_to_the_rate(records, now, settings, found):
    assert (grown(records, now, **settings) is not None) is found


def test_a_rate_that_only_doubled_was_not_raised():
    rows = [(1.0, 0.05), (2.0, 0.4), *[(2.0, 10.0)] * 7]
    found = grown([record(i, *row) for i, row in enumerate(rows)], 50.0)
    assert found.step == 1 and found.before is None
