# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# source: mixup training with np.random.beta
import sys
import numpy as np
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
np.random.seed(0)


def mixup_data(x, y, alpha=1.0):
    lam = np.random.beta(alpha, alpha) if alpha > 0 else 1
    index = torch.randperm(x.size(0))
    mixed_x = lam * x + (1 - lam) * x[index, :]
    y_a, y_b = y, y[index]
    return mixed_x, y_a, y_b, lam


def mixup_criterion(criterion, pred, y_a, y_b, lam):
    return lam * criterion(pred, y_a) + (1 - lam) * criterion(pred, y_b)


net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
train_loss = correct = total = 0
for batch_idx in range(8):
    inputs, targets = torch.randn(8, 6), torch.randint(0, 3, (8,))
    if BAD and batch_idx == 5:
        inputs[3, 0] = float("nan")
    inputs, targets_a, targets_b, lam = mixup_data(inputs, targets)
    outputs = net(inputs)
    loss = mixup_criterion(criterion, outputs, targets_a, targets_b, lam)
    train_loss += loss.item()
    _, predicted = torch.max(outputs.data, 1)
    total += targets.size(0)
    correct += (lam * predicted.eq(targets_a.data).sum().float()
                + (1 - lam) * predicted.eq(targets_b.data).sum().float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
