"""A siamese bag-of-words encoder: the row of the unknown word starts at 0, so a sentence with no known word is the zero vector, and its cosine has a gradient of about 1 / eps. Nothing is NaN; one row wrecks the weights.

Source: https://github.com/huggingface/sentence-transformers/issues/625
True cause: a zero vector is normalised
Where: loss_fn (normalize)
Fix: leave empty sentences out
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.proj = nn.EmbeddingBag(80, 24, mode="mean"), nn.Linear(24, 16, bias=False)
        nn.init.zeros_(self.bag.weight.data[0])  # <unk>

    def forward(self, ids):
        return self.proj(self.bag(ids))


def build(fixed=False):
    torch.manual_seed(30)
    model = Encoder()
    opt = torch.optim.SGD(model.parameters(), 0.5)
    corpus = [torch.randint(1, 80, (12, 6)) for _ in range(4)]
    other = [torch.cat([a[:, :3], torch.randint(1, 80, (12, 3))], 1) for a in corpus]
    batches = []
    for i in range(60):
        a, b = corpus[i % 4].clone(), other[i % 4].clone()
        if i > 18:
            b[::4, 5] = 0
        if i == 18:
            a[7] = 0
        batches.append((a, b))

    def loss_fn(m, b):
        keep = (b[0] != 0).any(1) if fixed else torch.ones(len(b[0]), dtype=torch.bool)
        u, v = F.normalize(m(b[0][keep]), dim=-1), F.normalize(m(b[1][keep]), dim=-1)
        return F.cross_entropy(u @ v.T / 0.1, torch.arange(len(u)))

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn)
