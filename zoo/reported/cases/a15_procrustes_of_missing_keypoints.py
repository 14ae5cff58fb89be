"""Pose lifting with a Procrustes-aligned loss (SVD of a 3 x 3 covariance); one person has no annotated keypoints, all are 0, and the covariance is 0.

Source: https://github.com/nkolot/GraphCMR/issues/10 https://github.com/Pzoom522/ProcrustEs-KGE/issues/2 https://github.com/pytorch/pytorch/issues/49886
True cause: the backward of SVD divides by differences of equal singular values
Where: loss_fn (svd)
Fix: separate the singular values, or leave the person out
"""
import torch
from torch import nn

torch.set_num_threads(1)


def align(pred, gt, reg):
    p, g = pred - pred.mean(1, keepdim=True), gt - gt.mean(1, keepdim=True)
    H = p.transpose(1, 2) @ g + reg
    U, S, Vh = torch.linalg.svd(H)
    R = U @ Vh
    return p @ R, g


def build(fixed=False):
    torch.manual_seed(15)
    model = nn.Sequential(nn.Linear(2 * 12, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 36), nn.Unflatten(1, (12, 3)))
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    reg = torch.diag(torch.tensor([3e-2, 2e-2, 1e-2])) * float(fixed)
    batches = []
    for i in range(32):
        gt = torch.randn(6, 12, 3)
        kp = gt[..., :2] + 0.05 * torch.randn(6, 12, 2)
        if i == 9:
            gt[2] = 0
        batches.append((kp.flatten(1), gt))

    def loss_fn(m, b):
        p, g = align(m(b[0]), b[1], reg)
        return (p - g).pow(2).mean()

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=1.0)
