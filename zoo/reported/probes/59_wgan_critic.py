import torch
import torch.nn as nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1),
                                 nn.InstanceNorm2d(32, affine=True), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(32 * 16, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = Critic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.5, 0.9))
    g = torch.Generator().manual_seed(59)
    batch = dict(real=torch.rand(8, 1, 16, 16, generator=g) * 2 - 1, fake=torch.tanh(torch.randn(8, 1, 16, 16, generator=g)))

    def loss_fn(model, batch):
        real, fake = batch["real"], batch["fake"]
        eps = torch.rand(real.size(0), 1, 1, 1)
        mid = (eps * real + (1 - eps) * fake).requires_grad_(True)
        grad, = torch.autograd.grad(model(mid).sum(), mid, create_graph=True)
        penalty = (grad.flatten(1).norm(2, dim=1) - 1).pow(2).mean()
        return model(fake).mean() - model(real).mean() + 10 * penalty

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
