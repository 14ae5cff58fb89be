"""Latents of latent-dlm and the pairs that a run reads: a sketch of bytes that nothing random moves, of mean 0 and variance 1."""

from __future__ import annotations

import json
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanproof import UsageError
from nanproof_recipes.latent_dlm.config import Config
from nanproof_recipes.latent_dlm.data.corpus import END, MASK, PAD, documents, windows
from nanproof_recipes.latent_dlm.data.dataset import Pairs, make
from nanproof_recipes.latent_dlm.data.latents import FLOOR, Scale, encode, matrix

pytest.importorskip("yaml")

FIRST = [0.445802, 0.969744, 1.143897]
"""The first numbers of the matrix, as torch 2.13 draws them on a CPU."""


@pytest.fixture(scope="module")
def tiny():
    return make(Config.load("tiny"))


def by_hand(row, length, width):
    """Histogram times matrix, over the root of the count, one number at a time."""
    table, out = matrix(width).double(), []
    for i in range(length):
        stretch = [t for t in row[i * len(row) // length : (i + 1) * len(row) // length] if t < 256]
        histogram = torch.zeros(256, dtype=torch.float64)
        for token in stretch:
            histogram[token] += 1
        out.append(histogram @ table / math.sqrt(len(stretch)) if stretch else torch.zeros(width, dtype=torch.float64))
    return torch.stack(out)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, PAD), min_size=11, max_size=11), min_size=1, max_size=3),
    st.integers(1, 13),
    st.integers(1, 9),
)
def test_a_latent_is_a_histogram_times_the_matrix(rows, length, width):
    found = encode(torch.tensor(rows), length, width)
    assert found.dtype == torch.float32 and found.shape == (len(rows), length, width)
    torch.testing.assert_close(found.double(), torch.stack([by_hand(row, length, width) for row in rows]), rtol=1e-5, atol=1e-5)


def test_many_windows_are_like_one_after_the_other():
    """More than are looked up at once; and none at all."""
    ids = windows(documents(None)[:200], 32, True)
    assert len(ids) > 600
    assert torch.equal(encode(ids, 4, 8), torch.cat([encode(row[None], 4, 8) for row in ids]))
    assert encode(ids[:0], 4, 8).shape == (0, 4, 8)


def test_ids_that_are_no_bytes_do_not_count():
    plain = encode(torch.tensor([[65, 66, 67, 68]]), 1, 8)
    assert torch.equal(plain, encode(torch.tensor([[65, 66, 67, 68, END, MASK, PAD]]), 1, 8))
    assert torch.equal(encode(torch.tensor([[PAD, END, 65, 66]]), 2, 8)[0, 0], torch.zeros(8))


def test_the_order_inside_a_stretch_is_not_in_its_latent():
    """So text is not simply spelt out by it; the stretch that a byte stands in is."""
    a, b, c = (encode(torch.tensor([list(text)]), 2, 8) for text in (b"abcd", b"badc", b"cdab"))
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(a[0, 0], c[0, 1])
    assert not torch.allclose(a, c)


def test_nothing_random_moves_the_matrix_and_it_moves_nothing():
    torch.manual_seed(1)
    first, after = matrix(16), torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), after)
    assert torch.equal(matrix(16), first) and first.shape == (256, 16)
    assert abs(float(first.mean())) < 0.1 and abs(float(first.std()) - 1) < 0.1


def test_the_matrix_is_that_of_every_other_machine():
    """Written down once: a checkpoint is of use only where the same bytes mean the same latents."""
    torch.testing.assert_close(matrix(16)[0, :3], torch.tensor(FIRST), rtol=1e-4, atol=1e-5)


def test_a_scale_brings_every_channel_to_mean_zero_and_variance_one():
    latents = torch.randn(50, 4, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-2, 1.0, 1e3]) + 7
    scale = Scale.fit(latents)
    assert scale.mean == pytest.approx(latents.double().mean((0, 1)).tolist())
    scaled = scale.to(latents).double()
    torch.testing.assert_close(scaled.mean((0, 1)), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-3)
    torch.testing.assert_close(scaled.var((0, 1), correction=0), torch.ones(3, dtype=torch.float64), rtol=1e-3, atol=0)
    torch.testing.assert_close(scale.back(scale.to(latents)), latents)
    assert Scale.from_state(json.loads(json.dumps(scale.state()))) == scale


