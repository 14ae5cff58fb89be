# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 3
# source: word language model, hidden state carried and detached
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 8)
        self.decoder = nn.Linear(8, 2)

    def forward(self, x, hidden):
        out, hidden = self.rnn(x, hidden)
        return self.decoder(out), hidden

    def init_hidden(self, bsz):
        return (torch.zeros(1, bsz, 8), torch.zeros(1, bsz, 8))


def repackage_hidden(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    else:
        return tuple(repackage_hidden(v) for v in h)


def get_batch(data, targets, i, bptt=5):
    return data[i:i + bptt], targets[i:i + bptt]


series = torch.randn(40, 8, 4)
answers = torch.randn(40, 8, 2)
if BAD:
    answers[27, 3, 1] = float("nan")
model = RNNModel()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
hidden = model.init_hidden(8)
for batch, i in enumerate(range(0, series.size(0), 5)):
    data, targets = get_batch(series, answers, i)
    optimizer.zero_grad()
    hidden = repackage_hidden(hidden)
    output, hidden = model(data, hidden)
    loss = criterion(output, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
