"""Llama built on meta and materialised with to_empty: inv_freq is not in the checkpoint and holds what was in memory (finite). RoPE rotates by garbage and attention cannot find a relative position.

Source: https://github.com/huggingface/transformers/issues/45902 https://github.com/pytorch/torchtitan/pull/4817
True cause: inv_freq was never filled
Where: model.rotary_emb.inv_freq
Fix: recompute the buffer after to_empty
"""
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)


def build(fixed=False):
    torch.manual_seed(0)
    cfg = LlamaConfig(vocab_size=24, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)
    model = LlamaForCausalLM(cfg)
    if not fixed:
        # what the allocator handed out: stale bits, no NaN among them
        g = torch.Generator().manual_seed(4)
        n = model.model.rotary_emb.inv_freq.numel()
        stale = torch.randint(0, 2**20, (n,), generator=g, dtype=torch.int32).view(torch.float32)
        stale[7] = 3.1e11
        model.model.rotary_emb.inv_freq.copy_(stale)
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    batches = []
    for _ in range(110):
        ids = torch.randint(0, 24, (16, 32))
        labels = torch.full_like(ids, -100)
        labels[:, 6:] = ids[:, :-6]  # with the model's own shift: copy the token five back
        batches.append(dict(input_ids=ids, labels=labels))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: m(**b).loss, max_grad_norm=1.0)
