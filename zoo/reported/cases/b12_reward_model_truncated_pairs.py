"""Bradley-Terry reward model: both answers are cut at max_length and the prompt alone is longer, so chosen and rejected are the same tokens. The loss stays around ln 2 (dropout makes it waver).

Source: https://github.com/natolambert/rlhf-book/issues/503
True cause: chosen and rejected are identical
Where: the batch (chosen_ids, rejected_ids)
Fix: truncate from the left, or drop such rows
"""
import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification

torch.set_num_threads(1)
MAX_LENGTH = 16


def tokenize(prompt, answer, fixed):
    ids = torch.cat([prompt, answer], 1)
    return ids[:, -MAX_LENGTH:] if fixed else ids[:, :MAX_LENGTH]


def build(fixed=False):
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, max_position_embeddings=32, num_labels=1))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = []
    for _ in range(80):
        prompt = torch.randint(10, 100, (12, 18))
        good = torch.randint(10, 55, (12, 6))
        bad = torch.randint(55, 100, (12, 6))
        batches.append(dict(chosen_ids=tokenize(prompt, good, fixed), rejected_ids=tokenize(prompt, bad, fixed)))

    def loss_fn(m, b):
        r_chosen = m(input_ids=b["chosen_ids"]).logits[:, 0]
        r_rejected = m(input_ids=b["rejected_ids"]).logits[:, 0]
        return -F.logsigmoid(r_chosen - r_rejected).mean()

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=1.0)
