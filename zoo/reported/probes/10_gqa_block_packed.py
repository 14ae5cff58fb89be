import torch
import torch.nn as nn
import torch.nn.functional as F


def packed_batch(vocab, lengths, rows, seed):
    """Rows of several documents laid end to end; positions restart at each document."""
    g = torch.Generator().manual_seed(seed)
    t = sum(lengths)
    ids = torch.randint(3, vocab, (rows, t), generator=g)
    pos = torch.cat([torch.arange(n) for n in lengths]).expand(rows, t).clone()
    labels = ids.clone()
    labels[pos == 0] = -100
    return ids, pos, labels


def block_causal(pos):
    doc = (pos == 0).cumsum(-1)
    same = doc[:, :, None] == doc[:, None, :]
    return (same & torch.ones(pos.size(1), pos.size(1), dtype=torch.bool).tril())[:, None]


class Attention(nn.Module):
    def __init__(self, d, h, kv):
        super().__init__()
        self.h, self.kv, self.hd = h, kv, d // h
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, kv * self.hd), nn.Linear(d, kv * self.hd)
        self.o = nn.Linear(d, d)

    def forward(self, x, keep):
        b, t, d = x.shape
        q = self.q(x).view(b, t, self.h, self.hd).transpose(1, 2)
        k = self.k(x).view(b, t, self.kv, self.hd).transpose(1, 2).repeat_interleave(self.h // self.kv, 1)
        v = self.v(x).view(b, t, self.kv, self.hd).transpose(1, 2).repeat_interleave(self.h // self.kv, 1)
        if keep is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.o(y.transpose(1, 2).reshape(b, t, d))


class PackedLM(nn.Module):
    def __init__(self, vocab=90, d=64, layers=2, respect_documents=True):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(64, d)
        self.attn = nn.ModuleList(Attention(d, 4, 2) for _ in range(layers))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(d, 2 * d), nn.SiLU(), nn.Linear(2 * d, d)) for _ in range(layers))
        self.n1 = nn.ModuleList(nn.RMSNorm(d) for _ in range(layers))
        self.n2 = nn.ModuleList(nn.RMSNorm(d) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, vocab, bias=False)
        self.respect_documents = respect_documents

    def forward(self, input_ids, position_ids):
        keep = block_causal(position_ids) if self.respect_documents else None
        x = self.tok(input_ids) + self.pos(position_ids)
        for a, m, n1, n2 in zip(self.attn, self.mlp, self.n1, self.n2):
            x = x + a(n1(x), keep)
            x = x + m(n2(x))
        return self.head(self.norm(x))


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = PackedLM(respect_documents=fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids, pos, labels = packed_batch(90, (9, 15, 8), 4, 10)
    batch = dict(input_ids=ids, position_ids=pos, labels=labels)

    def loss_fn(model, batch):
        logits = model(batch["input_ids"], batch["position_ids"])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
