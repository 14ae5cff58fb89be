import torch
from transformers import RobertaConfig, RobertaForSequenceClassification


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = RobertaForSequenceClassification(RobertaConfig(
        vocab_size=140, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=70, pad_token_id=1, num_labels=5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    g = torch.Generator().manual_seed(15)
    ids = torch.randint(4, 140, (5, 16), generator=g)
    mask = (torch.arange(16)[None] < torch.tensor([16, 6, 10, 13, 8])[:, None]).long()
    ids[mask == 0] = 1
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 5, (5,), generator=g)}

    def loss_fn(model, batch):
        if fixed:
            out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
        else:
            out = model(batch["input_ids"], labels=batch["labels"])
        return out.loss

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
