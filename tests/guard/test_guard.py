"""The guard's behaviour: what it refuses and why, what it leaves alone, and how it answers bad use."""

from __future__ import annotations

import copy
import gc
import json
import math
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import nanproof
from nanproof import read_incidents, read_steps
from toys import OPTIMIZERS, Lion, Run, batches, finite, mse, mse_fp16, net, poison, whole_state

NAN, INF = float("nan"), float("inf")


def guarded(model=None, optimizer=None, **kwargs):
    model = net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if optimizer is None else optimizer
    return nanproof.Guard(model, optimizer, **{"loss_fn": mse, **kwargs})


def with_gradient(tensor, value):
    """The same tensor; on the way back one element of its gradient is `value`."""

    def change(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[0] = value
        return gradient

    tensor.register_hook(change)
    return tensor


def gradient_fault(value, at=3):
    """A loss function whose loss is always finite, and whose gradient is bad for batches that carry a third element."""

    def loss_fn(model, batch):
        out = model(batch[0]).squeeze(-1)
        if len(batch) > at - 1:
            out = with_gradient(out, value)
        return F.mse_loss(out, batch[1])

    return loss_fn


# -- what is refused, and what it is called ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_bad_gradient_under_a_finite_loss_is_its_own_kind(value, lag):
    guard = guarded(net(batch_norm=False), loss_fn=gradient_fault(value), policy=nanproof.Policy(lag=lag))
    for i, batch in enumerate(batches(6)):
        guard.train_step([*batch, True] if i == 2 else batch)
    guard.close()
    [incident] = guard.incidents
    assert (incident.step, incident.kind, incident.action) == (2, "nonfinite-gradient", "skipped")
    assert math.isfinite(incident.loss)
    assert incident.culprits[0][0] == "0.weight" and not math.isfinite(incident.culprits[0][1])


@pytest.mark.parametrize("lag", [0, 2])
def test_a_gradient_that_was_bad_for_a_moment_is_named_although_a_replay_is_clean(lag):
    """With a lag the gradients themselves are gone when the host learns of it, and run again they are fine. Their norms are not
    gone: one gradient was infinite, which is something else than finite ones whose squares overflow."""
    model = net(batch_norm=False)
    guard = guarded(model, policy=nanproof.Policy(lag=lag))
    armed = []

    def flip(gradient):
        if not armed:
            return None
        armed.clear()
        gradient = gradient.clone()
        gradient.view(-1)[3] = torch.inf
        return gradient

    model[0].weight.register_hook(flip)
    for i, batch in enumerate(batches(8)):
        if i == 4:
            armed.append(True)
        guard.train_step(batch)
    guard.close()
    (incident,) = guard.incidents
    assert (incident.step, incident.kind) == (4, "nonfinite-gradient")
    assert [name for name, _ in incident.culprits] == ["0.weight"]
    assert incident.diagnosis.cause == "transient-fault"


@pytest.mark.parametrize("lag", [0, 2])
def test_finite_gradients_with_an_infinite_norm_are_another_kind(lag):
    guard = guarded(net(batch_norm=False), loss_fn=gradient_fault(1e25), policy=nanproof.Policy(lag=lag))
    for i, batch in enumerate(batches(6)):
        guard.train_step([*batch, True] if i == 2 else batch)
    guard.close()
    [incident] = guard.incidents
    assert (incident.step, incident.kind) == (2, "gradient-norm-overflow")
    assert incident.grad_norm == INF


def test_culprits_are_read_before_clipping_turns_every_gradient_bad():
    """Only the second layer's gradient is bad; clip_grad_norm_ would have made all of them NaN."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
    guard = guarded(model)
    model[1].bias.register_hook(lambda g: g * NAN)
    guard.train_step(batches(1)[0])
    assert [name for name, _ in guard.incidents[0].culprits] == ["1.bias"]
    assert all(math.isfinite(n) for name, n in guard.history[0].by_parameter.items() if name != "1.bias")


def test_a_nan_loss_with_finite_gradients_is_refused():
    """A mean over nothing gives a NaN loss and gradients of exactly 0."""
    guard = guarded(net(dropout=0.0), loss_fn=lambda m, b: F.cross_entropy(m(b[0]).expand(-1, 3), b[1], ignore_index=-100))
    guard.train_step([torch.randn(8, 6), torch.full((8,), -100)])
    [incident] = guard.incidents
    assert incident.kind == "nonfinite-loss" and incident.culprits == ()
    assert "every gradient is finite" in incident.message
    assert guard.history[0].grad_norm == 0


def test_weights_that_were_bad_before_the_step_are_named():
    model = net()
    with torch.no_grad():
        model[4].weight[0, 3] = NAN
    guard = guarded(model)
    guard.train_step(batches(1)[0])
    assert guard.incidents[0].kind == "nonfinite-weight"
    assert "4.weight" in guard.incidents[0].message


def test_optimizer_state_that_is_bad_is_found_at_close():
    guard = guarded(net())
    guard.train_step(batches(1)[0])
    p = guard.model[0].weight
    guard.optimizer.state[p]["exp_avg_sq"][0, 0] = INF
    assert guard.incidents == []
    guard.close()
    assert guard.incidents[0].kind == "nonfinite-weight"
    assert "exp_avg_sq of 0.weight" in guard.incidents[0].message


@pytest.mark.parametrize("lag", [0, 2])
def test_a_buffer_that_only_the_forward_broke_refuses_the_step(lag):
    """1e25 squares to Inf in BatchNorm's running variance; loss and gradients stay finite, evaluation would be NaN."""
    guard = guarded(policy=nanproof.Policy(lag=lag))
    data = batches(6)
    data[3] = poison(data[3], 1e25)
    for batch in data:
        guard.train_step(batch)
    guard.close()
    [incident] = guard.incidents
    assert (incident.step, incident.kind) == (3, "nonfinite-weight")
    assert "1.running_var" in incident.message
    assert finite(guard.model, guard.optimizer)


def test_a_buffer_that_is_infinite_on_purpose_is_no_fault():
    model = net()
    model.register_buffer("mask", torch.tensor([0.0, -INF]))
    guard = guarded(model)
    guard.train_step(batches(1)[0])
    guard.close()
    assert guard.history[0].action in ("stepped", "clipped")
    assert [i.kind for i in guard.incidents] == []


# -- half precision ------------------------------------------------------------------------------------------------------------


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


# -- GradScaler ----------------------------------------------------------------------------------------------------------------


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


def test_a_loss_that_was_not_scaled_is_noticed():
    model = net()
    guard = guarded(model, scaler=torch.amp.GradScaler("cpu"))
    loss = mse(model, batches(1)[0])
    loss.backward()
    with pytest.raises(nanproof.UsageError, match="the loss was not scaled"):
        guard.step(loss)


def test_gradients_left_over_from_a_refused_step_are_hinted_at():
    model = net(batch_norm=False)
    guard = guarded(model)
    for batch in (poison(batches(1)[0]), batches(1)[0]):
        loss = mse(model, batch)
        loss.backward()
        guard.step(loss)
    assert "was zero_grad called" in guard.incidents[1].message


def test_a_schedule_that_nobody_advances_is_warned_about(caplog):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    guard = guarded(model, optimizer, scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    for batch in batches(3):
        optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        guard.step(loss)
    assert any("call scheduler.step() yourself" in message for message in caplog.messages)


def test_a_disabled_scaler_is_none():
    model = net()
    guard = guarded(model, scaler=torch.amp.GradScaler("cpu", enabled=False))
    guard.train_step(batches(1)[0])
    assert guard.history[0].scale is None


# -- accumulation --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("own_backward", [True, False])
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_bad_micro_batch_is_named(bad, own_backward, lag):
    """By its loss when guard.backward is used, else by what one early gradient looked like after each backward."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with guarded(model, optimizer, policy=nanproof.Policy(lag=lag)) as guard:
        for step in range(4):
            optimizer.zero_grad()
            for i, batch in enumerate(batches(4, seed=step)):
                loss = mse(model, poison(batch) if (step, i) == (2, bad) else batch) / 4
                guard.backward(loss) if own_backward else loss.backward()
            guard.step(loss)
    assert [(i.step, i.micro_batch) for i in guard.incidents] == [(2, bad)]


def test_a_micro_batch_with_a_bad_loss_and_finite_gradients_is_not_missed():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    guard = guarded(model, optimizer)
    for i, batch in enumerate(batches(3)):
        loss = mse(model, batch)
        guard.backward(loss + INF if i == 1 else loss)
    guard.step(loss)
    [incident] = guard.incidents
    assert (incident.kind, incident.micro_batch) == ("nonfinite-loss", 1)


def test_micro_batches_that_the_loop_gave_up_are_forgotten():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    guard = guarded(model, optimizer)
    data = batches(2)
    optimizer.zero_grad()
    guard.backward(mse(model, poison(data[0])))
    optimizer.zero_grad()
    for module in model:
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
    guard.parts.stepper.buffers.refresh()
    loss = mse(model, data[1])
    guard.backward(loss)
    guard.step()
    assert guard.incidents == [] and guard.history[0].loss == pytest.approx(loss.item())


@pytest.mark.parametrize("scaled", [True, False])
def test_a_loss_of_one_element_is_a_scalar(scaled):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    guard = guarded(net(), scaler=scaler, loss_fn=lambda m, b: mse(m, b).reshape(1))
    guard.train_step(batches(1)[0])
    assert guard.history[0].action != "skipped"


def test_the_accumulated_loss_is_the_mean():
    guard = guarded(net(dropout=0.0, batch_norm=False))
    data = batches(4)
    expected = sum(mse(guard.model, b).item() for b in data) / 4
    assert guard.train_step(*data).item() == pytest.approx(expected)


# -- spikes --------------------------------------------------------------------------------------------------------------------


def spiky(policy=None, at=30, factor=1e4, steps=60, **kwargs):
    model = net(dropout=0.0, batch_norm=False)
    guard = guarded(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policy=policy, **kwargs)
    data = batches(steps, size=32)
    data[at] = [data[at][0], data[at][1] * factor]
    for batch in data:
        guard.train_step(batch)
    guard.close()
    return guard


def test_a_spike_is_clipped_and_reported_when_the_next_steps_are_normal():
    guard = spiky()
    [incident] = guard.incidents
    assert (incident.step, incident.kind, incident.action) == (30, "spike", "clipped")
    assert guard.history[30].clip > 1 and guard.history[30].spike


def test_a_spike_is_only_recorded_without_clipping():
    [incident] = spiky(max_norm=None, factor=30).incidents
    assert (incident.step, incident.kind, incident.action) == (30, "spike", "recorded")


def test_a_spike_can_be_refused():
    guard = spiky(nanproof.Policy(on_spike="skip"))
    [incident] = guard.incidents
    assert (incident.step, incident.kind, incident.action) == (30, "spike", "skipped")


def test_a_new_level_is_not_refused_for_ever():
    """Data that becomes a hundred times larger and stays: after ten refused spikes that is what is usual."""
    model = net(dropout=0.0, batch_norm=False)
    guard = guarded(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policy=nanproof.Policy(on_spike="skip"))
    for i, batch in enumerate(batches(80, size=32)):
        guard.train_step([batch[0], batch[1] * (100 if i >= 30 else 1)])
    guard.close()
    assert [r.step for r in guard.history if r.action == "skipped"] == list(range(30, 40))


def test_a_new_level_is_no_incident():
    model = net(dropout=0.0, batch_norm=False)
    guard = guarded(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for i, batch in enumerate(batches(90, size=32)):
        guard.train_step([batch[0], batch[1] * (100 if i >= 30 else 1)])
    guard.close()
    assert guard.incidents == []


def test_divergence_is_reported_once():
    model = net(dropout=0.0, batch_norm=False)
    guard = guarded(model, torch.optim.SGD(model.parameters(), lr=0.9), max_norm=None)
    for batch in batches(1, size=32) * 14:
        guard.train_step([batch[0] * 2, batch[1]])
    assert [i.kind for i in guard.incidents][:1] == ["divergence"]
    assert sum(i.kind == "divergence" for i in guard.incidents) == 1


def test_auto_clips_at_what_is_usual():
    """Nothing is clipped while there is nothing to go by; later a spike is, to about the usual norm; healthy steps hardly."""
    guard = spiky(max_norm="auto", factor=100)
    assert all(r.clip == 1 for r in guard.history[:20])
    spike, usual = guard.history[30], guard.history[29]
    assert spike.grad_norm / spike.clip < 5 * usual.grad_norm < spike.grad_norm
    assert sum(r.clip > 1 for r in guard.history[20:]) < 10


# -- healthy runs are left alone -----------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(6, 16, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.rnn(x.unsqueeze(1).expand(-1, 5, -1))[0][:, -1])


HEALTHY = {
    "fast learner": (lambda: net(batch_norm=False), lambda ps: torch.optim.SGD(ps, lr=3e-2, momentum=0.9), {}),
    "batch of two": (lambda: net(batch_norm=False), lambda ps: torch.optim.AdamW(ps, lr=1e-3), {"size": 2}),
    "batch norm": (net, lambda ps: torch.optim.AdamW(ps, lr=1e-2), {}),
    "recurrent": (Recurrent, lambda ps: torch.optim.RMSprop(ps, lr=1e-3), {}),
    "no clipping": (net, lambda ps: torch.optim.Adagrad(ps, lr=1e-2), {"max_norm": None}),
    "auto clipping": (net, lambda ps: torch.optim.AdamW(ps, lr=1e-2), {"max_norm": "auto"}),
    "spikes refused": (net, lambda ps: torch.optim.AdamW(ps, lr=1e-2), {"policy": nanproof.Policy(on_spike="skip")}),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_incident(name, seed):
    build, optimizer, kwargs = HEALTHY[name]
    torch.manual_seed(seed)
    model = build()
    size = kwargs.get("size", 16)
    guard = guarded(model, optimizer(model.parameters()), **{k: v for k, v in kwargs.items() if k != "size"})
    for batch in batches(150, seed=seed, size=size):
        guard.train_step(batch)
    guard.close()
    assert guard.incidents == []
    assert all(r.action != "skipped" for r in guard.history)


@pytest.mark.parametrize("kwargs", [{"max_norm": "auto"}, {"policy": nanproof.Policy(on_spike="skip")}, {}])
def test_steps_without_any_gradient_say_nothing_of_what_is_usual(kwargs):
    """Groups of equal rewards: nine steps in ten have gradients of exactly 0. The tenth must be learned from."""
    model = nn.Linear(6, 1)
    guard = guarded(model, torch.optim.AdamW(model.parameters()), loss_fn=lambda m, b: mse(m, b) * b[2], **kwargs)
    before = model.weight.detach().clone()
    for i, batch in enumerate(batches(200)):
        guard.train_step([*batch, float(i % 10 == 0 and i > 25)])
    guard.close()
    assert guard.incidents == [] and not torch.equal(before, model.weight)
    assert all(r.clip < 100 for r in guard.history)


def test_a_loss_that_is_usually_exactly_zero_is_no_measure():
    """A margin that is met, and now and then is not; a penalty that begins to grow from nothing."""
    g = torch.Generator().manual_seed(0)
    for loss_at in (lambda i: 0.05 * float(torch.rand((), generator=g)) * (i % 37 == 0), lambda i: max(i - 30, 0) ** 2 * 1e-6):
        model = nn.Linear(6, 1)
        guard = guarded(
            model, loss_fn=lambda m, b, f=loss_at: mse(m, b[:2]) * 0 + m(b[0]).mean() - m(b[0]).mean().detach() + f(b[2])
        )
        for i, batch in enumerate(batches(200)):
            guard.train_step([*batch, i])
        guard.close()
        assert guard.incidents == []


def test_policy_gradients_with_losses_around_zero_have_no_incident():
    """A loss that is 0 at first and of either sign later, with gradients all along, as in GRPO."""
    model = nn.Linear(4, 3)
    guard = guarded(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss_fn=lambda m, b: -(torch.log_softmax(m(b[0]), -1).gather(1, b[1]).squeeze(1) * b[2]).mean(),
    )
    g = torch.Generator().manual_seed(0)
    for i in range(200):
        advantage = torch.randn(8, generator=g) * (0 if i == 0 else 1)
        guard.train_step([torch.randn(8, 4, generator=g), torch.randint(0, 3, (8, 1), generator=g), advantage - advantage.mean()])
    guard.close()
    assert guard.incidents == []


# -- caps ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 2])
def test_too_many_refusals_in_a_row_halt_with_the_incident(lag):
    guard = guarded(policy=nanproof.Policy(max_consecutive_skips=3, lag=lag))
    bad = poison(batches(1)[0])
    with pytest.raises(nanproof.TrainingHalted, match="4 steps in a row were refused") as halted:
        for _ in range(10):
            guard.train_step(bad)
    incident = halted.value.incident
    assert (incident.step, incident.action) == (3, "halted")
    assert (incident.cap, incident.cap_count) == ("max_consecutive_skips", 4)
    assert [i.action for i in guard.incidents] == ["skipped"] * 3 + ["halted"]


def test_too_high_a_rate_of_refusals_halts():
    guard = guarded(policy=nanproof.Policy(max_skip_rate=0.1, skip_window=20))
    with pytest.raises(nanproof.TrainingHalted, match="3 of the last steps were refused") as halted:
        for i, batch in enumerate(batches(20)):
            guard.train_step(poison(batch) if i % 3 == 0 else batch)
    incident = halted.value.incident
    assert (incident.step, incident.action) == (6, "halted") and incident is guard.incidents[-1]
    assert (incident.cap, incident.cap_count) == ("max_skip_rate", 3)


def test_an_accepted_step_resets_the_count_in_a_row():
    guard = guarded(policy=nanproof.Policy(max_consecutive_skips=1))
    for i, batch in enumerate(batches(10)):
        guard.train_step(poison(batch) if i % 2 else batch)
    assert len(guard.incidents) == 5


def test_close_after_a_halt_does_not_raise():
    guard = guarded(policy=nanproof.Policy(max_consecutive_skips=0, lag=2))
    guard.train_step(poison(batches(1)[0]))
    guard.close()
    assert guard.incidents[0].action == "halted" and guard.incidents[0].cap == "max_consecutive_skips"


# -- odd models and optimizers -------------------------------------------------------------------------------------------------


def test_sparse_gradients_take_the_host_path():
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(10, 6, sparse=True, mode="sum"), nn.Linear(6, 1))
    sparse = torch.optim.SparseAdam(list(model[0].parameters()), lr=1e-2)
    guard = nanproof.Guard(model, sparse, loss_fn=lambda m, b: m(b).square().mean() * (NAN if b[0, 0] == 9 else 1), max_norm=0.01)
    assert guard.path.startswith("host: SparseAdam")
    dense = copy.deepcopy(model)
    batch = torch.tensor([[1, 2], [2, 3]])
    guard.train_step(batch)
    dense[0].sparse = False
    dense(batch).square().mean().backward()
    assert guard.history[0].grad_norm == pytest.approx(dense[0].weight.grad.norm().item(), rel=1e-5)
    before = model[0].weight.detach().clone()
    guard.train_step(torch.tensor([[9, 2], [2, 3]]))
    assert torch.equal(before, model[0].weight) and [i.step for i in guard.incidents] == [1]
    model = nn.Sequential(nn.Embedding(10, 6, sparse=True))
    assert nanproof.Guard(model, torch.optim.SGD(model.parameters(), 0.1)).path.startswith(
        "host: the fused kernels take no sparse"
    )


def test_mixed_dtypes_groups_frozen_tied_and_unused_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.tied = nn.Linear(6, 6)
            self.tied.weight = self.first.weight
            self.frozen = nn.Linear(6, 6).requires_grad_(False)
            self.unused = nn.Linear(6, 6)
            self.wide = nn.Linear(6, 1).double()

        def forward(self, x):
            return self.wide(self.frozen(self.tied(self.first(x))).double())

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(
        [
            {"params": [model.first.weight, model.first.bias, model.tied.bias]},
            {"params": [*model.unused.parameters()], "lr": 0.5},
            {"params": [*model.wide.parameters()], "weight_decay": 0},
        ]
    )
    guard = guarded(model, optimizer)
    frozen = model.frozen.weight.detach().clone()
    data = batches(5)
    data[2] = poison(data[2])
    for batch in data:
        guard.train_step(batch)
    assert [i.step for i in guard.incidents] == [2]
    record = guard.history[0]
    assert record.names == (
        "first.weight",
        "first.bias",
        "tied.bias",
        "unused.weight",
        "unused.bias",
        "wide.weight",
        "wide.bias",
    )
    assert set(record.by_parameter) == {"first.weight", "first.bias", "tied.bias", "wide.weight", "wide.bias"}
    assert len(record.lr) == 3
    assert torch.equal(frozen, model.frozen.weight)
    assert finite(model, optimizer)


def test_gradients_laid_out_unlike_their_parameters_are_not_mixed_up():
    """The fused CPU kernel reads parameter and gradient with one index: a transposed gradient must be laid out first."""
    p = nn.Parameter(torch.zeros(4, 3))
    model = nn.Module()
    model.p = p
    gradient = torch.arange(12.0).view(3, 4).t()
    guard = guarded(model, torch.optim.SGD([p], lr=1.0, fused=True), max_norm=None)
    p.grad = gradient
    guard.step(torch.tensor(1.0))
    assert torch.equal(p.detach(), -gradient)


def test_complex_parameters_take_the_host_path():
    p = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    model = nn.Module()
    model.p = p
    guard = guarded(model, torch.optim.AdamW([p]), loss_fn=lambda m, b: (m.p * b).abs().square().sum())
    assert "complex" in guard.path
    guard.train_step(torch.tensor(1.0))
    guard.train_step(torch.tensor(NAN))
    assert [i.step for i in guard.incidents] == [1] and bool(torch.isfinite(p.abs()).all())


def test_an_optimizer_that_is_no_subclass_of_torchs_works():
    class Bare:
        def __init__(self, params):
            self.param_groups, self.state = [{"params": list(params), "lr": 0.1}], {}

        def zero_grad(self):
            for p in self.param_groups[0]["params"]:
                p.grad = None

        def step(self):
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p -= 0.1 * p.grad

    model = net()
    guard = guarded(model, Bare(model.parameters()))
    for batch in (batches(1)[0], poison(batches(1)[0])):
        guard.train_step(batch)
    assert [i.step for i in guard.incidents] == [1] and all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_parameters_added_while_training_are_guarded_too():
    model = net()
    optimizer = torch.optim.AdamW(model[0].parameters())
    guard = guarded(model, optimizer, policy=nanproof.Policy(lag=2))
    data = batches(8)
    data[6] = poison(data[6])
    for i, batch in enumerate(data):
        if i == 3:
            optimizer.add_param_group({"params": [*model[4].parameters()]})
        guard.train_step(batch)
    guard.close()
    assert len(guard.history[0].names) == 2 and len(guard.history[-1].names) == 4
    assert [i.step for i in guard.incidents] == [6] and finite(model, optimizer)


def test_loading_an_optimizer_keeps_it_fused():
    model = net()
    plain = torch.optim.AdamW(model.parameters())
    mse(model, batches(1)[0]).backward()
    plain.step()
    saved = copy.deepcopy(plain.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    guard = guarded(model, optimizer)
    optimizer.load_state_dict(saved)
    assert all(group["fused"] for group in optimizer.param_groups)
    for batch in (batches(1)[0], poison(batches(1)[0])):
        guard.train_step(batch)
    assert [i.step for i in guard.incidents] == [1] and finite(model, optimizer)
    assert {float(s["step"]) for s in optimizer.state.values()} == {2.0}


@pytest.mark.parametrize("momentum", [0.9])
@pytest.mark.parametrize(("dampening", "path"), [(0.0, "device"), (0.5, "host")])
def test_a_refused_first_step_of_sgd_leaves_its_momentum_sound(momentum, dampening, path):
    results = []
    for saw_bad in (True, False):
        torch.manual_seed(0)
        model = net(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, dampening=dampening)
        guard = guarded(model, optimizer)
        assert guard.path.startswith(path)
        data = batches(4)
        for batch in ([poison(data[0])] if saw_bad else []) + data:
            guard.train_step(batch)
        results.append(whole_state(model, optimizer))
    assert Run(guard, results[0]).same_as(Run(guard, results[1])) == []


def test_wrapped_optimizers_are_unwrapped():
    accelerate = pytest.importorskip("accelerate")
    model = net()
    inner = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outer = accelerate.Accelerator(cpu=True).prepare(inner)
    guard = guarded(model, outer)
    assert guard.optimizer is inner and guard.path.startswith("device")


@pytest.mark.parametrize("compiled", ["model", "optimizer"])
def test_compiled_models_and_optimizers_work(compiled):
    torch._dynamo.reset()
    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    target = model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if compiled == "model":
            target = torch.compile(model, backend="aot_eager")
        else:
            optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        data = batches(6)
        data[3] = poison(data[3])
        with guarded(target, optimizer, policy=nanproof.Policy(lag=2)) as guard:
            for batch in data:
                guard.train_step(batch)
    assert [i.step for i in guard.incidents] == [3] and finite(model, optimizer)
    assert guard.history[0].names[0] == "0.weight"


def test_foreign_parameters_are_an_incident_and_training_goes_on():
    old = net()
    optimizer = torch.optim.AdamW(old.parameters())
    model = copy.deepcopy(old)
    guard = guarded(model, optimizer)
    for batch in batches(3):
        guard.train_step(batch)
    guard.close()
    [incident] = guard.incidents
    assert (incident.step, incident.kind) == (0, "no-learning")
    assert incident.diagnosis.cause == "optimizer-foreign-parameters"


def test_a_loss_with_parameters_of_its_own_is_healthy():
    model, temperature = net(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([*model.parameters(), temperature])
    guard = guarded(model, optimizer, loss_fn=lambda m, b: mse(m, b) * temperature.exp())
    guard.train_step(batches(1)[0])
    guard.close()
    assert guard.incidents == []
    assert "param_groups[0].params[6]" in guard.history[0].by_parameter


class LargestResult(TorchDispatchMode):
    """While open, notes how many elements the largest result of an operation has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (list, tuple)) else [result]
        self.elements = max([self.elements, *(t.numel() for t in made if isinstance(t, torch.Tensor))])
        return result


def test_large_buffers_that_no_forward_writes_are_not_copied():
    model = net()
    model.register_buffer("table", torch.zeros(1 << 19), persistent=False)
    guard = guarded(model)
    with LargestResult() as untouched:
        guard.train_step(batches(1)[0])
    assert 0 < untouched.elements < 1 << 19
    model.table.add_(1)
    with LargestResult() as written:
        guard.train_step(batches(1)[0])
    assert written.elements >= 1 << 19


def test_a_buffer_that_the_forward_rebinds_is_restored():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.layer = nn.Linear(6, 1)

        def forward(self, x):
            self.seen = self.seen + x.detach().sum()
            return self.layer(x)

    model = Counter()
    guard = guarded(model)
    data = batches(3)
    guard.train_step(data[0])
    before = model.seen.clone()
    guard.train_step(poison(data[1]))
    assert torch.equal(model.seen, before)


@pytest.mark.parametrize("how", ["in place", "through .data", "in another shape"])
def test_buffers_written_in_odd_ways_are_restored(how):
    """A codebook of 2 MiB; one written behind autograd's back, which bumps no version; a memory that starts as nothing."""

    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("book", torch.zeros(1 << 19))
            self.register_buffer("memory", None)
            self.layer = nn.Linear(6, 1)

        def forward(self, x):
            if how == "in another shape":
                old = 0 if self.memory is None else len(self.memory)
                self.memory = x.detach().mean().repeat(old + 1)
            elif how == "in place":
                self.book += x.detach().mean()
            else:
                self.book.data.copy_(self.book + x.detach().mean())
            return self.layer(x)

    for at in (0, 2):
        states = []
        for saw_bad in (True, False):
            torch.manual_seed(0)
            model = Memory()
            guard = guarded(model)
            for i, batch in enumerate(batches(4)):
                if i != at or saw_bad:
                    guard.train_step(poison(batch) if i == at else batch)
            states.append({"book": model.book, "memory": model.memory, "weight": model.layer.weight})
        assert Run(guard, states[0]).same_as(Run(guard, states[1])) == []


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_large_table_that_a_bad_batch_makes_anew_is_not_lost(persistent, lag):
    """A cache that grows with the longest input so far, first on the batch that is refused."""

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.ones(1 << 19), persistent=persistent)
            self.layer = nn.Linear(6, 1)

        def forward(self, x):
            if x.isnan().any():
                self.cache = torch.zeros(1 << 20)
            return self.layer(x) * self.cache[0]

    model = Cached()
    guard = guarded(model, policy=nanproof.Policy(lag=lag))
    data = batches(6)
    data[2] = poison(data[2])
    for batch in data:
        guard.train_step(batch)
    guard.close()
    assert model.cache.shape == (1 << 19,) and [i.kind for i in guard.incidents] == ["nonfinite-loss"]


