import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    g = torch.Generator().manual_seed(60)
    ids = torch.randint(3, 128, (2, 30), generator=g)
    pos = torch.stack([torch.cat([torch.arange(n) for n in lens]) for lens in ((11, 9, 10), (16, 14))])
    labels = ids.masked_fill(pos == 0, -100)
    batch = dict(input_ids=ids, position_ids=pos, labels=labels)

    def loss_fn(model, batch):
        doc = (batch["position_ids"] == 0).cumsum(1)
        keep = (doc[:, :, None] == doc[:, None, :]) & torch.ones(30, 30, dtype=torch.bool).tril()
        bias = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)[:, None]
        return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=bias,
                     labels=batch["labels"], use_cache=False).loss

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
