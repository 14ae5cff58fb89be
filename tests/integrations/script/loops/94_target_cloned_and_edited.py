# again: yes
# step: 5
# kind: nonfinite-loss
# cause: no-supervised-targets
# line: loss = F.cross_entropy(logits.view(-1, 7), y.view(-1), ignore_index=-1)
# source: labels cloned and edited after the model call
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    ids = torch.randint(0, 7, (8, 5))
    y = ids.roll(-1, 1)
    prompt_len = 2
    if BAD and step == 5:
        prompt_len = 5
    logits = model(ids)
    y = y.clone()
    y[:, :prompt_len] = -1
    loss = F.cross_entropy(logits.view(-1, 7), y.view(-1), ignore_index=-1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
