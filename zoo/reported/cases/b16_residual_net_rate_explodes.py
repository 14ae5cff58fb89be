"""A residual network for small images with SGD at the recipe's top rate: the loss explodes during the first iterations (2.5, 40, hundreds, thousands) and comes nowhere near its start again.

Source: https://github.com/gcr/torch-residual-networks/issues/10 https://github.com/jax-ml/jax/pull/159
True cause: the rate is too high
Where: the optimizer
Fix: a lower rate, warm up
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)


class BasicBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1 = nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(c)
        self.conv2 = nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(c)

    def forward(self, x):
        return x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))


class ResNet(nn.Module):
    def __init__(self, c=16, blocks=3, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*[BasicBlock(c) for _ in range(blocks)])
        self.fc = nn.Linear(c * 4, classes)

    def forward(self, x):
        x = F.relu(self.blocks(self.stem(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 2).flatten(1))


def build(fixed=False):
    torch.manual_seed(0)
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if fixed else 3.0, momentum=0.9, nesterov=True, weight_decay=1e-4)
    proto = torch.randn(10, 3, 4, 4)
    batches = []
    for _ in range(70):
        y = torch.randint(0, 10, (24,))
        batches.append((F.interpolate(proto[y], scale_factor=4) + 0.5 * torch.randn(24, 3, 16, 16), y))
    return dict(model=model, optimizer=optimizer, batches=batches, loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
