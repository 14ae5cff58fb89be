"""A scan says of every tensor what loading everything and counting says; and which checkpoint was the last good one."""

import json
import math
import os
import tempfile
import zlib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from crosses import part_of
from nanproof import UsageError, first_bad, scan
from nanproof.scan import _measure as measuring
from nanproof.scan._measure import Workers, measure

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
COMPLEX = (torch.complex64, torch.complex128)
WHOLE = (torch.int64, torch.uint8, torch.bool)


def oracle(tensor):
    """The obvious way: everything in float64, counted."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    tiny = torch.finfo(tensor.dtype).smallest_normal
    values = tensor.double() if tensor.element_size() > 1 else tensor.float().double()
    finite = values[values.isfinite()]
    return (
        int(values.isnan().sum()),
        int((values == math.inf).sum()),
        int((values == -math.inf).sum()),
        float(finite.min()) if finite.numel() else None,
        float(finite.max()) if finite.numel() else None,
        int(((values != 0) & (values.abs() < tiny)).sum()),
    )


def told(report):
    return report.nan, report.posinf, report.neginf, report.min, report.max, report.denormals


def write(form, tensors, folder):
    """The tensors in a file or folder of some format; the path to scan."""
    if form == "safetensors":
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
        return folder / "model.safetensors"
    if form == "dcp":
        dcp.save(dict(tensors), checkpoint_id=folder / "saved")
        return folder / "saved"
    path = folder / ("model.bin" if form == "legacy" else "model.pt")
    torch.save(tensors, path, _use_new_zipfile_serialization=form == "zip")
    return path


def only(report):
    ((file,),) = [checkpoint.files for checkpoint in report.checkpoints]
    return file


SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-310, 6e-6, 1e5, -7e4, 448.0, math.nan, math.inf, -math.inf]


@st.composite
def some_tensors(draw):
    made = {}
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(WIDE + BYTES + COMPLEX + WHOLE))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        count = math.prod(shape)
        values = draw(st.lists(st.sampled_from(SPECIAL), min_size=count, max_size=count))
        if dtype in WHOLE:
            tensor = torch.ones(shape).to(dtype)
        else:
            tensor = torch.tensor(values, dtype=torch.float64).reshape(shape).to(dtype)
        made[f"t{number}"] = tensor
    return made


@settings(max_examples=120)
@given(some_tensors(), st.sampled_from(["safetensors", "zip", "legacy", "dcp"]))
@example({"t0": torch.tensor([[0.0, 0.0], [0.0, -math.inf]], dtype=torch.float16)}, "safetensors")
@example({"t0": torch.tensor([[0.0, 0.0], [0.0, -math.inf]], dtype=torch.complex64)}, "zip")
def test_any_tensors_in_any_format_are_measured_as_by_the_obvious_way(tensors, form):
    lacks = {"safetensors": (*BYTES[2:], torch.complex128), "legacy": BYTES}  # types that a format has no name for
    tensors = {name: t for name, t in tensors.items() if t.dtype not in lacks.get(form, ())}
    with tempfile.TemporaryDirectory() as folder:
        file = only(scan([write(form, tensors, Path(folder))], denormals=True))
    wanted = {name: oracle(t) for name, t in tensors.items() if t.dtype not in WHOLE}
    assert {t.name: told(t) for t in file.tensors} == wanted
    assert {t.name: (t.shape, f"torch.{t.dtype}") for t in file.tensors} == {
        name: (tuple(t.shape), str(t.dtype)) for name, t in tensors.items() if t.dtype not in WHOLE
    }
    assert file.whole == sum(t.dtype in WHOLE for t in tensors.values())
    bad = {name for name, found in wanted.items() if sum(found[:3]) and not like_a_mask(tensors[name])}
    assert {t.name for t in file.tensors if t.bad} == bad
    assert file.status == ("bad" if bad else "clean")


def like_a_mask(tensor):
    """Squares of zeros with as many -inf as a causal mask has. Where they lie is not looked at."""
    if tensor.is_complex() or tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2]:
        return False
    numbers = tensor.double()
    infs = numbers.isneginf()
    return bool(((numbers == 0) | infs).all() and infs.sum() == torch.ones_like(numbers).triu(1).sum())


@pytest.mark.parametrize(
    ("value", "place", "dtype"),
    part_of((math.nan, math.inf, -math.inf), (0, 17, 1023, 1024, 4999), (*WIDE, *BYTES, *COMPLEX), every=3),
)
def test_one_bad_number_is_found_wherever_it_lies(dtype, place, value, tmp_path, monkeypatch):
    """Also at the edges of blocks and of vectors, in a tensor of many blocks."""
    monkeypatch.setattr(measuring, "BLOCK", 1024)
    monkeypatch.setattr(measuring, "JOB", 4096)
    values = torch.linspace(-3, 3, 5000, dtype=torch.float64)
    values[place] = value
    tensor = values.to(dtype)
    torch.save({"w": tensor}, tmp_path / "w.pt")
    found = only(scan([tmp_path / "w.pt"], denormals=True)).tensors[0]
    assert told(found) == oracle(tensor)
    if dtype in WIDE:
        save_file({"w": tensor}, tmp_path / "w.safetensors")
        assert told(only(scan([tmp_path / "w.safetensors"], denormals=True)).tensors[0]) == oracle(tensor)


@pytest.mark.parametrize("dtype", [*BYTES, getattr(torch, "float8_e8m0fnu", torch.float8_e5m2)], ids=str)
def test_any_three_codes_of_an_eight_bit_float_are_measured(dtype):
    torch.manual_seed(0)
    for codes in torch.randint(0, 256, (3000, 3), dtype=torch.uint8):
        numbers = codes.view(dtype)
        found, wanted = measure(numbers, denormals=True), oracle(numbers)
        low, high = (value if math.isfinite(value) else None for value in (found.low, found.high))
        assert (found.nan, found.posinf, found.neginf, low, high, found.denormals) == wanted


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::3],
        lambda x: x[5:40, 7:9],
        lambda x: x.reshape(10, 6, 20).permute(2, 0, 1)[3:, :, ::2],
        lambda x: x[:1].expand(50, 20),
        lambda x: x.reshape(-1)[7],
        lambda x: x[:, 0],
        lambda x: torch.view_as_complex(x.clone().reshape(-1, 2))[::3].conj(),
    ],
    ids=range(8),
)
def test_views_into_larger_storages_are_measured_as_they_are(view, tmp_path, monkeypatch):
    """What a view does not show must not be counted: here every number outside of it may be bad."""
    monkeypatch.setattr(measuring, "BLOCK", 256)
    torch.manual_seed(0)
    base = torch.randn(60, 20)
    base[torch.rand(60, 20) < 0.2] = math.nan
    base[torch.rand(60, 20) < 0.1] = -math.inf
    torch.save({"v": view(base), "whole": base}, tmp_path / "v.pt")
    found = {t.name: told(t) for t in only(scan([tmp_path / "v.pt"], denormals=True)).tensors}
    assert found == {"v": oracle(view(base)), "whole": oracle(base)}


def test_a_view_that_overlaps_itself_is_counted_once_and_quickly():
    numbers = torch.tensor([1.0, math.nan, 3.0])
    with Workers() as workers:
        (found,) = workers.measure([numbers.as_strided((2, 2), (1, 1))])
        (huge,) = workers.measure([numbers[:1].expand(1 << 40)])
    assert (found.nan, found.count) == (1, 3)
    assert (huge.nan, huge.count, huge.high) == (0, 1 << 40, 1.0)


def test_the_number_of_threads_of_torch_is_left_alone(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    before = torch.get_num_threads()
    scan([tmp_path])
    assert torch.get_num_threads() == before


def test_everything_nested_in_a_file_is_scanned_by_name(tmp_path):
    """As an optimizer's state, a Lightning checkpoint, or a module's state dict is nested."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.state[model.bias]["exp_avg"][1] = math.nan
    content = {
        "epoch": 3,
        "state_dict": OrderedDict(model.state_dict()),
        "optimizer_states": [optimizer.state_dict()],
        "callbacks": {"EarlyStopping": {"best_score": torch.tensor(math.inf), "wait_count": 0}},
        "tied": model.weight,
        "sparse": torch.tensor([[0.0, math.inf]]).to_sparse(),
    }
    torch.save(content, tmp_path / "last.ckpt")
    file = only(scan([tmp_path / "last.ckpt"]))
    by_name = {t.name: t for t in file.tensors}
    assert [t.name for t in file.tensors if t.bad] == ["optimizer_states.0.state.1.exp_avg", "sparse"]
    assert by_name["callbacks.EarlyStopping.best_score"].notes == ("a score that a callback keeps",)
    assert by_name["tied"].max == by_name["state_dict.weight"].max == model.weight.max().item()
    assert by_name["optimizer_states.0.state.0.step"].min == 1.0


