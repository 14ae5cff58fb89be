import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import ConvNextConfig, ConvNextModel


class CosineClassifier(nn.Module):
    """Features and class vectors on the sphere; logits are scaled cosines."""

    def __init__(self, same_scale):
        super().__init__()
        self.backbone = ConvNextModel(ConvNextConfig(num_channels=3, patch_size=2, num_stages=2, hidden_sizes=[24, 48],
                                                     depths=[1, 1], drop_path_rate=0.0, image_size=16))
        self.weight = nn.Parameter(torch.randn(10, 48))
        self.same_scale = same_scale

    def forward(self, x):
        f = F.normalize(self.backbone(pixel_values=x).pooler_output, dim=1)
        cos = f @ F.normalize(self.weight, dim=1).T
        if self.training or self.same_scale:
            return cos * 16.0
        return cos


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = CosineClassifier(same_scale=fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    g = torch.Generator().manual_seed(27)
    batch = dict(pixel_values=torch.randn(8, 3, 16, 16, generator=g), labels=torch.randint(0, 10, (8,), generator=g))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
