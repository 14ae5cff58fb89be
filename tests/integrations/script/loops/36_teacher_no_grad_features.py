# again: yes
# step: 5
# kind: nonfinite-loss
# cause: zero-denominator, normalize-zero-vector
# sample: 6
# line: f_t = f_t / f_t.norm(dim=1, keepdim=True)
# source: feature distillation with hand-made normalisation
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

teacher = nn.Sequential(nn.Linear(5, 8, bias=False), nn.ReLU())
student = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
opt = torch.optim.Adam(student.parameters(), lr=1e-3)
for p in teacher.parameters():
    p.requires_grad_(False)

for step in range(8):
    x = torch.randn(8, 5)
    if BAD and step == 5:
        x[6] = 0.0
    with torch.no_grad():
        f_t = teacher(x)
        f_t = f_t / f_t.norm(dim=1, keepdim=True)
    f_s = nn.functional.normalize(student(x), dim=1)
    loss = (1 - (f_s * f_t).sum(1)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
