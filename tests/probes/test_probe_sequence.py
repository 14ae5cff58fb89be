"""Positions that see what they must not see: later tokens, other documents, padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from probed import causes, probed


class Attention(nn.Module):
    def __init__(self, width, causal):
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(width, 3 * width), nn.Linear(width, width), causal

    def forward(self, x, mask=None):
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, -1))
        if mask is not None and self.causal:
            mask = mask & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and mask is None)
        return x + self.out(y.squeeze(1))


class Model(nn.Module):
    """A language model of two layers, right or wrong in one of several ways."""

    def __init__(self, causal=True, wrong=""):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(40, 16), nn.Embedding(32, 16)
        self.layers = nn.ModuleList([Attention(16, causal), Attention(16, causal and wrong != "second")])
        self.norm, self.conv, self.head = nn.LayerNorm(16), nn.Conv1d(16, 16, 3), nn.Linear(16, 40)
        self.wrong = wrong

    def forward(self, ids, mask=None):
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x, mask)
        if self.wrong == "pool":
            x = x + x.mean(1, keepdim=True)
        pad = {"conv": (1, 1)}.get(self.wrong, (2, 0))
        x = x + self.conv(F.pad(x.transpose(1, 2), pad)).transpose(1, 2)
        return self.head(self.norm(x))


def text(rows=3, length=12):
    return torch.randint(4, 40, (rows, length), generator=torch.Generator().manual_seed(1))


def shifting_loss(model, batch):
    logits = model(batch["input_ids"], batch.get("mask"))
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def shifted_data_loss(model, batch):
    ids, targets = batch
    return F.cross_entropy(model(ids).transpose(1, 2), targets)


def sliced_loss(model, ids):
    logp = model(ids[:, :-1]).log_softmax(-1)
    return -logp.gather(-1, ids[:, 1:].unsqueeze(-1)).mean()


BATCHES = {
    "loss shifts": (lambda: {"input_ids": text(), "labels": text()}, shifting_loss),
    "data is shifted": (lambda: (text()[:, :-1], text()[:, 1:]), shifted_data_loss),
    "one tensor": (text, sliced_loss),
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize(("wrong", "where"), [("second", "layers.1"), ("pool", "norm"), ("conv", "norm")])
def test_a_leak_of_later_tokens_is_found(kind, wrong, where):
    make, loss_fn = BATCHES[kind]
    (found,) = probed(Model(wrong=wrong), make(), loss_fn).found
    assert found.cause == "causal-leak" and found.verified and found.where == where


@pytest.mark.parametrize("kind", BATCHES)
def test_a_causal_model_passes(kind):
    make, loss_fn = BATCHES[kind]
    result = probed(Model(), make(), loss_fn)
    assert result.found == [] and "causal-leak" in [p.name for p in result.probes]


def test_a_masked_language_model_may_look_both_ways():
    ids = text()
    labels = torch.where(torch.rand(ids.shape) < 0.3, ids, -100)
    batch = {"input_ids": torch.where(labels == -100, ids, 3), "labels": labels}

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    result = probed(Model(causal=False), batch, loss_fn)
    assert result.found == [] and "causal-leak" not in [p.name for p in result.probes]


class Prefix(Model):
    """Sees its first 6 tokens both ways."""

    def forward(self, ids, mask=None):
        visible = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        visible[:, :6] = True
        x = self.embed(ids)
        q, k, v = (t.unsqueeze(1) for t in self.layers[0].qkv(x).chunk(3, -1))
        return self.head(x + F.scaled_dot_product_attention(q, k, v, attn_mask=visible).squeeze(1))


def test_a_prefix_may_be_seen_both_ways():
    """Its tokens have no targets; those after it see nothing ahead."""
    labels = text()
    labels[:, :6] = -100
    result = probed(Prefix(), {"input_ids": text(), "labels": labels}, shifting_loss)
    assert [p.name for p in result.probes if p.diagnosis] == [] and "causal-leak" in [p.name for p in result.probes]


def packed(kind):
    ids = text()
    documents = (torch.arange(12) // 5).expand(3, 12)
    batch = {"input_ids": ids, "labels": ids}
    if kind == "position_ids":
        batch[kind] = (torch.arange(12) % 5).expand(3, 12)
    elif kind == "doc_ids":
        batch[kind] = documents
    else:
        batch[kind] = (documents.unsqueeze(1) == documents.unsqueeze(2)).unsqueeze(1)
    return batch, (documents.unsqueeze(1) == documents.unsqueeze(2)).unsqueeze(1)


@pytest.mark.parametrize("kind", ["position_ids", "doc_ids", "block_mask"])
def test_packed_documents(kind):
    class Narrow(Model):
        def forward(self, ids, mask=None):
            x = self.embed(ids)
            for layer in self.layers:
                q, k, v = layer.qkv(x).chunk(3, -1)
                x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=visible(mask, ids))
            return self.head(x)

    def visible(mask, ids):
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        return causal if mask is None else causal & mask.squeeze(1)

    batch, mask = packed(kind)
    found = [d for d in probed(Narrow(), batch, shifting_loss).found if d.cause == "packed-documents-mix"]
    assert found and found[0].verified and found[0].samples == (0, 1, 2)
    result = probed(Narrow(), {**batch, "mask": mask}, shifting_loss)
    assert result.found == [] and "packed-documents-mix" in [p.name for p in result.probes]


class Classifier(nn.Module):
    def __init__(self, masked=True, bidirectional=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(40, 16, padding_idx=0), Attention(16, not bidirectional), nn.Linear(16, 3)
        self.masked = masked

    def forward(self, ids, mask):
        x = self.mix(self.embed(ids), mask.bool()[:, None, None] if self.masked else None)
        weights = mask.unsqueeze(-1).float()
        return self.head((x * weights).sum(1) / weights.sum(1))


def classify(model, batch):
    return F.cross_entropy(model(batch["input_ids"], batch["attention_mask"]), batch["labels"])


def padded(side="right", pad=0):
    ids, mask = text(4), torch.ones(4, 12, dtype=torch.long)
    for row, length in enumerate((12, 7, 9, 4)):
        mask[row, length:] = 0
    mask = mask if side == "right" else mask.flip(1)
    return {"input_ids": torch.where(mask == 1, ids, pad), "attention_mask": mask, "labels": torch.tensor([0, 1, 2, 1])}


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_that_attention_sees(side):
    (found,) = probed(Classifier(masked=False), padded(side), classify).found
    assert found.cause == "padding-changes-loss" and found.verified and 0 not in found.samples
    result = probed(Classifier(), padded(side), classify)
    assert result.found == [] and "padding-changes-loss" in [p.name for p in result.probes]


@pytest.mark.parametrize("ignored", [True, False])
def test_padding_that_the_loss_counts(ignored):
    batch = padded()
    batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100) if ignored else batch["input_ids"]
    found = probed(Model(), batch, shifting_loss).found
    assert [d.cause for d in found] == ([] if ignored else ["padding-changes-loss"])


def test_padding_that_the_loss_multiplies_by_0():
    batch = padded()

    def loss_fn(model, batch):
        ids, mask = batch["input_ids"], batch["attention_mask"][:, 1:].float()
        losses = F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        return (losses * mask).sum() / mask.sum()

    assert causes(Model(), batch, loss_fn) == []


def test_a_mask_of_answers_is_not_padding():
    batch = {"input_ids": text(), "labels": text(), "completion_mask": (torch.arange(12) > 5).long().expand(3, 12)}
    result = probed(Model(), batch, shifting_loss)
    assert result.found == [] and "padding-changes-loss" not in [p.name for p in result.probes]


@pytest.mark.parametrize("compared", [0, 2])
def test_ids_that_a_model_compares(compared):
    """With its padding id they mark padding; with another one, such as the end of the text, they do not."""

    class Pools(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.mix, self.head = nn.Embedding(40, 16, padding_idx=0), Attention(16, False), nn.Linear(16, 3)

        def forward(self, ids):
            return self.head(self.mix(self.embed(ids))[torch.arange(len(ids)), (ids == compared).int().argmax(1) - 1])

    batch = padded(pad=compared)
    found = causes(Pools(), (batch["input_ids"], batch["labels"]), lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    assert found == (["padding-changes-loss"] if compared == 0 else [])
