import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import GPT2Config, GPT2Model


class LastTokenClassifier(nn.Module):
    def __init__(self, use_mask):
        super().__init__()
        self.transformer = GPT2Model(GPT2Config(vocab_size=130, n_positions=64, n_embd=48, n_layer=2, n_head=4,
                                                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        self.score = nn.Linear(48, 4, bias=False)
        self.use_mask = use_mask

    def forward(self, input_ids, attention_mask):
        h = self.transformer(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        if self.use_mask:
            idx = (torch.arange(h.size(1)) * attention_mask).argmax(-1)
            last = h[torch.arange(h.size(0)), idx]
        else:
            last = h[:, -1]
        return self.score(last)


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = LastTokenClassifier(use_mask=fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    g = torch.Generator().manual_seed(14)
    mask = (torch.arange(22)[None] < torch.tensor([22, 9, 14, 17])[:, None]).long()
    ids = torch.randint(2, 130, (4, 22), generator=g) * mask
    batch = dict(input_ids=ids, attention_mask=mask, labels=torch.randint(0, 4, (4,), generator=g))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["input_ids"], batch["attention_mask"]), batch["labels"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
