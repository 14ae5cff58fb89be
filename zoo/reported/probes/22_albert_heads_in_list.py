import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import AlbertConfig, AlbertModel


class MultiTask(nn.Module):
    def __init__(self, registered, tasks=3):
        super().__init__()
        self.encoder = AlbertModel(AlbertConfig(vocab_size=90, embedding_size=32, hidden_size=48, num_hidden_layers=2,
                                                num_attention_heads=4, intermediate_size=96, max_position_embeddings=48))
        adapters = [nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(tasks)]
        self.adapters = nn.ModuleList(adapters) if registered else adapters
        self.out = nn.Linear(48, tasks)

    def forward(self, input_ids):
        h = self.encoder(input_ids=input_ids).last_hidden_state[:, 0]
        for layer in self.adapters:
            h = h + layer(h)
        return self.out(h)


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = MultiTask(registered=fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    g = torch.Generator().manual_seed(22)
    batch = dict(input_ids=torch.randint(3, 90, (6, 12), generator=g), labels=torch.randint(0, 3, (6,), generator=g))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["input_ids"]), batch["labels"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
