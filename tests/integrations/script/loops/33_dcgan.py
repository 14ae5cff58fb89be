# again: yes
# step: 6
# iteration: 3
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 3
# source: DCGAN tutorial, three backward calls per iteration
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
nz, real_label, fake_label = 4, 1.0, 0.0

netG = nn.Sequential(nn.Linear(nz, 8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh())
netD = nn.Sequential(nn.Linear(5, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
dataloader = [(torch.randn(8, 5), 0) for _ in range(6)]
if BAD:
    dataloader[3][0][3, 1] = float("nan")
G_losses, D_losses = [], []

for i, data in enumerate(dataloader, 0):
    # update D with all-real, then all-fake batches
    netD.zero_grad()
    real_cpu = data[0]
    b_size = real_cpu.size(0)
    label = torch.full((b_size,), real_label, dtype=torch.float)
    output = netD(real_cpu).view(-1)
    errD_real = criterion(output, label)
    errD_real.backward()
    D_x = output.mean().item()

    noise = torch.randn(b_size, nz)
    fake = netG(noise)
    label.fill_(fake_label)
    output = netD(fake.detach()).view(-1)
    errD_fake = criterion(output, label)
    errD_fake.backward()
    D_G_z1 = output.mean().item()
    errD = errD_real + errD_fake
    optimizerD.step()

    # update G
    netG.zero_grad()
    label.fill_(real_label)
    output = netD(fake).view(-1)
    errG = criterion(output, label)
    errG.backward()
    optimizerG.step()

    G_losses.append(errG.item())
    D_losses.append(errD.item())
