"""Several optimizers over one model are one step: all of them take it, or none does."""

from __future__ import annotations

import pytest
import torch

import nanproof
from toys import Lion, batches, mse, net, poison

PAIRS = {
    "fused, fused": (
        "device",
        lambda a, b: [torch.optim.AdamW(a, lr=1e-2, fused=True), torch.optim.SGD(b, 1e-2, 0.9, fused=True)],
    ),
    "left open": ("device", lambda a, b: [torch.optim.AdamW(a, lr=1e-2), torch.optim.Adam(b, lr=1e-2)]),
    "fused, own": ("host", lambda a, b: [torch.optim.AdamW(a, lr=1e-2, fused=True), Lion(b, lr=1e-3)]),
    "own, own": ("host", lambda a, b: [Lion(a, lr=1e-3), torch.optim.RMSprop(b, lr=1e-3)]),
}
BAD = 5


def trained(pair, lag, data, own_loop=False, **options):
    torch.manual_seed(0)
    model = net()
    parameters = list(model.parameters())
    optimizers = PAIRS[pair][1](parameters[:2], parameters[2:])
    policy = nanproof.Policy(lag=lag, **options.pop("policy", {}))
    with nanproof.Guard(model, optimizers, loss_fn=mse, policy=policy, **options) as guard:
        for batch in data:
            if own_loop:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss = mse(model, batch)
                loss.backward()
                guard.step(loss)
            else:
                guard.train_step(batch)
    return guard, model, optimizers


def state(model, optimizers):
    found = [p.detach().clone() for p in (*model.parameters(), *model.buffers())]
    for optimizer in optimizers:
        states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
        found += [torch.as_tensor(s[key]).clone() for s in states for key in sorted(s)]
    return found


