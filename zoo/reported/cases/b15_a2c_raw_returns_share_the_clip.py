"""A2C with separate actor and critic in one SGD optimizer and max_grad_norm 0.5. Returns are raw (around 400): the critic's gradient is in the thousands, the clip leaves the actor nothing.

Source: https://github.com/wandb/senpai/pull/978 https://github.com/huggingface/transformers/pull/614
True cause: the critic's gradient eats the global norm
Where: critic
Fix: normalise the returns, or clip actor and critic apart
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, obs):
        return torch.distributions.Categorical(logits=self.actor(obs)), self.critic(obs)[:, 0]


def build(fixed=False):
    torch.manual_seed(9)
    agent = Agent()
    opt = torch.optim.SGD(agent.parameters(), lr=0.05, momentum=0.9)
    rollouts = []
    for _ in range(120):
        obs = torch.randn(64, 4)
        best = (obs[:, 0] > 0).long() + (obs[:, 1] > 0.5).long()
        action = torch.randint(0, 3, (64,))
        hit = (action == best).float()
        returns = 380 + 60 * hit + 20 * obs[:, 2]
        adv = hit  # the extra reward of this step
        if fixed:
            returns = (returns - 400) / 35
        rollouts.append((obs, action, returns, adv))

    def loss_fn(m, b):
        obs, action, returns, adv = b
        dist, value = m(obs)
        policy_loss = -(dist.log_prob(action) * adv).mean()
        return policy_loss + 0.5 * F.mse_loss(value, returns) - 0.01 * dist.entropy().mean()

    return dict(model=agent, optimizer=opt, batches=rollouts, loss_fn=loss_fn, max_grad_norm=0.5)
