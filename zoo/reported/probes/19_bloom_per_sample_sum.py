import torch
import torch.nn.functional as F
from transformers import BloomConfig, BloomForCausalLM


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = BloomForCausalLM(BloomConfig(vocab_size=100, hidden_size=64, n_layer=2, n_head=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(4, 100, (6, 14), generator=torch.Generator().manual_seed(19))
    labels = ids.clone()
    labels[:, :4] = -100  # prompt
    batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)

    def loss_fn(model, batch):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        total = 0.0
        for row, target in zip(logits, batch["labels"]):
            total = total + F.cross_entropy(row[:-1], target[1:])
        return total / len(batch["labels"]) if fixed else total

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn, accumulate=3)
