"""Quiet failures are named within the stated number of steps; healthy runs that look like them are left alone.

Where a healthy run shows no signal at all, no replay calls its model: the loop's calls are the only ones.
"""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from quiet import classes, crossed, generator, mlp, own_loop, regression, squared, train
from torch import nn

import nanproof
from nanproof.explain._case import Case
from nanproof.explain._diagnose import explain
from nanproof.explain._start import garbage_buffers


def adam(model, rate=1e-2):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)


def sgd(model, rate=1e-2, **how):
    return torch.optim.SGD(model.parameters(), rate, **how)


def named(trained, cause, *, at, noticed):
    """One incident, verified, dated to a step and reported during another."""
    (incident,) = trained.guard.incidents
    assert (incident.diagnosis.cause, incident.kind) == (cause, "no-learning")
    assert incident.diagnosis.verified
    assert (incident.step, trained.noticed[cause]) == (at, noticed)
    return True


# -- what goes into the loss ----------------------------------------------------------------------


def softmax_twice(model, batch):
    return F.cross_entropy(model(batch[0]).softmax(-1), batch[1])


def sigmoid_twice(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0].sigmoid(), (batch[1] > 0).float())


def all_pairs(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


OBJECTIVES = [
    (softmax_twice, classes, 3, "activation-applied-twice"),
    (sigmoid_twice, classes, 1, "activation-applied-twice"),
    (all_pairs, regression, 1, "loss-broadcast"),
]


@pytest.mark.parametrize(("loss_fn", "batch", "outputs", "cause"), OBJECTIVES)
@pytest.mark.parametrize("run", [train, own_loop])
def test_a_loss_that_is_made_wrongly_is_named_at_the_third_step(run, loss_fn, batch, outputs, cause):
    model = mlp(outputs)
    assert named(run(model, adam(model), loss_fn, 4, batch), cause, at=0, noticed=2)


def test_a_backward_of_the_guard_shows_the_loss_too():
    """guard.step() needs no loss then."""
    model = mlp(1)
    optimizer = adam(model)
    guard = nanproof.Guard(model, optimizer)
    for i in range(4):
        optimizer.zero_grad()
        guard.backward(all_pairs(model, regression(i)))
        guard.step()
    guard.close()
    assert [i.diagnosis.cause for i in guard.incidents] == ["loss-broadcast"]


@pytest.mark.parametrize(
    ("signal", "details", "cause"),
    [
        ("activation-twice", {"inner": "softmax", "outer": "log_softmax"}, "activation-applied-twice"),
        ("broadcast", {"prediction": [8, 1], "result": [8, 8]}, "loss-broadcast"),
        ("uncleared-gradients", {"every_step": True}, "gradients-not-cleared"),
    ],
)
def test_what_a_graph_shows_is_named_without_a_replay(signal, details, cause):
    model = mlp(1)
    found = explain(Case("no-learning", model=model, optimizer=adam(model), signal=signal, uncleared=True, details=details))
    assert (found.cause, found.verified) == (cause, False)
    assert found.confidence >= 0.9


def distilled(model, batch):
    teacher = (batch[0] @ torch.eye(6, 3)).softmax(-1)
    return F.kl_div(model(batch[0]).log_softmax(-1), teacher, reduction="batchmean")


def capped(model, batch):
    return F.cross_entropy(30 * (model(batch[0]) / 30).tanh(), batch[1])


def probabilities(model, batch):
    return F.nll_loss(model(batch[0]).softmax(-1).log(), batch[1])


def log_softmax_twice(model, batch):
    return F.cross_entropy(model(batch[0]).log_softmax(-1), batch[1])


def energy(model, batch):
    """A distance of distributions: every prediction with every target, on purpose."""
    x, y = model(batch[0])[:, 0], batch[1]
    return (x[:, None] - y[None]).abs().mean() - 0.5 * (x[:, None] - x[None]).abs().mean()


def contrastive(model, batch):
    z = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(z @ F.normalize(batch[0][:, :3], dim=-1).T * 5, torch.arange(len(z)))


def smoothed(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.3)


@pytest.mark.parametrize("loss_fn", [distilled, capped, probabilities, log_softmax_twice, contrastive, energy, smoothed])
@pytest.mark.parametrize("run", [train, own_loop])
def test_losses_that_are_made_as_meant_are_left_alone(run, loss_fn):
    model = mlp(3)
    trained = run(model, adam(model), loss_fn, 45, regression if loss_fn is energy else classes)
    assert (trained.quiet, trained.calls) == (True, 45)


# -- gradients that stay --------------------------------------------------------------------------


def test_gradients_that_are_never_cleared_are_named_after_ten_steps():
    model = mlp()
    assert named(own_loop(model, adam(model), squared, 14, regression, clear=False), "gradients-not-cleared", at=1, noticed=10)


class EveryFourth(torch.optim.SGD):
    """Gathers gradients over four calls, then steps and clears them, as accumulation wrappers do."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls % 4 == 0:
            super().step(closure)
            super().zero_grad()

    def zero_grad(self, set_to_none=True):
        pass


@pytest.mark.parametrize("clear", [True, False])
def test_an_optimizer_that_steps_every_fourth_call_may_keep_its_gradients(clear):
    model = mlp()
    trained = own_loop(model, EveryFourth(model.parameters(), 1e-2), squared, 60, regression, clear=clear)
    assert trained.quiet


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_of_several_backwards_in_a_step_are_not_left_over(to_none):
    model = mlp()
    optimizer = adam(model)
    guard = nanproof.Guard(model, optimizer)
    for i in range(40):
        optimizer.zero_grad(set_to_none=to_none)
        for part in range(3):
            loss = squared(model, regression(3 * i + part)) / 3
            loss.backward()
        guard.step(loss)
    guard.close()
    assert guard.incidents == []


# -- pairs ----------------------------------------------------------------------------------------


class Scored(nn.Module):
    """The log-likelihood of token sequences."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop, self.head = nn.Embedding(20, 8), nn.Dropout(dropout), nn.Linear(8, 20)

    def forward(self, ids):
        scores = self.head(self.drop(self.embed(ids[:, :-1]))).log_softmax(-1)
        return scores.gather(-1, ids[:, 1:, None])[..., 0].sum(-1)


def preferring(beta, dropout=0.0):
    model = Scored(dropout)
    reference = copy.deepcopy(model).requires_grad_(False).eval()

    def loss_fn(model, b):
        with torch.no_grad():
            base = reference(b["chosen"]) - reference(b["rejected"])
        return -F.logsigmoid(beta * (model(b["chosen"]) - model(b["rejected"]) - base)).mean()

    return model, loss_fn


def same_pairs(i):
    chosen = torch.randint(0, 20, (8, 6), generator=generator(i))
    return {"chosen": chosen, "rejected": chosen.clone()}


def pairs(i):
    return {
        "chosen": torch.randint(0, 10, (8, 6), generator=generator(i)),
        "rejected": torch.randint(10, 20, (8, 6), generator=generator(i + 500)),
    }


def test_pairs_without_a_difference_are_named_at_the_fourth_step():
    model, loss_fn = preferring(0.1)
    assert named(train(model, adam(model), loss_fn, 16, same_pairs), "identical-pair", at=0, noticed=3)


def test_pairs_that_only_dropout_tells_apart_are_named_after_ten_steps():
    model, loss_fn = preferring(0.02, dropout=0.1)
    assert named(train(model, adam(model, 1e-4), loss_fn, 16, same_pairs), "identical-pair", at=0, noticed=9)


@pytest.mark.parametrize(("beta", "rate"), [(0.1, 1e-2), (0.1, 1e-6), (0.01, 1e-4)])
def test_preferences_that_begin_at_ln_2_are_left_alone(beta, rate):
    """At a small rate they stay there for long."""
    model, loss_fn = preferring(beta)
    trained = train(model, adam(model, rate), loss_fn, 60, pairs)
    assert trained.quiet and trained.guard.history[9].loss == pytest.approx(math.log(2), abs=0.1)


@pytest.mark.parametrize("run", [train, own_loop])
def test_a_critic_that_cannot_tell_real_from_fake_is_left_alone(run):
    def loss_fn(model, b):
        score = model(b[0])[:, 0] * 0.01
        return F.binary_cross_entropy_with_logits(score, b[1])

    def real_and_fake(i):
        return torch.randn(16, 6, generator=generator(i)), torch.tensor([1.0, 0.0]).repeat(8)

    model = mlp()
    trained = run(model, adam(model, 1e-4), loss_fn, 60, real_and_fake)
    assert trained.quiet and trained.guard.history[-1].loss == pytest.approx(math.log(2), abs=0.01)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, ids):
        return self.head(self.embed(ids))


