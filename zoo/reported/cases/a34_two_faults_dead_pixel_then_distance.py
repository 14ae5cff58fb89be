"""Keypoint regression: at step 7 one image holds NaN pixels, at step 21 two target keypoints coincide and the loss takes sqrt of a squared distance that is 0.

Source: https://github.com/uw-ipd/tmol/pull/146 https://github.com/pytorch/pytorch/issues/37154
True cause: a NaN in the batch (step 7), then the gradient of sqrt at 0 (step 21)
Where: batch["image"], then loss_fn (sqrt)
Fix: repair the image; eps inside the root
"""
import torch
from torch import nn

torch.set_num_threads(1)


class KeypointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1), nn.ReLU(), nn.Conv2d(12, 16, 3, 2, 1), nn.ReLU())
        self.query, self.attn, self.out = nn.Embedding(6, 16), nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 2)

    def forward(self, image, kind):
        f = self.features(image).flatten(2).transpose(1, 2)
        return self.out(self.attn(self.query(kind), f, f, need_weights=False)[0])


def build(fixed=False):
    torch.manual_seed(34)
    model = KeypointNet()
    opt = torch.optim.AdamW(model.parameters(), 2e-3)
    batches = []
    for i in range(40):
        image = torch.randn(6, 1, 16, 16)
        kind = torch.arange(6).repeat(6, 1)
        pts = torch.linspace(-1, 1, 12).view(6, 2) + 0.05 * torch.randn(6, 6, 2)
        if i == 7 and not fixed:
            image[4, 0, 3, 3:6] = float("nan")
        if i == 21:
            kind[1, 3] = kind[1, 2]  # annotated twice: the same query, so the same prediction
            pts[1, 3] = pts[1, 2]
        batches.append(dict(image=image, kind=kind, pts=pts))

    def loss_fn(m, b):
        p = m(b["image"], b["kind"])
        eps = 1e-6 if fixed else 0.0
        bone = lambda x: ((x[:, 1:] - x[:, :-1]).pow(2).sum(-1) + eps).sqrt()
        return (p - b["pts"]).abs().mean() + 0.3 * (bone(p) - bone(b["pts"])).abs().mean()

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=1.0)
