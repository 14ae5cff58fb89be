# again: yes
# step: 5
# kind: nonfinite-loss
# cause: log-of-zero, outlier-batch
# sample: 3
# line: kd = (p_t * (torch.log(p_t) - log_p_s)).sum(dim=1).mean()
# source: knowledge distillation behind a constant flag
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
USE_KD = True
T = 2.0
torch.manual_seed(0)

teacher = nn.Linear(4, 3)
student = nn.Linear(4, 3)
with torch.no_grad():
    teacher.weight.copy_(torch.tensor([[0.5] * 4, [0.0] * 4, [-0.5] * 4]))
teacher.eval()
optimizer = torch.optim.SGD(student.parameters(), lr=0.05)

for step in range(8):
    x = torch.randn(8, 4)
    y = torch.randint(0, 3, (8,))
    if BAD and step == 5:
        x[3] = 300.0
    with torch.no_grad():
        t_logits = teacher(x)
    s_logits = student(x)
    if USE_KD:
        p_t = F.softmax(t_logits / T, dim=1)
        log_p_s = F.log_softmax(s_logits / T, dim=1)
        kd = (p_t * (torch.log(p_t) - log_p_s)).sum(dim=1).mean()
        loss = 0.3 * F.cross_entropy(s_logits, y) + 0.7 * T * T * kd
    else:
        loss = F.cross_entropy(s_logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