def next_token(model, b):
    return F.cross_entropy(model(b["ids"])[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten())


def reconstructed(model, b):
    return F.mse_loss(model(b["ids"]), b["labels"])


@pytest.mark.parametrize("tokens", [True, False])
def test_inputs_that_are_their_own_labels_are_not_a_pair(tokens):
    """One batch over and over, at a rate that moves next to nothing: the loss is the same for many steps."""
    batch = torch.randint(0, 20, (8, 6), generator=generator(0)) if tokens else regression(0)[0]
    model, loss_fn = (Tokens(), next_token) if tokens else (mlp(6), reconstructed)
    trained = train(model, sgd(model, 1e-9), loss_fn, 10, lambda i: {"ids": batch.clone(), "labels": batch.clone()})
    assert trained.quiet
    losses = [record.loss for record in trained.guard.history]
    assert max(losses) - min(losses) < 1e-6 * losses[0]


def test_the_loss_of_a_policy_may_be_the_same_in_every_step():
    """With a ratio of 1 it is the mean of the advantages."""

    def loss_fn(model, b):
        chosen = model(b[0]).log_softmax(-1).gather(-1, b[1][:, None])[:, 0]
        return -((chosen - chosen.detach()).exp() * torch.tensor([1.0, -0.5, 0.25, 0.25]).repeat(8)).mean()

    model = mlp(3)
    trained = train(model, adam(model), loss_fn, 40, classes)
    assert trained.quiet and {record.loss for record in trained.guard.history} == {-0.25}


def twice_told(policy):
    """Every gradient is 0 after four steps, and the loss is the same for eight: both have one cause."""
    model, loss_fn = preferring(0.1)
    return train(model, adam(model), loss_fn, 16, same_pairs, policy=nanproof.Policy(diagnose=policy))


def test_two_signals_of_one_cause_are_one_report():
    assert [i.message for i in twice_told("new").guard.incidents] == ["every gradient has been exactly 0 for 4 steps"]
    always = twice_told("always")
    assert always.causes == ["identical-pair"] * 2
    assert "for 8 steps" in always.guard.incidents[1].message


# -- clipping -------------------------------------------------------------------------------------


def one_owner(model, batch):
    return squared(model, batch) + 300 * (model.scale - 3).square().sum()


def starving(optimizer):
    model = mlp()
    model.scale = nn.Parameter(torch.ones(1))
    return train(model, optimizer(model), one_owner, 30, regression, max_norm=1.0)


def test_a_parameter_that_takes_the_whole_norm_is_named_after_ten_steps():
    assert named(starving(lambda m: sgd(m, 1e-3)), "clipping-starves", at=0, noticed=9)


def test_adam_evens_heavy_clipping_out():
    assert starving(adam).quiet


@pytest.mark.parametrize("unit", [1e2, 1e4])
def test_a_loss_that_is_large_by_its_unit_is_left_alone(unit):
    """Of summed returns, or of prices: clipped heavily in every step, and learned all the same."""

    def loss_fn(model, b):
        return F.mse_loss(unit * model(b[0])[:, 0], unit * b[1])

    model = mlp()
    assert train(model, adam(model, 3e-3), loss_fn, 60, regression, max_norm=0.5).quiet


def test_a_policy_with_heavy_clipping_under_adam_is_left_alone():
    def loss_fn(model, b):
        chosen = model(b[0]).log_softmax(-1).gather(-1, b[1][:, None])[:, 0]
        return -(chosen * (100 * b[0][:, 0])).sum()

    model = mlp(3)
    assert train(model, adam(model, 1e-3), loss_fn, 60, classes, max_norm=0.5).quiet


# -- losses that do not fall ----------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [lambda m: sgd(m, 30.0, momentum=0.9), lambda m: adam(m, 3.0)])
def test_a_rate_that_is_far_too_high_is_named_within_thirty_steps(optimizer):
    model = mlp(3)
    assert named(train(model, optimizer(model), crossed, 31, classes), "learning-rate-too-high", at=20, noticed=20)


def test_pixels_that_are_not_normalised_are_named_within_eighty_steps():
    model = mlp(3)
    trained = train(model, adam(model), crossed, 81, lambda i: (128 + 60 * classes(i)[0], classes(i)[1]))
    assert named(trained, "inputs-not-normalised", at=80, noticed=80)


def noise(i):
    return classes(i)[0], torch.randint(0, 3, (32,), generator=generator(i + 500))


def warming(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 200))


