# again: no
# stops: policy_loss.append(-log_prob * R)
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# source: REINFORCE example with saved_log_probs on the policy
import sys
from collections import deque
import torch
import torch.nn as nn
from torch.distributions import Categorical

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 8)
        self.affine2 = nn.Linear(8, 2)
        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        return torch.softmax(self.affine2(torch.relu(self.affine1(x))), dim=1)


policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
gamma, eps = 0.99, 1e-8


def select_action(state):
    probs = policy(state.unsqueeze(0))
    m = Categorical(probs)
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode():
    R = 0
    policy_loss = []
    returns = deque()
    for r in policy.rewards[::-1]:
        R = r + gamma * R
        returns.appendleft(R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    for log_prob, R in zip(policy.saved_log_probs, returns):
        policy_loss.append(-log_prob * R)
    optimizer.zero_grad()
    policy_loss = torch.cat(policy_loss).sum()
    policy_loss.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved_log_probs[:]


for i_episode in range(7):
    state = torch.randn(4)
    for t in range(6):
        action = select_action(state)
        state = torch.randn(4)
        reward = float(torch.rand(()))
        if BAD and i_episode == 5 and t == 2:
            reward = float("nan")
        policy.rewards.append(reward)
    finish_episode()
