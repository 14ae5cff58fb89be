"""Activity recognition from accelerometer windows: forward ends with F.softmax and the criterion is nn.CrossEntropyLoss. The loss cannot fall below ln(1 + 5/e) = 1.04.

Source: https://github.com/jindongwang/Deep-learning-activity-recognition/issues/10 https://github.com/gitabcworld/MatchingNetworks/issues/5
True cause: softmax twice
Where: loss_fn (cross_entropy) / forward's softmax
Fix: return the logits
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)


class HARNet(nn.Module):
    def __init__(self, double):
        super().__init__()
        self.double = double
        self.conv1 = nn.Sequential(nn.Conv1d(9, 32, 9, padding=4), nn.ReLU(), nn.MaxPool1d(2))
        self.conv2 = nn.Sequential(nn.Conv1d(32, 48, 9, padding=4), nn.ReLU(), nn.MaxPool1d(2))
        self.fc1 = nn.Linear(48 * 16, 64)
        self.fc2 = nn.Linear(64, 6)

    def forward(self, x):
        x = self.conv2(self.conv1(x)).flatten(1)
        x = self.fc2(F.relu(self.fc1(x)))
        if self.double:
            x = F.softmax(x, dim=1)
        return x


def build(fixed=False):
    torch.manual_seed(7)
    model = HARNet(double=not fixed)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    t = torch.arange(64) / 64.0
    batches = []
    for _ in range(100):
        y = torch.randint(0, 6, (32,))
        phase = torch.rand(32, 9, 1) * 6.28
        x = torch.sin(6.28 * (y[:, None, None] * 2 + 2) * t + phase) + 0.5 * torch.randn(32, 9, 64)
        batches.append((x, y))
    return dict(model=model, optimizer=optimizer, batches=batches, loss_fn=lambda m, b: criterion(m(b[0]), b[1]))
