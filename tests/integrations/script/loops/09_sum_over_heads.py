# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 0
# source: multi-output regression, loss summed over heads
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)


class MultiHead(nn.Module):
    def __init__(self, n_heads):
        super().__init__()
        self.shared = nn.Linear(4, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(n_heads))

    def forward(self, x):
        h = torch.tanh(self.shared(x))
        return [head(h) for head in self.heads]


model = MultiHead(3)
criterion = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for step in range(8):
    x = torch.randn(8, 4)
    ys = [torch.randn(8, 1) for _ in range(3)]
    if BAD and step == 5:
        ys[1][0] = float("nan")
    optimizer.zero_grad()
    outputs = model(x)
    loss = 0
    for output, y in zip(outputs, ys):
        loss += criterion(output, y)
    loss.backward()
    optimizer.step()
