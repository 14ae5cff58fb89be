"""The oracle: after bad batches, everything is bit-identical to a run of the same guard that never saw them."""

import pytest
import torch

import nanproof
from crosses import part_of
from toys import OPTIMIZERS, Run, batches, finite, mse, mse_fp16, net, poison, whole_state

BAD = {0, 3, 4, 7, 11}
STEPS = 12


def train(optimizer_name, precision, accumulation, lag, saw_bad, *, dropout=0.2, batch_norm=True, value=float("nan"), **kwargs):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bf16 weights" else torch.float32
    model = net(dropout, batch_norm).to(dtype)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, STEPS, cycle_momentum="SGD" in optimizer_name)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) if precision == "fp16 + scaler" else None
    data = batches(STEPS * accumulation, dtype=dtype)
    steps = []
    for i in range(STEPS):
        micro = data[i * accumulation : (i + 1) * accumulation]
        if i in BAD:
            if not saw_bad:
                continue
            micro[-1] = poison(micro[-1], value)
        steps.append(micro)
    guard = nanproof.Guard(
        model,
        optimizer,
        loss_fn=mse_fp16 if scaler else mse,
        scaler=scaler,
        scheduler=scheduler,
        policy=nanproof.Policy(lag=lag),
        **kwargs,
    )
    for micro in steps:
        guard.train_step(*micro)
    state = whole_state(model, optimizer, scheduler, scaler, guard)
    guard.close()
    assert finite(model, optimizer)
    return Run(guard, state)


def check(*args, **kwargs):
    disturbed, oracle = (train(*args, saw_bad=saw, **kwargs) for saw in (True, False))
    assert [i.step for i in disturbed.guard.incidents] == sorted(BAD)
    assert all(i.action == "skipped" for i in disturbed.guard.incidents)
    assert oracle.guard.incidents == []
    assert [r.step for r in disturbed.guard.history] == list(range(STEPS))
    assert disturbed.same_as(oracle) == []
    return disturbed.guard


@pytest.mark.parametrize(
    ("optimizer", "precision", "accumulation", "lag"),
    part_of(OPTIMIZERS, ("fp32", "bf16 weights", "fp16 + scaler"), (1, 4), (0, 2), every=2),
)
def test_a_bad_batch_leaves_no_trace(optimizer, precision, accumulation, lag):
    """Weights, moments, step counts, buffers, schedule, loss scale, statistics and random numbers are all as never seen."""
    guard = check(optimizer, precision, accumulation, lag)
    fused = "fused" in optimizer or "default" in optimizer
    if precision == "bf16 weights" and "SGD" in optimizer:
        fused = False  # torch's kernel is wrong there
    assert guard.path.startswith("device" if fused else "host: ")
    assert [i.micro_batch for i in guard.incidents] == [accumulation - 1 if accumulation > 1 else None] * len(BAD)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_infinities_are_as_bad_as_nan_at_any_lag(value, lag):
    """1e30 squares to Inf in the loss."""
    check("AdamW-fused", "fp32", 1, lag, value=value)


@pytest.mark.parametrize("max_norm", [None, 0.05, "auto"])
@pytest.mark.parametrize("lag", [0, 2])
def test_any_clipping_leaves_no_trace(max_norm, lag):
    check("AdamW-fused", "fp32", 1, lag, max_norm=max_norm)
    check("AdamW-foreach", "fp32", 1, lag, max_norm=max_norm)


@pytest.mark.parametrize("max_norm", [None, 0.05, 1.0])
@pytest.mark.parametrize("name", ["AdamW-fused", "SGD-fused", "AdamW-foreach", "SGD-single"])
def test_a_healthy_run_is_the_plain_loop(name, max_norm):
    """Against clip_grad_norm_ and step() of the same optimizer: within 1e-6 after 30 steps, where clipping rounds differently."""
    data = batches(30)

    def run(guarded):
        torch.manual_seed(0)
        model = net(batch_norm=False)  # before it, a bias has no gradient but rounding, which Adam blows up
        optimizer = OPTIMIZERS[name](model.parameters())
        guard = nanproof.Guard(model, optimizer, loss_fn=mse, max_norm=max_norm) if guarded else None
        for batch in data:
            if guard:
                guard.train_step(batch)
            else:
                optimizer.zero_grad()
                mse(model, batch).backward()
                if max_norm:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
        if guard:
            guard.close()
            assert guard.incidents == []
        return model.state_dict()

    plain, guarded = run(False), run(True)
    for key, value in plain.items():
        torch.testing.assert_close(guarded[key], value, rtol=1e-5, atol=1e-6)
        if max_norm is None:
            assert torch.equal(guarded[key], value), key


@pytest.mark.parametrize("name", ["AdamW-fused", "SGD-fused", "AdamW-single", "Lion"])
@pytest.mark.parametrize("lag", [0, 2])
def test_step_of_your_own_loop_skips_exactly(name, lag):
    """`guard.step` leaves weights, moments and buffers alone; the schedule and random numbers belong to the loop."""
    data = batches(20)
    data[7], data[8] = poison(data[7]), poison(data[8], float("inf"))

    def run(skip):
        torch.manual_seed(0)
        model = net(dropout=0.0)
        optimizer = OPTIMIZERS[name](model.parameters())
        with nanproof.Guard(model, optimizer, policy=nanproof.Policy(lag=lag)) as guard:
            for i, batch in enumerate(data):
                if i in skip:
                    continue
                optimizer.zero_grad()
                loss = mse(model, batch)
                loss.backward()
                guard.step(loss)
        assert finite(model, optimizer)
        return Run(guard, whole_state(model, optimizer))

    disturbed, oracle = run(()), run((7, 8))
    assert [(i.step, i.kind) for i in disturbed.guard.incidents] == [(7, "nonfinite-loss"), (8, "nonfinite-loss")]
    assert disturbed.same_as(oracle) == []


def test_data_drawn_between_steps_is_not_repeated():
    """With a lag, random numbers that the loop itself drew are not rewound: the same data would come twice."""
    seen = []

    def run(lag):
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with nanproof.Guard(model, optimizer, loss_fn=mse, policy=nanproof.Policy(lag=lag)) as guard:
            for i in range(12):
                batch = [torch.randn(8, 6), torch.randn(8)]
                seen.append(batch[1])
                guard.train_step(poison(batch) if i == 5 else batch)
        return guard

    for lag in (0, 2):
        seen.clear()
        assert [i.step for i in run(lag).incidents] == [5]
        assert len({tuple(y.tolist()) for y in seen}) == len(seen)


def test_settings_changed_between_steps_hold_for_the_held_batches():
    """Without a scheduler of the guard's, a learning rate that the loop sets belongs to the batch it was set for."""

    def run(saw_bad, lag):
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with nanproof.Guard(model, optimizer, loss_fn=mse, policy=nanproof.Policy(lag=lag)) as guard:
            for i, batch in enumerate(batches(12)):
                if i == 5 and not saw_bad:
                    continue
                optimizer.param_groups[0]["lr"] = 1e-2 / (i + 1)
                guard.train_step(poison(batch) if i == 5 else batch)
        return Run(guard, whole_state(model, optimizer))

    for lag in (0, 2):
        assert run(True, lag).same_as(run(False, lag)) == []
