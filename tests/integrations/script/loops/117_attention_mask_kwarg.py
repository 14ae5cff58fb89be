# again: yes
# step: 5
# kind: nonfinite-loss
# cause: attention-row-fully-masked
# sample: 6
# line: attn = torch.softmax(scores.masked_fill(~mask[:, None, :], float("-inf")), dim=-1)
# source: small transformer called with a padding mask
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.emb = nn.Embedding(16, d)
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, 2)

    def forward(self, ids, mask=None):
        q, k, v = self.qkv(self.emb(ids)).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 8 ** 0.5
        attn = torch.softmax(scores.masked_fill(~mask[:, None, :], float("-inf")), dim=-1)
        return self.out((attn @ v).mean(1))


model = Attention()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    batch = dict(ids=torch.randint(1, 16, (8, 5)), labels=torch.randint(0, 2, (8,)))
    batch["ids"][:, 4] = 0
    if BAD and step == 5:
        batch["ids"][6] = 0
    labels = batch.pop("labels")
    out = model(batch["ids"], mask=batch["ids"] != 0)
    loss = F.cross_entropy(input=out, target=labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
