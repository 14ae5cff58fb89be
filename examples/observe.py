"""A forecast, and what it was of: the logits of a small classifier grow until fp16 cannot hold them.

The loss has a z-loss, which keeps logits small, with its sign the wrong way round. The task is learned all the same, so the loss
looks better and better; then the head's output overflows, and the loss is gone. A guard that observes says so some steps before.

    python examples/observe.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanproof

Z_LOSS = -1e-4  # meant to be +1e-4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Classifier(nn.Module):
    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(3)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, labels = batch
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x).float()
    return F.cross_entropy(logits, labels) + Z_LOSS * logits.logsumexp(-1).square().mean()


def main() -> None:
    torch.set_num_threads(1)  # more would only wait for each other over a model this small
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    centres = 2 * torch.randn(10, 32)
    observe = nanproof.Observe(modules=["blocks.*", "head"])
    guard = nanproof.Guard(model, optimizer, loss_fn=loss_fn, observe=observe)
    with guard:
        while guard.next_step < 400 and not guard.incidents:
            labels = torch.randint(10, (64,))
            guard.train_step((centres[labels] + torch.randn(64, 32), labels))
            record = guard.history[-1]
            if record.step % 20 == 0:
                print(f"step {record.step}: loss {record.loss:.4g}, largest logit {record.observed.by_site['head']:.4g}")
    for forecast in guard.forecasts:
        print(forecast)
    for incident in guard.incidents:
        print(incident)
    first = next(forecast for forecast in guard.forecasts if forecast.kind == "activation-overflow")
    [incident] = guard.incidents
    print(f"{first.where} overflows {incident.step - first.step} steps after it was seen coming")
    assert first.where == "head" and first.step < incident.step


if __name__ == "__main__":
    main()
