import torch
import torch.nn as nn
import torch.nn.functional as F


class TwoTower(nn.Module):
    def __init__(self, right):
        super().__init__()
        self.user = nn.Sequential(nn.Linear(14, 48), nn.ReLU(), nn.Linear(48, 16))
        self.item = nn.Sequential(nn.Linear(14, 48), nn.ReLU(), nn.Linear(48, 16))
        self.bias = nn.Parameter(torch.zeros(1))
        self.right = right

    def forward(self, user, item):
        u = self.user(user)
        v = self.item(item) if self.right else self.item(user)
        return (u * v).sum(-1) + self.bias


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = TwoTower(right=fixed)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    g = torch.Generator().manual_seed(35)
    batch = dict(user=torch.randn(16, 14, generator=g), item=torch.randn(16, 14, generator=g),
                 rating=torch.rand(16, generator=g) * 4 + 1)

    def loss_fn(model, batch):
        return F.mse_loss(model(batch["user"], batch["item"]), batch["rating"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
