"""Files made to harm whoever reads them: each is refused by name, nothing in it is executed, and its neighbours are scanned."""

import io
import json
import pickle
import struct
import zipfile
from collections import OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader

from nanproof import RefusedFile, load, scan
from scan.canary import Canary

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def sung(tmp_path):
    """Where the canary would show."""
    return tmp_path / "sung"


def status_of(path):
    (file,) = [f for c in scan([path]).checkpoints for f in c.files]
    return file


def write_torch(form, value, path):
    if form == "pickle":
        path.write_bytes(pickle.dumps(value, protocol=2))
    else:
        torch.save(value, path, _use_new_zipfile_serialization=form == "zip")


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
@pytest.mark.parametrize("suffix", [".pt", ".bin", ".ckpt", ".pth", ""])
def test_code_in_a_torch_file_is_not_executed(form, suffix, sung, tmp_path):
    path = tmp_path / f"model{suffix}"
    write_torch(form, {"x": Canary(sung), "w": torch.ones(2)}, path)
    file = status_of(path)
    assert file.status == "refused" and "posix.mkdir" in file.why
    assert not sung.exists()
    if form != "pickle":
        torch.load(path, weights_only=False)
        assert sung.exists(), "the stock reader is expected to execute it"


def test_neighbours_of_a_refused_file_are_still_scanned(sung, tmp_path):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    torch.save(Canary(sung), folder / "a.pt")
    save_file({"w": torch.tensor([float("nan")])}, folder / "model.safetensors")
    torch.save(Canary(sung), folder / "training_args.bin")
    report = scan([folder])
    assert [(f.path.name, f.status) for f in report.checkpoints[0].files] == [
        ("a.pt", "refused"),
        ("model.safetensors", "bad"),
        ("training_args.bin", "skipped"),
    ]
    assert report.status == "bad" and not sung.exists()


def test_code_in_dcp_metadata_is_not_executed(sung, tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "saved")
    metadata = FileSystemReader(tmp_path / "saved").read_metadata()
    metadata.planner_data = Canary(sung)
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(metadata))
    file = status_of(tmp_path / "saved")
    assert file.status == "refused" and "posix.mkdir" in file.why and not sung.exists()


def test_code_in_a_dcp_entry_is_not_executed(sung, tmp_path):
    """The scan does not read entries that are no tensors; loading refuses it."""
    dcp.save({"w": torch.ones(2), "x": Canary(sung)}, checkpoint_id=tmp_path / "saved")
    assert status_of(tmp_path / "saved").status == "clean"
    with pytest.raises(RefusedFile):
        load({"w": torch.zeros(2), "x": None}, tmp_path / "saved")
    assert not sung.exists()


def test_code_in_place_of_a_dcp_tensor_is_not_executed(sung, tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "saved")
    metadata = FileSystemReader(tmp_path / "saved").read_metadata()
    (info,) = metadata.storage_data.values()
    inside = io.BytesIO()
    torch.save(Canary(sung), inside)
    (tmp_path / "saved" / info.relative_path).write_bytes(inside.getvalue())
    info.offset, info.length = 0, len(inside.getvalue())
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "unreadable" in {f.status for c in scan([tmp_path / "saved"]).checkpoints for f in c.files}
    assert not sung.exists()


