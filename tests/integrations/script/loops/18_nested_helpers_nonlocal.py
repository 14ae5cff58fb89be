# again: yes
# step: 5
# kind: nonfinite-gradient
# cause: sqrt-at-zero
# line: return torch.sqrt((a - b).pow(2).sum(-1))
# source: experiment function with nested helpers and a nonlocal counter
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv


def run_experiment(seed=0, steps=8):
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    n_seen = 0
    running = 0.0

    def distance(a, b):
        return torch.sqrt((a - b).pow(2).sum(-1))

    def stress(z, target):
        d = distance(z.unsqueeze(1), z.flip(0).unsqueeze(1))
        return (d.squeeze(1) - target).pow(2).mean()

    def train_step(x, target):
        nonlocal n_seen, running
        z = model(x)
        loss = stress(z, target)
        n_seen += len(x)
        running = 0.9 * running + 0.1 * loss.item()
        opt.zero_grad()
        loss.backward()
        opt.step()

    for i in range(steps):
        x = torch.randn(8, 3)
        target = torch.rand(8)
        if BAD and i == 5:
            x[5] = x[2]
        train_step(x, target)
    return running


run_experiment()