def test_labels_without_a_pattern_are_nobodys_fault():
    model = mlp(3)
    trained = train(model, adam(model), crossed, 130, noise)
    assert (trained.quiet, trained.calls) == (True, 130)


def test_the_floor_of_smoothed_labels_is_not_a_failure():
    model = mlp(3)
    trained = train(model, adam(model), smoothed, 130, classes)
    assert (trained.quiet, trained.calls) == (True, 130)
    assert trained.guard.history[-1].loss > 0.6


@pytest.mark.parametrize("rate", [1e-5, 1e-6])
def test_fine_tuning_at_a_small_rate_is_left_alone(rate):
    """The weights are good already: the loss falls no further."""
    model = mlp(3)
    optimizer = adam(model, 3e-2)
    for i in range(60):
        optimizer.zero_grad()
        crossed(model, classes(i)).backward()
        optimizer.step()
    trained = train(model, adam(model, rate), crossed, 60, classes)
    assert (trained.quiet, trained.calls) == (True, 60)


def test_a_run_that_still_warms_up_is_left_alone():
    model = mlp(3)
    optimizer = adam(model)
    trained = train(model, optimizer, crossed, 60, classes, scheduler=warming(optimizer))
    assert (trained.quiet, trained.calls) == (True, 60)


# -- learning rates -------------------------------------------------------------------------------


