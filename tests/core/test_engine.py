"""The engine: what it does where several things happen at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nanproof
from toys import Lion, batches, mse, net, poison

RAISES, BAD = 4, 2


def noisy_loss(safe):
    """Draws noise whose deviation can be negative, which raises; batch 2 is NaN."""

    def loss_fn(model, batch):
        x, number = batch
        scale = 0.5 + x[:, 0]
        noise = torch.normal(torch.zeros_like(scale), scale.clamp(min=1e-3) if safe else scale)
        return (model(x).squeeze(-1) - noise).square().mean() + (float("nan") if number == BAD else 0.0) * model(x).sum()

    return loss_fn


def healed(safe, saw_bad, lag):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    policy, g = nanproof.Policy(lag=lag, heal=not safe), torch.Generator().manual_seed(1)
    with nanproof.Guard(model, optimizer, loss_fn=noisy_loss(safe), policy=policy) as guard:
        for i in range(8):
            x = torch.randn(6, 4, generator=g).clamp(-0.4, 0.4)
            if i == RAISES:
                x[2, 0] = -2.0
            if i != BAD or saw_bad:
                guard.train_step((x, i))
    return guard, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_an_exception_is_healed_after_the_steps_before_it(lag):
    """A NaN batch is under way and a good one is held behind it when the next step raises: both come first, in order."""
    guard, weights = healed(safe=False, saw_bad=True, lag=lag)
    assert [(i.step, i.kind, i.action) for i in guard.incidents] == [
        (BAD, "nonfinite-loss", "skipped"),
        (RAISES, "exception", "healed"),
    ]
    assert [record.step for record in guard.history] == list(range(8))
    _, never = healed(safe=True, saw_bad=False, lag=lag)
    assert all(torch.equal(mine, other) for mine, other in zip(weights, never, strict=True))


def test_an_exception_stays_the_users_where_the_steps_before_it_halt():
    """What was under way reaches the cap while the exception is looked into: both are told, and the user's own is raised."""

    def loss_fn(model, batch):
        if len(batch) > 2:
            raise ValueError("this batch is broken")
        return mse(model, batch)

    model, data = net(), batches(3)
    policy = nanproof.Policy(lag=2, heal=True, max_consecutive_skips=0)
    guard = nanproof.Guard(model, torch.optim.AdamW(model.parameters(), fused=True), loss_fn=loss_fn, policy=policy)
    guard.train_step(data[0])
    guard.train_step(poison(data[1]))
    with pytest.raises(ValueError, match="this batch is broken"):
        guard.train_step([*data[2], True])
    assert "exception" in [i.kind for i in guard.incidents]


def test_going_back_at_the_cap_says_so():
    """The limit and how far it was reached, as on a halt."""
    model = net()
    data = [poison(b) if 10 <= i < 13 else b for i, b in enumerate(batches(20))]
    policy = nanproof.Policy(snapshot_every=4, max_consecutive_skips=2)
    with nanproof.Guard(model, torch.optim.AdamW(model.parameters()), loss_fn=mse, policy=policy) as guard:
        for batch in data:
            guard.train_step(batch)
    (back,) = [i for i in guard.incidents if i.action == "rewound"]
    assert (back.step, back.cap, back.cap_count, back.cap_limit) == (12, "max_consecutive_skips", 3, 2)
    assert "3 steps in a row were refused (max_consecutive_skips=2)" in back.outcome and "went back to step 8" in back.outcome


def test_of_several_optimizers_none_is_changed_where_one_cannot_follow():
    """The step is taken on the host then, with every optimizer as the user made it."""
    model = net()
    parameters = list(model.parameters())
    adamw = torch.optim.AdamW(parameters[:2])
    guard = nanproof.Guard(model, [adamw, Lion(parameters[2:])])
    assert guard.path == "host: Lion has no fused form" and adamw.param_groups[0]["fused"] is None
    held = parameters[0] in guard.optimizer.state
    assert not held and len(guard.optimizer.state) == 0


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(("data", "largest"), [(True, 0.1), (False, 0.1), (False, 1000.0)])
def test_the_culprit_of_a_loop_that_clips_by_hand_is_the_one_from_before(parts, data, largest):
    """Clipping by a NaN makes every gradient NaN; `guard.backward` has read the norms by then. Also where the loop accumulates,
    and where the norms have all been small so far, as long as torch counts the writing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with nanproof.Guard(model, optimizer, policy=nanproof.Policy(diagnose="never")) as guard:
        for i in range(6):
            optimizer.zero_grad()
            for _ in range(parts):
                loss = model(torch.randn(4, 4)).square().mean()
                if i == 4:
                    loss = loss + (model[1].bias * 0).sqrt().sum()
                guard.backward(loss)
            total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            for p in model.parameters():
                gradient = p.grad.data if data else p.grad
                gradient *= (largest / total).clamp(max=1.0)
            guard.step()
    (incident,) = guard.incidents
    assert [name for name, _ in incident.culprits] == ["1.bias"]


def test_norms_are_read_after_backward_only_in_loops_that_write_into_gradients():
    """Three looks are enough to tell; from then on a loop that does not pays nothing for it."""
    for writes, reads in ((False, 3), (True, 8)):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        guard = nanproof.Guard(model, optimizer)
        judge, count = guard.engine.judge, []
        read = judge.norms
        judge.norms = lambda read=read, count=count: (count.append(1), read())[1]
        for _ in range(8):
            optimizer.zero_grad()
            guard.backward(model(torch.randn(4, 4)).square().mean())
            for p in model.parameters() if writes else ():
                p.grad.mul_(0.3)
            guard.step()
        guard.close()
        assert len(count) == reads
