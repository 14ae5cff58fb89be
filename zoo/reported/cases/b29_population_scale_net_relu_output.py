"""Population density network: the output layer is a ReLU so that counts are not negative. The initial prediction is below zero everywhere, the output is 0 and no gradient ever comes back.

Source: https://github.com/jvargasmu/population_estimation/issues/68 https://github.com/chelsea0x3b/dfdx/issues/486
True cause: the output ReLU never fires
Where: scale_net (its last ReLU)
Fix: softplus
"""
import torch
import torch.nn as nn

torch.set_num_threads(1)


class ScaleNet(nn.Module):
    def __init__(self, out_act):
        super().__init__()
        self.scale_net = nn.Sequential(nn.Conv2d(5, 32, 1), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.ReLU(), nn.Conv2d(32, 1, 1), out_act)
        nn.init.constant_(self.scale_net[4].bias, -0.8)  # most pixels are empty

    def forward(self, covariates, buildings):
        density = self.scale_net(covariates) * buildings
        return density.sum((1, 2, 3))


def build(fixed=False):
    torch.manual_seed(0)
    model = ScaleNet(nn.Softplus() if fixed else nn.ReLU())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = []
    for _ in range(100):
        cov = torch.randn(8, 5, 12, 12)
        houses = (torch.rand(8, 1, 12, 12) < 0.3).float()
        people = ((1.5 + cov[:, :1].clamp(-1, 1) + 0.5 * cov[:, 1:2].clamp(-1, 1)) * houses).sum((1, 2, 3))
        batches.append((cov, houses, people))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: nn.functional.l1_loss(m(b[0], b[1]), b[2]), max_grad_norm=5.0)
