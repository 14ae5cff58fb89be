# again: yes
# step: 5
# kind: nonfinite-loss
# cause: zero-denominator
# sample: 6
# line: loss += 0.1 * ((out - y).abs() / y.abs()).mean()
# source: forecasting script with a MAPE term
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

lstm = nn.LSTM(2, 8, batch_first=True)
fc = nn.Linear(8, 1)
model = nn.ModuleList([lstm, fc])
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
l2 = 1e-3

for step in range(8):
    x = torch.randn(8, 5, 2)
    y = torch.rand(8, 1) + 0.5
    if BAD and step == 5:
        y[6] = 0.0
    opt.zero_grad()
    h, _ = lstm(x)
    out = fc(h[:, -1])
    loss = nn.functional.mse_loss(out, y)
    loss += 0.1 * ((out - y).abs() / y.abs()).mean()
    loss = loss + l2 * fc.weight.pow(2).sum()
    loss *= 0.5
    loss.backward()
    opt.step()
