# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 1
# source: engine.py style module with train_one_epoch next to the script
import sys
import torch
import torch.nn as nn
from _helper_engine import train_one_epoch

BAD = "bad" in sys.argv
torch.manual_seed(0)


class ToyDetector(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 6)

    def forward(self, images, targets):
        out = self.fc(torch.stack(images))
        labels = torch.stack([t["labels"] for t in targets])
        boxes = torch.stack([t["boxes"] for t in targets])
        return {
            "loss_classifier": nn.functional.cross_entropy(out[:, :2], labels),
            "loss_box_reg": nn.functional.smooth_l1_loss(out[:, 2:], boxes),
        }


loader = []
for step in range(8):
    images = list(torch.randn(8, 4))
    targets = [{"labels": torch.randint(0, 2, ()), "boxes": torch.rand(4)} for _ in range(8)]
    if BAD and step == 5:
        targets[1]["boxes"][2] = float("nan")
    loader.append((images, targets))
model = ToyDetector()
train_one_epoch(model, torch.optim.SGD(model.parameters(), lr=0.01), loader, "cpu")
