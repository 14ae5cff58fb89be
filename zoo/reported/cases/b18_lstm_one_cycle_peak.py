"""Time-series forecasting with an LSTM and a one-cycle schedule: the loss falls well for a third of the run, then the rate comes near its peak and the loss jumps up and stays high.

Source: https://github.com/pytorch/examples/issues/247 https://github.com/guillaumegenthial/sequence_tagging/issues/47
True cause: the peak rate is too high
Where: the optimizer / the schedule
Fix: max_lr 0.01
"""
import torch
from torch import nn

torch.set_num_threads(1)


class Forecaster(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, num_layers=2, batch_first=True)
        self.linear = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.linear(self.lstm(x)[0])


def build(fixed=False):
    torch.manual_seed(1)
    model = Forecaster()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.01 if fixed else 2.0, total_steps=120, pct_start=0.5, div_factor=10 if fixed else 1000)
    t = torch.arange(25).float()
    batches = []
    for _ in range(110):
        phase = torch.rand(16, 1) * 6.28
        wave = torch.sin(0.5 * t[None] + phase).unsqueeze(-1)
        batches.append((wave[:, :-1], wave[:, 1:]))
    return dict(model=model, optimizer=opt, scheduler=sched, batches=batches, loss_fn=lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]))
