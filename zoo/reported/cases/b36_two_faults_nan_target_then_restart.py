"""U-Net denoiser with two faults: batch 50 holds a corrupt image (NaN), and a warm restart at step 70 sets the rate to 300 times the planned value, after which the loss runs away.

Source: https://github.com/ivanvovk/WaveGrad/issues/3 https://github.com/BVLC/caffe/issues/6047
True cause: a non-finite batch, then a rate that is too high
Where: batch 50; the schedule
Fix: drop the sample; restart at the planned rate
"""
import torch
import torch.nn.functional as F
from diffusers import UNet2DModel

torch.set_num_threads(1)


def build(fixed=False):
    torch.manual_seed(0)
    model = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"), add_attention=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 1.0 if s < 70 or fixed else 300.0)
    batches = []
    for i in range(110):
        clean = torch.sin(torch.arange(64).view(1, 1, 8, 8) * 0.3 + torch.rand(8, 1, 1, 1) * 6.28)
        noise = torch.randn(8, 1, 8, 8)
        t = torch.randint(0, 100, (8,))
        a = (1 - t / 100.0).view(-1, 1, 1, 1)
        noisy = a.sqrt() * clean + (1 - a).sqrt() * noise
        if i == 50 and not fixed:
            noisy[2, 0, 4, 4:] = float("nan")
        batches.append(dict(noisy=noisy, t=t, noise=noise))
    return dict(model=model, optimizer=opt, scheduler=sched, batches=batches, loss_fn=lambda m, b: F.mse_loss(m(b["noisy"], b["t"]).sample, b["noise"]))
