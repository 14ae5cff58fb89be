# again: yes
# step: 5
# kind: nonfinite-gradient
# cause: sqrt-at-zero
# sample: 2
# line: dist = torch.sqrt(((e1 - e2) ** 2).sum(dim=1))
# source: siamese network with contrastive loss
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
opt = torch.optim.Adam(net.parameters(), lr=5e-4)
margin = 2.0

for i in range(8):
    img0 = torch.randn(8, 5)
    img1 = torch.randn(8, 5)
    label = torch.randint(0, 2, (8,)).float()
    if BAD and i == 5:
        img1[2] = img0[2]
        label[2] = 0.0
    opt.zero_grad()
    e1 = net(img0)
    e2 = net(img1)
    dist = torch.sqrt(((e1 - e2) ** 2).sum(dim=1))
    loss_contrastive = torch.mean((1 - label) * dist + \
                                  label * torch.clamp(margin - dist, min=0.0) ** 2) \
        + 1e-4 * sum(p.pow(2).sum() for p in net.parameters())
    loss_contrastive.backward()
    opt.step()
