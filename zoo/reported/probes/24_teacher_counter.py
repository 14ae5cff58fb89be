import torch
import torch.nn as nn
import torch.nn.functional as F


class WarmedTeacher(nn.Module):
    """Mean-teacher: the averaging weight warms up with the number of updates done."""

    def __init__(self, counter_in_state):
        super().__init__()
        self.student = nn.GRU(8, 32, batch_first=True)
        self.teacher = nn.GRU(8, 32, batch_first=True)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.proj = nn.Linear(32, 5)
        if counter_in_state:
            self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        else:
            self.updates = 0

    def forward(self, x, y):
        s, _ = self.student(x)
        with torch.no_grad():
            t, _ = self.teacher(x)
        weight = min(1.0, float(self.updates) / 20)
        loss = F.cross_entropy(self.proj(s[:, -1]), y) + weight * (s - t - 0.1).pow(2).mean() * 10
        if self.training:
            self.updates = self.updates + 1
            with torch.no_grad():
                decay = 0.99 * (1 - 0.5 ** int(self.updates))
                for a, b in zip(self.student.parameters(), self.teacher.parameters()):
                    b.mul_(decay).add_(a, alpha=1 - decay)
        return loss


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = WarmedTeacher(counter_in_state=fixed)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    g = torch.Generator().manual_seed(24)
    batch = dict(x=torch.randn(8, 12, 8, generator=g), y=torch.randint(0, 5, (8,), generator=g))

    def loss_fn(model, batch):
        return model(batch["x"], batch["y"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
