# again: no
# stops: losses.append(loss_fn(scores, labels))
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# source: link prediction that collects losses of several events per update
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Linear(6, 1)
loss_fn = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

losses = []
for event in range(32):
    pair = torch.randn(2, 6)
    if BAD and event == 22:
        pair[0, 3] = float("nan")
    scores = model(pair).squeeze(1)
    labels = torch.tensor([1.0, 0.0])
    losses.append(loss_fn(scores, labels))

    if len(losses) >= 4:
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        losses = []
