# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 1
# source: diffusion class whose training_losses method draws noise itself
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)


class GaussianDiffusion(nn.Module):
    def __init__(self, net, steps=10):
        super().__init__()
        self.net = net
        self.register_buffer("abar", torch.linspace(0.99, 0.05, steps))

    def training_losses(self, x0):
        t = torch.randint(0, len(self.abar), (x0.shape[0],))
        noise = torch.randn_like(x0)
        a = self.abar[t][:, None]
        xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
        return {"mse": (self.net(xt) - noise).pow(2).mean(1), "t": t}


diffusion = GaussianDiffusion(nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 4)))
opt = torch.optim.AdamW(diffusion.parameters(), lr=1e-4)
for step in range(8):
    batch = torch.randn(8, 4)
    if BAD and step == 5:
        batch[1, 3] = float("nan")
    losses = diffusion.training_losses(batch)
    loss = losses["mse"].mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
