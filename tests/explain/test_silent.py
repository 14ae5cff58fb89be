"""Silent failures: found within the number of steps that is stated, and not in healthy runs that look like them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanproof
from nanproof.explain._graph import targets_of
from nanproof.explain._silent import moves_again


def train(model, optimizer, loss_fn, steps, batch, **kwargs):
    guard = nanproof.Guard(model, optimizer, loss_fn=loss_fn, **kwargs)
    for i in range(steps):
        guard.train_step(batch(i))
    guard.close()
    return guard


def data(i):
    g = torch.Generator().manual_seed(i)
    x = torch.randn(16, 6, generator=g)
    return x, x[:, 0] - x[:, 1]


def regress(model, batch):
    return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))


def test_a_learning_rate_of_zero_is_found_within_five_steps():
    model = mlp()
    guard = train(model, torch.optim.AdamW(model.parameters(), 0.0), regress, 6, data)
    (incident,) = guard.incidents
    assert incident.kind == "no-learning" and incident.step == 0
    assert incident.diagnosis.cause == "learning-rate-zero" and incident.diagnosis.verified
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1, i / 5) if i < 36 else 0.0)
    assert train(model, optimizer, regress, 40, data, scheduler=schedule).incidents == []  # warm-up, and 0 at the very end


def test_missing_gradients_are_found_within_three_steps_and_unused_parameters_are_not_reported():
    class Cut(nn.Module):
        def __init__(self, cut, unused):
            super().__init__()
            self.stem, self.head, self.cut = nn.Linear(6, 8), nn.Linear(8, 1), cut
            self.spare = nn.Linear(3, 3) if unused else None

        def forward(self, x):
            h = self.stem(x).tanh()
            return self.head(h.detach() if self.cut else h)

    for cut, unused in ((True, False), (False, True)):
        torch.manual_seed(0)
        model = Cut(cut, unused)
        guard = train(model, torch.optim.AdamW(model.parameters(), 1e-2), regress, 4, data)
        assert [i.diagnosis.cause for i in guard.incidents] == (["no-gradient-path"] if cut else [])


def test_rounded_updates_are_found_at_the_second_sample():
    for dtype in (torch.bfloat16, torch.float32):
        model = mlp().to(dtype)
        guard = train(
            model,
            torch.optim.AdamW(model.parameters(), 1e-5, weight_decay=0),
            lambda m, b, dtype=dtype: F.mse_loss(m(b[0].to(dtype)).squeeze(-1).float(), b[1]),
            12,
            data,
        )
        assert [i.diagnosis.cause for i in guard.incidents] == (["bf16-update-rounding"] if dtype == torch.bfloat16 else [])
        assert all(i.step <= 10 for i in guard.incidents)


@pytest.mark.parametrize("shifts", [True, False])
def test_labels_shifted_twice(shifts):
    """The data moves the labels by one; whether the loss does so again makes the difference."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))

    def loss_fn(model, b):
        logits, labels = model(b["ids"]), b["labels"]
        if shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def batch(i):
        ids = torch.randint(0, 12, (4, 9), generator=torch.Generator().manual_seed(i))
        return {"ids": ids, "mask": torch.ones_like(ids), "labels": F.pad(ids[:, 1:], (0, 1), value=-100)}

    guard = train(model, torch.optim.AdamW(model.parameters(), 1e-2), loss_fn, 5, batch)
    assert [i.diagnosis.cause for i in guard.incidents] == (["labels-shifted-twice"] if shifts else [])


def test_never_means_that_nothing_is_looked_for():
    model = mlp()
    guard = train(model, torch.optim.AdamW(model.parameters(), 0.0), regress, 8, data, policy=nanproof.Policy(diagnose="never"))
    assert guard.incidents == []


def test_gradients_that_are_not_cleared():
    """In a loop of one's own: told apart from one that clears them, in either of the two ways."""
    for clear in (None, True, False):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        guard = nanproof.Guard(model, optimizer)
        for i in range(4):
            if clear is not None:
                optimizer.zero_grad(set_to_none=clear)
            loss = regress(model, data(i)) * (float("inf") if i == 2 else 1)
            loss.backward()
            guard.step(loss)
        guard.close()
        causes = [i.diagnosis.cause for i in guard.incidents]
        assert causes[0] == ("gradients-not-cleared" if clear is None else "unknown")


