import torch
import torch.nn as nn
import torch.nn.functional as F


class TemporalBlock(nn.Module):
    def __init__(self, ch, k, dilation, causal):
        super().__init__()
        self.pad = (k - 1) * dilation
        self.causal = causal
        self.conv1 = nn.utils.parametrizations.weight_norm(nn.Conv1d(ch, ch, k, dilation=dilation))
        self.conv2 = nn.utils.parametrizations.weight_norm(nn.Conv1d(ch, ch, k, dilation=dilation))

    def _pad(self, x):
        if self.causal:
            return F.pad(x, (self.pad, 0))
        return F.pad(x, (self.pad // 2, self.pad - self.pad // 2))

    def forward(self, x):
        y = F.relu(self.conv1(self._pad(x)))
        y = F.relu(self.conv2(self._pad(y)))
        return F.relu(x + y)


class TCNDecoder(nn.Module):
    def __init__(self, vocab=64, ch=48, causal=True):
        super().__init__()
        self.emb = nn.Embedding(vocab, ch)
        self.blocks = nn.Sequential(*[TemporalBlock(ch, 3, 2 ** i, causal) for i in range(3)])
        self.out = nn.Linear(ch, vocab)

    def forward(self, tokens):
        x = self.emb(tokens).transpose(1, 2)
        return self.out(self.blocks(x).transpose(1, 2))


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = TCNDecoder(causal=fixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seq = torch.randint(0, 64, (5, 41), generator=torch.Generator().manual_seed(4))
    batch = {"input_ids": seq[:, :-1].clone(), "labels": seq[:, 1:].clone()}

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["input_ids"]).transpose(1, 2), batch["labels"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
