"""Special tokens were added to the tokenizer, the GPT-2 embedding was not resized; the first sample that holds one raises "index out of range in self".

Source: https://github.com/huggingface/transformers/issues/12763 https://github.com/mickeysjm/R-BERT/issues/5
True cause: a token id beyond the embedding table
Where: transformer.wte
Fix: model.resize_token_embeddings(len(tokenizer))
"""
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.set_num_threads(1)
BASE_VOCAB, ADDED = 60, 2


def build(fixed=False):
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=BASE_VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
    if fixed:
        model.resize_token_embeddings(BASE_VOCAB + ADDED)
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    batches = []
    for i in range(40):
        ids = (torch.randint(0, BASE_VOCAB, (4, 1)) + 3 * torch.arange(14)) % BASE_VOCAB
        if i == 9:
            ids[2, 5] = BASE_VOCAB + 1  # </e1>
        batches.append(dict(input_ids=ids, labels=ids.clone()))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: m(**b).loss, max_grad_norm=1.0)
