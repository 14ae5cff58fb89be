# again: yes
# step: 5
# kind: nonfinite-loss
# cause: log-of-zero
# sample: 0
# line: return (t * torch.log(t) - t * torch.log_softmax(o, 1)).sum(1).mean()
# source: two notebook cells, functions in one and the loop in the other
import linecache
import sys

CELLS = [
    '''
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(3, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def soft_ce(o, t):
    return (t * torch.log(t) - t * torch.log_softmax(o, 1)).sum(1).mean()


def train_batch(x, t):
    optimizer.zero_grad()
    out = model(x)
    loss = soft_ce(out, t)
    loss.backward()
    optimizer.step()
    return loss.item()
''',
    '''
for i in range(8):
    x = torch.randn(8, 3)
    t = torch.softmax(torch.randn(8, 4), 1)
    if BAD and i == 5:
        t[0] = torch.tensor([0.0, 0.5, 0.5, 0.0])
    train_batch(x, t)
''',
]
shell = {"__name__": "__main__", "BAD": "bad" in sys.argv}
for n, cell in enumerate(CELLS):
    name = f"/tmp/ipykernel_4242/{1000 + n}.py"
    linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
    exec(compile(cell, name, "exec"), shell)
