# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 5
# source: gradient accumulation with a modulo test
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

accumulation_steps = 2
model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 2))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

optimizer.zero_grad()
for i in range(16):
    x = torch.randn(8, 6)
    y = torch.randint(0, 2, (8,))
    if BAD and i == 10:
        x[5, 0] = float("inf")
    logits = model(x)
    loss = criterion(logits, y)
    loss = loss / accumulation_steps
    loss.backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
