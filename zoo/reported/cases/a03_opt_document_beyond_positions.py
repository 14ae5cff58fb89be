"""OPT has learned positions for 32 tokens; truncation was off, and one document of 40 tokens arrives among padded short ones.

Source: https://github.com/huggingface/transformers/issues/2446 https://github.com/huggingface/sentence-transformers/issues/1600 https://github.com/huggingface/transformers/pull/29600
True cause: a position beyond max_position_embeddings
Where: model.decoder.embed_positions
Fix: truncate to the model's maximum
"""
import torch
from transformers import OPTConfig, OPTForCausalLM

torch.set_num_threads(1)


def collate(lengths, truncate):
    lengths = [min(n, 32) if truncate else n for n in lengths]
    ids = torch.ones(len(lengths), max(lengths), dtype=torch.long)
    att = torch.zeros_like(ids)
    for r, n in enumerate(lengths):
        ids[r, :n], att[r, :n] = 3 + (torch.randint(0, 47, (1,)) + 2 * torch.arange(n)) % 47, 1
    return dict(input_ids=ids, attention_mask=att, labels=ids.masked_fill(att == 0, -100))


def build(fixed=False):
    torch.manual_seed(3)
    cfg = OPTConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64, max_position_embeddings=32, word_embed_proj_dim=32, dropout=0.0, pad_token_id=1)
    model = OPTForCausalLM(cfg)
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    batches = []
    for i in range(40):
        lengths = torch.randint(8, 30, (5,)).tolist()
        if i == 11:
            lengths[3] = 40
        batches.append(collate(lengths, truncate=fixed))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: m(**b).loss, max_grad_norm=1.0)