def test_a_rate_that_falls_to_a_millionth_is_named():
    model = mlp(3)
    optimizer = adam(model, 1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1.0 if i < 10 else 1e-7)
    trained = train(model, optimizer, crossed, 20, classes, scheduler=schedule)
    assert named(trained, "learning-rate-zero", at=10, noticed=14)


def test_schedules_that_end_at_zero_with_the_run_are_left_alone():
    for make in (
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=62, final_div_factor=1e9),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: max(0.0, 1 - i / 55)),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 20, eta_min=0.0),
    ):
        model = mlp(3)
        optimizer = adam(model)
        trained = train(model, optimizer, crossed, 60, classes, scheduler=make(optimizer))
        assert (trained.quiet, trained.calls) == (True, 60)


# -- parameters without a gradient ----------------------------------------------------------------


class Encoded(nn.Module):
    """A head on an encoder that may run under no_grad, and may follow another one."""

    def __init__(self, no_grad, momentum=False):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head, self.no_grad = nn.Linear(6, 16), nn.Linear(16, 1), no_grad
        self.online = nn.Linear(6, 16) if momentum else None

    def forward(self, x):
        if self.online is not None:
            with torch.no_grad():
                for p, q in zip(self.encoder.parameters(), self.online.parameters(), strict=True):
                    p.lerp_(q, 0.01)
        with torch.no_grad() if self.no_grad else nullcontext():
            features = self.encoder(x).tanh()
        if self.online is not None:
            features = features + self.online(x).tanh()
        return self.head(features)


