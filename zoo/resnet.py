"""A plain ResNet-50 in torch alone: 53 convolutions in 16 bottlenecks, named as in torchvision."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += self.downsample(x)
        return self.relu(y)


class ResNet50(nn.Module):
    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        """`width`: channels of the stem; 64 is ResNet-50."""
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        before, stages = width, []
        for stage, count in enumerate((3, 4, 6, 3)):
            blocks = []
            for i in range(count):
                blocks.append(Bottleneck(before, width << stage, 2 if stage and not i else 1))
                before = 4 * (width << stage)
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def resnet(device: str) -> tuple[ResNet50, tuple[Tensor, Tensor]]:
    """The network and a batch for it: as it is on CUDA, 64 images of 224 x 224, channels last; narrow and small on a CPU."""
    torch.manual_seed(0)
    width, batch, size = (64, 64, 224) if device == "cuda" else (8, 4, 64)
    model = ResNet50(width).to(device, memory_format=torch.channels_last)
    images = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    return model, (images, torch.randint(0, 1000, (batch,), device=device))
