"""PPO for a robot policy: the value head returns [B], the rollout's returns are [B, 1]. `returns - values` is [B, B]; every value is trained towards every return.

Source: https://github.com/RLinf/RLinf/issues/1568 https://github.com/openai/spinningup/issues/339
True cause: loss broadcast
Where: loss_fn (the value loss, sub)
Fix: squeeze the returns; assert the shapes
"""
import torch
from torch import nn
from torch.distributions import Normal

torch.set_num_threads(1)


class ActorCritic(nn.Module):
    def __init__(self, obs_dim=10, act_dim=3):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(obs_dim, 64), nn.Tanh(), nn.Linear(64, act_dim))
        self.log_std = nn.Parameter(torch.zeros(act_dim))
        self.critic = nn.Sequential(nn.Linear(obs_dim, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, obs):
        return Normal(self.actor(obs), self.log_std.exp()), self.critic(obs).squeeze(-1)


def build(fixed=False, clip=0.2, vf_coef=0.5, ent_coef=0.0):
    torch.manual_seed(3)
    model = ActorCritic()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
    w = torch.randn(10)
    rollouts = []
    for _ in range(100):
        obs = torch.randn(48, 10)
        returns = 2 * torch.tanh(obs @ w / 2) + 0.5 * obs[:, 0]
        with torch.no_grad():
            dist, _ = model(obs)
            act = dist.sample()
            logp = dist.log_prob(act).sum(-1)
        adv = torch.randn(48) * 0.1
        rollouts.append(dict(obs=obs, act=act, old_logp=logp, adv=adv, returns=returns[:, None]))

    def loss_fn(m, r):
        dist, values = m(r["obs"])
        returns = r["returns"].squeeze(-1) if fixed else r["returns"]
        ratio = (dist.log_prob(r["act"]).sum(-1) - r["old_logp"]).exp()
        pg = -torch.min(ratio * r["adv"], ratio.clamp(1 - clip, 1 + clip) * r["adv"]).mean()
        value_loss = ((returns - values) ** 2).mean()
        return pg + vf_coef * value_loss - ent_coef * dist.entropy().mean()

    return dict(model=model, optimizer=opt, batches=rollouts, loss_fn=loss_fn, max_grad_norm=0.5)