def test_an_encoder_under_no_grad_that_the_optimizer_is_to_train_is_named_at_the_third_step():
    model = Encoded(no_grad=True)
    assert named(train(model, sgd(model), squared, 5, regression), "no-gradient-path", at=0, noticed=2)


def test_an_encoder_under_no_grad_that_the_optimizer_does_not_hold_is_frozen_on_purpose():
    model = Encoded(no_grad=True)
    optimizer = torch.optim.SGD(model.head.parameters(), 1e-2)
    trained = train(model, optimizer, squared, 45, regression)
    assert trained.quiet


def test_an_encoder_that_the_forward_itself_moves_is_meant():
    model = Encoded(no_grad=True, momentum=True)
    trained = train(model, torch.optim.SGD([*model.head.parameters(), *model.online.parameters()], 1e-2), squared, 45, regression)
    assert trained.quiet
    model = Encoded(no_grad=True, momentum=True)
    assert train(model, sgd(model), squared, 45, regression).quiet


# -- buffers --------------------------------------------------------------------------------------


class Rotated(nn.Module):
    """Rotates its inputs by a buffer of frequencies."""

    def __init__(self, inv_freq):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.inner, self.head = nn.Linear(6, 16), nn.Linear(16, 1)

    def forward(self, x):
        angle = torch.arange(len(x))[:, None] * self.inv_freq
        return self.head(self.inner(x).tanh() * torch.cat((angle.cos(), angle.sin()), -1))


def frequencies(half=8, base=1e4):
    return base ** -(torch.arange(half) / half)


def unwritten():
    """What memory that nobody wrote may hold."""
    return torch.tensor([3e-41, 1e20, -2e-7, 8e17, 0.3, -4e-30, 6e19, 2e-12])


def test_frequencies_that_nobody_wrote_are_named_once_eight_steps_are_kept():
    model = Rotated(unwritten())
    trained = train(model, adam(model), squared, 12, regression)
    assert named(trained, "uninitialized-buffer", at=7, noticed=7)


def test_frequencies_as_they_should_be_are_left_alone():
    model = Rotated(frequencies())
    trained = train(model, adam(model, 1e-3), squared, 30, regression)
    assert trained.quiet and garbage_buffers(model) == []


def alibi(heads):
    return torch.tensor([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)])


BUFFERS = {
    "mask": torch.full((8, 8), torch.finfo(torch.float32).min).triu(1),
    "half_mask": torch.full((8, 8), torch.finfo(torch.float16).min).triu(1),
    "sentinels": torch.tensor([1e30, 0.0, 1e30, 1.0]),
    "window": torch.exp(-0.5 * (torch.arange(-64, 65) / 4.75) ** 2),
    "narrow": torch.exp(-0.5 * (torch.arange(-8, 9) / 0.6) ** 2),
    "slopes": alibi(12),
    "steep": alibi(2),
    "powers": 10.0 ** torch.arange(-30, 30),
    "position": torch.arange(1000.0),
    "running_var": torch.rand(16) * 1e-6,
    "running_mean": torch.randn(16) * 1e4,
    "log_var": torch.rand(16) - 3,
    "posterior_log_variance_clipped": torch.linspace(-46, -4, 100),
    "covariance": torch.randn(8, 8),
    "bits": 2.0 ** torch.arange(64),
    "inv_freq": frequencies(),
    "long_inv_freq": frequencies(64, 5e6),
    "schedule": torch.linspace(1e-4, 0.02, 1000).neg().add(1).cumprod(0),
    "sparse": F.one_hot(torch.arange(16), 64).float() * 1e-30,
    "hashes": torch.randn(64) * 1e6,
    "prices": torch.randn(64).exp() * 1e6,
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_that_are_odd_and_meant_are_not_garbage(name):
    module = nn.Module()
    module.register_buffer(name, BUFFERS[name].clone())
    assert [found.seen for found in garbage_buffers(module)] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inv_freq", unwritten()),
        ("inv_freq", torch.zeros(8)),
        ("inv_freq", frequencies().flip(0)),
        ("running_var", torch.tensor([1.0, -3e-12, 2.0])),
        ("table", unwritten()),
    ],
)
def test_buffers_that_nobody_wrote_are_garbage(name, value):
    module = nn.Module()
    module.register_buffer(name, value)
    assert [found.name for found in garbage_buffers(module)] == [name]


