# again: yes
# step: 5
# kind: nonfinite-loss
# cause: log-of-zero, outlier-batch
# sample: 4
# line: loss = -torch.log(probs[range(len(y)), y]).mean()
# source: adversarial training, inner attack loop before the training pass
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
epsilon, alpha, attack_iters = 0.1, 0.05, 2

model = nn.Linear(4, 3)
with torch.no_grad():
    model.weight.copy_(torch.tensor([[0.4] * 4, [0.1] * 4, [-0.4] * 4]))
opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(8):
    X, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    if BAD and step == 5:
        X[4], y[4] = 100.0, 2
    delta = torch.zeros_like(X).uniform_(-epsilon, epsilon).requires_grad_(True)
    for _ in range(attack_iters):
        output = model(X + delta)
        attack_loss = F.cross_entropy(output, y)
        grad = torch.autograd.grad(attack_loss, delta)[0].detach()
        delta.data = (delta + alpha * torch.sign(grad)).clamp(-epsilon, epsilon)
    delta = delta.detach()
    probs = model(X + delta).softmax(dim=1)
    loss = -torch.log(probs[range(len(y)), y]).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
