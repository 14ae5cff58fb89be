"""Language-model fine-tuning with new tokens: the (tied) embedding is replaced by a larger one after the optimizer was built. The optimizer keeps the old tensor, the new one never changes.

Source: https://github.com/huggingface/transformers/pull/3532 https://github.com/helpmefindaname/transformer-smaller-training-vocab/pull/3 https://github.com/hpcaitech/ColossalAI/issues/5539
True cause: the optimizer holds the replaced embedding
Where: model.decoder.embed_tokens
Fix: resize, then build the optimizer
"""
import torch
from transformers import OPTConfig, OPTForCausalLM

torch.set_num_threads(1)


def add_tokens(model, total):
    old = model.get_input_embeddings()
    new = torch.nn.Embedding(total, old.embedding_dim)
    torch.nn.init.normal_(new.weight, std=0.02)
    new.weight.data[: old.num_embeddings] = old.weight.data
    model.set_input_embeddings(new)
    model.lm_head = torch.nn.Linear(old.embedding_dim, total, bias=False)
    model.lm_head.weight = new.weight
    model.config.vocab_size = total


def build(fixed=False):
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(vocab_size=32, hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=32, word_embed_proj_dim=32, dropout=0.0, attention_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=1))
    groups = lambda: [dict(params=[p for n, p in model.named_parameters() if p.ndim > 1], weight_decay=0.01), dict(params=[p for n, p in model.named_parameters() if p.ndim <= 1], weight_decay=0.0)]
    if fixed:
        add_tokens(model, 128)
    optimizer = torch.optim.AdamW(groups(), lr=3e-3)
    if not fixed:
        add_tokens(model, 128)
    follow = torch.randperm(96) + 32
    batches = []
    for _ in range(90):
        seq = [torch.randint(32, 128, (16,))]
        for _ in range(11):
            seq.append(follow[seq[-1] - 32])
        ids = torch.stack(seq, 1)
        batches.append(dict(input_ids=ids, labels=ids))
    return dict(model=model, optimizer=optimizer, batches=batches, loss_fn=lambda m, b: m(**b).loss, max_grad_norm=1.0)
