# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 6
# source: train step behind decorators with functools.wraps
import functools
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
calls = {}


def counted(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        calls[fn.__name__] = calls.get(fn.__name__, 0) + 1
        return fn(*args, **kwargs)
    return wrapper


def grad_mode(enabled):
    def deco(fn):
        @functools.wraps(fn)
        def inner(*args, **kwargs):
            with torch.set_grad_enabled(enabled):
                return fn(*args, **kwargs)
        return inner
    return deco


@counted
@grad_mode(True)
def train_step(model, batch, optimizer, *, criterion):
    x, y = batch
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@counted
@torch.no_grad()
def evaluate(model, batch):
    model.eval()
    score = model(batch[0]).mean().item()
    model.train()
    return score


model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for i in range(8):
    batch = (torch.randn(8, 4), torch.randn(8, 1))
    if BAD and i == 5:
        batch[0][6, 2] = float("nan")
    train_step(model, batch, optimizer, criterion=nn.MSELoss())
    evaluate(model, batch)
