# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 4
# source: static input buffers refilled in place for each batch
import sys
import numpy as np
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
rng = np.random.RandomState(0)

static_x = torch.zeros(8, 5)
static_y = torch.zeros(8, 1)
model = nn.Linear(5, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.02)
for step in range(8):
    x = rng.randn(8, 5).astype("float32")
    y = x.sum(1, keepdims=True)
    if BAD and step == 5:
        y[4] = np.nan
    static_x.copy_(torch.from_numpy(x))
    static_y.copy_(torch.from_numpy(y))
    pred = model(static_x)
    loss = torch.nn.functional.mse_loss(pred, static_y)
    opt.zero_grad(set_to_none=False)
    loss.backward()
    opt.step()
