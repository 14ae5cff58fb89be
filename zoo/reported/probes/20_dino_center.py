import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import ViTConfig, ViTModel


class DINOHead(nn.Module):
    def __init__(self, persistent):
        super().__init__()
        cfg = ViTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=16,
                        patch_size=4, num_channels=3)
        self.backbone = ViTModel(cfg, add_pooling_layer=False)
        self.head = nn.Linear(48, 32)
        if persistent:
            self.register_buffer("center", torch.zeros(1, 32))
        else:
            self.center = torch.zeros(1, 32)

    def project(self, x):
        return self.head(self.backbone(pixel_values=x).last_hidden_state[:, 0])

    def forward(self, view1, view2):
        student = self.project(view1) / 0.1
        with torch.no_grad():
            teacher = self.project(view2)
        target = F.softmax((teacher - self.center) / 0.04, dim=-1)
        loss = -(target * F.log_softmax(student, dim=-1)).sum(-1).mean()
        if self.training:
            self.center = self.center * 0.9 + teacher.mean(0, keepdim=True) * 0.1
        return loss


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = DINOHead(persistent=fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.04)
    g = torch.Generator().manual_seed(20)
    img = torch.randn(6, 3, 16, 16, generator=g)
    batch = dict(view1=img + 0.1 * torch.randn(img.shape, generator=g), view2=img.flip(-1))

    def loss_fn(model, batch):
        return model(batch["view1"], batch["view2"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
