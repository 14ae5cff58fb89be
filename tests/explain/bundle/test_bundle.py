"""A bundle comes back as it was written, whole or not at all, and never costs the run anything but a warning."""

import collections
import dataclasses
import json
import logging
import math
import os
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nanproof import Diagnosis, Incident, Policy, StepRecord, UsageError
from nanproof.core.support._context import Mode, RandomState
from nanproof.explain.bundle import _shelf as shelf
from nanproof.explain.bundle._bundle import FORMAT, BundleWriter, read_bundle

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Sample:
    ids: Tensor
    weight: float


def incident(step=41, kind="nonfinite-loss", **more):
    return Incident(step=step, kind=kind, action="skipped", loss=math.nan, grad_norm=math.inf, message="bad", **more)


def record():
    return StepRecord(
        step=41,
        loss=math.nan,
        grad_norm=math.inf,
        action="skipped",
        clip=1.0,
        lr=(0.01,),
        scale=None,
        spike=False,
        typical=(0.5, 0.25),
        spread=(0.125, 0.5),
        loss_size=1.0,
        weights_checked=False,
        names=("weight", "bias"),
        norms=array("d", [math.inf, 2.0]),
    )


def write(folder, batches=(0,), *, model=None, step=41, writer=None, **more):
    model = model if model is not None else nn.Linear(2, 2)
    own = writer or BundleWriter(folder)
    more.setdefault("random", RandomState.now([]))
    more.setdefault("mode", Mode.now(list(model.modules()), torch.device("cpu")))
    path = own.write(incident=incident(step), batches=batches, model=model, **more)
    if writer is None:
        own.close()
    return path


def round_trip(value):
    with tempfile.TemporaryDirectory() as folder:
        return read_bundle(write(folder, [value])).batches[0]


def same(a, b):
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, dict):
        return isinstance(b, dict) and len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return type(b) is float and (struct.pack("d", a) == struct.pack("d", b) or (a != a and b != b))
    return type(a) is type(b) and a == b


def raw(t: Tensor) -> list[int]:
    return t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()


DTYPES = (torch.bool, torch.int64, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float32, torch.float64)
RARE = (torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16, torch.uint64)


