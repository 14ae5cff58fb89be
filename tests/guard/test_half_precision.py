"""Half-precision weights and GradScaler: steps that break weights are undone, and the loss scale follows torch's rules."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanproof
from guard.guarding import guarded
from toys import Run, batches, finite, mse_fp16, net, whole_state


def half_case(how, lag=0, **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)).half()
    if how == "foreach":
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)  # eps is 0 in fp16: 0/0 at the first step
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    data = [(torch.randn(8, 8).half(), torch.randint(0, 4, (8,))) for _ in range(8)]
    guard = guarded(
        model,
        optimizer,
        loss_fn=lambda m, b: F.cross_entropy(m(b[0]).float(), b[1]),
        policy=nanproof.Policy(lag=lag, **kwargs),
    )
    return model, optimizer, data, guard


def test_a_step_that_breaks_fp16_weights_is_put_back():
    model, optimizer, data, guard = half_case("foreach")
    before = copy.deepcopy(model.state_dict())
    guard.train_step(data[0])
    assert guard.path.startswith("host: trainable weights are fp16")
    assert guard.incidents[0].kind == "nonfinite-weight"
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert finite(model, optimizer) and not optimizer.state
    assert guard.history[0].weights_checked and guard.history[0].action == "skipped"


@pytest.mark.parametrize("lag", [0, 2])
def test_a_fused_step_that_breaks_fp16_weights_is_put_back_on_the_device(lag):
    """The step with the absurd learning rate is as if it had not been."""
    runs = []
    for saw_bad in (True, False):
        model, optimizer, data, guard = half_case("fused", lag)
        for i, batch in enumerate(data):
            if i == 4 and not saw_bad:
                continue
            optimizer.param_groups[0]["lr"] = 1e6 if i == 4 else 1e-3
            guard.train_step(batch)
        guard.close()
        assert guard.path == "device" and finite(model, optimizer)
        runs.append(Run(guard, {k: v for k, v in whole_state(model, optimizer).items() if k != "random"}))
    assert [(i.step, i.kind) for i in runs[0].guard.incidents] == [(4, "nonfinite-weight")]
    assert runs[0].same_as(runs[1]) == []


def test_half_weights_can_be_only_looked_at_or_not_at_all():
    model, optimizer, data, guard = half_case("foreach", half_weights="look")
    guard.train_step(data[0])
    assert guard.incidents[0].action == "recorded" and not finite(model, optimizer)
    model, optimizer, data, guard = half_case("foreach", half_weights="off")
    guard.train_step(data[0])
    assert guard.incidents == [] and not guard.history[0].weights_checked


def test_bf16_weights_are_looked_at_without_a_copy_under_a_fused_optimizer():
    model = net(batch_norm=False).bfloat16()
    guard = guarded(model, torch.optim.AdamW(model.parameters(), fused=True))
    guard.train_step(batches(1, dtype=torch.bfloat16)[0])
    assert guard.history[0].weights_checked
    assert guard.parts.stepper.weights.restore is False


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sgd_over_half_weights_does_not_use_the_kernel_of_torch_that_is_wrong(dtype):
    """torch's fused SGD on CPU moves half-precision weights by the wrong amounts: compared here with a sum done by hand."""
    p = nn.Parameter(torch.ones(64, dtype=dtype))
    model = nn.Module()
    model.p = p
    guard = guarded(model, torch.optim.SGD([p], lr=0.5, fused=True), max_norm=None)
    expected = p.detach().float()
    for i in range(4):
        gradient = torch.linspace(-1, 1, 64).to(dtype) * (i + 1)
        p.grad = gradient.clone()
        guard.step(torch.tensor(1.0))
        expected = expected - 0.5 * gradient.float()
        torch.testing.assert_close(p.detach().float(), expected, rtol=2e-2, atol=2e-2)
    assert "wrong" in guard.path


