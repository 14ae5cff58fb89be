# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 6
# source: regression script with def main and a train function
import sys
import torch
from torch import nn

BAD = "bad" in sys.argv


def batches():
    g = torch.Generator().manual_seed(1)
    for step in range(8):
        x = torch.randn(8, 5, generator=g)
        y = x.sum(1, keepdim=True)
        if BAD and step == 5:
            y[6] = float("inf")
        yield x, y


def train(model, criterion, optimizer, device):
    model.train()
    for x, y in batches():
        x, y = x.to(device), y.to(device)
        pred = model(x)
        loss = criterion(pred, y)

        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    torch.manual_seed(0)
    device = torch.device("cpu")
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, nn.MSELoss(), optimizer, device)


main()
