import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 128, (4, 24), generator=g)
    mask = torch.ones_like(ids)
    mask[1, 18:] = 0
    mask[3, 20:] = 0
    ids[mask == 0] = 0
    batch = dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))

    def attention_bias(mask):
        b, t = mask.shape
        keep = mask[:, None, None, :].bool().expand(b, 1, t, t)
        if fixed:
            keep = keep & torch.ones(t, t, dtype=torch.bool).tril()
        return torch.zeros(b, 1, t, t).masked_fill(~keep, torch.finfo(torch.float32).min)

    def loss_fn(model, batch):
        out = model(input_ids=batch["input_ids"], attention_mask=attention_bias(batch["attention_mask"]),
                    use_cache=False)
        logits = out.logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.size(-1)), batch["labels"][:, 1:].reshape(-1))

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
