# again: yes
# step: 5
# kind: nonfinite-loss
# cause: zero-denominator, zero-advantage
# line: returns = (returns - returns.mean()) / returns.std()
# source: advantage actor-critic update on a stored rollout
import sys
import torch
import torch.nn as nn
from torch.distributions import Categorical

BAD = "bad" in sys.argv
torch.manual_seed(0)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine = nn.Linear(4, 16)
        self.action_head = nn.Linear(16, 2)
        self.value_head = nn.Linear(16, 1)

    def forward(self, x):
        x = torch.relu(self.affine(x))
        return torch.softmax(self.action_head(x), dim=-1), self.value_head(x).squeeze(-1)


def update(model, optimizer, states, actions, rewards, gamma=0.9):
    probs, values = model(states)
    dist = Categorical(probs)
    log_probs = dist.log_prob(actions)
    discounts = gamma ** torch.arange(len(rewards), dtype=torch.float)
    returns = torch.flip(torch.cumsum(torch.flip(rewards * discounts, [0]), 0), [0])
    returns = (returns - returns.mean()) / returns.std()
    advantage = returns - values.detach()
    actor_loss = -(log_probs * advantage).mean()
    critic_loss = (returns - values).pow(2).mean()
    entropy = dist.entropy().mean()
    loss = actor_loss + 0.5 * critic_loss - 0.01 * entropy
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


model = ActorCritic()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for episode in range(8):
    states = torch.randn(8, 4)
    actions = torch.randint(0, 2, (8,))
    rewards = torch.rand(8)
    if BAD and episode == 5:
        rewards.zero_()
    update(model, optimizer, states, actions, rewards)
