# again: yes
# step: 5
# kind: nonfinite-loss
# cause: log-of-zero
# sample: 4
# line: loss = criterion(torch.log(pred), torch.log(label))
# source: Kaggle style loop with a progress bar and RMSLE
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)


class tqdm:
    def __init__(self, it, desc=""):
        self.it, self.postfix = it, {}

    def __iter__(self):
        return iter(self.it)

    def set_postfix(self, **kw):
        self.postfix = kw


model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1), nn.Softplus())
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = [(torch.randn(8, 4), torch.rand(8, 1) + 0.2) for _ in range(8)]
if BAD:
    loader[5][1][4] = 0.0
total_loss = 0
pbar = tqdm(loader, desc="train")
for step, (data, label) in enumerate(pbar):
    optimizer.zero_grad()
    pred = model(data)
    loss = criterion(torch.log(pred), torch.log(label))
    total_loss += loss.item()
    pbar.set_postfix(loss=total_loss / (step + 1), lr=optimizer.param_groups[0]["lr"])
    loss.backward()
    optimizer.step()
