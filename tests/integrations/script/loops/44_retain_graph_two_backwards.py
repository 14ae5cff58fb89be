# again: yes
# step: 5
# kind: nonfinite-gradient
# cause: inverse-trig-boundary
# sample: 4
# line: angle = torch.acos(cos.clamp(-1.0, 1.0))
# source: shared trunk, first backward keeps the graph
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

trunk = nn.Linear(4, 2, bias=False)
with torch.no_grad():
    trunk.weight.copy_(torch.eye(2, 4) + 0.1)
optimizer = torch.optim.SGD(trunk.parameters(), lr=1e-3)
axis = torch.tensor([1.0, 0.0])
for step in range(8):
    x = torch.randn(8, 4)
    y = torch.randn(8, 2)
    if BAD and step == 5:
        x[4] = 0.0
        with torch.no_grad():
            x[4, :2] = torch.linalg.solve(trunk.weight[:, :2], torch.tensor([[1.0], [0.0]])).view(-1)
            x[4, :2] *= 1e4
    z = trunk(x)
    loss1 = F.smooth_l1_loss(z, y)
    cos = F.cosine_similarity(z, axis.expand_as(z), dim=1)
    angle = torch.acos(cos.clamp(-1.0, 1.0))
    loss2 = angle.mean()
    optimizer.zero_grad()
    loss1.backward(retain_graph=True)
    loss2.backward()
    optimizer.step()
