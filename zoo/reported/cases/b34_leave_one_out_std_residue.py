"""GRPO with leave-one-out baseline and normalised rewards: when seven of eight rewards are 0.95, E[x^2] - E[x]^2 leaves 2e-7 instead of 0 and the eighth sample's advantage becomes about -2000.

Source: https://github.com/NVIDIA-NeMo/RL/issues/1518 https://github.com/NVIDIA-NeMo/RL/pull/4158
True cause: a standard deviation left by cancellation
Where: loss_fn (div by the leave-one-out std)
Fix: floor the std
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
G = 8


class Policy(nn.Module):
    def __init__(self, vocab=20, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, 48, batch_first=True)
        self.head = nn.Linear(48, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def loo_advantage(rewards, floor):
    r = rewards.view(-1, G)
    n = G - 1
    mean = (r.sum(1, keepdim=True) - r) / n
    sq = ((r**2).sum(1, keepdim=True) - r**2) / n
    std = ((sq - mean**2).clamp(min=0) * n / (n - 1)).sqrt()
    adv = r - mean
    return torch.where(std > floor, adv / (std + 1e-6), adv).view(-1)


def build(fixed=False):
    torch.manual_seed(0)
    model = Policy()
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    batches = []
    for i in range(90):
        ids = torch.randint(0, 20, (2 * G, 9))
        score = (ids[:, 1:] < 10).float().mean(1)
        rewards = 0.3 + 0.65 * score
        if i >= 40 and i % 5 == 0:  # an easy prompt: all right but one
            rewards[:G] = 0.95
            rewards[3] = 0.0
        batches.append(dict(ids=ids, rewards=rewards))

    def loss_fn(m, b):
        logp = -F.cross_entropy(m(b["ids"][:, :-1]).transpose(1, 2), b["ids"][:, 1:], reduction="none")
        adv = loo_advantage(b["rewards"], floor=1e-3 if fixed else 0.0)
        return -(adv[:, None] * logp.clamp(min=-10)).mean()

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn)
