# again: yes
# step: 7
# iteration: 3
# kind: nonfinite-loss
# cause: log-of-zero, outlier-batch
# sample: 5
# line: g_loss = -torch.log(discriminator(generator(z, c), c)).mean()
# source: conditional GAN with the log D trick, nested calls
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)


class G(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, z, c):
        return torch.tanh(self.fc(torch.cat([z, c], 1)))


class D(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 1)
        with torch.no_grad():
            self.fc.weight[:, 3:] = 0.5

    def forward(self, x, c):
        return torch.sigmoid(self.fc(torch.cat([x, c], 1)))


generator, discriminator = G(), D()
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)

for it in range(5):
    real = torch.randn(8, 3)
    c = torch.randn(8, 2)
    z = torch.randn(8, 2)

    d_loss = -(torch.log(discriminator(real, c)) + torch.log(1 - discriminator(generator(z, c).detach(), c))).mean()
    opt_d.zero_grad()
    d_loss.backward()
    opt_d.step()

    if BAD and it == 3:
        c = c.clone()
        c[5] = -300.0
    z = torch.randn(8, 2)
    g_loss = -torch.log(discriminator(generator(z, c), c)).mean()
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
