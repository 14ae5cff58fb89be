"""HEALTHY: a relativistic GAN trained in one step through a gradient reversal: the discriminator's loss goes back to ln 2 and hovers there because the generator has caught up.

Source: https://github.com/weilinie/RelGAN/issues/18 https://github.com/XPixelGroup/BasicSR/issues/23
True cause: none
Where: none
Fix: none
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


class RGAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, z, real):
        fake = Reverse.apply(self.generator(z))
        return self.critic(real), self.critic(fake)


def build(fixed=False):
    torch.manual_seed(0)
    model = RGAN()
    opt = torch.optim.Adam([dict(params=model.generator.parameters(), lr=3e-3), dict(params=model.critic.parameters(), lr=3e-3)], betas=(0.0, 0.9))
    batches = []
    for _ in range(120):
        real = torch.randn(64, 2) * torch.tensor([0.6, 0.3]) + torch.tensor([1.0, -0.5])
        batches.append((torch.randn(64, 4), real))

    def loss_fn(m, b):
        c_real, c_fake = m(*b)
        return F.binary_cross_entropy_with_logits(c_real - c_fake, torch.ones_like(c_real))

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn)
