# again: no
# stops: log_probs.append(dist.log_prob(action))
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# source: policy gradient, episode and update in one function
import sys
import torch
import torch.nn as nn
from torch.distributions import Categorical

BAD = "bad" in sys.argv
torch.manual_seed(0)
reward_of = torch.linspace(-1, 1, 3)


class Env:
    def __init__(self):
        self.state = torch.zeros(4)
        self.episode = -1

    def reset(self):
        self.episode += 1
        self.t = 0
        self.state = torch.randn(4)
        return self.state

    def step(self, action):
        self.t += 1
        self.state = 0.9 * self.state + 0.1 * action
        reward = float(reward_of[action])
        if BAD and self.episode == 5 and self.t == 3:
            reward = float("inf")
        return self.state, reward, self.t >= 5


def train(policy, optimizer, env, episodes):
    for _ in range(episodes):
        state, done = env.reset(), False
        log_probs, rewards = [], []
        while not done:
            dist = Categorical(logits=policy(state))
            action = dist.sample()
            log_probs.append(dist.log_prob(action))
            state, reward, done = env.step(action.item())
            rewards.append(reward)
        R = sum(rewards)
        loss = -torch.stack(log_probs).sum() * R
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


policy = nn.Linear(4, 3)
train(policy, torch.optim.Adam(policy.parameters(), lr=1e-2), Env(), 7)