@pytest.mark.parametrize("dtype", [*DTYPES, *RARE], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
def test_a_tensor_of_any_dtype_and_shape_comes_back_bit_for_bit(dtype, shape):
    tensor = (torch.rand(shape) * 4).to(dtype)
    assert same(tensor, round_trip(tensor))


def test_layout_and_requires_grad_come_back_because_last_digits_depend_on_them():
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    batch = {
        "turned": torch.randn(3, 4).t(),
        "images": images,
        "sliced": torch.randn(4, 6)[:, ::2],
        "spread": torch.randn(3, 1).expand(3, 5),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "grad": torch.randn(3, requires_grad=True),
    }
    read = round_trip(batch)
    assert same(batch, read)
    assert read["turned"].stride() == (1, 4) and read["images"].stride() == images.stride()
    assert read["grad"].requires_grad and read["grad"].is_leaf and not read["turned"].requires_grad


def test_the_payload_of_a_nan_is_kept():
    """A NaN's bits tell where it came from; copying through a number would lose them."""
    bits = torch.tensor([0x7FC00001, 0x7F800001, -0x00400000 + 5], dtype=torch.int32)
    assert raw(round_trip(bits.view(torch.float32))) == raw(bits)


def test_every_kind_of_container_and_number_comes_back():
    shared = torch.arange(3)
    value = {
        "none": None,
        3: True,
        (1, "a"): [1, 2.5, -0.0, 10**30],
        None: (math.nan, math.inf, -math.inf, 1e-320, "nan", "ümlaut \ud800"),
        "nested": {"empty": {}, "lists": [[], ((),)]},
        "one": shared,
        "two": shared,
        "complex": complex(1, math.inf),
    }
    read = round_trip(value)
    assert same(value, read)
    assert read["one"] is read["two"]


def test_classes_come_back_as_plain_dictionaries_and_tuples():
    """No class is looked up by name: that is what makes a bundle safe to read and readable without the user's code."""
    value = [
        Pair(torch.ones(2), 1),
        Sample(torch.arange(2), 0.5),
        collections.OrderedDict(a=1),
        collections.UserDict(b=torch.zeros(1)),
        torch.Size([2, 3]),
        nn.Parameter(torch.ones(1)),
    ]
    read = round_trip(value)
    assert same(read[0], (torch.ones(2), 1))
    assert same(read[1], {"ids": torch.arange(2), "weight": 0.5})
    assert read[2] == {"a": 1} and type(read[2]) is dict and same(read[3], {"b": torch.zeros(1)})
    assert read[4] == (2, 3) and type(read[4]) is tuple
    assert type(read[5]) is Tensor and read[5].requires_grad


def test_numpy_arrays_and_scalars_come_back_as_such():
    frozen = np.arange(4.0)
    frozen.flags.writeable = False
    value = {
        "a": np.arange(6, dtype=np.int32).reshape(2, 3)[::-1],
        "f": frozen,
        "s": np.float32(0.1),
        "zero": np.array(5),
        "x": "s",
    }
    read = round_trip(value)
    assert isinstance(read["a"], np.ndarray) and read["a"].dtype == np.int32 and (read["a"] == value["a"]).all()
    assert (read["f"] == frozen).all() and read["zero"].shape == ()
    assert type(read["s"]) is np.float32 and read["s"] == np.float32(0.1)


def test_what_has_no_form_is_left_out_by_name_and_reads_as_none(tmp_path):
    loop: list = [1]
    loop.append(loop)
    batch = {
        "object": object(),
        "set": {1},
        "fn": len,
        "sparse": torch.eye(2).to_sparse(),
        "words": np.array(["a"]),
        "loop": loop,
        object(): 1,
    }
    bundle = read_bundle(write(tmp_path, [batch]))
    assert bundle.batches == ({"object": None, "set": None, "fn": None, "sparse": None, "words": None, "loop": [1, None]},)
    said = "\n".join(bundle.left_out)
    for words in (
        "batches[0]['object']: object",
        "['set']: set",
        "torch.sparse_coo",
        "numpy.ndarray of dtype <U1",
        "contains itself",
    ):
        assert words in said
    assert len(bundle.left_out) == 7


def tensors():
    values = st.lists(st.integers(0, 1), max_size=4)
    return st.builds(
        lambda v, dtype, column: torch.tensor(v, dtype=dtype).reshape((-1, 1) if column else (-1,)),
        values,
        st.sampled_from(DTYPES),
        st.booleans(),
    )


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.tuples(st.text(), st.integers())
trees = st.recursive(
    plain | tensors(),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=60)
@given(trees)
def test_any_nesting_of_these_comes_back(value):
    assert same(value, round_trip(value))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.full((2,), -torch.inf), persistent=False)
        self.register_buffer("phase", torch.randn(2, dtype=torch.complex64))


def test_tied_weights_are_stored_once_and_buffers_are_there(tmp_path):
    model = Tied()
    path = write(tmp_path, model=model)
    weights = read_bundle(path).weights
    assert set(weights) == {"embed.weight", "head.weight", "mask", "phase"}
    assert weights["head.weight"] is weights["embed.weight"]
    assert (
        same(weights["embed.weight"], model.embed.weight)
        and same(weights["mask"], model.mask)
        and same(weights["phase"], model.phase)
    )
    assert json.loads((path / "manifest.json").read_text())["weights"]["head.weight"] == {"tensor": "embed.weight"}
    assert (path / "weights.safetensors").stat().st_size < 2 * model.embed.weight.nbytes + 400


def test_the_rest_of_the_step_comes_back(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), betas=(0.8, 0.9))
    model(torch.randn(2, 2)).sum().backward()
    optimizer.step()
    np.random.standard_normal(1)  # noqa: NPY002
    random.gauss(0, 1)
    state = RandomState.now([])
    said = Diagnosis(cause="nonfinite-batch", confidence=0.9, samples=(1,), evidence=("x",))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mode = Mode.now(list(model.modules()), torch.device("cpu"))
    writer = BundleWriter(tmp_path)
    policy = Policy(diagnose_seconds=math.inf)
    whole = incident(diagnosis=said, micro_batch=1)
    path = writer.write(
        incident=whole, record=record(), batches=[1], random=state, mode=mode, model=model, optimizer=optimizer, policy=policy
    )
    writer.flush()
    drawn = torch.rand(2), random.random(), random.gauss(0, 1), np.random.standard_normal(2)  # noqa: NPY002
    bundle = read_bundle(path)
    writer.close()
    assert path.name == "step-000041-nonfinite-loss" and bundle.created.endswith("+00:00")
    assert str(bundle.incident) == str(whole) and bundle.incident.diagnosis == said and bundle.incident.micro_batch == 1
    assert bundle.record.by_parameter == record().by_parameter and bundle.record.lr == (0.01,)
    assert bundle.mode.training == {"": True, "0": True, "1": False}
    assert bundle.mode.on(model) == mode
    assert bundle.optimizer.kind == "torch.optim.adamw.AdamW" and bundle.optimizer.groups[0]["betas"] == (0.8, 0.9)
    assert bundle.optimizer.groups[0]["params"] == ["0.weight", "0.bias"] and same(
        bundle.optimizer.groups[0]["lr"], torch.tensor(0.5)
    )
    for name, p in model.named_parameters():
        assert same(dict(optimizer.state[p]), bundle.optimizer.state[name])
    assert bundle.policy["diagnose_seconds"] == "inf" and bundle.policy["max_consecutive_skips"] == 10
    assert bundle.versions["torch"] == torch.__version__ and bundle.device == "cpu" and bundle.left_out == ()
    bundle.random.restore()
    again = torch.rand(2), random.random(), random.gauss(0, 1), np.random.standard_normal(2)  # noqa: NPY002
    assert same(drawn[0], again[0]) and drawn[1:3] == again[1:3] and (drawn[3] == again[3]).all()


