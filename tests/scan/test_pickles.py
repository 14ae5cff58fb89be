"""Pickles and archives that the real tools write pass the look that is taken before loading; what is made up does not."""

import io
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanproof import RefusedFile
from nanproof.scan._archives import records
from nanproof.scan._inside import UnreadableFile
from nanproof.scan._pickles import Suspicious, check_pickle
from nanproof.scan._torch_files import load_entry, load_torch

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
NESTED = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.frozensets(st.integers())
        | st.builds(lambda x: [x, x], inner)
        | st.builds(OrderedDict)
        | st.builds(bytearray, st.binary())
        | st.builds(complex, st.floats(), st.floats())
    ),
    max_leaves=30,
)


@settings(max_examples=150)
@given(NESTED, st.integers(0, 5))
def test_whatever_python_pickles_is_followed_to_its_end(value, protocol):
    data = pickle.dumps(value, protocol)
    assert check_pickle(data + b"rest", 1 << 40) == len(data)


def test_pickles_of_every_size_are_followed():
    for value in ([i % 300 for i in range(100_000)], {str(i): (i, i) for i in range(50_000)}, ["x" * 300] * 70_000):
        for protocol in (0, 2, 4):
            data = pickle.dumps(value, protocol)
            assert check_pickle(data, 1 << 30) == len(data)


@pytest.mark.parametrize("new", [True, False])
def test_what_torch_saves_is_loaded(new, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "counts": Counter("ab"),
    }
    state |= {"half": torch.ones(3).half(), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.ones(2, dtype=torch.complex128)}
    state |= {
        "tied": [model[0].weight] * 2,
        "view": torch.arange(10.0)[3:7],
        "bytes": b"x",
        "size": torch.Size([2]),
        "empty": torch.ones(0),
    }
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    loaded = load_torch(tmp_path / "a.pt", mmap=True)
    assert torch.equal(loaded["view"], state["view"]) and loaded["counts"] == state["counts"]
    assert loaded["optimizer"]["state"][0]["exp_avg"].equal(state["optimizer"]["state"][0]["exp_avg"])


def test_records_are_where_zipfile_finds_them(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(100.0), "v": torch.ones(3)}, path)
    with open(path, "rb") as file, zipfile.ZipFile(path) as archive:
        found = records(file, path, 0, path.stat().st_size)
        assert set(found) == set(archive.namelist())
        for name, record in found.items():
            file.seek(record.start)
            assert file.read(record.size) == archive.read(name)


def test_sizes_beyond_four_gigabytes_are_read_from_where_they_stand():
    """As torch writes them: the short fields are full, and the long ones stand in an extra field."""
    name, content = b"a/data.pkl", b"\x80\x02N."
    header = struct.pack("<4s5H3I2H", b"PK\x03\x04", 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(name), 20)
    local = header + name + struct.pack("<HHQQ", 1, 16, len(content), len(content)) + content
    extra = struct.pack("<HHQQQ", 1, 24, len(content), len(content), 0)
    full = 0xFFFFFFFF
    entry = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 45, 45, 0, 0, 0, 0, 0, full, full, len(name), len(extra), 0, 0, 0, 0, full)
    listed = entry + name + extra
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, len(listed), len(local))
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, len(local) + len(listed), 1)
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, full, full, 0)
    data = local + listed + end64 + locator + end
    found = records(io.BytesIO(data), Path("a"), 0, len(data))
    record = found["a/data.pkl"]
    assert data[record.start : record.start + record.size] == content


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\x80\x02Nr\xff\xff\xff\x0f.", Suspicious),
        (b"\x80\x02N" + b"\x85" * 2000 + b".", Suspicious),
        (b"\x80\x02" + b"]" * 2000 + b"a" * 1999 + b".", Suspicious),
        (b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.", Suspicious),
        (b"\x80\x02\x82\x01.", Suspicious),
        (b"N0" * (2 << 20) + b"N.", Suspicious),
        (b"\x80\x02X\xff\xff\xff\x7fabc.", UnreadableFile),
        (b"\x80\x02]", UnreadableFile),
        (b"\x80\x02.", UnreadableFile),
        (b"\x80\x02h\x05.", UnreadableFile),
        (b"", UnreadableFile),
    ],
)
def test_what_no_checkpoint_needs_is_not_followed(data, error):
    with pytest.raises(error):
        check_pickle(data, len(data))


def test_an_entry_that_executes_is_refused_by_name():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.")
        archive.writestr("a/version", b"3\n")
    with pytest.raises(RefusedFile, match=r"asks for os\.system"):
        load_entry(out.getvalue(), "entry")
