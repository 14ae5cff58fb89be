# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 1
# source: tabular training with dict batches and sample weights
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(7, 10)
        self.head = nn.Linear(10, 4)

    def forward(self, features):
        return {"logits": self.head(torch.relu(self.body(features)))}


loader = []
for step in range(8):
    loader.append({
        "features": torch.randn(8, 7),
        "labels": torch.randint(0, 4, (8,)),
        "weight": torch.rand(8) + 0.5,
    })
if BAD:
    loader[5]["weight"][1] = float("nan")

device = "cpu"
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in loader:
    batch = {k: v.to(device) for k, v in batch.items()}
    outputs = model(batch["features"])
    per_sample = F.cross_entropy(outputs["logits"], batch["labels"], reduction="none")
    loss = (per_sample * batch["weight"]).sum() / batch["weight"].sum()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
