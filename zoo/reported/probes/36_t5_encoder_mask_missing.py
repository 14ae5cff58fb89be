import torch
from transformers import T5Config, T5ForConditionalGeneration


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = T5ForConditionalGeneration(T5Config(vocab_size=120, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
                                                decoder_start_token_id=0, pad_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    g = torch.Generator().manual_seed(36)
    mask = (torch.arange(18)[None] < torch.tensor([18, 7, 13, 10])[:, None]).long()
    ids = torch.randint(2, 120, (4, 18), generator=g) * mask
    labels = torch.randint(2, 120, (4, 9), generator=g)
    labels[1, 6:] = -100
    labels[3, 4:] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def loss_fn(model, batch):
        inputs = dict(batch)
        if not fixed:
            inputs.pop("attention_mask")
        return model(**inputs, use_cache=False).loss

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
