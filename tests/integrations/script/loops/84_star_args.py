# again: yes
# step: 5
# kind: nonfinite-loss
# cause: zero-denominator
# sample: 2
# line: return ((pred - target) / scale).pow(2).mean() + 0.1 * aux.pow(2).mean()
# source: criterion called with star arguments and keywords
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x, *, gain=1.0):
        return gain * self.a(x), self.b(x)


def criterion(pred, aux, *, target, scale):
    return ((pred - target) / scale).pow(2).mean() + 0.1 * aux.pow(2).mean()


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    args = (torch.randn(8, 3),)
    labels = {"target": torch.randn(8, 1), "scale": torch.rand(8, 1) + 0.5}
    if BAD and step == 5:
        labels["scale"][2] = 0.0
    outputs = model(*args, **{"gain": 0.5})
    loss = criterion(*outputs, **labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
