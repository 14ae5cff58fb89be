"""Transfer learning: ExponentialLR with gamma 0.5, meant for epochs, is stepped after every batch. After 20 batches the rate is a millionth.

Source: https://github.com/NVIDIA/DIGITS/issues/662 https://github.com/pytorch/tutorials/pull/640 https://github.com/nodefluxio/vortex/issues/58
True cause: the rate decays to nothing
Where: optimizer.param_groups[*]['lr']
Fix: step the scheduler once per epoch
"""
import torch
import torch.nn as nn
from transformers import ResNetConfig, ResNetForImageClassification

torch.set_num_threads(1)
STEPS_PER_EPOCH = 40


def build(fixed=False):
    torch.manual_seed(0)
    cfg = ResNetConfig(embedding_size=16, hidden_sizes=[16, 24], depths=[1, 1], layer_type="basic", num_labels=5)
    model = ResNetForImageClassification(cfg)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if fixed:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: 0.5 ** (it // STEPS_PER_EPOCH))
    else:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    proto = torch.randn(5, 3, 4, 4)
    batches = []
    for _ in range(100):
        y = torch.randint(0, 5, (16,))
        x = nn.functional.interpolate(proto[y], size=16) + 1.5 * torch.randn(16, 3, 16, 16)
        batches.append({"pixel_values": x, "labels": y})
    return dict(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches, loss_fn=lambda m, b: m(**b).loss)