@pytest.mark.parametrize("clear", [None, True, False], ids=["never", "set to None", "set to zero"])
def test_gradients_that_another_model_left_are_cleared_in_time(clear):
    """The generator's backward adds to the discriminator's gradients, which it clears before its own, in two parts. A NaN in the
    data is not blamed on that; on gradients that really stay it is."""
    generator, critic = mlp(), mlp()
    optimizers = [torch.optim.SGD(model.parameters(), 0.0) for model in (generator, critic)]
    guards = [nanproof.Guard(m, o) for m, o in zip((generator, critic), optimizers, strict=True)]
    for i in range(4):
        real, noise = data(i)[0].clone(), torch.randn_like(data(i)[0])
        if i == 2:
            real[0, 0] = float("nan")
        if clear is not None:
            optimizers[1].zero_grad(set_to_none=clear)
        fake = generator(noise).expand(-1, real.shape[1])
        losses = critic(real).mean(), -critic(fake.detach()).mean()
        for loss in losses:
            loss.backward()
        guards[1].step(sum(losses))
        if clear is not None:
            optimizers[0].zero_grad(set_to_none=clear)
        loss = critic(fake).mean()
        loss.backward()
        guards[0].step(loss)
    for guard in guards:
        guard.close()
    assert guards[0].incidents == []
    assert guards[1].incidents[0].step == 2
    assert guards[1].incidents[0].diagnosis.cause == ("gradients-not-cleared" if clear is None else "nonfinite-batch")


class Counted(nn.Module):
    """A next-token model that counts its calls where no guard puts anything back."""

    def __init__(self, calls):
        super().__init__()
        self.embed, self.head, self._note = nn.Embedding(12, 8), nn.Linear(8, 12), calls.append

    def forward(self, ids, labels):
        self._note(1)
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())


def next_token(i):
    ids = torch.randint(0, 12, (4, 9), generator=torch.Generator().manual_seed(i))
    return ids[:, :-1], ids[:, 1:]


@pytest.mark.parametrize("own_loop", [False, True], ids=["train_step", "step"])
@pytest.mark.parametrize("optimizer", [lambda p: torch.optim.AdamW(p, 1e-2), lambda p: torch.optim.SGD(p, 1e-7)])
def test_a_healthy_run_calls_the_model_as_often_as_its_loop_does(own_loop, optimizer):
    """Labels that the data has shifted, and a rate that moves next to nothing, are both as they should be."""
    calls = []
    torch.manual_seed(0)
    model = Counted(calls)
    optimizer = optimizer(model.parameters())
    guard = nanproof.Guard(model, optimizer, loss_fn=None if own_loop else lambda m, b: m(*b))
    for i in range(60):
        if own_loop:
            loss = model(*next_token(i))
            optimizer.zero_grad()
            guard.backward(loss)
            guard.step(loss)
        else:
            guard.train_step(next_token(i))
    guard.close()
    assert (len(calls), guard.incidents) == (60, [])


def test_the_labels_of_a_loss_are_read_from_its_graph():
    """Those that cross_entropy was given, whichever way they lie; none where the loss computes with them itself."""
    logits, labels = torch.randn(4, 9, 12, requires_grad=True), torch.randint(0, 12, (4, 9))
    flat = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    in_two = F.cross_entropy(logits.transpose(1, 2), labels) * 0.5 + F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    by_hand = -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()
    assert [t.tolist() for t in targets_of(flat)] == [labels.flatten().tolist()]
    assert sorted(t.numel() for t in targets_of(in_two)) == [32, 36]
    assert targets_of(by_hand) == []
    again, as_they_are = moves_again(labels, targets_of(flat)).tolist()
    assert again < 0.5 and as_they_are == 1
    again, as_they_are = moves_again(labels, [labels[:, 1:].flatten()]).tolist()
    assert again == 1 and as_they_are == 0
