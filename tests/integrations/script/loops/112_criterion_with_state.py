# again: yes
# step: 5
# kind: nonfinite-loss
# cause: log-of-zero, outlier-batch
# sample: 2
# line: loss = torch.sum(-q * torch.log(F.softmax(student / self.temp, dim=-1)), dim=-1).mean()
# source: DINO loss with a running centre in the criterion
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


class DINOLoss(nn.Module):
    def __init__(self, dim, temp=0.5):
        super().__init__()
        self.temp = temp
        self.register_buffer("center", torch.zeros(1, dim))

    def forward(self, student, teacher):
        q = F.softmax((teacher - self.center) / 0.3, dim=-1).detach()
        loss = torch.sum(-q * torch.log(F.softmax(student / self.temp, dim=-1)), dim=-1).mean()
        self.update_center(teacher)
        return loss

    @torch.no_grad()
    def update_center(self, teacher):
        self.center = self.center * 0.9 + teacher.mean(0, keepdim=True) * 0.1


student, teacher = nn.Linear(4, 3), nn.Linear(4, 3)
with torch.no_grad():
    student.weight.copy_(torch.tensor([[0.5] * 4, [0.0] * 4, [-0.5] * 4]))
criterion = DINOLoss(3)
opt = torch.optim.SGD(student.parameters(), lr=0.01)
for step in range(8):
    view1 = torch.randn(8, 4)
    view2 = view1 + 0.1 * torch.randn(8, 4)
    if BAD and step == 5:
        view1[2] = 60.0
    s_out = student(view1)
    with torch.no_grad():
        t_out = teacher(view2)
    loss = criterion(s_out, t_out)
    opt.zero_grad()
    loss.backward()
    opt.step()
