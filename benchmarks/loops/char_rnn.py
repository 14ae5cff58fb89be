"""A GRU over characters, its hidden state carried on. `python char_rnn.py STEPS`."""

import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

steps = int(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
vocabulary, batch, length = 65, 8, 24
text = torch.randint(0, vocabulary, (batch, 100_000))


class CharRNN(nn.Module):
    def __init__(self, size=64):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.rnn = nn.GRU(size, size, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(size, vocabulary)

    def forward(self, x, hidden=None):
        out, hidden = self.rnn(self.embed(x), hidden)
        return self.head(self.drop(out)), hidden


def train(model, optimizer):
    hidden = None
    model.train()
    times = []
    began = time.process_time()
    for step in range(steps):
        at = step * length % (text.shape[1] - length - 1)
        x, y = text[:, at : at + length], text[:, at + 1 : at + 1 + length]
        if hidden is not None:
            hidden = hidden.detach()
        logits, hidden = model(x, hidden)
        loss = F.cross_entropy(logits.reshape(-1, vocabulary), y.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        now = time.process_time()
        times.append(now - began)
        began = now
    return times


model = CharRNN()
print(json.dumps(train(model, torch.optim.Adam(model.parameters(), lr=2e-3))))
