# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 4
# source: notebook style make_train_step that returns a closure
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv


def make_train_step_fn(model, loss_fn, optimizer):
    def perform_train_step_fn(x, y):
        model.train()
        yhat = model(x)
        loss = loss_fn(yhat, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return perform_train_step_fn


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
train_step_fn = make_train_step_fn(net, nn.MSELoss(reduction="mean"), torch.optim.SGD(net.parameters(), lr=0.1))
losses = []
for epoch in range(8):
    x = torch.rand(8, 1)
    y = 1 + 2 * x + 0.1 * torch.randn(8, 1)
    if BAD and epoch == 5:
        x[4] = float("nan")
    losses.append(train_step_fn(x, y))