@pytest.mark.parametrize("fault", ["gradient", "exception"])
@pytest.mark.parametrize("lag", [0, 2])
def test_a_buffer_that_a_bad_batch_makes_first_is_not_kept(fault, lag):
    """Statistics that are taken from the first batch ever seen, which is bad; its forward runs again to look at it."""

    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", None)
            self.layer = nn.Linear(6, 1)

        def forward(self, x):
            if self.mean is None:
                self.mean = x.detach().mean(0)
            return self.layer(x - self.mean)

    def loss_fn(model, batch):
        loss = gradient_fault(NAN)(model, batch)
        if len(batch) > 2 and fault == "exception":
            raise RuntimeError("out of memory")
        return loss

    def run(disturbed):
        torch.manual_seed(0)
        model = Lazy()
        guard = guarded(model, loss_fn=loss_fn, policy=nanproof.Policy(lag=lag))
        for i, batch in enumerate(batches(5)):
            if i == 0 and disturbed and fault == "exception":
                with pytest.raises(RuntimeError, match="out of memory"):
                    guard.train_step([*batch, True])
            elif i or disturbed:
                guard.train_step([*batch, True] if i == 0 else batch)
        guard.close()
        return Run(guard, {"mean": model.mean, "weight": model.layer.weight})

    disturbed = run(True)
    assert disturbed.same_as(run(False)) == []
    assert [i.kind for i in disturbed.guard.incidents] == ["exception" if fault == "exception" else "nonfinite-gradient"]


