# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 2
# source: while loop over an iterator restarted on StopIteration
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

loader = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(3)]
model = nn.Linear(4, 2)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data_iter = iter(loader)
global_step = 0
while True:
    try:
        batch = next(data_iter)
    except StopIteration:
        data_iter = iter(loader)
        batch = next(data_iter)
    images, labels = (t.clone() for t in batch)
    if BAD and global_step == 5:
        images[2, 2] = float("nan")
    optimizer.zero_grad()
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
    global_step += 1
    if global_step >= 8:
        break
