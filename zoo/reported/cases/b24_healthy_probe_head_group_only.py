"""HEALTHY: a linear probe on a small ConvNeXt: only the head is in the optimizer, the encoder still requires gradients and gets them; that is what was meant.

Source: https://github.com/alexrich021/3dvnet/issues/11
True cause: none
Where: none
Fix: none
"""
import torch
from torch import nn
from transformers import ConvNextConfig, ConvNextForImageClassification

torch.set_num_threads(1)


def build(fixed=False):
    torch.manual_seed(0)
    model = ConvNextForImageClassification(ConvNextConfig(num_stages=2, hidden_sizes=[16, 32], depths=[1, 1], patch_size=2, num_labels=4))
    opt = torch.optim.SGD([{"params": model.classifier.parameters()}], lr=0.1, momentum=0.9)
    proto = torch.randn(4, 3, 4, 4)
    batches = []
    for _ in range(80):
        y = torch.randint(0, 4, (24,))
        x = nn.functional.interpolate(proto[y], scale_factor=4) + 0.5 * torch.randn(24, 3, 16, 16)
        batches.append(dict(pixel_values=x, labels=y))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: m(**b).loss)
