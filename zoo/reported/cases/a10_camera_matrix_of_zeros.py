"""A NeRF-like network unprojects pixels with the inverse intrinsics of each frame; one frame came without calibration, its focal lengths are 0.

Source: https://github.com/naver/dust3r/issues/241 https://github.com/apple/ml-neuman/issues/62 https://github.com/jspenmar/slowtv_monodepth/issues/6
True cause: a singular matrix is inverted
Where: unproject (torch.linalg.inv)
Fix: drop frames without calibration
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class Unproject(nn.Module):
    def forward(self, pix, K):
        rays = torch.linalg.inv(K) @ F.pad(pix, (0, 1), value=1.0).transpose(1, 2)
        return F.normalize(rays.transpose(1, 2), dim=-1)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.unproject = Unproject()
        self.mlp = nn.Sequential(nn.Linear(3 + 12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3), nn.Sigmoid())

    def forward(self, pix, K):
        d = self.unproject(pix, K)
        enc = torch.cat([d] + [f(d * 2**k) for k in range(2) for f in (torch.sin, torch.cos)], -1)
        return self.mlp(enc)


def build(fixed=False):
    torch.manual_seed(10)
    model = Field()
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    batches = []
    for i in range(30):
        f = 0.8 + 0.4 * torch.rand(5)
        K = torch.zeros(5, 3, 3)
        K[:, 0, 0] = K[:, 1, 1] = f
        K[:, :2, 2], K[:, 2, 2] = 0.5, 1
        if i == 7 and not fixed:
            K[1, 0, 0] = K[1, 1, 1] = 0.0
        pix = torch.rand(5, 32, 2)
        batches.append(dict(pix=pix, K=K, rgb=torch.stack([pix[..., 0], pix[..., 1], 0.5 + 0 * pix[..., 0]], -1)))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: F.mse_loss(m(b["pix"], b["K"]), b["rgb"]))
