"""Sentence classification with 16 micro-batches: the trainer divides the loss by the accumulation steps and the accelerator's backward divides again. The effective rate is 16 times too low.

Source: https://github.com/huggingface/transformers/issues/40709 https://github.com/huggingface/accelerate/issues/3533
True cause: the accumulated loss is scaled twice
Where: loss_fn
Fix: divide once
"""
import torch
from transformers import BertConfig, BertForSequenceClassification

torch.set_num_threads(1)


class Accelerator:
    """The part of it that matters here."""

    def __init__(self, gradient_accumulation_steps):
        self.gradient_accumulation_steps = gradient_accumulation_steps

    def scale(self, loss):
        return loss / self.gradient_accumulation_steps


def build(fixed=False, steps=16):
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, max_position_embeddings=16, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    opt = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    accelerator = Accelerator(steps)
    batches = []
    for _ in range(70):
        y = torch.randint(0, 5, (steps, 2))
        ids = torch.randint(10, 40, (steps, 2, 8))
        ids[:, :, 0] = y + 1
        batches.append((ids, y))

    def loss_fn(m, batch):
        out = 0
        for ids, y in zip(*batch):
            loss = m(input_ids=ids, labels=y).loss
            if not fixed:
                loss = loss / steps
            out = out + accelerator.scale(loss)
        return out

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn)
