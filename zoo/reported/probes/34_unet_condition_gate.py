import torch
import torch.nn as nn
import torch.nn.functional as F
from diffusers import UNet2DModel


class ConditionalUNet(nn.Module):
    """A hint image is embedded, gated, and joined to the noisy sample."""

    def __init__(self, gate):
        super().__init__()
        self.unet = UNet2DModel(sample_size=16, in_channels=4, out_channels=1, layers_per_block=1,
                                block_out_channels=(16, 32), norm_num_groups=8,
                                down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                                up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8)
        self.hint = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))
        self.gate = gate

    def forward(self, noisy, timesteps, hint):
        h = self.hint(hint) * self.gate
        return self.unet(torch.cat([noisy, h], 1), timesteps).sample


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = ConditionalUNet(gate=1.0 if fixed else 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    g = torch.Generator().manual_seed(34)
    clean, noise = torch.rand(4, 1, 16, 16, generator=g) * 2 - 1, torch.randn(4, 1, 16, 16, generator=g)
    t = torch.randint(0, 1000, (4,), generator=g)
    batch = dict(clean=clean, noise=noise, timesteps=t, hint=(clean > 0).float())
    alpha = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)

    def loss_fn(model, batch):
        a = alpha[batch["timesteps"]].view(-1, 1, 1, 1)
        noisy = a.sqrt() * batch["clean"] + (1 - a).sqrt() * batch["noise"]
        return F.mse_loss(model(noisy, batch["timesteps"], batch["hint"]), batch["noise"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