def rotary(kind, **how):
    transformers = pytest.importorskip("transformers")
    module, config, name = {
        "llama": ("llama.modeling_llama", "LlamaConfig", "LlamaRotaryEmbedding"),
        "gemma": ("gemma3.modeling_gemma3", "Gemma3TextConfig", "Gemma3RotaryEmbedding"),
        "qwen": ("qwen2.modeling_qwen2", "Qwen2Config", "Qwen2RotaryEmbedding"),
    }[kind]
    import importlib

    cls = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    return cls(getattr(transformers, config)(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, **how))


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 5e5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 131072}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
        ("qwen", {"rope_parameters": YARN, "max_position_embeddings": 131072}),
        ("gemma", {}),
    ],
)
def test_rotary_frequencies_of_real_models_are_not_garbage(kind, how):
    """Scaled or not, as their configs make them; the same buffers emptied are."""
    module = rotary(kind, **how)
    assert list(module.named_buffers())
    assert [found.seen for found in garbage_buffers(module)] == []
    for buffer in module.buffers():
        buffer.copy_(unwritten().repeat(len(buffer))[: len(buffer)])
    assert garbage_buffers(module)


# -- state that began anew ------------------------------------------------------------------------


def noisy(i):
    x = torch.randn(64, 6, generator=generator(i))
    return x, x[:, 0] - x[:, 1] + torch.randn(64, generator=generator(i + 5000))


def resumed(*, lose_state, outlier=False, rate=0.1):
    """A run that warms up, settles, and goes on from step 150 with or without the state of its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 60))
    policy = nanproof.Policy(spike_sensitivity=6)
    guard = nanproof.Guard(model, optimizer, loss_fn=squared, scheduler=schedule, policy=policy)
    for i in range(170):
        if i == 150 and lose_state:
            optimizer.state.clear()
        x, y = noisy(i)
        guard.train_step((x, 30 * y) if outlier and i == 150 else (x, y))
    guard.close()
    return guard


def test_an_optimizer_whose_state_began_anew_in_the_middle_is_named_at_the_spike():
    (incident,) = resumed(lose_state=True).incidents
    assert (incident.step, incident.kind, incident.diagnosis.cause) == (151, "spike", "optimizer-state-reset")


def test_a_spike_with_the_whole_state_is_not_blamed_on_it():
    assert resumed(lose_state=False).incidents == []
    causes = [i.diagnosis.cause for i in resumed(lose_state=False, outlier=True).incidents]
    assert causes and "optimizer-state-reset" not in causes


def test_state_that_began_anew_without_a_spike_is_left_alone():
    assert resumed(lose_state=True, rate=1e-3).incidents == []


def test_two_things_that_show_at_the_same_step_are_both_named():
    """A parameter without a gradient is noticed at the third step too, and must not hide how the loss is made."""

    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.spare, self.head = nn.Parameter(torch.zeros(3)), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(x).softmax(-1)

    model = Spare()
    with nanproof.Guard(model, adam(model), loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1])) as guard:
        for i in range(6):
            g = torch.Generator().manual_seed(i)
            x = torch.randn(16, 6, generator=g)
            guard.train_step((x, x[:, :3].argmax(1)))
    assert [i.diagnosis.cause for i in guard.incidents] == ["activation-applied-twice"]
