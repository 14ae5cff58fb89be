# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 1
# source: step inside try and except for out-of-memory errors
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


def train(model, optimizer, loader):
    skipped = 0
    for step, (inputs, labels) in enumerate(loader):
        try:
            logits = model(inputs)
            loss = F.mse_loss(
                logits.squeeze(-1), labels
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        except RuntimeError as e:
            if "out of memory" in str(e):
                skipped += 1
                continue
            raise
        finally:
            last = step
    return skipped, last


net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
data = [(torch.randn(8, 4), torch.randn(8)) for _ in range(8)]
if BAD:
    data[5][1][1] = float("inf")
train(net, torch.optim.Adam(net.parameters()), data)
