"""RoBERTa (type_vocab_size 1) gets BERT-style segment ids; most texts are single sentences, the first sentence pair raises.

Source: https://github.com/huggingface/transformers/issues/9111
True cause: a token_type id of 1 where the table has one row
Where: roberta.embeddings.token_type_embeddings
Fix: do not pass token_type_ids (or all zeros)
"""
import torch
from transformers import RobertaConfig, RobertaForSequenceClassification

torch.set_num_threads(1)


def build(fixed=False):
    torch.manual_seed(5)
    model = RobertaForSequenceClassification(RobertaConfig(vocab_size=80, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, max_position_embeddings=40, type_vocab_size=1, initializer_range=0.1, num_labels=3))
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    batches = []
    for i in range(40):
        ids = torch.randint(4, 80, (8, 16))
        y = torch.randint(0, 3, (8,))
        ids[:, 1:4] = 4 + y[:, None]
        seg = torch.zeros_like(ids)
        if i == 5 and not fixed:
            seg[0, 9:] = 1
        batches.append(dict(input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=seg, labels=y))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: m(**b).loss, max_grad_norm=1.0)
