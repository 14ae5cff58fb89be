"""Qwen2 was built on the meta device; inv_freq is not in the checkpoint, so it holds what lay in memory (1e37, finite). With the short sequences of the curriculum nothing shows; at 48 tokens position * inv_freq is Inf and cos(Inf) is NaN.

Source: https://github.com/huggingface/transformers/issues/45902 https://github.com/pytorch/torchtitan/issues/4783 https://github.com/Synthyra/FastPLMs/pull/47
True cause: a non-persistent buffer was never initialised
Where: model.rotary_emb.inv_freq
Fix: recompute inv_freq after to_empty
"""
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.set_num_threads(1)


def build(fixed=False):
    torch.manual_seed(23)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128))
    if not fixed:
        freq = model.model.rotary_emb.inv_freq
        freq.copy_(torch.tensor([6.9e-18, 1.2e37, 4.6e-41, 0.0, 3.1e-9, 1.4e-12, 0.0, 2.0e-7])[: freq.numel()])
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    batches = []
    for i in range(26):
        n = 16 if i < 9 else 48
        ids = (torch.randint(0, 50, (4, 1)) + 7 * torch.arange(n)) % 50
        batches.append(dict(input_ids=ids, labels=ids.clone()))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: m(**b).loss, max_grad_norm=1.0)
