# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 2
# source: script with a dataclass config and dataclass outputs
import sys
from dataclasses import dataclass, field
from typing import Optional
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv


@dataclass
class Config:
    lr: float = 1e-3
    weights: dict = field(default_factory=lambda: {"mean": 1.0, "scale": 0.1})
    steps: int = 8


@dataclass
class Output:
    mean: torch.Tensor
    scale: torch.Tensor
    hidden: Optional[torch.Tensor] = None


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 2)

    def forward(self, x):
        o = self.fc(x)
        return Output(mean=o[:, 0], scale=F.softplus(o[:, 1]), hidden=o)


def fit(cfg: Config) -> None:
    torch.manual_seed(0)
    model = Head()
    optim = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    for step in range(cfg.steps):
        x = torch.randn(8, 5)
        y = x.sum(1)
        if BAD and step == 5:
            y[2] = float("nan")
        out = model(x)
        mean_loss = F.mse_loss(out.mean, y)
        scale_loss = ((out.mean - y).abs().detach() - out.scale).pow(2).mean()
        loss = cfg.weights["mean"] * mean_loss + cfg.weights["scale"] * scale_loss
        optim.zero_grad()
        loss.backward()
        optim.step()


fit(Config())