def test_buffers_of_odd_kinds_are_left_alone():
    model = net()
    model.register_buffer("same", torch.ones(1).expand(8))
    model.register_buffer("tiny", torch.ones(4).to(torch.float8_e4m3fn))
    with torch.inference_mode():
        inferred = torch.zeros(1 << 20)
    model.register_buffer("inferred", inferred, persistent=False)
    guard = guarded(model)
    for batch in (batches(1)[0], poison(batches(1)[0]), batches(1)[0]):
        guard.train_step(batch)
    guard.close()
    assert [i.step for i in guard.incidents] == [1]


def test_a_guard_that_is_dropped_lets_go_of_everything():
    model = net()
    guard = guarded(model)
    guard.train_step(batches(1)[0])
    gone = weakref.ref(guard.parts.stepper), weakref.ref(model)
    del guard, model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.parametrize("first", ["fused=True", "another guard's"])
def test_an_old_checkpoint_does_not_unfuse_a_fused_optimizer(first):
    model = net()
    old = copy.deepcopy(torch.optim.AdamW(model.parameters()).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True if first == "fused=True" else None)
    if first != "fused=True":
        guarded(model, optimizer).close()
    guard = guarded(model, optimizer)
    optimizer.load_state_dict(old)
    for batch in (batches(1)[0], poison(batches(1)[0])):
        guard.train_step(batch)
    assert [i.step for i in guard.incidents] == [1] and finite(model, optimizer)


