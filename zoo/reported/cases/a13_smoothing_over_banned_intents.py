"""BERT intent classification; a few utterances carry a list of intents that their domain does not allow (logits set to -inf), trained with label_smoothing=0.1.

Source: https://github.com/facebookresearch/pytext/pull/1698 https://github.com/pytorch/pytorch/issues/7455
True cause: the smoothing term averages log-probabilities of -inf
Where: loss_fn (cross_entropy)
Fix: smooth over the allowed classes only
"""
import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification

torch.set_num_threads(1)


def build(fixed=False):
    torch.manual_seed(13)
    model = BertForSequenceClassification(BertConfig(vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, max_position_embeddings=24, num_labels=8, initializer_range=0.1))
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    batches = []
    for i in range(40):
        ids = torch.randint(0, 90, (6, 12))
        y = torch.randint(0, 8, (6,))
        ids[:, 1:5] = 10 + y[:, None]
        banned = torch.zeros(6, 8, dtype=torch.bool)
        if i == 7:
            banned[3] = True
            banned[3, [int(y[3]), (int(y[3]) + 1) % 8, (int(y[3]) + 2) % 8]] = False
        batches.append(dict(ids=ids, labels=y, banned=banned))

    def loss_fn(m, b):
        logits = m(input_ids=b["ids"]).logits.masked_fill(b["banned"], float("-inf"))
        if not fixed:
            return F.cross_entropy(logits, b["labels"], label_smoothing=0.1)
        logp = logits.log_softmax(-1)
        nll = -logp.gather(1, b["labels"][:, None]).squeeze(1)
        ok = ~b["banned"]
        smooth = -logp.masked_fill(~ok, 0.0).sum(-1) / ok.sum(-1)
        return (0.9 * nll + 0.1 * smooth).mean()

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=1.0)
