"""A LoRA-style run is interrupted and resumed from a checkpoint without optimizer state: weights and schedule continue, Adam's moments start from zero, the loss jumps by orders of magnitude at once.

Source: https://github.com/paiml/entrenar/issues/293 https://github.com/KempnerInstitute/KempnerForge/pull/115
True cause: Adam's state is lost on resume
Where: optimizer.state
Fix: save and load the optimizer's state
"""
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

torch.set_num_threads(1)


class Resumable(LambdaLR):
    """The schedule of a job that is preempted once and comes back from its checkpoint."""

    def __init__(self, optimizer, lr_lambda, preempted_at, restore_optimizer):
        self.preempted_at, self.restore_optimizer = preempted_at, restore_optimizer
        super().__init__(optimizer, lr_lambda)

    def step(self, epoch=None):
        super().step()
        if self.last_epoch == self.preempted_at and not self.restore_optimizer:
            self.optimizer.state.clear()


def build(fixed=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 4))
    teacher = nn.Linear(16, 4)
    opt = torch.optim.Adam(model.parameters(), lr=6e-3, betas=(0.9, 0.999))
    sched = Resumable(opt, lambda s: 1.0, preempted_at=80, restore_optimizer=fixed)
    batches = []
    with torch.no_grad():
        for _ in range(120):
            x = torch.randn(64, 16)
            batches.append((x, 3 * teacher(x)))
    return dict(model=model, optimizer=opt, scheduler=sched, batches=batches, loss_fn=lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]))