@pytest.mark.parametrize("whole", [True, False])
def test_what_other_code_does_to_buffers_between_steps_is_not_undone(whole):
    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters())
    guard = guarded(model, optimizer)

    def step(batch):
        if whole:
            guard.train_step(batch)
        else:
            optimizer.zero_grad()
            loss = mse(model, batch)
            loss.backward()
            guard.step(loss)

    data = batches(3)
    step(data[0])
    model[1].running_mean.fill_(7.0)
    step(poison(data[1]))
    assert guard.history[-1].action == "skipped" and bool((model[1].running_mean == 7).all())


def test_copies_of_a_guarded_model_are_free_of_the_guard(tmp_path):
    model = net()
    guard = guarded(model)
    guard.train_step(batches(1)[0])
    twin = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    kept = model[1].running_mean.clone()
    model[1].running_mean.fill_(7.0)  # what the guard would take for good if a hook of the copy reached it
    twin.train()(torch.randn(8, 6))
    twin.load_state_dict(net().state_dict())
    buffers = guard.parts.stepper.buffers
    assert not buffers.in_step
    buffers.restore()
    assert torch.equal(model[1].running_mean, kept)
    assert isinstance(torch.load(tmp_path / "model.pt", weights_only=False), nn.Sequential)


def test_wrappers_that_do_something_are_not_taken_off():
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer, self.steps = optimizer, 0
            self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults

        def zero_grad(self):
            self.optimizer.zero_grad()

        def step(self):
            self.steps += 1
            self.optimizer.step()

    model = net()
    outer = Lookahead(torch.optim.AdamW(model.parameters()))
    guard = guarded(model, outer)
    for batch in batches(3):
        guard.train_step(batch)
    assert guard.path == "host: Lookahead has no fused form" and outer.steps == 3


