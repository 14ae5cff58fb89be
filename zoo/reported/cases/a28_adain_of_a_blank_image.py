"""Style transfer with AdaIN: (x - mean) / (sqrt(var) + eps). The forward is fine for a blank image, but the gradient of the standard deviation at equal values is NaN.

Source: https://github.com/pytorch/pytorch/issues/4320 https://github.com/FluxML/Flux.jl/issues/2096
True cause: the square root of a variance of 0
Where: adain (sqrt)
Fix: sqrt(var + eps)
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class AdaIN(nn.Module):
    def __init__(self, safe):
        super().__init__()
        self.safe = safe

    def forward(self, x, style):
        mean = x.mean((2, 3), keepdim=True)
        std = (x.var((2, 3), keepdim=True) + 1e-5).sqrt() if self.safe else x.var((2, 3), keepdim=True).sqrt()
        return (x - mean) / (std + 1e-5) * style.std((2, 3), keepdim=True) + style.mean((2, 3), keepdim=True)


class Stylizer(nn.Module):
    def __init__(self, safe):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect", bias=False), nn.LeakyReLU(0.1))
        self.adain = AdaIN(safe)
        self.dec = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.Conv2d(16, 3, 1))

    def forward(self, content, style):
        return self.dec(self.adain(self.enc(content), self.enc(style).detach()))


def build(fixed=False):
    torch.manual_seed(28)
    model = Stylizer(fixed)
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    batches = []
    for i in range(36):
        content, style = torch.rand(4, 3, 16, 16), 0.3 * torch.randn(4, 3, 16, 16) + torch.rand(4, 3, 1, 1)
        if i == 10:
            content[1] = 0.0
        batches.append((content, style))

    def loss_fn(m, b):
        out = m(*b)
        return F.mse_loss(out.mean((2, 3)), b[1].mean((2, 3))) + 0.5 * F.mse_loss(out, b[0])

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=1.0)
