import torch
import torch.nn as nn
import torch.nn.functional as F


class CharRNN(nn.Module):
    def __init__(self, vocab, emb, hidden, bidirectional):
        super().__init__()
        self.embed = nn.Embedding(vocab, emb)
        self.lstm = nn.LSTM(emb, hidden, num_layers=2, batch_first=True, dropout=0.1, bidirectional=bidirectional)
        self.head = nn.Linear(hidden * (2 if bidirectional else 1), vocab)

    def forward(self, x):
        h, _ = self.lstm(self.embed(x))
        return self.head(h)


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = CharRNN(70, 32, 64, bidirectional=not fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    text = torch.randint(0, 70, (4, 31), generator=torch.Generator().manual_seed(5))
    batch = {"input_ids": text[:, :-1].clone(), "labels": text[:, 1:].clone()}

    def loss_fn(model, batch):
        logits = model(batch["input_ids"])
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["labels"].reshape(-1))

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
