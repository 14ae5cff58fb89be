"""The reader of safetensors files: against the real one, and against files that lie."""

from __future__ import annotations

import json
import math
import struct

import pytest
import torch
from safetensors.torch import save_file

from nanproof.report.folder._tensors import MOST_NUMBERS, NotRead, Tensors

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
DTYPES = [*INTEGERS, torch.float64, torch.float32, torch.float16, torch.bfloat16]


def same(found, expected):
    return len(found) == len(expected) and all(x == y or (x != x and y != y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_is_what_torch_reads(dtype, tmp_path):
    """Rows of all dtypes, with NaN, Inf, and the smallest and largest numbers, come back exactly."""
    tensor = (torch.randn(5, 3, 4, dtype=torch.float64) * 100).to(dtype)
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        tensor[0, 0] = torch.tensor([math.nan, math.inf, -math.inf, limits.max], dtype=dtype)
        tensor[1, 0] = torch.tensor([limits.tiny, limits.tiny / 2, -0.0, limits.min], dtype=dtype)
    elif dtype is not torch.bool:
        tensor[0, 0, :2] = torch.tensor([torch.iinfo(dtype).max, torch.iinfo(dtype).min], dtype=dtype)
    parts = {"other": torch.ones(7), "t": tensor, "scalar": tensor[0, 0, 0].clone(), "empty": tensor[:, :0].clone()}
    save_file(parts, tmp_path / "f")
    read = Tensors(tmp_path / "f")
    assert read.stored["t"].shape == (5, 3, 4)
    for i in range(5):
        assert same(read.row("t", i), tensor[i].flatten().tolist())
        assert same(read.row("t", i, start=5, most=4), tensor[i].flatten()[5:9].tolist())
    assert same(read.row("t"), tensor.flatten().tolist())
    assert same(read.row("scalar"), [tensor[0, 0, 0].item()])
    assert list(read.row("empty", 4)) == [] and list(read.row("t", 0, start=99)) == []
    for index in (5, -1):
        with pytest.raises(NotRead):
            read.row("t", index)


def test_a_row_is_read_up_to_the_cap(tmp_path):
    save_file({"t": torch.arange(2 * MOST_NUMBERS).reshape(1, -1)}, tmp_path / "f")
    assert list(Tensors(tmp_path / "f").row("t", 0)) == list(range(MOST_NUMBERS))


def with_header(path, header, data=b"\0" * 16):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape, offsets, dtype="I64"):
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


LIES = {
    "past the end": entry([2], [0, 24]),
    "backwards": entry([2], [8, 0]),
    "another size": entry([3], [0, 16]),
    "negative shape": entry([-1], [0, 16]),
    "negative offset": entry([2], [-8, 8]),
    "float shape": entry([2.0], [0, 16]),
    "bool shape": entry([True, 2], [0, 16]),
    "huge": entry([1 << 60, 1 << 60], [0, 16]),
    "many dimensions": entry([0] + [1 << 47] * 100, [0, 0]),
    "text shape": entry("2", [0, 16]),
    "one offset": entry([2], [0]),
    "no offsets": entry([2], None),
    "dtype": entry([2], [0, 16], dtype=3),
    "no entry": {"t": []},
    "list": [],
    "cut": b"{",
    "deep": b"[" * 100_000,
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(lie, tmp_path):
    with pytest.raises(NotRead):
        Tensors(with_header(tmp_path / "f", LIES[lie]))


@pytest.mark.parametrize("data", [b"", b"\1", b"\xff" * 8, struct.pack("<Q", 1 << 40) + b"{}", struct.pack("<Q", 50) + b"{}"])
def test_a_file_that_is_none_is_refused(data, tmp_path):
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(NotRead):
        Tensors(tmp_path / "f")
    with pytest.raises(NotRead):
        Tensors(tmp_path / "missing")


def test_a_dtype_that_is_not_known_is_named_but_not_read(tmp_path):
    read = Tensors(with_header(tmp_path / "f", entry([16], [0, 16], dtype="F8_E4M3")))
    assert read.stored["t"].dtype == "F8_E4M3"
    with pytest.raises(NotRead, match="F8_E4M3"):
        read.row("t")