@pytest.mark.parametrize("name", ["../secret.distcp", "/etc/hostname"])
def test_dcp_paths_that_leave_the_folder_are_refused(name, tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "saved")
    metadata = FileSystemReader(tmp_path / "saved").read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = name
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert status_of(tmp_path / "saved").status == "refused"


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "a/../../outside", "..\\outside", ""])
def test_an_index_that_leaves_its_folder_is_refused(kind, name, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "outside.safetensors")
    (folder / f"model.{kind}.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    file = status_of(folder)
    assert file.status == "refused" and "it names" in file.why


@pytest.mark.parametrize("text", ["", "[", "[]", "{}", '{"weight_map": 3}', '{"weight_map": [1]}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert status_of(tmp_path).status == "refused"


def test_a_manifest_that_leaves_its_folder_is_refused(tmp_path):
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "w.safetensors")
    (folder / "manifest.json").write_text(json.dumps({"files": {"../x": {"bytes": 1}}}))
    assert [f.status for f in scan([folder]).checkpoints[0].files] == ["clean", "refused"]


def repacked(path, compression=zipfile.ZIP_DEFLATED):
    """The same archive, compressed."""
    with zipfile.ZipFile(path) as archive:
        records = [(record.filename, archive.read(record)) for record in archive.infolist()]
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records:
            archive.writestr(name, data)


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "bomb.pt"
    torch.save({"w": torch.zeros(4 << 20)}, path)
    repacked(path)
    assert path.stat().st_size < 1 << 20
    file = status_of(path)
    assert file.status == "refused" and "compressed" in file.why


def test_records_that_claim_more_than_the_file_has_are_refused(tmp_path):
    path = tmp_path / "w.pt"
    torch.save({"w": torch.ones(1000)}, path)
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    while at >= 0:  # every record of the central directory now claims four hundred megabytes
        if b"/data/0" in data[at : at + 120]:
            data[at + 20 : at + 28] = struct.pack("<II", 400 << 20, 400 << 20)
        at = data.find(b"PK\x01\x02", at + 4)
    path.write_bytes(data)
    file = status_of(path)
    assert file.status == "refused" and "claim" in file.why


def legacy_file(path, *, storage, shape):
    """What torch.save wrote before 1.6, with sizes that are made up."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, thing):
            return ("storage", torch.FloatStorage, "0", "cpu", storage, None) if thing is mark else None

    mark = object()

    class Rebuilt:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (mark, 0, shape, (1,), False, OrderedDict())

    with open(path, "wb") as file:
        for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
            pickle.dump(value, file, protocol=2)
        Pickler(file, protocol=2).dump({"w": Rebuilt()})
        pickle.dump(["0"], file, protocol=2)
        file.write(struct.pack("<q", storage) + b"\0" * 40)


@pytest.mark.parametrize(
    ("storage", "shape", "status"),
    [(10, (10,), "clean"), (1 << 42, (10,), "unreadable"), (1 << 24, (10,), "unreadable"), (10, (1 << 20,), "unreadable")],
)
def test_an_old_file_that_claims_more_than_it_has_is_not_believed(storage, shape, status, tmp_path):
    legacy_file(tmp_path / "old.pt", storage=storage, shape=shape)
    assert status_of(tmp_path / "old.pt").status == status


def safetensors_file(path, header, data=b"\0" * 16, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


F32 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("header", "more"),
    [
        ({"w": {**F32, "data_offsets": [0, 1 << 40]}}, {}),
        ({"w": {**F32, "data_offsets": [-16, 0]}}, {}),
        ({"w": {**F32, "data_offsets": [16, 0]}}, {}),
        ({"w": {**F32, "shape": [1 << 62]}}, {}),
        ({"w": {**F32, "shape": [5]}}, {}),
        ({"w": {**F32, "dtype": "F99"}}, {}),
        ({"a": F32, "b": F32}, {}),
        ({"w": F32}, {"data": b""}),
        ({"w": F32}, {"length": 1 << 60}),
        (b"{" * 1000, {}),
        (b'{"w": ' + json.dumps(F32).encode() + b', "w": ' + json.dumps(F32).encode() + b"}", {}),
        (b"", {}),
    ],
    ids=range(12),
)
def test_a_safetensors_header_that_lies_is_not_believed(header, more, tmp_path):
    safetensors_file(tmp_path / "w.safetensors", header, **more)
    assert status_of(tmp_path / "w.safetensors").status == "unreadable"


@pytest.mark.parametrize("form", ["safetensors", "zip", "legacy"])
def test_a_file_cut_anywhere_is_unreadable_or_refused_and_never_a_crash(form, tmp_path):
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pt")
    if form == "safetensors":
        save_file({"w": torch.ones(50), "v": torch.ones(3)}, path)
    else:
        write_torch(form, {"w": torch.ones(50), "v": torch.ones(3)}, path)
    data = path.read_bytes()
    for end in (*range(0, len(data), 37), len(data) - 1):
        path.write_bytes(data[:end])
        assert status_of(path).status in ("unreadable", "refused"), end


@pytest.mark.parametrize("form", ["safetensors", "zip", "legacy", "dcp"])
def test_changed_bytes_are_never_a_crash(form, tmp_path):
    """Every reader ends in a report, whichever byte is wrong."""
    import random

    if form == "dcp":
        dcp.save({"w": torch.ones(5), "x": 3}, checkpoint_id=tmp_path / "saved")
        target, path = tmp_path / "saved", tmp_path / "saved" / ".metadata"
    else:
        target = path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pt")
        if form == "safetensors":
            save_file({"w": torch.ones(5)}, path)
        else:
            write_torch(form, {"w": torch.ones(5)}, path)
    data, draw = path.read_bytes(), random.Random(0)
    for _ in range(150):
        changed = bytearray(data)
        changed[draw.randrange(len(changed))] = draw.randrange(256)
        path.write_bytes(changed)
        assert scan([target]).status in ("clean", "bad", "unreadable", "refused")
