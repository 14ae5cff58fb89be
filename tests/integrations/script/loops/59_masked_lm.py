# again: yes
# step: 5
# kind: nonfinite-loss
# cause: no-supervised-targets, zero-denominator
# line: loss = (token_loss * mask).sum() / mask.sum()
# source: masked language model with the mask drawn in the loop
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
VOCAB, PAD, MASK = 30, 0, 1

model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    tokens = torch.randint(2, VOCAB, (8, 12))
    if BAD and step == 5:
        tokens[:] = PAD
    rand = torch.rand(tokens.shape)
    mask = (rand < 0.15) & (tokens != PAD)
    inputs = tokens.clone()
    inputs[mask] = MASK
    logits = model(inputs)
    mask = mask.float()
    token_loss = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
    loss = (token_loss * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
