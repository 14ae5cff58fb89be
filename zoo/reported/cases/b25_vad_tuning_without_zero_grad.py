"""Fine-tuning a voice activity detector: the tuning loop has no optimizer.zero_grad(). With Adam nothing explodes; the sum of all past gradients drives the weights, the loss swings and ends above its start.

Source: https://github.com/snakers4/silero-vad/pull/699
True cause: .grad is never cleared
Where: the loop
Fix: optimizer.zero_grad() before backward
"""
import torch
from torch import nn

torch.set_num_threads(1)


class VADDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(16, 32, 3, padding=1), nn.ReLU())
        self.rnn = nn.GRU(32, 32, batch_first=True)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        h, _ = self.rnn(self.front(x).transpose(1, 2))
        return self.out(h).squeeze(-1)


def build(fixed=False):
    torch.manual_seed(0)
    model = VADDecoder()
    criterion = nn.BCEWithLogitsLoss()
    opt = torch.optim.Adam(model.parameters(), lr=2e-2)
    voice = torch.randn(16)
    batches = []
    for _ in range(110):
        speech = (torch.rand(8, 6) < 0.4).float().repeat_interleave(5, dim=1)
        feats = torch.randn(8, 16, 30) + speech[:, None] * voice[None, :, None] * 0.8
        batches.append((feats, speech))
    return dict(model=model, optimizer=opt, batches=batches, zero_grad=fixed, loss_fn=lambda m, b: criterion(m(b[0]), b[1]))
