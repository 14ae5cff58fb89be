# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 3
# source: R-Drop, two passes with dropout and a symmetric KL
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
alpha = 0.7
for step in range(8):
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    confidence = torch.rand(8)
    if BAD and step == 5:
        confidence[3] = float("nan")
    logits1 = model(x)
    logits2 = model(F.dropout(x, 0.1))
    ce = 0.5 * (F.cross_entropy(logits1, y, reduction="none") + F.cross_entropy(logits2, y, reduction="none"))
    p, q = F.log_softmax(logits1, -1), F.log_softmax(logits2, -1)
    kl = 0.5 * (F.kl_div(p, q, log_target=True, reduction="batchmean")
                + F.kl_div(q, p, log_target=True, reduction="batchmean"))
    ce = (F.dropout(confidence, 0.1) * ce).mean()
    loss = ce + alpha * kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
