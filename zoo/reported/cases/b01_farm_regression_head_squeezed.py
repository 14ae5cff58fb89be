"""DistilBERT document regression: the head gives (N, 1), the labels are (N). The loss is over all N x N pairs; the model predicts the mean and the loss stays at the variance.

Source: https://github.com/deepset-ai/FARM/issues/229 https://github.com/pytorch/pytorch/issues/16045
True cause: loss broadcast
Where: loss_fn (mse_loss)
Fix: bring both to the same shape
"""
import torch
import torch.nn.functional as F
from transformers import DistilBertConfig, DistilBertForSequenceClassification

torch.set_num_threads(1)


def build(fixed=False):
    torch.manual_seed(0)
    model = DistilBertForSequenceClassification(DistilBertConfig(vocab_size=64, dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=16, num_labels=1, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0))
    opt = torch.optim.AdamW(model.parameters(), 2e-3)
    batches = []
    for _ in range(100):
        ids = torch.randint(20, 64, (16, 10))
        grade = torch.randint(0, 17, (16,))
        ids[:, 0] = grade + 1
        batches.append((ids, (grade.float() - 8) / 4.9))

    def loss_fn(m, b):
        preds = m(input_ids=b[0]).logits
        labels = b[1].unsqueeze(1) if fixed else b[1]
        return F.mse_loss(preds, labels)

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=1.0)
