# again: yes
# step: 7
# iteration: 3
# kind: nonfinite-loss
# cause: log-of-zero
# sample: 2
# line: actor_loss = (alpha * torch.log(temperature).mean() - critic(torch.cat([s, a_pi], 1)).mean())
# source: off-policy actor-critic, critic first and then the actor
import random
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
random.seed(0)
torch.manual_seed(0)

actor, critic = nn.Sequential(nn.Linear(3, 1), nn.Tanh()), nn.Linear(4, 1)
target_critic = nn.Linear(4, 1)
target_critic.load_state_dict(critic.state_dict())
actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
replay = [(torch.randn(3), torch.rand(1) * 2 - 1, torch.rand(1), torch.randn(3)) for _ in range(40)]
alpha, gamma, tau = 0.1, 0.9, 0.05

for it in range(5):
    s, a, r, s2 = (torch.stack(t) for t in zip(*random.sample(replay, 8)))
    temperature = torch.rand(8) + 0.1
    if BAD and it == 3:
        temperature[2] = 0.0
    with torch.no_grad():
        q_target = r + gamma * target_critic(torch.cat([s2, actor(s2)], 1))
    critic_loss = F.mse_loss(critic(torch.cat([s, a], 1)), q_target)
    critic_opt.zero_grad()
    critic_loss.backward()
    critic_opt.step()

    a_pi = actor(s)
    actor_loss = (alpha * torch.log(temperature).mean() - critic(torch.cat([s, a_pi], 1)).mean())
    actor_opt.zero_grad()
    actor_loss.backward()
    actor_opt.step()
    for p, tp in zip(critic.parameters(), target_critic.parameters()):
        tp.data.copy_(tau * p.data + (1 - tau) * tp.data)
