"""Padding of sequences of numbers, which a model sees or does not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from probed import causes, probed

LENGTHS = (20, 9, 14, 5, 17)


class Reader(nn.Module):
    """Something over (samples, length, 6) and a classifier, right or wrong."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.lift, self.head = kind, nn.Linear(6, 16), nn.Linear(16, 4)
        self.gru = nn.GRU(16, 8, batch_first=True, bidirectional=True)
        self.attention = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.conv, self.norm = nn.Conv1d(16, 16, 5, padding=2), nn.GroupNorm(4, 16)

    def forward(self, x, mask):
        x, lengths = self.lift(x), mask.sum(1)
        if "packed" in self.kind:
            packed = self.gru(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0]
            x = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])[0]
        elif "gru" in self.kind:
            x = self.gru(x)[0]
        if "attention" in self.kind:
            x = self.attention(x, src_key_padding_mask=mask == 0 if "masked" in self.kind else None)
        if "conv" in self.kind:
            x = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        if "norm" in self.kind:
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        if "tags" in self.kind:
            return self.head(x)
        if "plain" in self.kind:
            return self.head(x.relu().mean(1))
        weights = mask.unsqueeze(-1).float()
        return self.head((x * weights).sum(1) / weights.sum(1))


def batch(left=False, tags=False, marker="mask"):
    g = torch.Generator().manual_seed(0)
    mask = (torch.arange(20) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    mask = mask.flip(1) if left else mask
    y = torch.where(mask == 1, torch.randint(0, 4, (5, 20), generator=g), -100) if tags else torch.arange(5) % 4
    return {"x": torch.randn(5, 20, 6, generator=g) * mask.unsqueeze(-1), marker: mask, "y": y}


def loss_fn(model, batch):
    logits = model(batch["x"], batch.get("mask", batch.get("observed_mask")))
    return F.cross_entropy(logits.flatten(0, -2), batch["y"].flatten())


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", ["attention", "gru", "plain", "tags attention", "tags gru", "conv attention"])
def test_padding_that_is_seen(kind, left):
    (found,) = probed(Reader(kind), batch(left, "tags" in kind), loss_fn).found
    assert found.cause == "padding-changes-loss" and found.verified and found.samples == (1, 2, 3, 4)


@pytest.mark.parametrize("kind", ["attention masked", "tags attention masked", "tags", "packed", "tags packed"])
def test_padding_that_is_masked(kind):
    result = probed(Reader(kind), batch(tags="tags" in kind), loss_fn)
    assert result.found == [] and "padding-changes-loss" in [p.name for p in result.probes]


@pytest.mark.parametrize("kind", ["conv plain", "norm attention masked"])
def test_clips_and_norms_read_silence_on_purpose(kind):
    assert causes(Reader(kind), batch(), loss_fn) == []


def test_a_mask_of_missing_values_is_not_padding():
    assert causes(Reader("attention"), batch(marker="observed_mask"), loss_fn) == []
