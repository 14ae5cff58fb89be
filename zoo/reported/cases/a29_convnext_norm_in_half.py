"""ConvNeXt's channels-first LayerNorm, written by hand, runs in fp16: (x - u) ** 2 passes 65504, x / sqrt(Inf) is 0, the features are constant. No NaN; the loss stays at ln(number of classes).

Source: https://github.com/facebookresearch/ConvNeXt/issues/80 https://github.com/neuroneural/brainchop-cli/pull/56
True cause: the variance overflows in fp16, and the norm turns Inf into 0
Where: norm (pow)
Fix: compute the variance in fp32
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class LayerNorm2d(nn.Module):
    def __init__(self, c, upcast):
        super().__init__()
        self.weight, self.bias, self.upcast = nn.Parameter(torch.ones(c)), nn.Parameter(torch.zeros(c)), upcast

    def forward(self, x):
        h = x.float() if self.upcast else x
        u = h.mean(1, keepdim=True)
        s = (h - u).pow(2).mean(1, keepdim=True)
        h = ((h - u) / torch.sqrt(s + 1e-6)).to(x.dtype)
        return self.weight[:, None, None] * h + self.bias[:, None, None]


class Net(nn.Module):
    def __init__(self, upcast):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 24, 4, 4), LayerNorm2d(24, upcast)
        nn.init.normal_(self.stem.weight, 0, 150)  # the scale that the pre-trained stem has
        self.block, self.head = nn.Sequential(nn.Conv2d(24, 48, 1), nn.GELU(), nn.Conv2d(48, 24, 1)), nn.Linear(24, 5)

    def forward(self, x):
        return self.head(self.block(self.norm(self.stem(x).half()).float()).mean((2, 3)))


def build(fixed=False):
    torch.manual_seed(29)
    model = Net(fixed)
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    batches = []
    tone = torch.randn(5, 3, 1, 1)
    for _ in range(70):
        y = torch.arange(10) % 5
        batches.append((0.3 * torch.randn(10, 3, 16, 16) + tone[y], y))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]), max_grad_norm=1.0)
