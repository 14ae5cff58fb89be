"""Behaviour cloning of a board game with the annotated transformer's LabelSmoothing (KLDivLoss against a smoothed distribution); illegal moves have logit -inf.

Source: https://github.com/harvardnlp/annotated-transformer/issues/109 https://github.com/sooftware/kospeech/issues/37
True cause: probability mass is put on moves whose log-probability is -inf
Where: loss_fn (kl_div)
Fix: no smoothing mass on illegal moves
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
MOVES = 9


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 8)
        self.conv = nn.Sequential(nn.Conv2d(8, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(24, 1, 1)

    def forward(self, board):
        return self.head(self.conv(self.embed(board).permute(0, 3, 1, 2))).flatten(1)


def build(fixed=False):
    torch.manual_seed(14)
    model = Policy()
    opt = torch.optim.Adam(model.parameters(), 5e-3)
    batches = []
    for i in range(60):
        board = torch.randint(0, 3, (10, 3, 3))
        legal = torch.ones(10, MOVES, dtype=torch.bool)  # this variant allows captures, almost every move is legal
        y = (board.flatten(1) * torch.arange(MOVES, 0, -1)).argmax(1)
        if i == 15:
            legal[6, [(int(y[6]) + 4) % MOVES]] = False
        batches.append((board, legal, y))

    def loss_fn(m, b):
        board, legal, y = b
        logp = m(board).masked_fill(~legal, float("-inf")).log_softmax(-1)
        target = torch.full_like(logp, 0.1 / (MOVES - 1)).scatter(1, y[:, None], 0.9)
        if fixed:
            target = target * legal
            logp = logp.masked_fill(~legal, 0.0)
        return F.kl_div(logp, target, reduction="batchmean")

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn)