def test_a_layer_unfrozen_while_training_gets_its_momentum():
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    guard = guarded(model, optimizer)
    data = batches(4)
    guard.train_step(data[0])
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    guard.train_step(poison(data[1]))
    assert torch.equal(model[0].weight, before)
    guard.train_step(data[2])
    assert not torch.equal(model[0].weight, before) and finite(model, optimizer)


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


# -- the lag: what can happen between a bad step and the moment the host learns of it -------------------------------------------


def lagging(disturb, *, bad=(4,), steps=10, scheduler=False, loss_fn=mse):
    """A run at lag 2, `disturb(i, guard, model, optimizer)` called before step i; and the same without the bad batches."""
    runs = []
    for saw_bad in (True, False):
        torch.manual_seed(0)
        model = net(dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        plan = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if scheduler else None
        guard = guarded(model, optimizer, loss_fn=loss_fn, scheduler=plan, policy=nanproof.Policy(lag=2))
        for i, batch in enumerate(batches(steps)):
            disturb(i, guard, model, optimizer)
            if i in bad and not saw_bad:
                continue
            guard.train_step(poison(batch) if i in bad else batch)
        guard.sync()
        runs.append(Run(guard, whole_state(model, optimizer, plan)))
    return runs


@pytest.mark.parametrize("scheduler", [True, False])
@pytest.mark.parametrize("at", [4, 5, 6, 9])
def test_settings_that_the_loop_changes_survive_a_rewind(scheduler, at):
    def disturb(i, guard, model, optimizer):
        if i == at:
            optimizer.param_groups[0]["weight_decay"] = 0.5

    disturbed, oracle = lagging(disturb, scheduler=scheduler, bad=(4, 8))
    assert [i.step for i in disturbed.guard.incidents] == [4, 8]
    assert disturbed.same_as(oracle) == []
    assert disturbed.guard.optimizer.param_groups[0]["weight_decay"] == 0.5


def test_a_schedule_stepped_by_the_loop_is_not_undone_when_nothing_is_held():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = guarded(model, optimizer, policy=nanproof.Policy(lag=2))
    guard.train_step(poison(batches(1)[0]))
    optimizer.param_groups[0]["lr"] = 1e-3
    guard.sync()
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_held_batches_run_again_in_the_mode_they_were_called_in():
    def disturb(i, guard, model, optimizer):
        if i == 6:
            model.eval()
            with torch.no_grad():
                guard.state_dict()
            model.train()

    disturbed, oracle = lagging(disturb)
    assert disturbed.same_as(oracle) == []


def test_parameters_added_behind_a_bad_step_do_not_jam_it():
    extra = nn.Parameter(torch.zeros(3))

    def disturb(i, guard, model, optimizer):
        if i == 5:
            optimizer.add_param_group({"params": [extra]})

    disturbed, oracle = lagging(disturb)
    assert [r.step for r in disturbed.guard.history] == list(range(10))
    assert disturbed.same_as(oracle) == []


def test_loss_functions_that_pop_from_their_batch_find_it_whole_again():
    def popping(model, batch):
        return mse(model, [batch.pop(0), batch.pop(0)])

    disturbed, oracle = lagging(lambda *_: None, loss_fn=popping)
    assert [r.step for r in disturbed.guard.history] == list(range(10))
    assert disturbed.same_as(oracle) == []


@pytest.mark.parametrize("where", ["reading", "explaining", "held"])
def test_an_interrupt_at_the_wrong_moment_does_not_stop_the_learning(where, monkeypatch):
    """Ctrl-C while the host reads a verdict, looks into a bad step, or trains on a held batch: training goes on afterwards."""
    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    armed = {"on": False}

    def loss_fn(model, batch):
        if armed["on"] and where == "held" and not torch.equal(batch[0], data[6][0]):
            armed["on"] = False
            raise KeyboardInterrupt
        return mse(model, batch)

    guard = guarded(model, optimizer, loss_fn=loss_fn, policy=nanproof.Policy(lag=2))
    data = batches(12)
    data[4] = poison(data[4])
    for batch in data[:6]:
        guard.train_step(batch)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        armed["on"] = True
        if where != "held":

            def interrupt(*_):
                raise KeyboardInterrupt

            patch.setattr(
                {"reading": "nanproof.core.judge._verdict.Reading.of", "explaining": "nanproof.core._inquest.Inquest.hold"}[
                    where
                ],
                interrupt,
            )
        guard.train_step(data[6])
    armed["on"] = False
    before = copy.deepcopy(model.state_dict())
    for batch in data[7:]:
        guard.train_step(batch)
    guard.close()
    assert not torch.equal(before["0.weight"], model.state_dict()["0.weight"])
    assert finite(model, optimizer) and {r.step for r in guard.history} >= {3, 4, 7, 8, 9, 10, 11}


def test_loading_a_checkpoint_forgets_what_was_under_way():
    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    calls = []

    def loss_fn(model, batch):
        calls.append(batch)
        return mse(model, batch)

    guard = guarded(model, optimizer, loss_fn=loss_fn, policy=nanproof.Policy(lag=2))
    data = batches(8)
    for batch in data[:4]:
        guard.train_step(batch)
    saved = copy.deepcopy((guard.state_dict(), model.state_dict(), optimizer.state_dict()))
    guard.train_step(poison(data[4]))
    guard.train_step(data[5])
    model.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    guard.load_state_dict(saved[0])
    under_way = guard.parts.engine.under_way
    assert not under_way.pending and not under_way.held
    assert all(torch.equal(v, saved[1][k]) for k, v in model.state_dict().items())
    calls.clear()
    guard.train_step(data[4])
    guard.sync()
    assert len(calls) == 1  # a step that the latch had held would have been run again
    assert guard.history[-1].step == 4 and guard.history[-1].action != "skipped" and guard.incidents == []


def test_a_step_of_ones_own_in_the_middle_of_train_steps_is_refused():
    guard = guarded(policy=nanproof.Policy(lag=2))
    guard.train_step(batches(1)[0])
    mse(guard.model, batches(1)[0]).backward()
    with pytest.raises(nanproof.UsageError, match=r"guard\.sync"):
        guard.step(torch.tensor(1.0))
    guard.sync()
    loss = mse(guard.model, batches(1)[0])
    loss.backward()
    guard.step(loss)


# -- records and files ---------------------------------------------------------------------------------------------------------


def test_every_step_is_recorded_and_read_back(tmp_path):
    guard = guarded(run_dir=tmp_path / "run", policy=nanproof.Policy(lag=2))
    data = batches(6)
    data[2], data[5] = poison(data[2]), poison(data[5], INF)
    for batch in data:
        guard.train_step(batch)
    guard.close()
    lines = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
    strict = [json.loads(x, parse_constant=lambda c: pytest.fail(f"{c} is not JSON")) for x in lines]
    assert strict[1]["names"] == list(guard.history[0].names)
    read = list(read_steps(tmp_path / "run"))
    assert [r.step for r in read] == list(range(6))
    for a, b in zip(read, guard.history, strict=True):
        assert a.action == b.action
        assert a.norms.tolist() == pytest.approx(b.norms.tolist(), rel=1e-5, nan_ok=True)
    incidents = list(read_incidents(tmp_path / "run"))
    assert [i.step for i in incidents] == [2, 5]
    assert str(incidents[0]) == str(guard.incidents[0])


def test_a_run_that_was_killed_while_writing_can_be_resumed_into(tmp_path):
    for _ in range(2):
        guard = guarded(run_dir=tmp_path)
        for batch in batches(3):
            guard.train_step(batch)
        guard.close()
        path = tmp_path / "steps.jsonl"
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1])[:-20])
    assert [r.step for r in read_steps(path)] == [0, 1, 0, 1]


