"""A vocoder's last convolution is zero-initialised "for a stable start" and then wrapped in weight norm: g * v / |v| with v = 0.

Source: https://github.com/pytorch/pytorch/issues/19126 https://github.com/google/flax/issues/1671
True cause: division by a weight norm of 0
Where: conv_post (weight norm)
Fix: do not zero a weight-normalised layer (zero g instead)
"""
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

torch.set_num_threads(1)


class Generator(nn.Module):
    def __init__(self, zero):
        super().__init__()
        self.conv_pre = weight_norm(nn.Conv1d(20, 32, 7, padding=3))
        self.up = weight_norm(nn.ConvTranspose1d(32, 16, 8, 4, 2))
        self.res = nn.ModuleList(weight_norm(nn.Conv1d(16, 16, 3, padding=d, dilation=d)) for d in (1, 3))
        last = nn.Conv1d(16, 1, 7, padding=3, bias=False)
        if zero:
            nn.init.zeros_(last.weight)
        self.conv_post = weight_norm(last)

    def forward(self, mel):
        x = self.up(F.leaky_relu(self.conv_pre(mel), 0.1))
        for r in self.res:
            x = x + r(F.leaky_relu(x, 0.1))
        return torch.tanh(self.conv_post(F.leaky_relu(x, 0.1))).squeeze(1)


def build(fixed=False):
    torch.manual_seed(25)
    model = Generator(zero=not fixed)
    opt = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.8, 0.99))
    batches = []
    for _ in range(30):
        mel = torch.randn(4, 20, 16)
        wav = torch.tanh(F.interpolate(mel[:, :1], scale_factor=4, mode="linear").squeeze(1))
        batches.append((mel, wav))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: F.l1_loss(m(b[0]), b[1]))
