"""HEALTHY: a warm-up from 1e-6: for the first quarter of the run nearly nothing moves, then the loss falls as planned.

Source: https://github.com/sunset1995/pytorch-layoutnet/issues/1 https://github.com/huggingface/transformers/issues/34754
True cause: none
Where: none
Fix: none
"""
import torch
from transformers import T5Config, T5ForConditionalGeneration

torch.set_num_threads(1)


def build(fixed=False):
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0))
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 10 ** (-3.7 * max(0.0, 1 - s / 45)))
    batches = []
    for _ in range(110):
        src = torch.randint(4, 40, (16, 6))
        batches.append(dict(input_ids=src, labels=src.sort(1).values[:, :4].contiguous()))
    return dict(model=model, optimizer=opt, scheduler=sched, batches=batches, loss_fn=lambda m, b: m(**b).loss, max_grad_norm=1.0)
