"""Fine-tuning a neural audio codec: encode() still carries the no_grad from inference. Only the decoder learns; the encoder's parameters are in the optimizer and their .grad stays None.

Source: https://github.com/lucidrains/audiolm-pytorch/issues/255 https://github.com/chawins/pal/issues/6
True cause: no_grad around the encoder
Where: encoder
Fix: encode with gradients while training
"""
import torch
from torch import nn

torch.set_num_threads(1)


class Codec(nn.Module):
    def __init__(self, width=24, latent=3):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(1, width, 8, 4, 2), nn.ELU(), nn.Conv1d(width, width, 8, 4, 2), nn.ELU(), nn.Conv1d(width, latent, 3, padding=1))
        self.decoder = nn.Sequential(nn.Conv1d(latent, width, 3, padding=1), nn.ELU(), nn.ConvTranspose1d(width, width, 8, 4, 2), nn.ELU(), nn.ConvTranspose1d(width, 1, 8, 4, 2))

    @torch.no_grad()
    def encode_inference(self, wav):
        return self.encoder(wav)

    def encode(self, wav):
        return self.encoder(wav)


def build(fixed=False):
    torch.manual_seed(0)
    codec = Codec()
    opt = torch.optim.Adam(codec.parameters(), lr=4e-3, betas=(0.8, 0.99))
    t = torch.arange(128) / 128
    batches = []
    for _ in range(110):
        f = torch.randint(2, 7, (8, 3, 1)).float()
        phase = torch.rand(8, 3, 1) * 6.28
        batches.append(torch.sin(6.28 * f * t + phase).sum(1, keepdim=True))

    def loss_fn(m, wav):
        z = m.encode(wav) if fixed else m.encode_inference(wav)
        return nn.functional.mse_loss(m.decoder(z), wav)

    return dict(model=codec, optimizer=opt, batches=batches, loss_fn=loss_fn)
