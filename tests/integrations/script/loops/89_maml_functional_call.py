# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 0
# source: MAML inner step with functional_call and autograd.grad
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

BAD = "bad" in sys.argv
torch.manual_seed(0)
inner_lr = 0.1

model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
meta_opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for it in range(8):
    xs, xq = torch.rand(8, 1), torch.rand(8, 1)
    amp = torch.rand(1) + 0.5
    ys, yq = amp * torch.sin(xs), amp * torch.sin(xq)
    if BAD and it == 5:
        yq[0] = float("nan")
    params = dict(model.named_parameters())
    support_loss = F.mse_loss(functional_call(model, params, (xs,)), ys)
    grads = torch.autograd.grad(support_loss, tuple(params.values()), create_graph=True)
    fast = {k: p - inner_lr * g for (k, p), g in zip(params.items(), grads)}
    query_pred = functional_call(model, fast, (xq,))
    meta_loss = F.mse_loss(query_pred, yq)
    meta_opt.zero_grad()
    meta_loss.backward()
    meta_opt.step()
