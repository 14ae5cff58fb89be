"""A graph network with learned edge weights and spectral features from eigh of the Laplacian; one molecule has lost its bonds: the Laplacian is 0, all eigenvalues are equal.

Source: https://github.com/pytorch/pytorch/issues/47599 https://github.com/XanaduAI/GradDFT/pull/38 https://github.com/pytorch/pytorch/pull/50942
True cause: the backward of eigh divides by differences of equal eigenvalues
Where: spectral (eigh)
Fix: break the degeneracy, or drop graphs without edges
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class Spectral(nn.Module):
    def __init__(self, split):
        super().__init__()
        self.edge, self.split = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 1)), split

    def forward(self, attr, adj):
        w = F.softplus(self.edge(attr)).squeeze(-1) * adj
        lap = torch.diag_embed(w.sum(-1)) - w
        if self.split:
            lap = lap + torch.diag(torch.linspace(0, 0.5, lap.shape[-1]))
        values, vectors = torch.linalg.eigh(lap)
        return values, vectors


class Net(nn.Module):
    def __init__(self, split):
        super().__init__()
        self.spectral = Spectral(split)
        self.node, self.out = nn.Linear(5 + 6, 32), nn.Linear(32, 1)

    def forward(self, x, attr, adj):
        values, vectors = self.spectral(attr, adj)
        filt = vectors @ torch.diag_embed(torch.exp(-values)) @ vectors.transpose(1, 2)
        h = torch.relu(self.node(torch.cat([filt @ x, vectors.abs()], -1)))
        return self.out(h.mean(1)).squeeze(-1)


def build(fixed=False):
    torch.manual_seed(16)
    model = Net(fixed)
    opt = torch.optim.Adam(model.parameters(), 5e-3)
    batches = []
    for i in range(60):
        u = torch.triu(torch.rand(7, 6, 6) < 0.5, 1).float()
        for k in range(5):
            u[:, k, k + 1] = 1
        adj = u + u.transpose(1, 2)
        attr = torch.rand(7, 6, 6, 4)
        attr = attr + attr.transpose(1, 2)
        if i == 17:
            adj[4] = 0
        x = torch.randn(7, 6, 5)
        batches.append(dict(x=x, attr=attr, adj=adj, y=2 * x[..., 0].mean(1)))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: F.mse_loss(m(b["x"], b["attr"], b["adj"]), b["y"]), max_grad_norm=1.0)
