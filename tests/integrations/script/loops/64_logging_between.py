# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 6
# source: prints and running averages between the loss and backward
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
criterion = nn.CrossEntropyLoss(reduction="none")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses, top1 = AverageMeter(), AverageMeter()
history = []
for i in range(8):
    images, target = torch.randn(8, 5), torch.randint(0, 3, (8,))
    weight = torch.ones(8)
    if BAD and i == 5:
        weight[6] = float("nan")
    output = model(images)
    loss = (criterion(output, target) * weight).mean()
    acc = (output.argmax(1) == target).float().mean().item()
    losses.update(loss.item(), images.size(0))
    top1.update(acc, images.size(0))
    history.append(loss.item())
    if i % 3 == 0:
        print(f"iter {i} loss {losses.avg:.4f} acc {top1.avg:.3f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
