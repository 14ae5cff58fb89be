# again: yes
# step: 5
# kind: nonfinite-loss
# cause: zero-denominator
# sample: 2
# line: weight = alpha_bar[t] / (1.0 - alpha_bar[t])
# source: diffusion training, noise and timesteps drawn in the loop
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
T = 20
alpha_bar = torch.linspace(1.0, 0.02, T)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(T, 6)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 6))

    def forward(self, x, t):
        return self.net(x + self.emb(t))


model = Denoiser()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(8):
    clean = torch.randn(8, 6)
    noise = torch.randn_like(clean)
    t = torch.randint(1, T, (clean.shape[0],)).long()
    if BAD and step == 5:
        t[2] = 0
    a = alpha_bar[t].unsqueeze(1)
    noisy = a.sqrt() * clean + (1 - a).sqrt() * noise
    noise_pred = model(noisy, t)
    weight = alpha_bar[t] / (1.0 - alpha_bar[t])
    loss = (weight.clamp(max=5.0).unsqueeze(1) * (noise_pred - noise) ** 2).mean() + 1e-3 * (weight * noise_pred.pow(2).mean(1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
