# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 0
# source: mean teacher with an exponential moving average of weights
import copy
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


@torch.no_grad()
def update_ema(model, ema_model, decay=0.9):
    for p, q in zip(model.parameters(), ema_model.parameters()):
        q.mul_(decay).add_(p, alpha=1 - decay)


model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
ema_model = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(8):
    x_l, y_l = torch.randn(8, 4), torch.randint(0, 3, (8,))
    x_u = torch.randn(8, 4)
    if BAD and step == 5:
        x_u[0, 2] = float("nan")
    logits = model(x_l)
    sup = F.cross_entropy(logits, y_l)
    student_u = model(x_u + 0.1 * torch.randn_like(x_u))
    with torch.no_grad():
        teacher_u = ema_model(x_u + 0.1 * torch.randn_like(x_u))
    cons = F.mse_loss(student_u.softmax(1), teacher_u.softmax(1))
    w = min(1.0, step / 4)
    loss = sup + w * cons
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    update_ema(model, ema_model)
