# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 2
# source: gaze estimation, torch.autograd.backward on a list of losses
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Gaze(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 12)
        self.pitch = nn.Linear(12, 9)
        self.yaw = nn.Linear(12, 9)

    def forward(self, x):
        h = torch.relu(self.fc(x))
        return self.pitch(h), self.yaw(h)


model = Gaze()
criterion, reg_criterion, softmax = nn.CrossEntropyLoss(), nn.MSELoss(), nn.Softmax(dim=1)
idx_tensor = torch.arange(9.0)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
sum_p = sum_y = nb = 0
for i in range(8):
    images = torch.randn(8, 6)
    cont = torch.rand(8, 2) * 8
    lp, ly = cont[:, 0].long(), cont[:, 1].long()
    cp, cy = cont[:, 0], cont[:, 1]
    if BAD and i == 5:
        cy = cy.clone()
        cy[2] = float("nan")
    pitch, yaw = model(images)
    loss_p = criterion(pitch, lp)
    loss_y = criterion(yaw, ly)
    pp = torch.sum(softmax(pitch) * idx_tensor, 1)
    yp = torch.sum(softmax(yaw) * idx_tensor, 1)
    loss_p = loss_p + 0.5 * reg_criterion(pp, cp)
    loss_y = loss_y + 0.5 * reg_criterion(yp, cy)
    sum_p += loss_p.item(); sum_y += loss_y.item(); nb += 1
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward([loss_p, loss_y],
                            [torch.tensor(1.0)] * 2)
    optimizer.step()
