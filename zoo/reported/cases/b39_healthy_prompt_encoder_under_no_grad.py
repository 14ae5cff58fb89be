"""HEALTHY: a promptable segmenter: the prompt encoder runs under no_grad on purpose and is not in the optimizer (its parameters still say requires_grad).

Source: https://github.com/bowang-lab/MedSAM/issues/233
True cause: none
Where: none
Fix: none
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class PromptSegmenter(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.image_encoder = nn.Sequential(nn.Conv2d(1, dim, 3, padding=1), nn.GELU(), nn.Conv2d(dim, dim, 3, padding=1), nn.GELU())
        self.prompt_encoder = nn.Sequential(nn.Linear(4, dim), nn.Tanh(), nn.Linear(dim, dim))
        self.mask_decoder = nn.Sequential(nn.Conv2d(2 * dim, dim, 3, padding=1), nn.GELU(), nn.Conv2d(dim, 1, 1))

    def forward(self, image, box):
        f = self.image_encoder(image)
        with torch.no_grad():  # do not fine-tune the prompt encoder
            p = self.prompt_encoder(box)
        p = p[:, :, None, None].expand(-1, -1, *f.shape[-2:])
        return self.mask_decoder(torch.cat([f, p], 1))


def build(fixed=False):
    torch.manual_seed(0)
    model = PromptSegmenter()
    opt = torch.optim.AdamW(list(model.image_encoder.parameters()) + list(model.mask_decoder.parameters()), lr=2e-3, weight_decay=0.01)
    batches = []
    for _ in range(80):
        mask = torch.zeros(6, 1, 16, 16)
        boxes = torch.zeros(6, 4)
        for k in range(6):
            x, y = torch.randint(0, 9, (2,)).tolist()
            mask[k, 0, y : y + 6, x : x + 6] = 1
            boxes[k] = torch.tensor([x, y, x + 6, y + 6]) / 16
        batches.append((0.5 * torch.randn(6, 1, 16, 16) + mask, boxes, mask))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: F.binary_cross_entropy_with_logits(m(b[0], b[1]), b[2]))