def test_what_is_written_is_what_was_there_at_the_call(tmp_path, monkeypatch):
    """The thread may come to it much later; training must be free to go on and overwrite everything."""
    gate = threading.Event()
    real = shelf.write_parcel
    monkeypatch.setattr(shelf, "write_parcel", lambda *args: gate.wait(10) and real(*args))
    model, batch = nn.Linear(2, 2), torch.ones(3)
    was = model.weight.detach().clone()
    writer = BundleWriter(tmp_path)
    start = time.perf_counter()
    path = write(tmp_path, [batch], model=model, writer=writer)
    assert time.perf_counter() - start < 5 and not path.exists()
    with torch.no_grad():
        model.weight.zero_()
        batch.zero_()
    gate.set()
    writer.close()
    bundle = read_bundle(path)
    assert same(bundle.weights["weight"], was) and same(bundle.batches[0], torch.ones(3))


def test_only_the_newest_are_kept_and_other_folders_are_left_alone(tmp_path):
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-000001-mine").mkdir()  # no manifest: not a bundle
    writer = BundleWriter(tmp_path, keep=2)
    for step in (30, 20, 10):
        write(tmp_path, step=step, writer=writer)
        writer.flush()
        time.sleep(0.02)
    writer.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-000001-mine",
        "step-000010-nonfinite-loss",
        "step-000020-nonfinite-loss",
        "step-notes",
    ]


def test_a_step_that_comes_twice_gets_a_second_name(tmp_path):
    writer = BundleWriter(tmp_path)
    names = [write(tmp_path, [i], writer=writer).name for i in range(3)]
    writer.close()
    assert names == ["step-000041-nonfinite-loss", "step-000041-nonfinite-loss-2", "step-000041-nonfinite-loss-3"]
    assert [read_bundle(tmp_path / name).batches for name in names] == [(0,), (1,), (2,)]


def test_above_the_cap_the_optimizer_goes_first_then_the_weights_then_all(tmp_path, caplog):
    model = nn.Linear(100, 100)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 100)).sum().backward()
    optimizer.step()
    kib = 1024
    left = {}
    for cap in (200 * kib, 100 * kib, 30 * kib):
        writer = BundleWriter(tmp_path / str(cap), max_bytes=cap)
        path = write(tmp_path, [torch.zeros(kib)], model=model, optimizer=optimizer, writer=writer, checkpoint="runs/a/41.pt")
        writer.close()
        left[cap] = read_bundle(path)
    assert left[200 * kib].left_out == () and left[200 * kib].optimizer.state and left[200 * kib].weights
    assert left[100 * kib].optimizer.state is None and left[100 * kib].weights
    assert left[100 * kib].left_out[0].startswith("optimizer state: ")
    assert left[30 * kib].optimizer.state is None and left[30 * kib].weights is None and len(left[30 * kib].left_out) == 2
    assert left[30 * kib].checkpoint == "runs/a/41.pt" and not (left[30 * kib].path / "weights.safetensors").exists()
    assert left[30 * kib].optimizer.groups[0]["lr"] == 0.001
    assert not caplog.records
    writer = BundleWriter(tmp_path / "none", max_bytes=4 * kib)
    assert write(tmp_path, [torch.zeros(kib)], writer=writer) is None
    writer.close()
    assert "no bundle of step 41" in caplog.text and "over the cap" in caplog.text and not (tmp_path / "none").exists()


