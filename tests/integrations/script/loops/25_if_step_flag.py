# again: yes
# step: 6
# kind: nonfinite-loss
# cause: zero-denominator
# sample: 2
# line: z = (feat - feat.mean(1, keepdim=True)) / feat.std(1, keepdim=True)
# source: auxiliary loss switched on after some warm-up steps
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
WARMUP = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(4, 6, bias=False)
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        feat = self.enc(x)
        return self.out(torch.relu(feat)), feat


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for global_step in range(9):
    x = torch.randn(8, 4)
    y = torch.randint(0, 2, (8,))
    if BAD and global_step == 6:
        x[2] = 0.0
    logits, feat = model(x)
    loss = F.cross_entropy(logits, y)
    if global_step >= WARMUP:
        z = (feat - feat.mean(1, keepdim=True)) / feat.std(1, keepdim=True)
        loss = loss + 0.05 * (z.t() @ z / len(z) - torch.eye(6)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
