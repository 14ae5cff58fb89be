# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 1
# source: trainer whose update method takes the loss and calls backward
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Learner:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.opt = torch.optim.RMSprop(self.net.parameters(), lr=1e-3)
        self.loss_fn = nn.SmoothL1Loss()

    def update(self, loss):
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 10.0)
        self.opt.step()

    def learn(self, obs, target):
        pred = self.net(obs)
        loss = self.loss_fn(pred, target)
        self.update(loss)
        return loss.item()


learner = Learner()
for step in range(8):
    obs = torch.randn(8, 4)
    target = obs.mean(1, keepdim=True)
    if BAD and step == 5:
        obs[1, 0] = float("nan")
    learner.learn(obs, target)
