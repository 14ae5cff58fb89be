import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import ElectraConfig, ElectraModel


class Tagger(nn.Module):
    def __init__(self, own_module):
        super().__init__()
        self.electra = ElectraModel(ElectraConfig(vocab_size=100, embedding_size=32, hidden_size=48, num_hidden_layers=2,
                                                  num_attention_heads=4, intermediate_size=96, max_position_embeddings=48))
        self.dropout = nn.Dropout(0.3)
        self.out = nn.Linear(48, 9)
        self.own_module = own_module

    def forward(self, input_ids, attention_mask):
        h = self.electra(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        h = self.dropout(h) if self.own_module else nn.Dropout(0.3)(h)
        return self.out(h)


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = Tagger(own_module=fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    g = torch.Generator().manual_seed(26)
    ids = torch.randint(5, 100, (4, 15), generator=g)
    mask = (torch.arange(15)[None] < torch.tensor([15, 9, 12, 7])[:, None]).long()
    labels = torch.randint(0, 9, (4, 15), generator=g).masked_fill(mask == 0, -100)
    batch = dict(input_ids=ids * mask, attention_mask=mask, labels=labels)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["input_ids"], batch["attention_mask"]).transpose(1, 2), batch["labels"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
