import torch
import torch.nn as nn
import torch.nn.functional as F


class SentenceEncoder(nn.Module):
    def __init__(self, permute, vocab=80, h=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, 32)
        self.rnn = nn.GRU(32, h, batch_first=True, bidirectional=True)
        self.latent = nn.Linear(2 * h, 16)
        self.cls = nn.Linear(16, 6)
        self.permute = permute

    def forward(self, input_ids):
        b = input_ids.size(0)
        _, hidden = self.rnn(self.emb(input_ids))
        if self.permute:
            hidden = hidden.transpose(0, 1).reshape(b, -1)
        else:
            hidden = hidden.view(b, -1)
        return self.cls(torch.tanh(self.latent(hidden)))


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = SentenceEncoder(permute=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(31)
    batch = dict(input_ids=torch.randint(0, 80, (6, 13), generator=g), labels=torch.randint(0, 6, (6,), generator=g))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["input_ids"]), batch["labels"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
