"""A log reads the same wherever its bytes are cut into blocks, and whichever way its lines are read: fast or one at a time."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest

from nanproof.logs._points import Note, singly
from nanproof.logs._story import Story
from nanproof.logs.judge._findings import judge
from nanproof.logs.read import _files as files
from nanproof.logs.read._sources import find, read
from nanproof.logs.text._layouts import TRIES
from nanproof.logs.text._text import TextReader
from zoo.logs.__main__ import EXCERPTS

CORPUS = Path(__file__).parent / "corpus"
LOGS = [path for folder in (CORPUS, EXCERPTS) for path in sorted(folder.glob("*.log")) if path.stat().st_size < 30_000]


def items(data, size=1 << 20, tries=0):
    reader = TextReader()
    reader._tries = tries
    return list(singly(reader.read(files.blocks(files.unpacked(io.BytesIO(data)), size))))


def told(path, data):
    path.write_bytes(data)
    story = Story()
    for item in read(find([path])[0]):
        story.add(item)
    return story, [(f.kind, f.place.line) for f in judge(story)]


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_where_a_block_ends_changes_nothing(path):
    whole = items(path.read_bytes())
    for size in (7, 100, 4096):
        assert repr(items(path.read_bytes(), size)) == repr(whole), size


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_lines_of_one_shape_are_read_as_if_each_were_alone(path):
    fast, slow = items(path.read_bytes()), items(path.read_bytes(), tries=TRIES)
    assert [facts(item) for item in fast] == [facts(item) for item in slow]


def facts(item):
    """Of a point, whatever the order of its values."""
    if isinstance(item, Note):
        return item
    return item.line, item.step, item.epoch, item.settings, repr(sorted(item.values.items())), repr(sorted(item.terms.items()))


def step(i, value="1.5", end="\n"):
    return f"step {i} loss {value}{end}"


@pytest.mark.parametrize("tries", [0, TRIES])
def test_a_carriage_return_among_lines_of_one_shape_hides_nothing(tries):
    text = "".join(step(i) for i in range(1, 60)) + step(60, end="\r") + step(61, "nan") + "".join(step(i) for i in range(62, 80))
    found = items(text.encode(), tries=tries)
    assert len(found) == 79 and [p.step for p in found if math.isnan(p.values["loss"])] == [61]


def test_a_point_that_is_repeated_after_a_batch_counts_once():
    text = "".join(step(i, f"1.{i}") for i in range(1, 30)) + "hello\n" + step(29, "1.29") + step(30)
    assert [p.step for p in items(text.encode())] == [*range(1, 31)]


@pytest.mark.parametrize("tries", [0, TRIES])
def test_a_dictionary_waits_for_the_bar_below_it(tries):
    line = "{{'loss': {i}.5, 'epoch': 0.0{i}}}\nTrain:   0%|          | {i}/1988 [00:14<8:01:28, 14.54s/it]nothing\n"
    text = "".join(line.format(i=i) for i in range(1, 6)).encode()
    assert [p.step for p in items(text)] == [p.step for p in items(text, tries=tries)]


def test_json_lines_take_nan_as_python_prints_it(tmp_path):
    """Read with its neighbours or alone."""
    for count in (2, 30):
        rows = [f'{{"step": {i}, "loss": {"nan" if i == count else 1.5}}}' for i in range(1, count + 1)]
        _, found = told(tmp_path / "log.jsonl", "\n".join(rows).encode())
        assert found == [("nan", count)]


def test_a_rate_of_0_at_the_end_is_read_line_by_line(tmp_path):
    rows = [json.dumps({"step": i, "loss": 2 / (i + 1), "lr": 1e-3 if i < 600 else 0.0}) for i in range(1200)]
    story, found = told(tmp_path / "log.jsonl", "\n".join(rows).encode())
    assert story.points == 1200 and found == [("learning-rate-zero", 601)]


def test_rows_of_one_step_are_one_point_as_long_as_none_is_lost(tmp_path):
    story, found = told(tmp_path / "log.csv", b"step,kl,loss\n1,0.1,1.0\n2,nan,\n2,0.1,\n2,,1.0\n3,0.1,1.0\n")
    assert story.points == 4 and ("nan", 3) in found


@pytest.mark.parametrize(
    "text",
    [
        "Epoch 1e300:  50%|#####     | 5/999999999999999 [00:01<00:01, 1.0it/s, loss=1.0]\n",
        "".join(f"{{'loss': 1.0, 'grad_norm': nan, 'learning_rate': 0.{i}, 'epoch': 1e-310}}\n" for i in range(1, 10)),
        " iteration 1/ 10 | lm loss: 1.0E+00 | grad norm: 1.0 | number of nan iterations: 1,000 |\n",
    ],
    ids=["a huge epoch", "tiny epochs", "a count with a comma"],
)
def test_odd_numbers_are_read(text, tmp_path):
    story, _ = told(tmp_path / "a.log", text.encode())
    assert story.points