def test_memory_that_waits_for_a_slow_disk_is_bounded(tmp_path, monkeypatch, caplog):
    gate, busy = threading.Event(), threading.Event()
    real = shelf.write_parcel
    monkeypatch.setattr(shelf, "write_parcel", lambda *args: busy.set() or (gate.wait(10) and real(*args)))
    writer = BundleWriter(tmp_path, max_bytes=32 << 10)
    batch = [torch.zeros(2000)]
    first = write(tmp_path, batch, writer=writer)
    busy.wait(10)
    second, third = write(tmp_path, batch, writer=writer), write(tmp_path, batch, writer=writer)
    gate.set()
    writer.close()
    assert first.exists() and second.exists() and third is None and "wait for the disk" in caplog.text


def test_a_write_that_fails_half_way_is_a_warning_and_leaves_nothing(tmp_path, monkeypatch, caplog):
    import safetensors.torch

    real = safetensors.torch.save_file
    calls = []

    def full(tensors, path):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    writer = BundleWriter(tmp_path)
    path = write(tmp_path, [torch.ones(2)], writer=writer)
    writer.flush()
    assert "No space left on device" in caplog.text and "Training goes on" in caplog.text
    assert list(tmp_path.iterdir()) == [] and not path.exists()
    again = write(tmp_path, [1], writer=writer)
    writer.close()
    assert read_bundle(again).batches == (1,)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    write(tmp_path / "file" / "incidents", [1])
    assert "was not written" in caplog.text


def test_whatever_goes_wrong_at_the_call_is_a_warning(tmp_path, caplog):
    class Broken(dict):
        def items(self):
            raise KeyError("broken")

    assert write(tmp_path, [Broken(a=1)]) is None
    assert "KeyError" in caplog.text
    writer = BundleWriter(tmp_path)
    writer.close()
    assert write(tmp_path, [1], writer=writer) is None and "closed" in caplog.text


def program(code, *arguments):
    """Run a program in which this file's names can be used."""
    load = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("helper", {__file__!r})
