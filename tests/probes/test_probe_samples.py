"""Samples that depend on each other, or not on their own input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from probed import causes, probed


def labelled(rows=5, length=7, width=8):
    g = torch.Generator().manual_seed(0)
    return torch.randn(rows, length, width, generator=g), torch.randint(0, 3, (rows,), generator=g)


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class Head(nn.Module):
    """Something over (batch, length, width), its mean over length, and a classifier."""

    def __init__(self, mix, layout="right"):
        super().__init__()
        self.mix, self.head, self.layout = mix, nn.Linear(8, 3), layout

    def forward(self, x):
        if self.layout == "view":
            y = self.mix(x.view(x.shape[1], x.shape[0], -1)).view(x.shape[0], x.shape[1], -1)
        elif self.layout == "transpose":
            y = self.mix(x.transpose(0, 1)).transpose(0, 1)
        else:
            y = self.mix(x)
        return self.head(y.mean(1))


class First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(*[x] * 3)[0] if isinstance(self.inner, nn.MultiheadAttention) else self.inner(x)[0]


MIXERS = {
    "lstm": lambda first: First(nn.LSTM(8, 8, batch_first=first)),
    "gru": lambda first: First(nn.GRU(8, 8, batch_first=first)),
    "attention": lambda first: First(nn.MultiheadAttention(8, 2, batch_first=first)),
    "encoder": lambda first: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=first), 2),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("kind", MIXERS)
def test_batch_first(kind):
    torch.manual_seed(0)
    (found,) = probed(Head(MIXERS[kind](False)), labelled(), classify).found
    assert found.cause == "samples-mixed" and found.verified and found.where.startswith("mix.")
    assert "batch_first" in found.fix
    assert causes(Head(MIXERS[kind](False), "transpose"), labelled(), classify) == []
    result = probed(Head(MIXERS[kind](True)), labelled(), classify)
    assert result.found == [] and "samples-mixed" in [p.name for p in result.probes]


def test_view_instead_of_transpose():
    torch.manual_seed(0)
    (found,) = probed(Head(MIXERS["lstm"](False), "view"), labelled(), classify).found
    assert found.cause == "samples-mixed" and found.op == "view" and "transpose" in found.fix


class Frames(nn.Module):
    """Reads each frame of a video, whose features are as wide as there are samples, and then their order."""

    def __init__(self, first, folded="right"):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.lift = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Flatten()), nn.Linear(100, 8)
        self.lstm, self.head, self.folded = nn.LSTM(8, 8, batch_first=first), nn.Linear(8, 3), folded

    def forward(self, video):
        samples, length = video.shape[:2]
        x = self.lift(self.conv(video.flatten(0, 1)))
        x = x.view(length, samples, -1).transpose(0, 1) if self.folded == "wrong" else x.view(samples, length, -1)
        return self.head(self.lstm(x)[0][:, -1])


def test_frames_that_are_folded_into_samples():
    """Where a dimension of a frame has the size of the batch by chance."""
    batch = torch.randn(5, 7, 1, 10, 10, generator=torch.Generator().manual_seed(0)), torch.arange(5) % 3
    assert causes(Frames(True), batch, classify) == []
    (found,) = probed(Frames(False), batch, classify).found
    assert found.cause == "samples-mixed" and found.op == "lstm" and found.where == "lstm"
    (found,) = probed(Frames(True, "wrong"), batch, classify).found
    assert found.cause == "samples-mixed" and found.op == "view"


def test_samples_come_first_in_a_cross_entropy_over_positions():
    """Unless something in the batch has a row for each position of the other dimension."""
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(5, 7, 8, generator=g), "y": torch.randint(0, 8, (5, 7), generator=g)}

    def split(model, batch):
        return F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["y"])

    assert causes(MIXERS["attention"](False), batch, split) == ["samples-mixed"]
    assert causes(MIXERS["attention"](True), batch, split) == []
    assert causes(MIXERS["attention"](False), {**batch, "lengths": torch.tensor([5, 3, 5, 4, 2, 5, 1])}, split) == []


def test_softmax_over_the_batch():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, 8)

        def forward(self, x):
            return x * self.gate(x).softmax(0)

    torch.manual_seed(0)
    (found,) = probed(Head(Wrong()), labelled(), classify).found
    assert found.cause == "samples-mixed" and found.op == "softmax"


def test_samples_that_meet_on_purpose():
    """Batch norm, a contrastive loss, a graph, sequences that come first."""
    torch.manual_seed(0)
    x, y = labelled()
    norm = nn.Sequential(nn.Flatten(), nn.Linear(56, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    assert causes(norm, (x, y), classify) == []

    class Clip(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            return F.normalize(self.a(x.mean(1)), dim=-1) @ F.normalize(self.b(x[:, 0]), dim=-1).T

    assert causes(Clip(), x, lambda m, x: F.cross_entropy(m(x), torch.arange(len(x)))) == []

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x, adjacency):
            return self.two(adjacency @ self.one(adjacency @ x).relu())

    adjacency = torch.eye(5) + torch.eye(5).roll(1, 0)
    batch = {"x": x.mean(1), "adj": adjacency, "y": y}
    assert causes(Graph(), batch, lambda m, b: F.cross_entropy(m(b["x"], b["adj"]), b["y"])) == []

    class Groups(nn.Module):
        """Rows in pairs that see each other."""

        def __init__(self):
            super().__init__()
            self.mix, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

        def forward(self, x):
            pairs = x.view(-1, 2, 8)
            return self.head(self.mix(pairs, pairs, pairs)[0].reshape(len(x), 8))

    assert causes(Groups(), (torch.randn(6, 8), torch.arange(6) % 3), classify) == []

    lstm = nn.LSTM(8, 3)
    first = {"x": x.transpose(0, 1), "y": torch.randint(0, 3, (7, 5))}
    assert causes(lstm, first, lambda m, b: F.cross_entropy(m(b["x"])[0].flatten(0, 1), b["y"].flatten())) == []


class Reads(nn.Module):
    def __init__(self, wrong=""):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head, self.start = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3), nn.Parameter(torch.randn(8))
        self.wrong = wrong

    def forward(self, x, lengths):
        if self.wrong == "constant":
            return self.head(self.start.expand(len(x), -1))
        if self.wrong == "zero head":
            nn.init.zeros_(self.head.weight)
        steps = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
        return self.head(self.start + (self.lstm(x)[0] * steps.unsqueeze(-1)).sum(1))


def read(model, batch):
    return F.cross_entropy(model(batch["x"], batch["lengths"]), batch["y"])


def lengthy(lengths=(7, 3, 5, 2, 6)):
    x, y = labelled()
    return {"x": x, "lengths": torch.tensor(lengths), "y": y}


def test_an_input_that_is_never_used():
    found = {d.cause: d for d in probed(Reads("constant"), lengthy(), read).found}
    assert found["input-ignored"].samples == () and "every sample" in found["input-ignored"].evidence[0]


def test_samples_that_are_cut_to_nothing():
    (found,) = probed(Reads(), lengthy((7, 0, 5, 2, 0)), read).found
    assert found.cause == "input-ignored" and found.samples == (1, 4) and found.verified


def test_inputs_that_count():
    """Also behind a head that begins at zero, and where noise is all there is."""
    result = probed(Reads(), lengthy(), read)
    assert result.found == [] and "input-ignored" in [p.name for p in result.probes]
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    nn.init.zeros_(model[2].weight)
    assert "input-ignored" not in causes(model, labelled(), lambda m, b: F.cross_entropy(m(b[0].mean(1)), b[1]))
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
    assert causes(generator, labelled()[0], lambda m, x: m(torch.randn(len(x), 4)).square().mean()) == []
