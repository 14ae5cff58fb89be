# again: yes
# step: 5
# kind: nonfinite-loss
# cause: no-supervised-targets
# source: language model that returns its loss when labels are given
import sys
from dataclasses import dataclass
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


@dataclass
class CausalOutput:
    logits: torch.Tensor
    loss: torch.Tensor = None


class TinyLM(nn.Module):
    def __init__(self, vocab=11):
        super().__init__()
        self.emb, self.head = nn.Embedding(vocab, 6), nn.Linear(6, vocab)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.emb(input_ids))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalOutput(logits, loss)


model = TinyLM()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.train()
for step in range(8):
    batch = {"input_ids": torch.randint(0, 11, (8, 6)), "attention_mask": torch.ones(8, 6)}
    batch["labels"] = batch["input_ids"].clone()
    if BAD and step == 5:
        batch["labels"].fill_(-100)
    outputs = model(**batch)
    loss = outputs.loss
    loss = loss / 1
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
