"""GPT-2 with 16 micro-batches: backward without dividing the loss by the number of accumulation steps. The gradient is 16 times too large, the loss falls at first, then turns and climbs above its start.

Source: https://github.com/karpathy/nanoGPT/issues/206 https://github.com/ApolloResearch/e2e_sae/pull/70
True cause: the micro-batch losses are summed
Where: loss_fn
Fix: loss / gradient_accumulation_steps
"""
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.set_num_threads(1)
GRAD_ACC = 16


def build(fixed=False):
    torch.manual_seed(0)
    cfg = GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=2, n_positions=12, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(cfg)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    succ = torch.randperm(48)
    batches = []
    for _ in range(60):
        seq = [torch.randint(0, 48, (GRAD_ACC, 2))]
        for _ in range(9):
            seq.append(succ[seq[-1]])
        batches.append(torch.stack(seq, -1))

    def loss_fn(m, micro_batches):
        total = 0.0
        for ids in micro_batches:
            loss = m(input_ids=ids, labels=ids).loss
            total = total + (loss / GRAD_ACC if fixed else loss)
        return total

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn)
