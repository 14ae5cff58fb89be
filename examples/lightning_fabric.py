"""A loop of one's own with Lightning's Fabric, protected: accumulation, clipping, and one bad batch."""

import lightning.fabric
import torch
from torch import nn

import nanproof


class Model(nn.Module):
    """Returns its own loss: then a bad step can be run again, and explained."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x, y):
        return {"loss": nn.functional.mse_loss(self.net(x), y)}


torch.manual_seed(0)
fabric = lightning.fabric.Fabric(accelerator="cpu", devices=1)
guard = nanproof.protect(fabric, run_dir="run")
model = Model()
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))

weights = torch.randn(16, 1)
for step in range(60):
    optimizer.zero_grad()
    for micro in range(2):
        x = torch.randn(32, 16)
        y = x @ weights
        if (step, micro) == (30, 1):
            x[5, 3] = float("inf")
        fabric.backward(model(x, y)["loss"] / 2)
    norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
guard.close()

print(guard.path)
for incident in guard.incidents:
    print(incident)
    print(incident.diagnosis)
print(f"loss {guard.history[0].loss:.3f} -> {guard.history[-1].loss:.3f}; last norm before clipping {norm:.3f}")
assert [(i.step, i.micro_batch) for i in guard.incidents] == [(30, 1)]
