# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 5
# source: timing context manager and record_function around the forward
import sys
import time
from contextlib import nullcontext
import torch
import torch.nn as nn
from torch.profiler import record_function

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Timer:
    def __enter__(self):
        self.start = time.perf_counter()
        return self

    def __exit__(self, *args):
        self.elapsed = time.perf_counter() - self.start


amp_ctx = nullcontext()
model = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 2))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
spent = 0.0
for it in range(8):
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    if BAD and it == 5:
        x[5, 1] = float("inf")
    with Timer() as t:
        with record_function("forward"), amp_ctx:
            logits = model(x)
        with record_function("loss"):
            loss = nn.functional.cross_entropy(logits, y)
    spent += t.elapsed
    opt.zero_grad()
    loss.backward()
    opt.step()
