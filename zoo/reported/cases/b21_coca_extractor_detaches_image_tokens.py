"""CoCa-like training: the extractor hook that collects the image tokens clones and detaches them. The image encoder is in the optimizer and never gets a gradient.

Source: https://github.com/lucidrains/CoCa-pytorch/issues/6
True cause: detach between image encoder and loss
Where: image_encoder
Fix: do not detach in the extractor
"""
import torch
import torch.nn.functional as F
from torch import nn
from transformers import ViTConfig, ViTModel

torch.set_num_threads(1)


class Extractor(nn.Module):
    def __init__(self, vit, detach):
        super().__init__()
        self.vit, self.detach, self.latents = vit, detach, None
        vit.layernorm.register_forward_hook(self._hook)

    def _hook(self, _, args, output):
        self.latents = output.clone().detach() if self.detach else output.clone()

    def forward(self, img):
        self.vit(pixel_values=img)
        return self.latents


class CoCa(nn.Module):
    def __init__(self, detach):
        super().__init__()
        vit = ViTModel(ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=12, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), add_pooling_layer=False)
        self.image_encoder = Extractor(vit, detach)
        self.text = nn.EmbeddingBag(40, 32)
        self.log_temp = nn.Parameter(torch.tensor(2.0))

    def forward(self, img, tokens):
        i = F.normalize(self.image_encoder(img)[:, 0], dim=-1)
        t = F.normalize(self.text(tokens), dim=-1)
        sim = i @ t.T * self.log_temp.exp()
        y = torch.arange(len(sim))
        return (F.cross_entropy(sim, y) + F.cross_entropy(sim.T, y)) / 2


def build(fixed=False):
    torch.manual_seed(0)
    model = CoCa(detach=not fixed)
    opt = torch.optim.AdamW(model.parameters(), 2e-3)
    concept = torch.randn(40, 3, 12, 12)
    batches = []
    for _ in range(90):
        tokens = torch.stack([torch.randperm(40)[:3] for _ in range(16)])
        batches.append((concept[tokens].sum(1) + 0.3 * torch.randn(16, 3, 12, 12), tokens))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: m(*b), max_grad_norm=1.0)
