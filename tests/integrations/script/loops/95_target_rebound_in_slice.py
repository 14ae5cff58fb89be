# again: yes
# step: 5
# kind: nonfinite-loss
# cause: zero-denominator, tiny-std-amplification
# line: y = (y - y.mean()) / y.std()
# source: targets standardised after the model call, under the same name
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(8):
    x = torch.randn(8, 4)
    y = torch.randn(8) * 3 + 10
    if BAD and step == 5:
        y.fill_(12.0)
    out = model(x).squeeze(1)
    y = (y - y.mean()) / y.std()
    y = y / 2 + 0.1
    loss = nn.functional.mse_loss(out, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
