"""What was quarantined is there for the next process, whole; a damaged file costs a warning, never the run."""

import dataclasses
import enum
import io
import json
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from nanproof.core.journal._lines import cut_broken_line
from nanproof.recover.data._loaders import wrap
from nanproof.recover.data._quarantine import FILE, Entry, Quarantine, sample_hash


def entry(index=3, **more):
    fields = {"hash": "00ff", "size": 10, "worker": None, "workers": None, "step": 41, "cause": "nan-input", "bundle": None}
    return Entry(**{"index": index, **fields, "at": "2026-01-01T00:00:00+00:00", **more})


numbers = st.none() | st.integers(0, 2**40)
entries = st.builds(
    Entry,
    index=numbers,
    hash=st.none() | st.text(max_size=16),
    size=numbers,
    worker=numbers,
    workers=numbers,
    step=st.integers(0, 2**40),
    cause=st.text(),
    bundle=st.none() | st.text(),
    at=st.text(),
)


@settings(max_examples=60)
@given(st.lists(entries, max_size=6))
def test_entries_come_back(tmp_path_factory, given_entries):
    """Every field, in order, once for each sample."""
    path = tmp_path_factory.mktemp("q") / FILE
    Quarantine(path).add(given_entries)
    oracle = {e.what: e for e in reversed(given_entries)}
    first_of_each = [e for i, e in enumerate(given_entries) if e.what not in {x.what for x in given_entries[:i]}]
    assert list(Quarantine(path)) == first_of_each and len(Quarantine(path)) == len(oracle)


def test_the_file_is_only_appended_to(tmp_path):
    path = tmp_path / "new" / FILE
    quarantine = Quarantine(path)
    assert not path.exists()
    quarantine.add([entry(1)])
    first = path.read_bytes()
    quarantine.add([entry(1), entry(2)])
    Quarantine(path).add([entry(1, step=99)])
    text = path.read_bytes()
    assert text.startswith(first) and [json.loads(line)["index"] for line in text.splitlines()] == [1, 2]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_half_a_line_is_cut(tmp_path, cut):
    """What a killed run left half written is gone, and the next entry is readable."""
    path = tmp_path / FILE
    Quarantine(path).add([entry(1), entry(2)])
    path.write_bytes(path.read_bytes()[:-cut])
    again = Quarantine(path)
    assert [e.index for e in again] == [1]
    again.add([entry(5)])
    assert [e.index for e in Quarantine(path)] == [1, 5]


def test_lines_that_are_no_entries_are_passed_over(tmp_path, caplog):
    """Unknown fields are ignored; anything else is one warning with a count."""
    path = tmp_path / FILE
    good = dataclasses.asdict(entry(4))
    lines = [
        "no json",
        "[1, 2]",
        json.dumps({**good, "index": "four"}),
        json.dumps({**good, "index": True}),
        json.dumps({"index": 1}),
        "",
        "\xff",
        json.dumps({**good, "later": {"field": 1}}),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="latin-1")
    with caplog.at_level(logging.WARNING, "nanproof"):
        assert list(Quarantine(path)) == [entry(4)]
    assert len(caplog.records) == 1 and "6 line(s)" in caplog.text


def test_a_line_that_is_being_written_is_read_later(tmp_path):
    path = tmp_path / FILE
    Quarantine(path).add([entry(1), entry(2)])
    text = path.read_bytes()
    path.write_bytes(text[:-10])
    reading = Quarantine(None)
    reading.path = path
    reading.refresh()
    assert [e.index for e in reading] == [1]
    path.write_bytes(text)
    reading.refresh()
    assert [e.index for e in reading] == [1, 2]


def append_many(path, first):
    quarantine = Quarantine(path)
    for index in range(first, first + 100):
        quarantine.add([entry(index, size=999, hash="x" * 500)])


