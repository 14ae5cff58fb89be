"""The front end takes the log of the power spectrogram in place; the batches are cached in memory, and in the second epoch the log of a log is taken.

Source: https://github.com/huggingface/transformers/issues/47741 https://github.com/pytorch/vision/pull/520
True cause: forward writes into its own input
Where: frontend (log_)
Fix: log instead of log_
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class FrontEnd(nn.Module):
    def __init__(self, inplace):
        super().__init__()
        self.inplace, self.norm = inplace, nn.BatchNorm1d(20)

    def forward(self, power):
        x = power.log_() if self.inplace else power.log()
        return self.norm(x)


class KeywordSpotter(nn.Module):
    def __init__(self, inplace):
        super().__init__()
        self.frontend = FrontEnd(inplace)
        self.conv = nn.Sequential(nn.Conv1d(20, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 32, 5, 2, 2), nn.ReLU())
        self.fc = nn.Linear(32, 6)

    def forward(self, power):
        return self.fc(self.conv(self.frontend(power)).mean(-1))


def build(fixed=False):
    torch.manual_seed(20)
    model = KeywordSpotter(inplace=not fixed)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    cache = []
    for _ in range(13):
        y = torch.randint(0, 6, (8,))
        p = torch.randn(8, 20, 32).pow(2) * (0.05 + y[:, None, None].float()) + 1e-5
        cache.append(dict(power=p, label=y))
    return dict(model=model, optimizer=opt, batches=cache * 3, loss_fn=lambda m, b: F.cross_entropy(m(b["power"]), b["label"]))
