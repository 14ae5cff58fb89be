"""TensorBoard's and W&B's own files, made by these tools, read without them."""

from __future__ import annotations

import io
import math
import struct
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanproof.logs._points import Note, Point
from nanproof.logs.read import _files as files
from nanproof.logs.read import _tensorboard as tensorboard
from nanproof.logs.read import _wandb as wandb
from nanproof.logs.read._sources import find, format_of, read
from nanproof.logs.read._wire import Damaged, fields, signed, varint

DATA = Path(__file__).parents[1] / "data" / "readers"
SIMPLE, TENSORS = sorted((DATA / "tensorboard").iterdir())
TRANSFORMERS, NESTED = DATA / "wandb" / "run-transformers.wandb", DATA / "wandb" / "run-nested.wandb"


def stream(data: bytes) -> io.BufferedReader:
    return files.unpacked(io.BytesIO(data))


@pytest.mark.parametrize("path", [SIMPLE, TENSORS])
def test_scalars_of_tensorboard(path):
    """20 steps of three scalars each, among histograms and text; as plain values and as tensors."""
    found = list(tensorboard.points(tensorboard.records(stream(path.read_bytes()))))
    assert format_of(path.read_bytes()[:100]) == "TensorBoard"
    assert [p.step for p in found] == [10.0 * n for n in range(20)]
    assert [math.isnan(p.values["loss"]) for p in found] == [n >= 15 for n in range(20)]
    assert all(abs(p.values["loss"] - (2 - n / 10)) < 1e-6 for n, p in enumerate(found[:15]))
    assert [p.values["grad_norm"] for p in found] == [math.inf if n == 14 else 1.5 for n in range(20)]
    assert [p.step for p in found if "eval_loss" in p.values] == [40, 90, 140, 190]


def test_tensorboard_reads_the_same():
    """Beside TensorBoard's own reader."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    messages = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    expected = {}
    for said in map(messages.Event.FromString, loader.RawEventFileLoader(str(SIMPLE)).Load()):
        expected.update({(said.step, v.tag): v.simple_value for v in said.summary.value if v.HasField("simple_value")})
    found = tensorboard.points(tensorboard.records(stream(SIMPLE.read_bytes())))
    tags = {"loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/learning_rate", "eval_loss": "eval/loss"}
    seen = {(int(p.step), tags[name]): value for p in found for name, value in p.values.items()}
    assert repr(sorted(seen.items())) == repr(sorted((key, value) for key, value in expected.items() if key[1] in tags.values()))


def test_the_event_files_of_a_folder_are_one_run():
    (source,) = find([DATA / "tensorboard"])
    assert [path.name for path in source.files] == [SIMPLE.name, TENSORS.name]
    assert len(list(read(source))) == 40


def test_transformers_in_wandb():
    """The step is the trainer's, not W&B's count of rows."""
    (source,) = find([TRANSFORMERS])
    assert source.format == "Weights & Biases"
    found = list(read(source))
    train = [p for p in found if "loss" in p.values]
    assert [p.step for p in train] == [10.0 * (n + 1) for n in range(60)]
    assert all(p.values["loss"] == 2.0 - 0.01 * n for n, p in enumerate(train[:50]))
    assert all(math.isnan(p.values["loss"]) for p in train[50:])
    assert [p.step for p in train if math.isinf(p.values["grad_norm"])] == [500]
    assert [p.step for p in found if "eval_loss" in p.values] == [200, 400, 600]


def test_nested_values_and_records_across_blocks_in_wandb():
    data = NESTED.read_bytes()
    assert len(data) > 32768
    found = list(wandb.points(stream(data)))
    assert [(p.step, p.values["loss"], p.values["lr"]) for p in found] == [(5.0 * n, 2.0 - 0.01 * n, 1e-3) for n in range(38)]


def test_the_exception_that_ended_a_run_is_in_wandbs_file():
    """What the program printed is there too; its lines of losses are not counted twice."""
    (source,) = find([DATA / "wandb" / "run-crashed.wandb"])
    found = list(read(source))
    notes = [(item.kind, item.text, item.step) for item in found if isinstance(item, Note)]
    assert notes == [
        ("nan-warning", "WARNING: NaN gradient detected at step 4", 4.0),
        ("unscale-fp16", "ValueError: Attempting to unscale FP16 gradients.", None),
    ]
    assert [(p.step, p.values["loss"]) for p in found if isinstance(p, Point)] == [(n, 2.0 - n) for n in range(5)]


@pytest.mark.parametrize("path", [SIMPLE, TENSORS, TRANSFORMERS, NESTED])
@given(data=st.data())
@settings(max_examples=60)
def test_a_file_that_is_cut_or_damaged_gives_what_comes_before(path, data):
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    reader = wandb.points if path.suffix == ".wandb" else lambda s: tensorboard.points(tensorboard.records(s))
    expected = list(reader(stream(whole)))
    cut = list(reader(stream(whole[:at])))
    assert repr(cut[:-1]) == repr(expected[: len(cut[:-1])])  # the last may lack scalars that are cut off
    flipped = whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]
    assert len(list(reader(stream(flipped)))) <= len(expected) + 2


def test_a_record_of_a_terabyte_is_not_allocated():
    start = struct.pack("<Q", 1 << 40)
    data = start + struct.pack("<I", tensorboard._masked(start)) + b"x" * 1000
    assert list(tensorboard.records(stream(data))) == []


@given(value=st.integers(-(2**63), 2**63 - 1))
def test_varints(value):
    encoded, rest = bytearray(), value & (2**64 - 1)
    while rest >= 0x80:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    encoded.append(rest)
    found, at = varint(bytes(encoded), 0)
    assert (signed(found), at) == (value, len(encoded))
    with pytest.raises(Damaged):
        varint(bytes(encoded[:-1]) or b"\x80", 0)


@given(st.binary(max_size=60))
def test_any_bytes_are_fields_or_damaged(data):
    with suppress(Damaged):
        assert all(number >= 0 for number, _ in fields(data))