@pytest.mark.parametrize("pair", PAIRS)
def test_a_healthy_run_is_the_one_it_would_have_been(pair):
    """Each optimizer takes every step, as in a plain loop over both, in the form that the guard chose."""
    data = batches(8)
    guard, *mine = trained(pair, 0, data, max_norm=None)
    torch.manual_seed(0)
    model = net()
    parameters = list(model.parameters())
    optimizers = PAIRS[pair][1](parameters[:2], parameters[2:])
    for group in (group for optimizer in optimizers for group in optimizer.param_groups if "switched" in guard.path):
        group["fused"] = True
    for batch in data:
        for optimizer in optimizers:
            optimizer.zero_grad()
        mse(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(state(*mine), state(model, optimizers), strict=True))


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_bad_batch_leaves_no_trace_in_any_of_them(pair, lag):
    """Bit for bit the run that never saw it: weights, moments, step counts."""
    data = batches(12)
    seen = [poison(batch) if i == BAD else batch for i, batch in enumerate(data)]
    guard, *saw = trained(pair, lag, seen)
    _, *never = trained(pair, lag, [batch for i, batch in enumerate(data) if i != BAD])
    assert guard.path.split(":")[0] == PAIRS[pair][0]
    assert [(i.step, i.action) for i in guard.incidents] == [(BAD, "skipped")]
    for mine, other in zip(state(*saw), state(*never), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("pair", PAIRS)
def test_in_a_loop_of_your_own_neither_takes_the_bad_step(pair):
    """One refused and the other stepping would leave them at different steps."""
    data = batches(8)
    seen = [poison(batch) if i == BAD else batch for i, batch in enumerate(data)]
    guard, model, optimizers = trained(pair, 0, seen, own_loop=True)
    assert [r.action == "skipped" for r in guard.history] == [i == BAD for i in range(8)]
    assert all(torch.isfinite(x).all() for x in state(model, optimizers) if x.is_floating_point())
    steps = {int(s["step"]) for optimizer in optimizers for s in optimizer.state.values() if "step" in s}
    assert steps <= {7}


@pytest.mark.parametrize("pair", PAIRS)
def test_they_go_back_and_resume_together(pair, tmp_path):
    """Both states are in the copy in memory and in the checkpoint."""
    data = batches(40)
    seen = [poison(batch) if 20 <= i < 24 else batch for i, batch in enumerate(data)]
    guard, model, optimizers = trained(pair, 0, seen, policy={"snapshot_every": 5, "max_consecutive_skips": 2})
    (back,) = [i for i in guard.incidents if i.action == "rewound"]
    assert (back.restored_step, back.restored_from) == (20, "memory") and torch.isfinite(model[0].weight).all()
    whole = trained(pair, 0, data, checkpoints=nanproof.Checkpoints(tmp_path / "a", every=10, prove=5, background=False))
    trained(pair, 0, data[:26], checkpoints=nanproof.Checkpoints(tmp_path / "b", every=10, prove=5, background=False))
    torch.manual_seed(9)
    fresh = net()
    parameters = list(fresh.parameters())
    optimizers = PAIRS[pair][1](parameters[:2], parameters[2:])
    kept = nanproof.Checkpoints(tmp_path / "b", every=10, prove=5, background=False)
    with nanproof.Guard(fresh, optimizers, loss_fn=mse, policy=nanproof.Policy(lag=0), checkpoints=kept) as guard:
        start = guard.resume()
        assert start == 20
        for batch in data[start:]:
            guard.train_step(batch)
    for mine, other in zip(state(fresh, optimizers), state(*whole[1:]), strict=True):
        assert torch.equal(mine, other)


def test_what_cannot_be_one_step_is_refused():
    model = net()
    one = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(nanproof.UsageError, match="a parameter is in two optimizers"):
        nanproof.Guard(model, [one, torch.optim.SGD(model.parameters(), 0.1)])
    with pytest.raises(nanproof.UsageError, match="the list is empty"):
        nanproof.Guard(model, [])
    assert nanproof.Guard(model, [one]).optimizer is one


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_step_in_parts_is_the_step(pair, bad):
    """Each optimizer acts at a call of its own, on one verdict: the result is that of the step at once, bit for bit."""
    data = batches(8)
    seen = [poison(batch) if bad and i == BAD else batch for i, batch in enumerate(data)]
    whole = trained(pair, 0, seen, own_loop=True)
    torch.manual_seed(0)
    model = net()
    parameters = list(model.parameters())
    optimizers = PAIRS[pair][1](parameters[:2], parameters[2:])
    with nanproof.Guard(model, optimizers, loss_fn=mse, policy=nanproof.Policy(lag=0)) as guard:
        engine = guard.engine
        for batch in seen:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = mse(model, batch)
            loss.backward()
            engine.step(loss=loss, acting=optimizers[1:])
            assert len(guard.history) == engine.next_step - 1, "the step has not ended"
            engine.act(optimizers[0])
            engine.end()
    assert [r.action for r in guard.history] == [r.action for r in whole[0].history]
    assert all(torch.equal(a, b) for a, b in zip(state(model, optimizers), state(*whole[1:]), strict=True))


def test_half_weights_that_the_second_optimizer_breaks_take_the_first_ones_step_back():
    """The first has acted by then. Both are put back, and the step counts as refused."""
    torch.manual_seed(0)
    model = net().to(torch.bfloat16)
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[:2], 1e-2), torch.optim.SGD(parameters[2:], 1e-2)]
    policy = nanproof.Policy(lag=0, half_weights="restore", diagnose="never", switch_to_fused=False)
    x, y = batches(1)[0]
    with nanproof.Guard(model, optimizers, policy=policy, max_norm=None) as guard:
        before = [p.detach().clone() for p in parameters]
        loss = mse(model, (x.bfloat16(), y.bfloat16()))
        loss.backward()
        guard.engine.step(loss=loss, acting=optimizers[:1])
        assert not torch.equal(parameters[0], before[0])
        optimizers[1].param_groups[0]["lr"] = 3e38
        parameters[2].grad.fill_(3e38)
        guard.engine.act(optimizers[1])
        guard.engine.end()
    assert [r.action for r in guard.history] == ["skipped"]
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))


def test_weights_that_the_second_breaks_are_put_back_in_both():
    """The optimizers act one by one on one verdict, on the device. 0 / 0 in the second undoes the first."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    first = torch.optim.AdamW([model.weight], lr=1e-2, fused=True)
    second = torch.optim.AdamW([model.bias], lr=1e-2, eps=0.0, fused=True)
    guard = nanproof.Guard(model, [first, second], policy=nanproof.Policy(diagnose="never"))
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(torch.ones(3, 4)).square().mean()
    loss.backward()
    model.bias.grad.zero_()
    guard.engine.step(loss=loss, acting=[first])
    guard.engine.act(second)
    guard.engine.end()
    assert guard.path == "device" and guard.incidents[0].kind == "nonfinite-weight"
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
