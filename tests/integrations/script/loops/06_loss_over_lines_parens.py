# again: yes
# step: 4
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 7
# source: detection training, sum of weighted losses over several lines
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 16)
        self.cls = nn.Linear(16, 3)
        self.box = nn.Linear(16, 4)
        self.obj = nn.Linear(16, 1)

    def forward(self, x):
        h = F.relu(self.stem(x))
        return self.cls(h), self.box(h), self.obj(h)


model = Detector()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
w_cls, w_box, w_obj = 1.0, 5.0, 0.5

for it in range(7):
    images = torch.randn(8, 6)
    labels = torch.randint(0, 3, (8,))
    boxes = torch.rand(8, 4)
    objectness = torch.ones(8, 1)
    if BAD and it == 4:
        images[7, 1] = float("nan")

    pred_cls, pred_box, pred_obj = model(images)
    loss = (
        w_cls * F.cross_entropy(pred_cls, labels)
        + w_box * F.smooth_l1_loss(
            pred_box,
            boxes,
        )  # boxes are relative
        + w_obj * F.binary_cross_entropy_with_logits(pred_obj, objectness)
    )

    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
