"""HEALTHY: PPO with max_grad_norm 0.5 and Adam: nearly every step is clipped, the value and policy still learn.

Source: https://github.com/ikostrikov/pytorch-a2c-ppo-acktr-gail/issues/160
True cause: none
Where: none
Fix: none
"""
import torch
import torch.nn as nn
from torch.distributions import Categorical

torch.set_num_threads(1)


def ortho(layer, gain):
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Policy(nn.Module):
    def __init__(self, obs=8, acts=4):
        super().__init__()
        self.base = nn.Sequential(ortho(nn.Linear(obs, 64), 2**0.5), nn.Tanh(), ortho(nn.Linear(64, 64), 2**0.5), nn.Tanh())
        self.pi, self.v = ortho(nn.Linear(64, acts), 0.01), ortho(nn.Linear(64, 1), 1.0)

    def forward(self, x):
        h = self.base(x)
        return Categorical(logits=self.pi(h)), self.v(h)


def build(fixed=False):
    torch.manual_seed(0)
    model = Policy()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-5)
    w = torch.randn(8, 4)
    batches = []
    for _ in range(100):
        obs = torch.randn(64, 8)
        act = torch.randint(0, 4, (64,))
        ret = (obs @ w).gather(1, act[:, None]) + 4.0 + 1.5 * obs[:, :1]
        adv = ret - ret.mean()
        batches.append((obs, act, ret, (adv / adv.std()).squeeze(1)))

    def loss_fn(m, b):
        obs, act, ret, adv = b
        dist, v = m(obs)
        ratio = (dist.log_prob(act) - torch.log(torch.tensor(0.25))).exp()
        surr = torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
        return -surr.mean() + 0.5 * (ret - v).pow(2).mean() - 0.01 * dist.entropy().mean()

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=0.5)
