"""Healthy trainings of many kinds: the guard must have nothing to say about any of them.

python -m zoo.healthy            # 53 runs, 30,100 steps, about four minutes on one core
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanproof
from nanproof.cli._demo import ALPHABET, documents, encode_text
from zoo.architectures import RUNS
from zoo.llama import Llama

KEEP = nanproof.Policy(history=10_000)
VOCABULARY = len(ALPHABET) + 1


def convolutional() -> Iterator[nanproof.Guard]:
    """Bright patches to classify, up to convergence: at the end one hard image is a large surprise."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600)
    guard = nanproof.Guard(
        model, optimizer, loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]), scheduler=scheduler, policy=KEEP
    )
    for _ in range(600):
        labels = torch.randint(0, 4, (32,))
        images = torch.randn(32, 1, 16, 16) * 0.5
        for image, label in zip(images, labels.tolist(), strict=True):
            row, column = 4 * (label // 2), 4 * (label % 2)
            image[0, row : row + 4, column : column + 4] += 1
        guard.train_step((images, labels))
    yield guard


def adversarial() -> Iterator[nanproof.Guard]:
    """Two guards, one for each side of a GAN."""
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    adam = [torch.optim.Adam(m.parameters(), 2e-3, betas=(0.5, 0.9)) for m in (critic, generator)]
    judge = nanproof.Guard(
        critic, adam[0], loss_fn=lambda m, b: F.softplus(-m(b[0])).mean() + F.softplus(m(b[1])).mean(), policy=KEEP
    )
    forge = nanproof.Guard(generator, adam[1], loss_fn=lambda m, z: F.softplus(-critic(m(z))).mean(), policy=KEEP)
    for _ in range(800):
        angle = torch.rand(64) * math.tau
        real = torch.stack((angle.cos(), angle.sin()), 1) + 0.02 * torch.randn(64, 2)
        with torch.no_grad():
            fake = generator(torch.randn(64, 8))
        judge.train_step((real, fake))
        forge.train_step(torch.randn(64, 8))
    yield judge
    yield forge


def policy_gradient() -> Iterator[nanproof.Guard]:
    """REINFORCE with normalised rewards: losses of either sign, and exactly 0 once all rewards are equal."""
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))

    def loss_fn(m: nn.Module, b: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return -(torch.log_softmax(m(b[0]), -1).gather(1, b[1]).squeeze(1) * b[2]).mean()

    guard = nanproof.Guard(policy, torch.optim.AdamW(policy.parameters(), 3e-3), loss_fn=loss_fn, policy=KEEP)
    for _ in range(800):
        state = torch.randn(64, 4)
        action = torch.distributions.Categorical(logits=policy(state).detach()).sample()
        reward = (action == state[:, :3].argmax(1)).float()
        guard.train_step((state, action[:, None], (reward - reward.mean()) / (reward.std() + 1e-4)))
    yield guard


def autoencoder() -> Iterator[nanproof.Guard]:
    model = nn.ModuleList([nn.Linear(16, 8), nn.Linear(4, 16)])
    mixing = torch.randn(3, 16)

    def loss_fn(m: nn.ModuleList, x: Tensor) -> Tensor:
        mean, log_variance = m[0](x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return F.mse_loss(m[1](z), x) + 0.01 * (log_variance.exp() + mean.square() - 1 - log_variance).mean()

    guard = nanproof.Guard(model, torch.optim.Adam(model.parameters(), 1e-2), loss_fn=loss_fn, max_norm=None, policy=KEEP)
    for _ in range(800):
        guard.train_step(torch.randn(32, 3) @ mixing)
    yield guard


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = (
            nn.Embedding(VOCABULARY, 32),
            nn.LSTM(32, 64, batch_first=True),
            nn.Linear(64, VOCABULARY),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0])


def one_document_a_batch() -> Iterator[nanproof.Guard]:
    """Losses and norms as noisy as they get."""
    text = [t for t in documents() if len(t) > 1]
    model = Recurrent()
    guard = nanproof.Guard(
        model,
        torch.optim.RMSprop(model.parameters(), 1e-3),
        loss_fn=lambda m, b: F.cross_entropy(m(b[:, :-1]).transpose(1, 2), b[:, 1:]),
        max_norm=5.0,
        policy=KEEP,
    )
    for _ in range(800):
        document = text[int(torch.randint(len(text), ()))][:60]
        guard.train_step(encode_text([document])[0][:, : len(document)])
    yield guard


def language_models() -> Iterator[nanproof.Guard]:
    """Batches of 16, 2 and 8; the last with adaptive clipping and a long warm-up."""
    tokens, mask = encode_text([t for t in documents() if len(t) > 1])

    def loss_fn(m: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        each = F.cross_entropy(m(b[0])[:, :-1].transpose(1, 2), b[0][:, 1:], reduction="none") * b[1][:, 1:]
        return each.sum() / b[1][:, 1:].sum()

    for size, steps, max_norm, warmup in ((16, 300, 1.0, 20), (2, 500, 1.0, 20), (8, 300, "auto", 100)):
        model = Llama(hidden=64, layers=2, heads=2, kv_heads=2, intermediate=128, vocab=VOCABULARY, length=128)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, total_iters=warmup)
        guard = nanproof.Guard(model, optimizer, loss_fn=loss_fn, scheduler=scheduler, max_norm=max_norm, policy=KEEP)
        for _ in range(steps):
            chosen = torch.randint(len(tokens), (size,))
            guard.train_step((tokens[chosen], mask[chosen]))
        yield guard


KINDS = (convolutional, adversarial, policy_gradient, autoencoder, one_document_a_batch, language_models)


def main() -> None:
    logging.disable()
    torch.set_num_threads(1)
    runs = steps = alarms = 0
    for seed in range(3):
        for kind in KINDS:
            torch.manual_seed(seed)
            for guard in kind():
                guard.close()
                runs, steps, alarms = runs + 1, steps + len(guard.history), alarms + len(guard.incidents)
                for incident in guard.incidents:
                    print(f"{kind.__name__} seed {seed}: {incident}")
    for make in RUNS:
        made = make()
        settings = {"loss_fn": made["loss_fn"], "max_norm": made.get("max_grad_norm"), "scaler": made.get("scaler")}
        guard = nanproof.Guard(made["model"], made["optimizer"], scheduler=made.get("scheduler"), **settings)
        for batch in made["batches"]:
            guard.train_step(batch)
        guard.close()
        runs, steps, alarms = runs + 1, steps + len(guard.history), alarms + len(guard.incidents)
        for incident in guard.incidents:
            print(f"{make.__name__}: {incident}")
    print(f"{alarms} incidents in {runs} healthy runs of {steps} steps")
    raise SystemExit(1 if alarms else 0)


if __name__ == "__main__":
    main()
