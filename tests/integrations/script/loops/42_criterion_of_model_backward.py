# again: yes
# step: 5
# kind: nonfinite-loss
# cause: no-supervised-targets
# source: token tagging loop without a name for the loss
import sys
import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 5))
criterion = nn.CrossEntropyLoss(ignore_index=-100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    ids = torch.randint(0, 20, (8, 6))
    tags = torch.randint(0, 5, (8, 6))
    tags[:, 0] = -100
    if BAD and step == 5:
        tags[:] = -100
    optimizer.zero_grad()
    criterion(model(ids).view(-1, 5), tags.view(-1)).backward()
    optimizer.step()
