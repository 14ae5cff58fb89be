# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 3
# source: notebook cell, its source registered in linecache
import linecache
import sys

CELL = '''
import torch
import torch.nn as nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
loss_fn = nn.MSELoss()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(8):
    xb = torch.randn(8, 4)
    yb = xb.mean(dim=1, keepdim=True)
    if BAD and step == 5:
        yb[3] = float("nan")
    pred = net(xb)
    loss = loss_fn(pred, yb)
    opt.zero_grad()
    loss.backward()
    opt.step()
'''

name = "<ipython-input-1-0a1b2c3d4e5f>"
linecache.cache[name] = (len(CELL), None, CELL.splitlines(True), name)
namespace = {"__name__": "__main__", "BAD": "bad" in sys.argv}
exec(compile(CELL, name, "exec"), namespace)