def test_a_channel_that_never_changes_stays_finite():
    scale = Scale.fit(torch.full((5, 2, 1), 3.0))
    assert scale.std == [FLOOR] and torch.equal(scale.to(torch.full((1, 2, 1), 3.0)), torch.zeros(1, 2, 1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_enters_no_statistics(bad):
    latents = torch.zeros(4, 2, 3)
    latents[1, 1, 1] = bad
    with pytest.raises(UsageError, match="not all finite"):
        Scale.fit(latents)
    with pytest.raises(UsageError, match="no latents"):
        Scale.fit(latents[:0])


@pytest.mark.parametrize(
    "state", [{"mean": [0.0], "std": [0.0]}, {"mean": [0.0], "std": [1.0, 1.0]}, {"mean": [0.0], "std": [float("nan")]}]
)
def test_a_state_that_is_no_scale_is_refused(state):
    with pytest.raises(UsageError, match="no scale"):
        Scale.from_state(state)


def test_the_shipped_text_gives_pairs_of_the_configured_size(tiny):
    model = Config.load("tiny").model
    assert len(tiny.train) > 10_000 and len(tiny.valid) > 500
    item = tiny.train[5]
    assert item["ids"].shape == (model.text_length,) and item["latent"].shape == (model.latent_length, model.latent_width)
    assert item["latent"].dtype == torch.float32 and item["ids"].dtype == torch.int64
    every = tiny.train.latents.reshape(-1, model.latent_width).double()
    assert float(every.mean(0).abs().max()) < 1e-4 and float((every.var(0) - 1).abs().max()) < 1e-3
    assert torch.equal(tiny.valid.latents, tiny.scale.to(encode(tiny.valid.ids, model.latent_length, model.latent_width)))
    assert bool(tiny.train.latents.isfinite().all())


def test_the_same_settings_give_the_same_data_and_others_another_checksum(tiny, tmp_path):
    (tmp_path / "text").write_bytes(b"\f".join(b"document %d" % i for i in range(40)))
    config = Config.load("tiny", [f"data.text={tmp_path / 'text'}", "model.text_length=16", "training.steps=9"])
    again = make(config)
    assert make(config.with_(**{"optimizer.lr": 1.0})).checksum == again.checksum != tiny.checksum
    assert torch.equal(make(config).train.latents, again.train.latents)
    for change in (
        {"data.seed": 1},
        {"data.packed": False},
        {"data.valid_share": 0.2},
        {"model.text_length": 17},
        {"model.latent_width": 4},
        {"model.latent_length": 4},
    ):
        assert make(config.with_(**change)).checksum != again.checksum, change
    (tmp_path / "text").write_bytes(b"\f".join(b"Document %d" % i for i in range(40)))
    assert make(config).checksum != again.checksum and len(again.checksum) == 64


def test_other_held_out_text_is_another_checksum(tmp_path):
    """Of a single document the end is held out: what arms are measured on has to be the same in all of them."""
    config = Config.load("tiny", [f"data.text={tmp_path / 'text'}", "model.text_length=16"])
    made = []
    for end in (b"x", b"y"):
        (tmp_path / "text").write_bytes(b"a" * 4000 + end * 96)
        made.append(make(config))
    assert torch.equal(made[0].train.ids, made[1].train.ids) and made[0].checksum != made[1].checksum


def test_a_damaged_record_is_in_a_copy_alone(tiny):
    before = tiny.train.latents.clone()
    damaged = tiny.train.corrupt(7)
    assert torch.equal(tiny.train.latents, before) and len(damaged) == len(tiny.train)
    torch.testing.assert_close(damaged[7]["latent"][0], before[7][0] * 1e25)
    assert torch.equal(damaged[7]["latent"][1:], before[7][1:])
    assert bool(damaged[7]["latent"].isfinite().all()) and bool(damaged[7]["latent"].square().isinf().any())
    others = torch.arange(len(before)) != 7
    assert torch.equal(damaged.latents[others], before[others]) and damaged[7]["ids"].equal(tiny.train[7]["ids"])
    assert tiny.train.corrupt(-1, factor=2.0)[len(before) - 1]["latent"][0].equal(before[-1][0] * 2)
    with pytest.raises(UsageError, match="sample"):
        tiny.train.corrupt(len(before))


def test_pairs_are_a_dataset_of_torch():
    pairs = Pairs(torch.arange(12).view(4, 3), torch.arange(8.0).view(4, 2, 1))
    batches = list(torch.utils.data.DataLoader(pairs, batch_size=3))
    assert [batch["ids"].shape for batch in batches] == [(3, 3), (1, 3)] and batches[1]["latent"].tolist() == [[[6.0], [7.0]]]
    assert len(list(pairs)) == 4 and pickle.loads(pickle.dumps(pairs))[1]["ids"].tolist() == [3, 4, 5]
    with pytest.raises(UsageError, match="do not make pairs"):
        Pairs(torch.zeros(2, 3), torch.zeros(3, 2, 1))
