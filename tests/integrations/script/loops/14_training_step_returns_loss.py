# again: yes
# step: 5
# kind: nonfinite-loss
# cause: log-of-zero, outlier-batch
# sample: 6
# line: nll = -torch.log(torch.sigmoid(margin))
# source: trainer whose train_step returns the loss, backward in the caller
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv


class RankingTrainer:
    def __init__(self, model, lr=1e-3):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def train_step(self, batch):
        chosen, rejected = batch
        margin = self.model(chosen) - self.model(rejected)
        nll = -torch.log(torch.sigmoid(margin))
        return nll.mean()

    def fit(self, loader):
        for batch in loader:
            self.optimizer.zero_grad()
            loss = self.train_step(batch)
            loss.backward()
            self.optimizer.step()


torch.manual_seed(0)
net = nn.Linear(4, 1, bias=False)
with torch.no_grad():
    net.weight.fill_(0.5)
pairs = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(8)]
if BAD:
    pairs[5][1][6] = 300.0
RankingTrainer(net).fit(pairs)