def test_a_causal_mask_is_no_fault_and_anything_else_with_inf_is(tmp_path):
    mask = torch.full((2, 5, 5), -math.inf).triu(1)
    broken = mask.clone()
    broken[0, 4, 0] = -math.inf
    weight = mask.clone()
    weight[0, 0, 0] = 0.5
    save_file({"mask": mask, "broken": broken, "weight": weight}, tmp_path / "m.safetensors")
    found = {t.name: (t.bad, t.notes) for t in only(scan([tmp_path / "m.safetensors"])).tensors}
    assert found == {"mask": (False, ("a causal mask",)), "broken": (True, ()), "weight": (True, ())}


def test_zeros_and_numbers_too_large_for_half_are_notes(tmp_path):
    tensors = {
        "zeros": torch.zeros(3),
        "large": torch.tensor([1.0, -70000.0]),
        "edge": torch.tensor([65504.0]),
        "bf": torch.tensor([1e38]).bfloat16(),
        "half": torch.tensor([65504.0]).half(),
        "empty": torch.zeros(0),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    report = scan([tmp_path / "m.safetensors"])
    notes = {t.name: t.notes for t in only(report).tensors}
    large = ("too large for float16",)
    assert notes == {"zeros": ("all zeros",), "large": large, "edge": (), "bf": large, "half": (), "empty": ()}
    assert report.status == "clean"


def save_model(folder, bad=False, name="model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.tensor([1.0, math.nan if bad else 2.0])}, folder / name)


def test_the_last_good_of_many_checkpoints_is_named_by_step_not_by_name(tmp_path):
    for step in (9, 10, 100):
        save_model(tmp_path / f"checkpoint-{step}", bad=step == 100)
    save_model(tmp_path)
    (tmp_path / "latest").symlink_to(tmp_path / "checkpoint-100")
    report = scan([tmp_path])
    assert [(c.path.name, c.step, c.status) for c in report.checkpoints] == [
        ("checkpoint-9", 9, "clean"),
        ("checkpoint-10", 10, "clean"),
        ("checkpoint-100", 100, "bad"),
        (tmp_path.name, None, "clean"),
    ]
    assert report.last_good[tmp_path].path == tmp_path / "checkpoint-10"
    named = scan(sorted(tmp_path.glob("checkpoint-*")))
    assert named.last_good[tmp_path].path == tmp_path / "checkpoint-10"


def test_lightning_files_of_one_folder_are_checkpoints_of_their_own(tmp_path):
    for epoch, step, value in ((0, 50, 1.0), (1, 100, 1.0), (10, 1100, math.inf)):
        torch.save({"state_dict": {"w": torch.tensor([value])}}, tmp_path / f"epoch={epoch}-step={step}.ckpt")
    torch.save({"state_dict": {"w": torch.tensor([math.inf])}}, tmp_path / "last.ckpt")
    report = scan([tmp_path])
    assert [c.step for c in report.checkpoints] == [50, 100, 1100, None]
    assert report.last_good[tmp_path].step == 100


def test_a_folder_of_checkpoints_may_have_a_number_itself(tmp_path):
    for step in (10, 20):
        save_model(tmp_path / "epoch-2-runs" / f"checkpoint-{step}")
        save_model(tmp_path / "checkpoint-7" / f"global_step{step}")
    save_model(tmp_path / "checkpoint-7")
    assert [c.step for c in scan([tmp_path / "epoch-2-runs"]).checkpoints] == [10, 20]
    assert [c.step for c in scan([tmp_path / "checkpoint-7"]).checkpoints] == [7]


def test_no_checkpoint_is_good_where_all_are_bad(tmp_path):
    for step in (1, 2):
        save_model(tmp_path / f"step={step}", bad=True)
    assert scan([tmp_path]).last_good == {tmp_path: None}


def test_a_checkpoint_with_an_unreadable_file_is_not_the_last_good_one(tmp_path):
    for step in (1, 2):
        save_model(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-2" / "optimizer.pt").write_bytes(b"PK\x03\x04 cut short")
    report = scan([tmp_path])
    assert report.checkpoints[1].status == "unreadable" == report.status
    assert [f.status for f in report.checkpoints[1].files] == ["clean", "unreadable"]
    assert report.last_good[tmp_path].step == 1


def test_incidents_of_a_run_are_not_taken_for_checkpoints(tmp_path):
    save_model(tmp_path / "step-00000100")
    bundle = tmp_path / "incidents" / "step-000041-nonfinite-loss"
    save_model(bundle, bad=True, name="batch.safetensors")
    for name in ("incident.json", "manifest.json"):
        (bundle / name).write_text("{}")
    assert [c.path.name for c in scan([tmp_path]).checkpoints] == ["step-00000100"]


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_sharded_models_are_read_through_their_index(kind, tmp_path):
    names = [f"model-0000{n}-of-00002.{kind}" for n in (1, 2)]
    for n, name in enumerate(names):
        tensors = {f"w{n}": torch.tensor([1.0, math.nan if n else 2.0])}
        save_file(tensors, tmp_path / name) if kind == "safetensors" else torch.save(tensors, tmp_path / name)
    index = tmp_path / f"model.{kind}.index.json"
    index.write_text(json.dumps({"weight_map": {"w0": names[0], "w1": names[1]}}))
    for path in (tmp_path, index):
        (checkpoint,) = scan([path]).checkpoints
        assert [(f.path.name, f.status) for f in checkpoint.files] == [(names[0], "clean"), (names[1], "bad")]
    index.write_text(json.dumps({"weight_map": {"w0": names[0], "lost": names[0], "w1": names[1]}}))
    assert "lacks 'lost'" in scan([index]).checkpoints[0].files[-1].why
    os.remove(tmp_path / names[0])
    (checkpoint,) = scan([tmp_path]).checkpoints
    assert [(f.path.name, f.status) for f in checkpoint.files] == [(names[1], "bad"), (index.name, "unreadable")]
    assert checkpoint.files[-1].why == f"{names[0]} is missing"


def test_files_without_weights_beside_a_model_do_not_make_it_unreadable(tmp_path):
    """Every checkpoint of transformers has a pickled object of a class of its own beside the weights."""
    import argparse

    save_model(tmp_path / "checkpoint-5")
    torch.save(argparse.Namespace(lr=1), tmp_path / "checkpoint-5" / "training_args.bin")
    (tmp_path / "checkpoint-5" / "vocabulary.bin").write_bytes(b"whatever this is")
    report = scan([tmp_path / "checkpoint-5"])
    assert [(f.path.name, f.status) for f in report.checkpoints[0].files] == [
        ("model.safetensors", "clean"),
        ("training_args.bin", "skipped"),
    ]
    assert report.status == "clean"
    assert scan([tmp_path / "checkpoint-5" / "training_args.bin"]).status == "refused"


def nanproof_checkpoint(folder):
    dcp.save({"m": {"w": torch.arange(6.0).reshape(2, 3).t(), "n": 3}}, checkpoint_id=folder)
    torch.save({"host": torch.ones(2)}, folder / "host-0.pt")
    files = {p.name: {"bytes": p.stat().st_size, "crc32": f"{zlib.crc32(p.read_bytes()):08x}"} for p in folder.iterdir()}
    (folder / "manifest.json").write_text(json.dumps({"files": files}))
    (folder / "GOOD.json").write_text("{}")


def test_a_checkpoint_of_nanproof_is_compared_with_its_manifest(tmp_path):
    folder = tmp_path / "step-00000100"
    nanproof_checkpoint(folder)
    (checkpoint,) = scan([folder], checksums=True).checkpoints
    assert checkpoint.status == "clean" and {t.name for f in checkpoint.files for t in f.tensors} == {"m.w", "host"}
    assert checkpoint.checksums == {
        p: f"{zlib.crc32(p.read_bytes()):08x}" for p in folder.iterdir() if not p.name.endswith(".json")
    }
    data = bytearray((folder / "host-0.pt").read_bytes())
    place = data.index(torch.ones(2).numpy().tobytes())
    data[place] ^= 1
    (folder / "host-0.pt").write_bytes(data)
    assert "it was changed" in scan([folder], checksums=True).checkpoints[0].files[-1].why
    (folder / "host-0.pt").write_bytes(data + b"x")
    assert "manifest.json says" in scan([folder]).checkpoints[0].files[-1].why
    os.remove(folder / "host-0.pt")
    assert scan([folder]).checkpoints[0].files[-1].why == "missing, though manifest.json names it"


def test_dcp_folders_with_missing_or_cut_files_are_read_as_far_as_they_go(tmp_path):
    from torch.distributed.checkpoint import FileSystemWriter

    writer = FileSystemWriter(tmp_path / "saved", single_file_per_rank=False)
    dcp.save({"a": torch.tensor([math.nan]), "b": torch.ones(3), "c": torch.ones(2)}, storage_writer=writer)
    from nanproof.scan._dcp import read_metadata

    files = {index.fqn: info.relative_path for index, info in read_metadata(tmp_path / "saved").storage_data.items()}
    os.remove(tmp_path / "saved" / files["b"])
    os.truncate(tmp_path / "saved" / files["c"], 100)
    (checkpoint,) = scan([tmp_path / "saved"]).checkpoints
    found = {f.path.name: (f.status, [t.name for t in f.tensors if t.bad]) for f in checkpoint.files}
    assert found == {files["b"]: ("unreadable", []), files["c"]: ("unreadable", []), "saved": ("bad", ["a"])}
    os.remove(tmp_path / "saved" / ".metadata")
    (file,) = scan([tmp_path / "saved"]).checkpoints[0].files
    assert file.status == "unreadable" and "no .metadata" in file.why


def test_what_lies_before_the_cut_of_a_dcp_file_is_scanned(tmp_path):
    dcp.save({"a": torch.tensor([math.nan]), "b": torch.ones(3)}, checkpoint_id=tmp_path / "saved")
    (data,) = (tmp_path / "saved").glob("*.distcp")
    os.truncate(data, data.stat().st_size - 100)
    files = scan([tmp_path / "saved"]).checkpoints[0].files
    assert [(f.path, f.status) for f in files] == [(data, "unreadable"), (tmp_path / "saved", "bad")]
    assert [t.name for t in files[1].tensors] == ["a"]


def test_chunks_of_one_tensor_in_several_files_are_one_tensor(tmp_path):
    """As FSDP writes them; here without ranks, through the metadata that ranks would have written."""
    import pickle

    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    dcp.save({"w": torch.tensor([1.0, math.nan])}, checkpoint_id=tmp_path / "saved")
    dcp.save({"w": torch.tensor([-5.0, math.inf])}, checkpoint_id=tmp_path / "other")
    metadata, other = (FileSystemReader(tmp_path / name).read_metadata() for name in ("saved", "other"))
    (info,) = other.storage_data.values()
    os.rename(tmp_path / "other" / info.relative_path, tmp_path / "saved" / "__1_0.distcp")
    info.relative_path = "__1_0.distcp"
    metadata.storage_data[MetadataIndex("w", torch.Size([2]), 1)] = info
    entry = metadata.state_dict_metadata["w"]
    entry.size = torch.Size([4])
    entry.chunks.append(ChunkStorageMetadata(torch.Size([2]), torch.Size([2])))
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(metadata))
    (tensor,) = only(scan([tmp_path / "saved"])).tensors
    assert told(tensor)[:5] == (1, 1, 0, -5.0, 1.0) and tensor.shape == (4,)


def test_first_bad_names_the_first_bad_tensor_in_memory():
    good = {"a": torch.ones(3), "n": torch.arange(3), "e": torch.zeros(0), "f": torch.ones(2).to(torch.float8_e4m3fn)}
    assert first_bad(good.items()) is None
    bad = {**good, "x": torch.tensor([1, math.inf]), "y": torch.tensor([math.nan])}
    assert first_bad(bad.items()) == "x"
    assert first_bad([("p", nn.Parameter(torch.tensor([math.nan])))]) == "p"


def test_what_cannot_be_scanned_at_all_is_said_with_what_to_do(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        scan([tmp_path / "nothing"])
    with pytest.raises(UsageError, match="holds no checkpoint"):
        scan([tmp_path])


def test_the_report_is_strict_json_and_progress_sees_every_file(tmp_path):
    for step in (1, 2):
        save_model(tmp_path / f"checkpoint-{step}", bad=step == 2)
    seen = []
    report = scan([tmp_path], denormals=True, checksums=True, progress=seen.append)
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["status"] == "bad" and data["last_good"] == {str(tmp_path): str(tmp_path / "checkpoint-1")}
    assert data["checkpoints"][1]["files"][0]["tensors"][0]["nan"] == 1
    assert [r.path for r in seen] == [f.path for c in report.checkpoints for f in c.files]
