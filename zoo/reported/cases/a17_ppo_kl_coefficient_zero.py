"""PPO with kl_coeff = 0 (the KL is only a metric): for one odd observation an action's probability underflows to 0, KL is Inf, and 0 * Inf is NaN.

Source: https://github.com/ray-project/ray/issues/21297 https://github.com/ray-project/ray/pull/21456
True cause: an infinite term with weight 0 in the sum of losses
Where: loss_fn (kl_coeff * kl)
Fix: leave the term out when its weight is 0
"""
import torch
from torch import nn
from torch.distributions import Categorical, kl_divergence

torch.set_num_threads(1)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.pi, self.critic = nn.Linear(48, 4), nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 1))

    def forward(self, obs):
        return self.pi(self.body(obs)), self.critic(obs).squeeze(-1)


def build(fixed=False):
    torch.manual_seed(17)
    model = ActorCritic()
    opt = torch.optim.Adam(model.parameters(), 3e-3, eps=1e-5)
    kl_coeff, batches = 0.0, []
    for i in range(40):
        obs = torch.randn(16, 6)
        if i == 11:
            obs[3] *= 3000.0  # one sensor package in raw units
        old = 0.3 * torch.randn(16, 4)
        act = Categorical(logits=old).sample()
        batches.append(dict(obs=obs, old=old, act=act, adv=torch.where(act == (obs[:, 0] > 0).long(), 1.0, -0.5), ret=obs[:, 1].clamp(-2, 2)))

    def loss_fn(m, b):
        logits, v = m(b["obs"])
        pi, old = Categorical(logits=logits), Categorical(logits=b["old"])
        ratio = (pi.log_prob(b["act"]) - old.log_prob(b["act"])).exp()
        surrogate = torch.min(ratio * b["adv"], ratio.clamp(0.8, 1.2) * b["adv"]).mean()
        loss = -surrogate + 0.5 * torch.nn.functional.smooth_l1_loss(v, b["ret"])
        kl = kl_divergence(old, pi).mean()
        if not fixed:
            loss = loss + kl_coeff * kl
        return loss

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=0.5)
