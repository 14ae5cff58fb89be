import torch
from transformers import ResNetConfig, ResNetForImageClassification


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = ResNetForImageClassification(ResNetConfig(num_channels=3, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1],
                                                      layer_type="basic", num_labels=6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    g = torch.Generator().manual_seed(56)
    batch = dict(pixel_values=torch.randn(10, 3, 32, 32, generator=g), labels=torch.randint(0, 6, (10,), generator=g))

    def loss_fn(model, batch):
        logits = model(pixel_values=batch["pixel_values"]).logits
        return torch.nn.functional.cross_entropy(logits, batch["labels"], label_smoothing=0.1)

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
