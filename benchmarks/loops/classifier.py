"""A classifier of small pictures: SGD with momentum, clipped. `python classifier.py STEPS`."""

import json
import sys
import time

import torch
from torch import nn

steps = int(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
images, labels = torch.randn(4096, 784), torch.randint(0, 10, (4096,))

model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

times = []
began = time.process_time()
for step in range(steps):
    index = torch.randint(0, len(images), (128,))
    x, y = images[index], labels[index]
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    now = time.process_time()
    times.append(now - began)
    began = now
print(json.dumps(times))
