"""Training and evaluation: the same without dropout, and evaluation is not random."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from probed import causes, probed


class Net(nn.Module):
    def __init__(self, wrong=""):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm, self.two = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.drop, self.wrong = nn.Dropout(0.2), wrong

    def forward(self, x):
        x = self.drop(self.norm(self.one(x)).relu())
        if self.wrong == "functional":
            x = F.dropout(x, 0.3)
        if self.wrong == "scaled" and self.training:
            x = x * 2
        if self.wrong == "noise" and self.training:
            x = x + torch.randn_like(x)
        if self.wrong == "always":
            x = x + 0.1 * torch.randn_like(x)
        return self.two(x)


def batch():
    g = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, generator=g), torch.randint(0, 3, (8,), generator=g)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def test_dropout_in_evaluation():
    (found,) = probed(Net("functional"), batch(), loss_fn).found
    assert found.cause == "random-in-eval" and found.op == "dropout" and found.where == "Net" and found.verified


def test_a_dropout_that_eval_does_not_reach():
    net = Net()
    net.hidden = [nn.Dropout(0.5)]
    forward = net.forward
    net.forward = lambda x: forward(net.hidden[0](x))
    assert causes(net, batch(), loss_fn) == ["random-in-eval"]


def test_code_that_asks_for_the_mode():
    (found,) = probed(Net("scaled"), batch(), loss_fn).found
    assert found.cause == "train-eval-differ" and found.where == "two"


def test_dropout_and_batch_norm_pass():
    result = probed(Net(), batch(), loss_fn)
    assert result.found == [] and "train-eval-differ" in [p.name for p in result.probes]


def test_noise_on_purpose_passes():
    assert causes(Net("noise"), batch(), loss_fn) == []
    assert causes(Net("always"), batch(), loss_fn) == []
    lstm = nn.LSTM(6, 3, 2, dropout=0.5, batch_first=True)
    assert causes(lstm, torch.randn(4, 5, 6), lambda m, x: m(x)[0].square().mean()) == []


class Habits(Net):
    """Returns probabilities in evaluation, or feeds a decoder its targets in training."""

    def forward(self, x):
        out = super().forward(x)
        if self.wrong == "probabilities" and not self.training:
            return out.softmax(-1)
        if self.wrong == "forced":
            steps = torch.arange(3).expand(len(x), 3) if self.training else out.argsort(-1)
            return out + F.embedding(steps, self.two.weight).mean((1, 2)).unsqueeze(-1)
        return out


def test_habits_pass():
    assert causes(Habits("probabilities"), batch(), loss_fn) == []
    assert causes(Habits("forced"), batch(), loss_fn) == []
