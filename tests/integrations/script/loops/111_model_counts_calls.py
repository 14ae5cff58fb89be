# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 3
# source: model that counts its forward calls for logging
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0
        self.register_buffer("num_samples", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        self.num_samples += x.shape[0]
        return self.fc(self.norm(x))


model = Counting()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    if BAD and step == 5:
        y[3, 1] = float("nan")
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
