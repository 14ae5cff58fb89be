"""A small CNN with batch norm: AdamW and a cosine schedule. `python cnn.py STEPS`."""

import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

steps = int(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(2048, 3, 16, 16), torch.randint(0, 10, (2048,)))


class Block(nn.Module):
    def __init__(self, inside, out):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inside, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(3, 16), nn.MaxPool2d(2), Block(16, 32), nn.MaxPool2d(2), Block(32, 32))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.drop(self.blocks(x).mean((2, 3))))


def main():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    times = []
    while len(times) < steps:
        model.train()
        began = time.process_time()
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            scheduler.step()
            now = time.process_time()
            times.append(now - began)
            began = now
    print(json.dumps(times))


if __name__ == "__main__":
    main()
