# again: yes
# step: 5
# kind: nonfinite-loss
# cause: zero-denominator, no-supervised-targets
# line: "depth": ((depth - batch["depth"]).abs() * valid).sum() / valid.sum(),
# source: multi-task training with a dict of losses and a dict of weights
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
WEIGHTS = {"seg": 1.0, "depth": 0.5, "reg": 0.01}


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 12)
        self.seg = nn.Linear(12, 3)
        self.depth = nn.Linear(12, 1)

    def forward(self, x):
        h = torch.relu(self.trunk(x))
        return self.seg(h), self.depth(h).squeeze(-1)


def data():
    for step in range(8):
        batch = {"image": torch.randn(8, 6), "seg": torch.randint(0, 3, (8,)), "depth": torch.rand(8) + 0.1}
        batch["depth"][::3] = 0.0
        if BAD and step == 5:
            batch["depth"].zero_()
        yield batch


model = TwoHeads()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for batch in data():
    seg, depth = model(batch["image"])
    valid = (batch["depth"] > 0).float()
    losses = {
        "seg": F.cross_entropy(seg, batch["seg"]),
        "depth": ((depth - batch["depth"]).abs() * valid).sum() / valid.sum(),
        "reg": depth.pow(2).mean(),
    }
    loss = sum(WEIGHTS[k] * v for k, v in losses.items())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log = {k: v.item() for k, v in losses.items()}
