"""Entity embeddings sized on the first file; a later shard has one row with a category that was not there.

Source: https://github.com/dreamquark-ai/tabnet/issues/359 https://github.com/dreamquark-ai/tabnet/issues/357 https://github.com/fastai/fastai/issues/1423
True cause: a category code beyond the embedding table
Where: embeds.1
Fix: reserve a row for unknown categories
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
CARDINALITY = (7, 12, 4)


class TabularModel(nn.Module):
    def __init__(self, sizes, n_cont):
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(n, 6) for n in sizes)
        self.bn_cont = nn.BatchNorm1d(n_cont)
        self.layers = nn.Sequential(nn.Linear(6 * len(sizes) + n_cont, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 1))

    def forward(self, cat, cont):
        h = [e(cat[:, j]) for j, e in enumerate(self.embeds)]
        return self.layers(torch.cat(h + [self.bn_cont(cont)], 1)).squeeze(1)


def build(fixed=False):
    torch.manual_seed(4)
    model = TabularModel([n + int(fixed) for n in CARDINALITY], 5)
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    batches = []
    for i in range(40):
        cat = torch.stack([torch.randint(0, n, (32,)) for n in CARDINALITY], 1)
        cont = torch.randn(32, 5)
        if i == 14:
            cat[21, 1] = 12
        batches.append(dict(cat=cat, cont=cont, y=(cont[:, 0] + 0.3 * cat[:, 2] > 0.4).float()))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: F.binary_cross_entropy_with_logits(m(b["cat"], b["cont"]), b["y"]))