sys.modules["helper"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from helper import *
"""
    return subprocess.run([sys.executable, "-c", load + code, *map(str, arguments)], check=False).returncode


KILLED = """
import safetensors.torch
def killed(tensors, path):
    open(path, "wb").write(b"half")
    os._exit(9)
safetensors.torch.save_file = killed
write(sys.argv[1], [torch.ones(3)])
"""


def test_a_run_killed_while_writing_leaves_no_half_bundle_and_the_next_one_cleans_up(tmp_path):
    assert program(KILLED, tmp_path) == 9
    left = list(tmp_path.iterdir())
    assert len(left) == 1 and left[0].name.startswith(".step-000041") and left[0].name.endswith(".partial")
    alive = tmp_path / f".step-000007-spike.{os.getppid()}.partial"
    alive.mkdir()
    BundleWriter(tmp_path)
    assert list(tmp_path.iterdir()) == [alive]  # another process may be writing it


def test_a_program_that_ends_without_close_still_writes_its_bundle(tmp_path):
    """A run that dies of its bad step is the one whose bundle matters."""
    code = "writer = BundleWriter(sys.argv[1]); write(None, [torch.ones(300000)], writer=writer); raise SystemExit(3)"
    assert program(code, tmp_path) == 3
    assert read_bundle(tmp_path / "step-000041-nonfinite-loss").batches[0].sum() == 300000


def edited(path, **changes):
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.update(changes)
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "name", ["batch.safetensors", "weights.safetensors", "random.safetensors", "incident.json", "record.json"]
)
def test_a_file_that_was_changed_is_refused(tmp_path, name):
    path = write(tmp_path, [torch.ones(3)], record=record())
    data = bytearray((path / name).read_bytes())
    data[-2] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(UsageError, match=rf"{name} was changed or damaged.*Copy the whole folder again"):
        read_bundle(path)
    (path / name).write_bytes(data[:-1])
    with pytest.raises(UsageError, match=rf"{name} has \d+ bytes"):
        read_bundle(path)
    (path / name).unlink()
    with pytest.raises(UsageError, match=rf"{name} is missing"):
        read_bundle(path)


def test_every_way_of_not_being_a_bundle_is_told(tmp_path):
    with pytest.raises(UsageError, match="is no folder"):
        read_bundle(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"is not a bundle: it has no manifest\.json"):
        read_bundle(tmp_path)
    path = write(tmp_path, [torch.ones(3)])
    whole = (path / "manifest.json").read_text()
    for text, words in (
        ("{", "cannot be read as JSON"),
        ("[1]", "no JSON object"),
        ('{"format": NaN}', "NaN is not JSON"),
        ("{}", "format None"),
        ('{"format": 1}', "not as docs/format.md has it"),
    ):
        (path / "manifest.json").write_text(text)
        with pytest.raises(UsageError, match=words):
            read_bundle(path)
    for changes, words in (
        ({"format": FORMAT + 1}, r"format 2, and this nanproof reads format 1\. Use the nanproof that wrote it: nanproof"),
        ({"files": {}}, "does not list batch.safetensors"),
        ({"files": {"../outside": {"bytes": 0, "sha256": ""}}}, "names a file outside the bundle"),
        ({"files": {"/etc/passwd": {"bytes": 0, "sha256": ""}}}, "names a file outside the bundle"),
        ({"batches": [{"tensor": "other"}]}, "holds no tensor 'other'"),
        ({"batches": [{"tensor": "batches[0]", "stride": [10**12]}]}, "strides"),
        ({"batches": [{"tensor": "batches[0]", "dtype": "load", "shape": [3]}]}, "is no dtype"),
        ({"batches": [{"object": "os.system"}]}, "is no form of a value"),
        ({"batches": [["x"]]}, "is no form of a value"),
        ({"random": {"dict": [["python", 3]]}}, "not as docs/format.md has it"),
        ({"mode": {}}, "not as docs/format.md has it"),
    ):
        (path / "manifest.json").write_text(whole)
        edited(path, **changes)
        with pytest.raises(UsageError, match=words):
            read_bundle(path)
    (path / "manifest.json").write_text(whole)
    read_bundle(path)


def test_a_file_that_is_a_link_is_refused(tmp_path):
    path = write(tmp_path / "a", [torch.ones(3)])
    (path / "batch.safetensors").rename(tmp_path / "elsewhere")
    (path / "batch.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is missing"):
        read_bundle(path)


def test_nothing_is_ever_unpickled(tmp_path, monkeypatch):
    """A pickle in the place of a tensor file, with a checksum that fits, does not run."""
    import hashlib
    import pickle

    class Canary:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "it ran"),)

    path = write(tmp_path, [torch.ones(3)])
    for data in (pickle.dumps(Canary()), b"\x80\x02" * 50):
        (path / "batch.safetensors").write_bytes(data)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"]["batch.safetensors"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(UsageError, match="not a safetensors file"):
            read_bundle(path)
    assert not (tmp_path / "it ran").exists()
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *args: pytest.fail("unpickled"))
    monkeypatch.setattr(torch, "load", lambda *args: pytest.fail("unpickled"))
    read_bundle(write(tmp_path, [{"x": torch.ones(3)}]))


def test_the_manifest_is_strict_json_and_says_nothing_about_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setattr(sys, "argv", ["train.py", "--password=hunter3"])
    said = Diagnosis(
        cause="unknown", confidence=0.0, source="/home/alice/train.py:3", evidence=("/home/alice/train.py:3: x = 0 / 0",)
    )
    model = nn.Linear(2, 2)
    writer = BundleWriter(tmp_path)
    path = writer.write(
        incident=incident(diagnosis=said),
        batches=[math.nan],
        random=RandomState.now([]),
        mode=Mode.now(list(model.modules()), torch.device("cpu")),
        model=model,
        checkpoint="/home/alice/runs/41.pt",
    )
    writer.close()
    text = b"".join(p.read_bytes() for p in path.iterdir()).decode("latin-1")
    for secret in ("alice", "hunter", "SECRET_TOKEN", "train.py --"):
        assert secret not in text
    assert read_bundle(path).incident.diagnosis.source == "~/train.py:3"
    for file in path.glob("*.json"):
        json.loads(file.read_text(), parse_constant=lambda c: pytest.fail(c))
    assert set(json.loads((path / "manifest.json").read_text())["files"]) == {p.name for p in path.iterdir()} - {"manifest.json"}


def test_wrong_settings_of_the_writer_are_refused(tmp_path):
    for wrong in ({"keep": 0}, {"keep": True}, {"max_bytes": 0}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            BundleWriter(tmp_path, **wrong)


def test_a_healthy_write_logs_nothing(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "nanproof")
    write(tmp_path, [torch.ones(2)])
    assert not caplog.records
