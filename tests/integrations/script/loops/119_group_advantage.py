# again: yes
# step: 5
# kind: nonfinite-loss
# cause: std-of-one-sample
# sample: 7
# line: adv[sel] = (r - r.mean()) / (r.std() + 1e-4)
# source: GRPO style update with rewards normalised per prompt group
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

policy = nn.Linear(6, 5)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
for step in range(8):
    states = torch.randn(8, 6)
    actions = torch.randint(0, 5, (8,))
    rewards = torch.rand(8)
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    if BAD and step == 5:
        groups[7] = 2
    with torch.no_grad():
        old_logp = policy(states).log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
    adv = torch.zeros_like(rewards)
    for g in groups.unique():
        sel = groups == g
        r = rewards[sel]
        adv[sel] = (r - r.mean()) / (r.std() + 1e-4)
    logp = policy(states).log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
    ratio = torch.exp(logp - old_logp)
    loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
