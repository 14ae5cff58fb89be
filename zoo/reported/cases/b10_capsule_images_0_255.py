"""A small convolutional classifier gets the raw bytes 0..255 instead of x / 255: at an ordinary SGD rate the first steps blow the weights up and it never recovers.

Source: https://github.com/www0wwwjs1/Matrix-Capsules-EM-Tensorflow/issues/51 https://github.com/chainer/chainercv/issues/358
True cause: the images are not normalised
Where: the batch (images)
Fix: x / 255
"""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.gelu(self.conv1(x))
        x = F.gelu(self.conv2(x))
        x = F.gelu(self.fc1(torch.flatten(x, 1)))
        return self.fc2(x)


def load_digits(n, rng, glyphs):
    y = rng.integers(0, 10, n)
    img = glyphs[y] * 200 + rng.integers(0, 56, (n, 16, 16))
    return img.astype(np.uint8), y


def build(fixed=False):
    torch.manual_seed(2)
    rng = np.random.default_rng(2)
    glyphs = (rng.random((10, 16, 16)) < 0.3).astype(np.float64)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    batches = []
    for _ in range(115):
        img, y = load_digits(32, rng, glyphs)
        x = torch.from_numpy(img).float().unsqueeze(1)
        if fixed:
            x = x / 255.0
        batches.append((x, torch.from_numpy(y)))
    return dict(model=model, optimizer=optimizer, batches=batches, loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
