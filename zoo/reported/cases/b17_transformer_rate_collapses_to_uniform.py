"""A post-norm transformer encoder over sensor patches with Adam at 0.05 (a rate copied from SGD): after a few steps the output no longer depends on the input and the loss stays at ln 10.

Source: https://github.com/rajveermalviya/language-modeling/issues/3 https://github.com/NLeSC/mcfly/issues/43
True cause: the rate is too high
Where: the optimizer
Fix: 1e-3
"""
import torch
from torch import nn

torch.set_num_threads(1)


class PatchTransformer(nn.Module):
    def __init__(self, dim=32, classes=10):
        super().__init__()
        self.proj = nn.Linear(24, dim)
        self.pos = nn.Parameter(torch.randn(1, 8, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.fc = nn.Linear(dim, classes)

    def forward(self, x):
        return self.fc(self.encoder(self.proj(x) + self.pos).mean(1))


def build(fixed=False):
    torch.manual_seed(0)
    model = PatchTransformer()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3 if fixed else 0.05)
    pattern = torch.randn(10, 8, 24)
    batches = []
    for _ in range(100):
        y = torch.randint(0, 10, (32,))
        batches.append((pattern[y] + 1.0 * torch.randn(32, 8, 24), y))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), max_grad_norm=1.0)
