# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 4
# source: helper generator that yields one loss per scale
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


def scale_losses(outputs, target):
    for k, out in enumerate(outputs):
        yield 0.5 ** k * F.mse_loss(out, target[:, :: k + 1])


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        y = self.fc(x)
        return [y, y[:, ::2], y[:, ::3]]


model = Pyramid()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x = torch.randn(8, 6)
    target = torch.randn(8, 6)
    if BAD and step == 5:
        x[4, 2] = float("nan")
    outputs = model(x)
    total = torch.zeros(())
    for loss in scale_losses(outputs, target):
        total = total + loss
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
