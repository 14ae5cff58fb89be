"""A biaffine NER head whose tensor U was made with torch.Tensor(...) and never initialised: most of it is 0, a few entries are about 1e37. All are finite.

Source: https://github.com/suolyer/PyTorch_BERT_Biaffine_NER/pull/3 https://github.com/sauradip/STALE/issues/16
True cause: garbage in a parameter before the first step
Where: biaffine.U
Fix: initialise U
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class Biaffine(nn.Module):
    def __init__(self, dim, labels, init):
        super().__init__()
        U = 0.1 * torch.randn(dim, labels, dim)
        if not init:
            U = torch.zeros(dim, labels, dim)
            U[3, 1, 7], U[11, 2, 0], U[5, 0, 15], U[20, 3, 4] = 2.9e37, -1.7e37, 4.5e-41, 8.8e36
        self.U, self.W = nn.Parameter(U), nn.Linear(2 * dim, labels)

    def forward(self, h):
        n = h.shape[1]
        bi = torch.einsum("bxi,iok,byk->bxyo", h, self.U, h)
        pair = torch.cat([h[:, :, None].expand(-1, n, n, -1), h[:, None].expand(-1, n, n, -1)], -1)
        return bi + self.W(pair)


class Tagger(nn.Module):
    def __init__(self, init):
        super().__init__()
        self.emb = nn.Embedding(60, 24)
        self.lstm, self.biaffine = nn.LSTM(24, 12, bidirectional=True, batch_first=True), Biaffine(24, 4, init)

    def forward(self, ids):
        return self.biaffine(self.lstm(self.emb(ids))[0])


def build(fixed=False):
    torch.manual_seed(24)
    model = Tagger(fixed)
    opt = torch.optim.Adam(model.parameters(), 5e-3)
    batches = []
    for _ in range(30):
        ids = torch.randint(0, 60, (4, 10))
        batches.append((ids, (ids[:, :, None] % 2) * 2 + ids[:, None] % 2))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 2), b[1].flatten()))
