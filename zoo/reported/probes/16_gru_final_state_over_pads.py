import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence


class SensorGRU(nn.Module):
    def __init__(self, packed):
        super().__init__()
        self.gru = nn.GRU(6, 40, batch_first=True)
        self.fc = nn.Linear(40, 7)
        self.packed = packed

    def forward(self, x, attention_mask):
        if self.packed:
            lengths = attention_mask.sum(1).cpu()
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, h = self.gru(x)
        return self.fc(h[-1])


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = SensorGRU(packed=fixed)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(16)
    mask = (torch.arange(30)[None] < torch.tensor([30, 12, 21, 17, 9, 26])[:, None]).long()
    x = torch.randn(6, 30, 6, generator=g) * mask[..., None]
    batch = dict(x=x, attention_mask=mask, labels=torch.randint(0, 7, (6,), generator=g))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["x"], batch["attention_mask"]), batch["labels"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
