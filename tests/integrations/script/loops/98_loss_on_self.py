# again: no
# stops: self.loss = self.criterion(output, target)
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 5
# source: trainer that keeps the loss as an attribute
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Solver:
    def __init__(self):
        self.net = nn.Linear(4, 2)
        self.criterion = nn.MSELoss()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        self.loss = None

    def optimize(self, data, target):
        self.optimizer.zero_grad()
        output = self.net(data)
        self.loss = self.criterion(output, target)
        self.loss.backward()
        self.optimizer.step()


solver = Solver()
for i in range(8):
    data, target = torch.randn(8, 4), torch.randn(8, 2)
    if BAD and i == 5:
        data[5, 1] = float("nan")
    solver.optimize(data, target)
