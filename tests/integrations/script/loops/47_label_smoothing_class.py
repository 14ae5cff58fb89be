# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 7
# source: label smoothing criterion written as a module
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)


class LabelSmoothing(nn.Module):
    def __init__(self, classes, smoothing=0.1):
        super().__init__()
        self.cls, self.smoothing = classes, smoothing

    def forward(self, pred, target):
        pred = pred.log_softmax(dim=-1)
        with torch.no_grad():
            true_dist = torch.zeros_like(pred)
            true_dist.fill_(self.smoothing / (self.cls - 1))
            true_dist.scatter_(1, target.unsqueeze(1), 1.0 - self.smoothing)
        return torch.mean(torch.sum(-true_dist * pred, dim=-1))


model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
criterion = LabelSmoothing(5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for x, y in ((torch.randn(8, 4), torch.randint(0, 5, (8,))) for _ in range(5)):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
x, y = torch.randn(8, 4), torch.randint(0, 5, (8,))
if BAD:
    x[7, 1] = float("nan")
optimizer.zero_grad()
loss = criterion(model(x), y)
loss.backward()
optimizer.step()
