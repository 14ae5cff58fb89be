import torch
from transformers import MistralConfig, MistralForCausalLM


def packed_batch(vocab, lengths, rows, seed):
    """Rows of several documents laid end to end; positions restart at each document."""
    g = torch.Generator().manual_seed(seed)
    t = sum(lengths)
    ids = torch.randint(3, vocab, (rows, t), generator=g)
    pos = torch.cat([torch.arange(n) for n in lengths]).expand(rows, t).clone()
    labels = ids.clone()
    labels[pos == 0] = -100
    return ids, pos, labels


def block_causal(pos):
    doc = (pos == 0).cumsum(-1)
    same = doc[:, :, None] == doc[:, None, :]
    return (same & torch.ones(pos.size(1), pos.size(1), dtype=torch.bool).tril())[:, None]


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = MistralForCausalLM(MistralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, sliding_window=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    ids, pos, labels = packed_batch(128, (10, 7, 13), 2, 8)
    batch = dict(input_ids=ids, position_ids=pos, labels=labels)

    def loss_fn(model, batch):
        if fixed:
            keep = block_causal(batch["position_ids"])
            mask = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
        else:
            mask = torch.ones_like(batch["input_ids"])
        return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=mask,
                     labels=batch["labels"], use_cache=False).loss

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
