# again: yes
# step: 5
# kind: nonfinite-loss
# cause: log-of-zero
# sample: 4
# line: log_pop = torch.log(popularity)
# source: model called through encode and score methods
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Linear(5, 4)
        self.item = nn.Linear(6, 4)

    def encode_user(self, u):
        return F.normalize(self.user(u), dim=1)

    def encode_item(self, i):
        return F.normalize(self.item(i), dim=1)

    def compute(self, u, i):
        return self.encode_user(u) @ self.encode_item(i).t()


model = Matcher()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(8):
    u, i = torch.randn(8, 5), torch.randn(8, 6)
    popularity = torch.rand(8) + 0.1
    if BAD and step == 5:
        popularity[4] = 0.0
    scores = model.compute(u, i) / 0.1
    log_pop = torch.log(popularity)
    loss = F.cross_entropy(scores - log_pop, torch.arange(8))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
