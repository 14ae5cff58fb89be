import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

PAD = 0


def collate(rows, fixed):
    n = max(len(r) for r in rows)
    ids = torch.stack([torch.cat([r, torch.full((n - len(r),), PAD)]) for r in rows])
    mask = torch.stack([(torch.arange(n) < len(r)).long() for r in rows])
    labels = ids.clone()
    if fixed:
        labels[mask == 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                                         use_sliding_window=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    g = torch.Generator().manual_seed(12)
    rows = [torch.randint(3, 128, (n,), generator=g) for n in (24, 11, 17, 8)]
    batch = collate(rows, fixed)

    def loss_fn(model, batch):
        return model(**batch, use_cache=False).loss

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
