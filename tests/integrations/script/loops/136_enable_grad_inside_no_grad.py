# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 5
# source: no_grad on the outer function, enable_grad around the step
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv


@torch.no_grad()
def adapt(model, optimizer, stream):
    kept = []
    for x, y in stream:
        before = model(x).softmax(1)
        with torch.enable_grad():
            logits = model(x)
            entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
            loss = (entropy * y).mean() + 0.1 * F.mse_loss(logits.softmax(1), before)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        kept.append(model(x).argmax(1))
    return kept


torch.manual_seed(0)
net = nn.Linear(5, 3)
data = [(torch.randn(8, 5), torch.rand(8)) for _ in range(8)]
if BAD:
    data[5][1][5] = float("nan")
adapt(net, torch.optim.SGD(net.parameters(), lr=0.05), data)
