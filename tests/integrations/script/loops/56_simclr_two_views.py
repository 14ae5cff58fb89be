# again: yes
# step: 5
# kind: nonfinite-loss
# cause: zero-denominator, normalize-zero-vector
# sample: 6
# line: z1, z2 = z1 / z1.norm(dim=1, keepdim=True), z2 / z2.norm(dim=1, keepdim=True)
# source: contrastive training with two augmented views
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
tau = 0.5

encoder = nn.Sequential(nn.Linear(6, 12, bias=False), nn.ReLU(), nn.Linear(12, 4, bias=False))
optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
for it in range(8):
    images = torch.randn(8, 6)
    if BAD and it == 5:
        images[6] = 0.0
    gain1, gain2 = torch.rand(8, 1) + 0.5, torch.rand(8, 1) + 0.5
    view1, view2 = images * gain1, images * gain2
    z1 = encoder(view1)
    z2 = encoder(view2)
    z1, z2 = z1 / z1.norm(dim=1, keepdim=True), z2 / z2.norm(dim=1, keepdim=True)
    logits = z1 @ z2.t() / tau
    labels = torch.arange(len(logits))
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
