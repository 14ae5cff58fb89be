"""Distillation with kl_div(log_target=True): for one prompt a grammar bans some tokens, both log-probabilities are -inf there, and exp(-inf) * (-inf + inf) is NaN.

Source: https://github.com/google-deepmind/optax/pull/1786 https://github.com/google-deepmind/optax/pull/473
True cause: 0 * log 0: a target of probability 0 given as -inf
Where: loss_fn (kl_div)
Fix: leave banned tokens out of the sum
"""
import torch
import torch.nn.functional as F
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

torch.set_num_threads(1)


def build(fixed=False):
    torch.manual_seed(27)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, max_position_embeddings=32))
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    batches = []
    for i in range(36):
        ids = torch.randint(0, 40, (6, 10))
        teacher = 4.0 * F.one_hot((ids + 1) % 40, 40).float() + 0.2 * torch.randn(6, 10, 40)
        allowed = torch.ones(6, 40, dtype=torch.bool)
        if i == 13:
            allowed[5, 28:] = False
        batches.append(dict(ids=ids, teacher=teacher, allowed=allowed))

    def loss_fn(m, b):
        ban = ~b["allowed"][:, None]
        s = m(input_ids=b["ids"]).logits.masked_fill(ban, float("-inf")).log_softmax(-1)
        t = b["teacher"].masked_fill(ban, float("-inf")).log_softmax(-1)
        if fixed:
            s, t = s.masked_fill(ban, 0.0), t.masked_fill(ban, -1e4)
        return F.kl_div(s, t, reduction="sum", log_target=True) / b["ids"].numel()

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=1.0)
