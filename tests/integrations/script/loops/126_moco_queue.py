# again: no
# stops: queue[:, ptr:ptr + 8] = k.t()
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 1
# source: MoCo, keys written into the queue before backward
import copy
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

encoder_q = nn.Linear(5, 4)
encoder_k = copy.deepcopy(encoder_q)
queue = F.normalize(torch.randn(4, 32), dim=0)
ptr = 0
optimizer = torch.optim.SGD(encoder_q.parameters(), lr=0.03, momentum=0.9)
for step in range(8):
    im_q = torch.randn(8, 5)
    im_k = im_q + 0.1 * torch.randn(8, 5)
    if BAD and step == 5:
        im_q[1, 0] = float("nan")
    q = F.normalize(encoder_q(im_q), dim=1)
    with torch.no_grad():
        k = F.normalize(encoder_k(im_k.nan_to_num()), dim=1)
    l_pos = (q * k).sum(1, keepdim=True)
    l_neg = q @ queue.clone().detach()
    logits = torch.cat([l_pos, l_neg], dim=1) / 0.2
    loss = F.cross_entropy(logits, torch.zeros(8, dtype=torch.long))
    queue[:, ptr:ptr + 8] = k.t()
    ptr = (ptr + 8) % 32
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
