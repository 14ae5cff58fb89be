# again: yes
# step: 5
# kind: nonfinite-loss
# cause: zero-denominator
# sample: 6
# line: stats = (act - act.mean(1, keepdim=True)) / act.std(1, keepdim=True)
# source: activations taken by a forward hook and used in the loss
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 2))
features = {}


def save(name):
    def hook(module, inputs, output):
        features[name] = output
    return hook


model[1].register_forward_hook(save("tanh"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(8):
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    if BAD and step == 5:
        x[6] = 0.0
    logits = model(x)
    act = features["tanh"]
    stats = (act - act.mean(1, keepdim=True)) / act.std(1, keepdim=True)
    loss = F.cross_entropy(logits, y) + 0.01 * stats.abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
