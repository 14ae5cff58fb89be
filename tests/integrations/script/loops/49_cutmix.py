# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# source: CutMix with a coin per batch and in-place pasting
import sys
import numpy as np
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
np.random.seed(1)


def rand_bbox(size, lam):
    W = size[-1]
    cut = int(W * np.sqrt(1.0 - lam))
    cx = np.random.randint(W)
    return np.clip(cx - cut // 2, 0, W), np.clip(cx + cut // 2, 0, W)


model = nn.Sequential(nn.Flatten(), nn.Linear(2 * 8, 12), nn.ReLU(), nn.Linear(12, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.MSELoss()
beta, cutmix_prob = 1.0, 0.5

for i in range(8):
    input = torch.randn(8, 2, 8)
    target = torch.randn(8, 1)
    if BAD and i == 5:
        target[6] = float("nan")
    r = np.random.rand(1)
    if beta > 0 and r < cutmix_prob:
        lam = np.random.beta(beta, beta)
        rand_index = torch.randperm(input.size()[0])
        target_a = target
        target_b = target[rand_index]
        b1, b2 = rand_bbox(input.size(), lam)
        input[:, :, b1:b2] = input[rand_index, :, b1:b2]
        lam = 1 - (b2 - b1) / input.size()[-1]
        output = model(input)
        loss = criterion(output, target_a) * lam + criterion(output, target_b) * (1.0 - lam)
    else:
        output = model(input)
        loss = criterion(output, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
