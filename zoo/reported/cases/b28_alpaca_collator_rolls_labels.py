"""Instruction tuning: the collator masks the prompt and rolls the labels left by one; GPT-NeoX shifts them once more. The answer is copied from the instruction, but the target is the wrong character.

Source: https://github.com/InternLM/InternLM/issues/318 https://github.com/huggingface/transformers/pull/562
True cause: labels shifted by the collator and by the model
Where: the batch (labels)
Fix: do not roll in the collator
"""
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

torch.set_num_threads(1)
IGNORE = -100


def collate(prompts, answers, fixed):
    ids = torch.cat([prompts, answers], 1)
    labels = ids.clone()
    labels[:, : prompts.shape[1]] = IGNORE
    if not fixed:
        labels = torch.roll(labels, -1, dims=1)
        labels[:, -1] = IGNORE
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def build(fixed=False):
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=50, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, max_position_embeddings=32))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    cipher = torch.randperm(50)
    batches = []
    for _ in range(100):
        prompts = torch.randint(0, 50, (16, 4))
        key = torch.randint(0, 50, (16, 5))
        answers = torch.stack([key, cipher[key]], -1).flatten(1)  # each letter is followed by its code
        batches.append(collate(prompts, answers, fixed))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: m(**b).loss, max_grad_norm=1.0)