@pytest.mark.parametrize("path", ["fused", "foreach"])
def test_a_step_that_breaks_one_half_weight_is_undone_on_all_weights(path):
    """fp16 and fp32 layers in one optimizer: the fp32 one steps too, and must go back too."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow, self.wide = nn.Linear(6, 6).half(), nn.Linear(6, 1)

        def forward(self, x):
            return self.wide(self.narrow(x.half()).float())

    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **{path: True})
    guard = guarded(model, optimizer)
    optimizer.param_groups[0]["lr"] = 1e6 if path == "fused" else 1e-3
    before = copy.deepcopy(model.state_dict())
    guard.train_step(batches(1)[0])
    assert guard.incidents[0].kind == "nonfinite-weight"
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(float(state.get("step", 0)) == 0 for state in optimizer.state.values())


def scaled_run(init_scale, loss_fn=mse_fp16, steps=10, mode="train_step", lag=0):
    model = net(batch_norm=False, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    guard = guarded(model, optimizer, loss_fn=loss_fn, scaler=scaler, policy=nanproof.Policy(lag=lag))
    try:
        for batch in batches(1, size=64) * steps:
            if mode == "train_step":
                guard.train_step(batch)
            else:
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                scaler.scale(loss).backward()
                guard.step(loss)
    finally:
        guard.close()
    return guard, scaler


@pytest.mark.parametrize(("mode", "lag"), [("train_step", 0), ("train_step", 2), ("step", 0), ("step", 2)])
def test_overflows_that_calibrate_the_loss_scale_are_no_incident(mode, lag):
    guard, scaler = scaled_run(2.0**22, mode=mode, lag=lag)
    assert guard.incidents == []
    skipped = [r.action == "skipped" for r in guard.history]
    assert 0 < sum(skipped) < len(skipped) and not skipped[-1]
    assert scaler.get_scale() == 2.0 ** (22 - sum(skipped))


def test_the_scale_follows_torchs_own_rules():
    """Against GradScaler.step and update on the same run: the same scale, and the same weights to rounding."""
    results = []
    for guarded_ in (True, False):
        torch.manual_seed(0)
        model = net(batch_norm=False, dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
        guard = guarded(model, optimizer, loss_fn=mse_fp16, scaler=scaler, max_norm=None) if guarded_ else None
        scales = []
        for batch in batches(16, size=64):
            if guard:
                guard.train_step(batch)
            else:
                optimizer.zero_grad()
                scaler.scale(mse_fp16(model, batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            scales.append(scaler.get_scale())
        results.append((scales, [p.detach().clone() for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b)


def never_finite(model, batch):
    """sqrt at 0: an infinite gradient at any scale."""
    out = model(batch[0]).float().squeeze(-1)
    return F.mse_loss(out, batch[1]) + (out - out.detach()).abs().sqrt().sum()


@pytest.mark.parametrize("lag", [0, 2])
def test_an_overflow_that_a_replay_at_a_small_scale_does_not_cure_is_one_at_that_step(lag):
    model = net(batch_norm=False, dropout=0.0)
    scaler = torch.amp.GradScaler("cpu")
    guard = guarded(model, loss_fn=never_finite, scaler=scaler, policy=nanproof.Policy(lag=lag))
    guard.train_step(batches(1)[0])
    guard.close()
    assert [(i.step, i.kind) for i in guard.incidents] == [(0, "nonfinite-gradient")]
    assert scaler.get_scale() == 2.0**16, "the scale is not to blame, so it stays"


def test_a_scale_that_falls_below_one_is_a_collapse():
    with pytest.raises(nanproof.TrainingHalted) as halted:
        scaled_run(2.0**2, loss_fn=never_finite, steps=40, mode="step")
    assert halted.value.incident.kind == "loss-scale-collapse"


def test_a_disabled_scaler_is_none():
    model = net()
    guard = guarded(model, scaler=torch.amp.GradScaler("cpu", enabled=False))
    guard.train_step(batches(1)[0])
    assert guard.history[0].scale is None
