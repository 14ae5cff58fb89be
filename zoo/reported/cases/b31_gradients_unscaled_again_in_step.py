"""Mixed precision with a GradScaler: the loop unscales before clipping, and a wrapper around the optimizer divides by the loss scale once more. Every update is 65536 times too small.

Source: https://github.com/NVIDIA/apex/pull/1512 https://github.com/Lightning-AI/pytorch-lightning/issues/9599
True cause: gradients are unscaled twice
Where: optimizer.step (pre-hook)
Fix: unscale once
"""
import torch
from torch import nn

torch.set_num_threads(1)


class SpeechCommands(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(20, 32, 5, padding=2), nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv1d(32, 32, 5, 2, 2), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, classes))

    def forward(self, x):
        return self.net(x)


def unscale_in_step(scaler):
    def hook(optimizer, args, kwargs):
        inv = 1.0 / scaler.get_scale()
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(inv)
    return hook


def build(fixed=False):
    torch.manual_seed(0)
    model = SpeechCommands()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    if not fixed:
        opt.register_step_pre_hook(unscale_in_step(scaler))
    words = torch.randn(8, 20, 1)
    batches = []
    for _ in range(90):
        y = torch.randint(0, 8, (24,))
        batches.append((words[y] * torch.rand(24, 1, 30) + 0.5 * torch.randn(24, 20, 30), y))
    return dict(model=model, optimizer=opt, scaler=scaler, batches=batches, max_grad_norm=1.0, loss_fn=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))