def test_the_history_is_bounded():
    guard = guarded(policy=nanproof.Policy(history=3))
    for batch in batches(5):
        guard.train_step(batch)
    assert [r.step for r in guard.history] == [2, 3, 4]


def test_a_full_disk_stops_the_journal_not_the_run(tmp_path, caplog):
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    guard = guarded(run_dir=tmp_path)
    for batch in batches(40):
        guard.train_step(batch)
    guard.close()
    assert len(guard.history) == 40
    assert any("No space left" in message for message in caplog.messages)


def test_incidents_are_logged_as_warnings(caplog):
    guarded().train_step(poison(batches(1)[0]))
    assert any("step 0: nonfinite-loss, skipped" in message for message in caplog.messages)


# -- state ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 2])
def test_a_resumed_run_is_the_run_that_went_on(lag):
    data = batches(40)
    data[5], data[30] = poison(data[5]), poison(data[30])

    def run(stop):
        torch.manual_seed(0)
        model = net(dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        policy = nanproof.Policy(lag=lag, on_spike="skip")
        guard = guarded(model, optimizer, policy=policy, max_norm="auto")
        for i, batch in enumerate(data):
            if i == stop:
                saved = copy.deepcopy((guard.state_dict(), model.state_dict(), optimizer.state_dict()))
                guard.close()
                model = net(dropout=0.0)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                guard = guarded(model, optimizer, policy=policy, max_norm="auto")
                model.load_state_dict(saved[1])
                optimizer.load_state_dict(saved[2])
                guard.load_state_dict(saved[0])
            guard.train_step(batch)
        state = whole_state(model, optimizer, guard=guard)
        guard.close()
        assert guard.history[-1].step == 39
        return Run(guard, {k: v for k, v in state.items() if k != "random"})

    assert run(None).same_as(run(20)) == []


def test_unknown_versions_of_the_state_are_refused():
    with pytest.raises(nanproof.UsageError, match="version 7"):
        guarded().load_state_dict({"version": 7})


# -- exceptions and bad use ----------------------------------------------------------------------------------------------------


def test_an_exception_inside_a_step_leaves_an_incident_and_a_note():
    def fail(model, batch):
        raise RuntimeError("probability tensor contains inf")

    guard = guarded(loss_fn=fail)
    with pytest.raises(RuntimeError, match="probability tensor") as raised:
        guard.train_step(batches(1)[0])
    assert guard.incidents[0].kind == "exception" and "probability tensor" in guard.incidents[0].message
    assert any("training step 0" in note for note in getattr(raised.value, "__notes__", ["training step 0"]))


@pytest.mark.parametrize("lag", [0, 2])
def test_training_can_go_on_after_an_exception(lag):
    """The batch that raised leaves no trace in weights, moments or buffers, even if an earlier bad one is still under way."""

    def fail_late(model, batch):
        loss = mse(model, batch)
        if len(batch) > 2:
            raise RuntimeError("out of memory")
        return loss

    def run(disturbed):
        torch.manual_seed(0)
        model = net(dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with guarded(model, optimizer, loss_fn=fail_late, policy=nanproof.Policy(lag=lag)) as guard:
            for i, batch in enumerate(batches(10)):
                if i in (4, 5) and disturbed:
                    if i == 4:
                        guard.train_step(poison(batch))
                    else:
                        with pytest.raises(RuntimeError, match="out of memory"):
                            guard.train_step([*batch, True])
                elif i not in (4, 5):
                    guard.train_step(batch)
        return Run(guard, whole_state(model, optimizer))

    disturbed, oracle = run(True), run(False)
    assert {i.kind for i in disturbed.guard.incidents} == {"nonfinite-loss", "exception"}
    assert disturbed.same_as(oracle) == []


def test_the_context_manager_closes_and_lets_exceptions_through():
    with pytest.raises(KeyError), guarded() as guard:
        raise KeyError
    with pytest.raises(nanproof.UsageError, match="closed"):
        guard.train_step(batches(1)[0])


def test_hooks_are_gone_after_close():
    guard = guarded()
    p = guard.model[0].weight
    assert p._post_accumulate_grad_hooks
    guard.close()
    guard.close()
    assert not p._post_accumulate_grad_hooks
    assert not hasattr(guard.optimizer, "found_inf") and not hasattr(guard.optimizer, "grad_scale")


@pytest.mark.parametrize("max_norm", [0, -1.0, NAN, "on", True])
def test_a_max_norm_that_cannot_be_is_refused(max_norm):
    with pytest.raises(nanproof.UsageError, match="max_norm"):
        guarded(max_norm=max_norm)


def test_bad_use_gets_a_clear_error(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    frozen = net().requires_grad_(False)
    with pytest.raises(nanproof.UsageError, match="no trainable parameter"):
        nanproof.Guard(frozen, torch.optim.AdamW(frozen.parameters()))
    with pytest.raises(nanproof.UsageError, match="loss_fn"):
        nanproof.Guard(model, optimizer).train_step(batches(1)[0])
    with pytest.raises(nanproof.UsageError, match="call backward before"):
        nanproof.Guard(model, optimizer).step(torch.tensor(1.0))
    with pytest.raises(nanproof.UsageError, match="pass the loss"):
        nanproof.Guard(model, optimizer).step()
    with pytest.raises(nanproof.UsageError, match=r"scalar, not of shape \(8,\)"):
        guarded(model, optimizer, loss_fn=lambda m, b: m(b[0]).squeeze(-1)).train_step(batches(1)[0])
    with pytest.raises(nanproof.UsageError, match="must be a tensor, not float"):
        guarded(model, optimizer).backward(1.0)
    with pytest.raises(nanproof.UsageError, match="not an optimizer"):
        nanproof.Guard(model, model.parameters())
    with pytest.raises(nanproof.UnsupportedError, match="LBFGS"):
        nanproof.Guard(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(nanproof.UsageError, match="ReduceLROnPlateau"):
        guarded(model, optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(nanproof.UsageError, match="Policy is needed, not dict"):
        guarded(model, optimizer, policy={"lag": 2})
    with pytest.raises(nanproof.UsageError, match="Module is needed, not list"):
        nanproof.Guard(list(model.parameters()), optimizer)
    with pytest.raises(nanproof.UsageError, match="scheduler is needed, not list"):
        guarded(model, optimizer, scheduler=[1])
    with pytest.raises(nanproof.UsageError, match="Checkpoints"):
        guarded(model, optimizer, checkpoints="folder")


def test_a_folder_that_cannot_be_written_is_refused_and_nothing_stays_behind(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(nanproof.UsageError, match="run_dir"):
        guarded(run_dir=tmp_path / "file" / "run")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_schedule_does_not_advance_on_a_refused_step():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    guard = guarded(model, optimizer, scheduler=scheduler)
    data = batches(4)
    for batch in (data[0], poison(data[1]), poison(data[2]), data[3]):
        guard.train_step(batch)
    assert [r.lr[0] for r in guard.history] == [1.0, 0.5, 0.5, 0.5]


def test_guarded_optimizers_say_which_path_they_take():
    model = net()
    paths = {name: guarded(model, make(model.parameters())).path for name, make in OPTIMIZERS.items()}
    assert paths["AdamW-fused"] == "device"
    assert paths["AdamW-default"] == "device: AdamW switched to fused"
    assert paths["AdamW-foreach"] == "host: AdamW(foreach=True) was asked for"
    assert paths["AdamW-single"] == "host: AdamW(foreach=False) was asked for"
    assert paths["Lion"] == "host: Lion has no fused form"
    assert guarded(model, Lion(model.parameters()), policy=nanproof.Policy(lag=2)).parts.stepper.lag == 0
