"""ViT with warm restarts: each cycle warms up over int(fraction * length) steps. For the shorter second cycle that is 0 steps, and numpy's 1 / 0 makes the rate Inf.

Source: https://github.com/allenai/OLMo-core/pull/655 https://github.com/mlcommons/hpc/pull/27
True cause: an infinite learning rate; gradients and weights are finite until the step
Where: optimizer.step (lr = inf)
Fix: max(1, warm-up)
"""
import numpy as np
import torch
from transformers import ViTConfig, ViTForImageClassification

torch.set_num_threads(1)


def schedule(fixed):
    def scale(step):
        start, length = (0, 24) if step < 24 else (24, 18)
        t, warm = step - start, int(length * 0.05)
        if fixed:
            warm = max(1, warm)
        if t <= warm:
            with np.errstate(all="ignore"):
                return float(np.float64(t + 1) / np.float64(warm))
        return 0.5 * (1 + np.cos(np.pi * t / length))

    return scale


def build(fixed=False):
    torch.manual_seed(22)
    model = ViTForImageClassification(ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4, num_labels=4))
    opt = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, schedule(fixed))
    batches = []
    for _ in range(42):
        y = torch.randint(0, 4, (8,))
        batches.append(dict(pixel_values=torch.randn(8, 3, 16, 16) + 0.6 * y[:, None, None, None], labels=y))
    return dict(model=model, optimizer=opt, scheduler=sched, batches=batches, loss_fn=lambda m, b: m(**b).loss, max_grad_norm=1.0)
