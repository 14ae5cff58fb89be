import torch
from transformers import T5Config, T5ForConditionalGeneration


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = T5ForConditionalGeneration(T5Config(vocab_size=100, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4,
                                                feed_forward_proj="gated-gelu", decoder_start_token_id=0, pad_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(52)
    mask = (torch.arange(16)[None] < torch.tensor([16, 9, 12])[:, None]).long()
    ids = torch.randint(2, 100, (3, 16), generator=g) * mask
    labels = torch.randint(2, 100, (3, 10), generator=g)
    labels[1, 7:] = -100
    batch = dict(input_ids=ids, attention_mask=mask, labels=labels)

    def loss_fn(model, batch):
        return model(**batch, use_cache=False).loss

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