def test_two_processes_append(tmp_path):
    """No line is torn, none is lost, and each sees what the other wrote when it looks again."""
    path = tmp_path / FILE
    mine = Quarantine(path)
    forked = multiprocessing.get_context("fork")
    others = [forked.Process(target=append_many, args=(path, first)) for first in (0, 500)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert len(mine) == 0
    mine.refresh()
    assert sorted(e.index for e in mine) == [*range(100), *range(500, 600)]
    assert mine.leaves_out(999) == {*range(100), *range(500, 600)}


def test_a_line_that_another_process_appends_meanwhile_is_not_cut_off(tmp_path, monkeypatch):
    """Looking for half a line at the end takes a moment, in which somebody may write a whole one."""
    path = tmp_path / FILE
    path.write_text("{}\n")

    class Slow(io.BufferedRandom):
        def read(self, size=-1):
            found = super().read(size)
            with open(path, "ab") as other:
                other.write(b"[]\n")
            return found

    monkeypatch.setattr(os, "fdopen", lambda handle, mode: Slow(io.FileIO(handle, "r+")))
    cut_broken_line(path)
    assert path.read_text() == "{}\n[]\n"


def test_a_disk_that_refuses_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    quarantine = Quarantine(tmp_path / "file" / FILE)
    with caplog.at_level(logging.WARNING, "nanproof"):
        quarantine.add([entry(3)])
        quarantine.refresh()
    assert "was not written: File exists" in caplog.text
    assert quarantine.leaves_out(10) == {3}


def test_other_data_is_not_touched(caplog):
    """An entry for a dataset of another length is not used; one warning says how many."""
    quarantine = Quarantine(None)
    quarantine.add([entry(3), entry(4, size=11), entry(5, size=None)])
    with caplog.at_level(logging.WARNING, "nanproof"):
        assert quarantine.leaves_out(10) == quarantine.leaves_out(10) == {3}
    assert len(caplog.records) == 1 and "1 quarantined" in caplog.text
    found = quarantine.stream_filter()
    assert found.hashes == {"00ff"} and not found.places
    quarantine.add([entry(7, size=None, hash=None, worker=1, workers=4)])
    assert quarantine.stream_filter().places == {(1, 4, 7)}


def test_it_travels_to_workers(tmp_path):
    quarantine = Quarantine(tmp_path / FILE)
    quarantine.add([entry(3)])
    assert list(pickle.loads(pickle.dumps(quarantine))) == [entry(3)]


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: object
    y: object = None


class Bag:
    def __init__(self, **fields):
        self.__dict__.update(fields)


DIFFERENT = {
    "none": lambda: None,
    "zero": lambda: 0,
    "false": lambda: False,
    "float": lambda: 0.0,
    "minus": lambda: -0.0,
    "nan": lambda: float("nan"),
    "complex": lambda: 1j,
    "text": lambda: "0",
    "bytes": lambda: b"0",
    "empty": list,
    "split": lambda: ["a", "b"],
    "joined": lambda: ["ab"],
    "nested": lambda: [["a"], "b"],
    "dict": lambda: {"a": 1, "b": 2},
    "dict, other": lambda: {"a": 2, "b": 1},
    "set": lambda: {"a", "b", "c"},
    "float32": lambda: torch.zeros(4),
    "bfloat16": lambda: torch.zeros(4, dtype=torch.bfloat16),
    "half": lambda: torch.zeros(4, dtype=torch.float16),
    "float8": lambda: torch.zeros(4, dtype=torch.float8_e4m3fn),
    "bool": lambda: torch.zeros(4, dtype=torch.bool),
    "complex64": lambda: torch.zeros(4, dtype=torch.complex64),
    "other shape": lambda: torch.zeros(2, 2),
    "no elements": lambda: torch.zeros(0),
    "no elements, other shape": lambda: torch.zeros(3, 0),
    "scalar": lambda: torch.tensor(0.0),
    "arange": lambda: torch.arange(6.0).view(2, 3),
    "arange turned": lambda: torch.arange(6.0).view(2, 3).t(),
    "array": lambda: np.zeros(4, dtype=np.float32),
    "array of doubles": lambda: np.zeros(4),
    "array of objects": lambda: np.array(["a", None], dtype=object),
    "number": lambda: np.float32(0),
    "point": lambda: Point(1, torch.ones(2)),
    "point, other": lambda: Point(1, torch.zeros(2)),
    "bag": lambda: Bag(a=1, b="x"),
    "enum": lambda: Colour.RED,
    "object": lambda: object(),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


def test_different_samples_have_different_hashes():
    """And the same sample, made anew, has the same."""
    found = {name: sample_hash(make()) for name, make in DIFFERENT.items()}
    assert len(set(found.values())) == len(found)
    assert {name: sample_hash(make()) for name, make in DIFFERENT.items()} == found
    assert all(len(h) == 16 and int(h, 16) >= 0 for h in found.values())


def test_the_way_a_sample_is_stored_does_not_matter():
    image = torch.arange(24.0).view(4, 6)
    assert sample_hash(image[:, ::2]) == sample_hash(image[:, ::2].clone())
    assert sample_hash(image.t()) == sample_hash(image.t().contiguous())
    assert sample_hash(np.arange(6).reshape(2, 3).T) == sample_hash(np.arange(6).reshape(2, 3).T.copy())
    assert sample_hash((1, [2])) == sample_hash([1, (2,)])
    assert sample_hash({"a": 1, "b": 2}) == sample_hash({"b": 2, "a": 1})
    z = torch.tensor([1 + 2j, 3j])
    assert sample_hash(z.conj()) == sample_hash(z.conj().clone())
    assert sample_hash(torch.ones(2, requires_grad=True)) == sample_hash(torch.ones(2))


def test_a_value_that_contains_itself():
    endless = [1]
    endless.append(endless)
    assert sample_hash(endless) == sample_hash(endless)


def test_pixels_are_what_counts_in_an_image():
    image = pytest.importorskip("PIL.Image")
    one = image.new("RGB", (2, 3), (1, 2, 3))
    assert sample_hash(one) == sample_hash(one.copy())
    assert sample_hash(one) != sample_hash(image.new("RGB", (3, 2), (1, 2, 3)))
    assert sample_hash(one) != sample_hash(image.new("RGB", (2, 3), (1, 2, 4)))


def test_the_hash_is_the_same_in_another_process():
    """Also where Python's own hashes of texts are others."""
    sample = "{'x': torch.arange(3.).bfloat16(), 'y': {'a', 'b', 'c'}, 'z': [1, 2., None, b'q', np.arange(2)]}"
    code = f"import torch, numpy as np; from nanproof.recover.data._quarantine import sample_hash; print(sample_hash({sample}))"
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    there = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout.strip()
    assert there == sample_hash(eval(sample))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, [[0], [1], [5], [5], [5], [5], [6], [7]]),
        (2, [[0, 1], [5, 5], [5], [6, 7]]),
        (None, [[0], [1], [5], [5], [5], [5], [6], [7]]),
    ],
)
def test_for_ranks_that_train_together_no_batch_falls_away(size, expected):
    """A batch whose samples are all left out is made of the next ones, so that every rank takes as many steps."""
    quarantine = Quarantine(None)
    quarantine.add(entry(index, size=8) for index in (2, 3, 4))
    loader = wrap(DataLoader(TensorDataset(torch.arange(8)), size), quarantine, even=True)
    assert [batch[0].reshape(-1).tolist() for batch in loader] == expected
