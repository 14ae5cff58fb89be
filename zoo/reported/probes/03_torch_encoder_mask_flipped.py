import math
import torch
import torch.nn as nn


class TransformerLM(nn.Module):
    """word_language_model style: nn.TransformerEncoder with an additive square mask."""

    def __init__(self, vocab, d, heads, hid, layers, flipped):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        pe = torch.zeros(128, d)
        pos = torch.arange(128).unsqueeze(1).float()
        div = torch.exp(torch.arange(0, d, 2).float() * (-math.log(10000.0) / d))
        pe[:, 0::2], pe[:, 1::2] = torch.sin(pos * div), torch.cos(pos * div)
        self.register_buffer("pe", pe)
        layer = nn.TransformerEncoderLayer(d, heads, hid, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.decoder = nn.Linear(d, vocab)
        self.d, self.flipped = d, flipped

    def square_mask(self, n):
        m = torch.triu(torch.ones(n, n)) == 1
        if not self.flipped:
            m = m.transpose(0, 1)
        return torch.zeros(n, n).masked_fill(~m, float("-inf"))

    def forward(self, src):
        x = self.emb(src) * math.sqrt(self.d) + self.pe[: src.size(1)]
        return self.decoder(self.encoder(x, mask=self.square_mask(src.size(1))))


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = TransformerLM(100, 48, 4, 96, 2, flipped=not fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    tok = torch.randint(0, 100, (6, 21), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": tok[:, :-1].clone(), "labels": tok[:, 1:].clone()}
    criterion = nn.CrossEntropyLoss()

    def loss_fn(model, batch):
        out = model(batch["input_ids"])
        return criterion(out.reshape(-1, 100), batch["labels"].reshape(-1))

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
