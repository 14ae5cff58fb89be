"""HEALTHY: a policy with invalid actions at -inf in every state, and for some states a single legal action (its loss is exactly 0); entropy is taken with xlogy-like care.

Source: https://github.com/hill-a/stable-baselines/pull/453
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


def build(fixed=False):
    torch.manual_seed(36)
    model = nn.Sequential(nn.Linear(10, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 6))
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    batches = []
    for i in range(60):
        obs = torch.randn(16, 10)
        legal = torch.rand(16, 6) < 0.5
        best = obs[:, :6].masked_fill(~legal, -9).argmax(1)
        legal[torch.arange(16), best] = True
        if i % 7 == 3:
            legal[5] = F.one_hot(best[5], 6).bool()
        batches.append(dict(obs=obs, legal=legal, act=best))

    def loss_fn(m, b):
        logits = m(b["obs"]).masked_fill(~b["legal"], float("-inf"))
        logp = logits.log_softmax(-1)
        entropy = -(logp.exp() * logp.masked_fill(~b["legal"], 0.0)).sum(-1).mean()
        return F.nll_loss(logp, b["act"]) - 0.01 * entropy

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=0.5)
