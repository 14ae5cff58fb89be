import torch
import torch.nn as nn
import torch.nn.functional as F


class PrefixLM(nn.Module):
    """Bidirectional inside the prefix, causal after it; loss on the continuation only."""

    def __init__(self, vocab=90, d=48, layers=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(64, d)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(d, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
                                    for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab)

    def forward(self, input_ids, prefix_len):
        b, t = input_ids.shape
        i = torch.arange(t)
        keep = (i[None, :, None] >= i[None, None, :]) | (i[None, None, :] < prefix_len[:, None, None])
        blocked = (~keep).repeat_interleave(4, 0)
        x = self.tok(input_ids) + self.pos(i)
        for layer in self.layers:
            x = layer(x, src_mask=blocked)
        return self.head(self.norm(x))


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = PrefixLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    g = torch.Generator().manual_seed(53)
    ids = torch.randint(0, 90, (4, 20), generator=g)
    prefix = torch.tensor([6, 9, 4, 11])
    labels = ids.clone()
    labels[torch.arange(20)[None] < prefix[:, None]] = -100
    batch = dict(input_ids=ids, prefix_len=prefix, labels=labels)

    def loss_fn(model, batch):
        logits = model(batch["input_ids"], batch["prefix_len"])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
