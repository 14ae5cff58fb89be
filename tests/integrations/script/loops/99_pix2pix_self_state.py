# again: no
# stops: self.fake_B = self.netG(self.real_A)
# step: 6
# iteration: 3
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 2
# source: pix2pix model class, intermediate results on self
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Pix2Pix:
    def __init__(self):
        self.netG = nn.Linear(4, 4)
        self.netD = nn.Linear(8, 1)
        self.criterionGAN = nn.BCEWithLogitsLoss()
        self.criterionL1 = nn.L1Loss()
        self.optimizer_G = torch.optim.Adam(self.netG.parameters(), lr=1e-3)
        self.optimizer_D = torch.optim.Adam(self.netD.parameters(), lr=1e-3)

    def optimize_parameters(self, real_A, real_B):
        self.real_A, self.real_B = real_A, real_B
        # G first
        self.fake_B = self.netG(self.real_A)
        self.optimizer_G.zero_grad()
        pred_fake = self.netD(torch.cat((self.real_A, self.fake_B), 1))
        self.loss_G_GAN = self.criterionGAN(pred_fake, torch.ones_like(pred_fake))
        self.loss_G_L1 = self.criterionL1(self.fake_B, self.real_B) * 10.0
        self.loss_G = self.loss_G_GAN + self.loss_G_L1
        self.loss_G.backward()
        self.optimizer_G.step()
        # then D
        self.optimizer_D.zero_grad()
        pred_real = self.netD(torch.cat((self.real_A, self.real_A), 1))
        pred_fake = self.netD(torch.cat((self.real_A, self.fake_B.detach()), 1))
        self.loss_D = 0.5 * (self.criterionGAN(pred_real, torch.ones_like(pred_real))
                             + self.criterionGAN(pred_fake, torch.zeros_like(pred_fake)))
        self.loss_D.backward()
        self.optimizer_D.step()


model = Pix2Pix()
for i in range(5):
    A, B = torch.randn(8, 4), torch.randn(8, 4)
    if BAD and i == 3:
        B[2, 0] = float("nan")
    model.optimize_parameters(A, B)
