"""LogisticRegression module: loss = nll_loss(log_softmax(softmax(linear(x)))). It learns slowly and ends at ln(1 + 9/e) = 1.46 at best.

Source: https://github.com/Lightning-Universe/lightning-bolts/issues/654 https://github.com/speedinghzl/Pytorch-Deeplab/issues/2
True cause: softmax, then log_softmax
Where: loss_fn (log_softmax of probabilities)
Fix: log_softmax of the linear output only
"""
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam

torch.set_num_threads(1)


class LogisticRegression(nn.Module):
    def __init__(self, input_dim, num_classes, probs):
        super().__init__()
        self.linear = nn.Linear(input_dim, num_classes)
        self.probs = probs

    def forward(self, x):
        y_hat = self.linear(x)
        return F.softmax(y_hat, dim=-1) if self.probs else y_hat


def build(fixed=False):
    torch.manual_seed(11)
    model = LogisticRegression(64, 10, probs=not fixed)
    optimizer = Adam(model.parameters(), lr=2e-2)
    prototypes = torch.rand(10, 64)
    batches = []
    for _ in range(120):
        y = torch.randint(10, (64,))
        batches.append([(prototypes[y] + 0.3 * torch.randn(64, 64)).view(64, 8, 8), y])

    def loss_fn(m, batch):
        x, y = batch
        y_hat = m(x.view(x.size(0), -1))
        return F.nll_loss(F.log_softmax(y_hat, dim=-1), y)

    return dict(model=model, optimizer=optimizer, batches=batches, loss_fn=loss_fn)
