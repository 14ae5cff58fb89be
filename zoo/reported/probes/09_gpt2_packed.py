import torch
from transformers import GPT2Config, GPT2LMHeadModel


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
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=64, n_embd=64, n_layer=2, n_head=4,
                                       bos_token_id=0, eos_token_id=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    ids, pos, labels = packed_batch(100, (12, 12, 8), 3, 9)
    batch = {"input_ids": ids, "position_ids": pos, "labels": labels}

    def loss_fn(model, batch):
        t = batch["input_ids"].size(1)
        if fixed:
            keep = block_causal(batch["position_ids"])
        else:
            keep = torch.ones(t, t, dtype=torch.bool).tril()[None, None].expand(batch["input_ids"].size(0), 1, t, t)
        bias = torch.zeros(keep.shape).masked_fill(~keep, -1e9)
        return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=bias,
                     labels=batch["labels"], use_cache=False).loss

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
