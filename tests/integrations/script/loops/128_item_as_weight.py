# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 6
# source: two losses balanced by the ratio of their values
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

net = nn.Linear(4, 4)
critic = nn.Linear(4, 1)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(8):
    x = torch.randn(8, 4)
    ref = x.clone()
    if BAD and step == 5:
        x[6, 1] = float("nan")
    out = net(x)
    l_rec = F.mse_loss(out, ref)
    l_adv = F.softplus(-critic(out)).mean()
    w = l_rec.item() / (l_adv.item() + 1e-8)
    loss = l_rec + 0.1 * w * l_adv
    opt.zero_grad()
    loss.backward()
    opt.step()
