# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 7
# source: deep supervision, sum over a generator expression
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.exits = nn.ModuleList(nn.Linear(5, 1) for _ in range(3))

    def forward(self, x):
        outs = []
        for block, head in zip(self.blocks, self.exits):
            x = torch.tanh(block(x))
            outs.append(head(x))
        return outs


model = Deep()
losses = [nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss()]
weights = (0.2, 0.3, 0.5)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(8):
    x, y = torch.randn(8, 5), torch.randn(8, 1)
    if BAD and step == 5:
        x[7, 0] = float("nan")
    outs = model(x)
    loss = sum(w * l(o, y) for w, l, o in zip(weights, losses, outs))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
