# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 6
# source: script of functions that share global names
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
MODEL = nn.Linear(3, 1)
OPT = torch.optim.SGD(MODEL.parameters(), lr=0.1)
X, Y, STEP = None, None, 0


def load():
    global X, Y
    X = torch.randn(8, 3)
    Y = X.abs().sum(1)
    if BAD and STEP == 5:
        Y[6] = float("nan")


def step():
    global STEP, LOSS
    load()
    OPT.zero_grad()
    pred = MODEL(X)[:, 0]
    LOSS = torch.mean((pred - Y) ** 2)
    LOSS.backward()
    OPT.step()
    STEP += 1


for _ in range(8):
    step()
