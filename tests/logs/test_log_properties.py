"""Whatever is logged, in whatever text, cut wherever: it reads back the same. And no bytes make a reader fall over."""

from __future__ import annotations

import gzip
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logs.formats import TEXT
from nanproof import UsageError
from nanproof.logs._points import Note, Point, singly
from nanproof.logs.read import _files as files
from nanproof.logs.read._sources import find, format_of, read
from nanproof.logs.read._tables import csv_rows, json_lines
from nanproof.logs.text._text import TextReader

NUMBERS = st.one_of(
    st.floats(min_value=-1e6, max_value=1e6, allow_nan=False).map(lambda x: float(f"{x:.5g}")),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), 0.0, 65536.0, 1e-38]),
)
OTHER = st.sampled_from(
    [
        "loading shard 3 of 12 from data/part-00012.parquet",
        "saving checkpoint to out/ckpt-100",
        "  0%|          | 0/10 [00:00<?, ?it/s]",
        "INFO:root:nothing to see here, the loss of precision is small",
        "",
        "\x1b[32mdone\x1b[0m",
    ]
)


@st.composite
def logs(draw, names):
    """(points, for each the lines that stand before it)"""
    steps = draw(st.lists(st.integers(1, 500), min_size=1, max_size=12))
    points, at = [], 0
    for gap in steps:
        at += gap
        points.append((Point({name: draw(NUMBERS) for name in names}, float(at)), draw(st.lists(OTHER, max_size=2))))
    return points


def values(points):
    return [(repr(sorted(p.values.items())), p.step) for p in points]


@pytest.mark.parametrize("name", TEXT)
@given(data=st.data())
@settings(max_examples=40)
def test_what_was_logged_is_read(name, data):
    """The same values and the same steps, among other lines, with the text cut into pieces anywhere."""
    render, names, has_step = TEXT[name]
    made = data.draw(logs(names))
    text = "".join("".join(f"{line}\n" for line in before) + render(point) + "\n" for point, before in made).encode()
    size = data.draw(st.integers(1, len(text)))
    found = list(singly(TextReader().read(files.blocks(files.unpacked(io.BytesIO(text)), size))))
    assert all(isinstance(item, Point) for item in found)
    kept = [Point({n: p.values[n] for n in names}, p.step if has_step else None) for p, _ in made]
    seen = [Point({n: v for n, v in p.values.items() if n in names}, p.step if has_step else None) for p in found]
    assert values(seen) == values(kept)


@given(data=st.data())
@settings(max_examples=40)
def test_tables_read_back(data):
    made = [point for point, _ in data.draw(logs(("loss", "grad_norm", "lr")))]
    delimiter = data.draw(st.sampled_from(",;\t|"))
    rows = ["step", "train_loss", "grad_norm", "lr"], *([f"{p.step:.0f}", *map(repr, p.values.values())] for p in made)
    text = "\n".join(delimiter.join(row) for row in rows).encode()
    size = data.draw(st.integers(1, len(text)))
    assert format_of(text) == "CSV"
    assert values(csv_rows(files.lines(files.unpacked(io.BytesIO(text)), size))) == values(made)
    text = "".join(TEXT["JSON"][0](p) + "\n" for p in made).encode()
    assert values(singly(json_lines(files.whole_lines(files.unpacked(io.BytesIO(text)), size)))) == values(made)


@given(
    start=st.sampled_from(
        [b"", b":W&B\xe1\xbe\x00", b"\x1f\x8b", b"\xff\xfe", b"{", b'{"log_history": [', b"[{", b"loss,step\n1,"]
    ),
    rest=st.one_of(st.binary(max_size=600), st.text(max_size=300).map(str.encode)),
    packed=st.booleans(),
)
@settings(max_examples=300)
def test_rubbish_is_read_as_nothing_or_refused(start, rest, packed, tmp_path_factory):
    """Any bytes: points, notes, nothing or a UsageError, and never another exception."""
    path = tmp_path_factory.getbasetemp() / "rubbish"
    path.write_bytes(gzip.compress(start + rest) if packed else start + rest)
    try:
        for source in find([path]):
            for item in singly(read(source)):
                assert isinstance(item, (Point, Note))
    except UsageError:
        pass


@given(line=st.text(alphabet="loss nan=:.0123456789|/[]{}'\"()%,eE+-stepgradinfWARNING\r\x1b\x00", max_size=400))
@settings(max_examples=400)
def test_any_line_of_the_letters_that_matter_is_read(line):
    for item in singly(TextReader().read([line.encode() + b"\n"] * 2)):
        assert isinstance(item, (Point, Note))
        assert len(item.text) <= 300 if isinstance(item, Note) else item.values


def test_numbers_too_large_to_count_with_are_no_steps():
    """Also on the short way, which the second line takes."""
    line = "step {0} epoch {0} loss 1.5\n"
    found = list(singly(TextReader().read([(line.format(1) + line.format("9" * 500) + line.format(2)).encode()])))
    assert [(p.step, p.epoch) for p in found] == [(1, 1), (None, None), (2, 2)]
