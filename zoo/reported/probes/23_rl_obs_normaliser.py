import torch
import torch.nn as nn


class RunningNorm(nn.Module):
    def __init__(self, n, persistent):
        super().__init__()
        self.register_buffer("mean", torch.zeros(n), persistent=persistent)
        self.register_buffer("var", torch.ones(n), persistent=persistent)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.05)
                self.var.lerp_(x.var(0), 0.05)
        return (x - self.mean) / (self.var + 1e-5).sqrt()


class ValueModule(nn.Module):
    """What one would put in a LightningModule: forward plus training_step."""

    def __init__(self, persistent):
        super().__init__()
        self.norm = RunningNorm(10, persistent)
        self.net = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, obs):
        return self.net(self.norm(obs)).squeeze(-1)

    def training_step(self, batch):
        return nn.functional.mse_loss(self(batch["obs"]), batch["returns"])


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = ValueModule(persistent=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, eps=1e-5)
    g = torch.Generator().manual_seed(23)
    batch = dict(obs=torch.randn(32, 10, generator=g) * 4 + 3, returns=torch.randn(32, generator=g))

    def loss_fn(model, batch):
        return model.training_step(batch)

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
