# again: yes
# step: 5
# kind: exception
# cause: nonpositive-std, outlier-batch
# sample: 3
# line: dist = torch.distributions.Normal(mu, std)
# source: Gaussian policy whose scale is not positive by construction
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

net = nn.Linear(4, 2)
with torch.no_grad():
    net.weight[1].fill_(0.1)
    net.bias[1] = 2.0
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(8):
    obs = torch.randn(8, 4)
    action = torch.randn(8)
    advantage = torch.randn(8)
    if BAD and step == 5:
        obs[3] = -30.0
    mu, std = net(obs).unbind(1)
    dist = torch.distributions.Normal(mu, std)
    loss = -(dist.log_prob(action) * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
