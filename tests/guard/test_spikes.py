"""Spikes and divergence: what is unusual, what the guard does about it, and that healthy runs have no incident."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nanproof
from guard.guarding import guarded
from toys import batches, mse, net


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


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
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
