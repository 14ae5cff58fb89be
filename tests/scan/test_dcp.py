"""A DCP folder is read as the stock reader reads it, and nothing in it is executed."""

import contextlib
import io
import pickle
import shutil
import textwrap
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import forked
from nanproof import RefusedFile, UsageError, load
from nanproof.scan._dcp import SafePlanner, SafeReader, read_metadata
from scan.canary import Canary

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def state():
    return {
        "plain": torch.arange(6.0).reshape(2, 3),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "nested": {"list": [torch.ones(2, dtype=torch.bfloat16), 3, "text"], "pair": (1, 2.5), "number": {"7": 8}},
        "half": torch.ones(3, dtype=torch.float16),
        "bytes": b"raw",
    }


@pytest.fixture
def folder(tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path / "saved")
    return tmp_path / "saved"


def rewrite(folder, change):
    """Change the metadata as a stranger could."""
    metadata = FileSystemReader(folder).read_metadata()
    metadata = change(metadata) or metadata
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_metadata_is_what_the_stock_reader_reads(folder):
    ours, stock = read_metadata(folder), FileSystemReader(folder).read_metadata()
    assert type(ours) is Metadata
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.storage_data == stock.storage_data
    assert ours.planner_data == stock.planner_data
    assert getattr(ours, "version", None) == getattr(stock, "version", None)
    assert [type(key) for key in ours.storage_data] == [MetadataIndex] * len(stock.storage_data)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_of_any_pickle_protocol_is_read(folder, protocol):
    stock = FileSystemReader(folder).read_metadata()
    (folder / ".metadata").write_bytes(pickle.dumps(stock, protocol=protocol))
    assert read_metadata(folder).storage_data == stock.storage_data


def test_sharded_tensors_of_two_ranks_are_read(tmp_path):
    """DTensors, sharded state dicts of a model and an optimizer, as ranks of a real run write them."""
    code = """
        import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        m, o = get_state_dict(model, optimizer)
        whole = torch.arange(10.0).reshape(5, 2)
        dcp.save({"m": m, "o": o, "d": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=sys.argv[1] + "/saved")
        dist.barrier()
        os._exit(0)  # taking gloo down aborts now and then
    """
    ranks = forked.two_ranks_of("-W", "ignore", "-c", textwrap.dedent(code), tmp_path)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr
    ours, stock = read_metadata(tmp_path / "saved"), FileSystemReader(tmp_path / "saved").read_metadata()
    assert ours.state_dict_metadata == stock.state_dict_metadata and ours.storage_data == stock.storage_data
    assert len(ours.state_dict_metadata["d"].chunks) == 2
    target = {"d": torch.zeros(5, 2)}
    load(target, tmp_path / "saved")
    assert target["d"].equal(torch.arange(10.0).reshape(5, 2))


def test_what_was_saved_is_loaded(folder):
    target = state()
    for tensor in (target["plain"], target["turned"], target["scalar"], target["half"], target["nested"]["list"][0]):
        tensor.zero_()
    target["nested"]["list"][1], target["nested"]["pair"] = None, None
    load(target, folder)
    wanted = state()
    assert all(target[name].equal(wanted[name]) for name in ("plain", "turned", "scalar", "empty", "half"))
    assert target["nested"]["list"][0].equal(wanted["nested"]["list"][0])
    assert target["nested"]["list"][1:] == [3, "text"] and target["nested"]["pair"] == (1, 2.5)


def test_stock_load_executes_a_canary_in_the_metadata_and_ours_refuses_it(folder, tmp_path):
    def poison(path):
        def change(metadata):
            metadata.planner_data = Canary(path)

        return change

    untouched = tmp_path / "untouched"
    shutil.copytree(folder, untouched)
    rewrite(folder, poison(tmp_path / "stock"))
    with contextlib.suppress(Exception, CheckpointException):
        dcp.load(state(), checkpoint_id=folder)
    assert (tmp_path / "stock").exists(), "the stock reader is expected to execute it"
    rewrite(untouched, poison(tmp_path / "ours"))
    with pytest.raises(RefusedFile, match=r"\.metadata was refused: it asks for posix\.mkdir"):
        read_metadata(untouched)
    with pytest.raises(RefusedFile, match=r"posix\.mkdir"):
        load(state(), untouched)
    assert not (tmp_path / "ours").exists()


def test_a_canary_in_an_entry_is_refused(tmp_path):
    saved = {"a": torch.ones(2), "thing": Canary(tmp_path / "stock")}
    dcp.save(saved, checkpoint_id=tmp_path / "saved")
    with pytest.raises(RefusedFile, match=r"entry 'thing' was refused: .*mkdir"):
        load({"a": torch.zeros(2), "thing": None}, tmp_path / "saved")
    assert not (tmp_path / "stock").exists()
    with pytest.raises(CheckpointException):  # without our load, DCP's own wrapping is all one gets
        dcp.load({"thing": None}, storage_reader=SafeReader(tmp_path / "saved"), planner=SafePlanner())
    assert not (tmp_path / "stock").exists()


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "a/../../b", "..\\up.distcp", "C:\\x", "", "a\0b"])
def test_paths_that_leave_the_folder_are_refused(folder, name):
    def change(metadata):
        next(iter(metadata.storage_data.values())).relative_path = name

    rewrite(folder, change)
    with pytest.raises(RefusedFile, match="it names"):
        read_metadata(folder)


def test_a_link_that_leads_outside_is_refused(folder, tmp_path):
    data = next(folder.glob("*.distcp"))
    shutil.move(data, tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedFile, match="a link that leads outside"):
        read_metadata(folder)


class Raw:
    """Pickles as any call of any name."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("made_up", "why"),
    [
        ([1, 2], "list where Metadata belongs"),
        (Raw(eval, "1"), "asks for builtins.eval"),
        (Raw(getattr, MetadataIndex, "__init__"), "damaged"),
        (Raw(torch.Size, ("x",)), "damaged"),
        (Metadata({}, storage_data=None), "NoneType where dict belongs"),
        (Metadata({"a": 3}, storage_data={}), "int where TensorStorageMetadata belongs"),
        (Metadata({}, storage_data={}, planner_data={"a": ({},)}), "keys of a nested dictionary"),
    ],
    ids=range(7),
)
def test_metadata_that_is_something_else_is_refused(tmp_path, made_up, why):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(made_up))
    with pytest.raises(RefusedFile, match=why):
        read_metadata(tmp_path)


def test_a_pickle_cannot_change_the_classes_of_torch(tmp_path):
    """Pickles may set attributes on the classes they are given; so they are given none of torch's."""
    build = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n(NN}X\x07\x00\x00\x00versionX\x05\x00\x00\x00wrongs\x86b."
    build = build.replace(b"(NN}", b"N}")
    (tmp_path / ".metadata").write_bytes(build)
    pickle.loads(build)
    assert Metadata.version == "wrong", "the stock unpickler is expected to be fooled"
    Metadata.version = None
    with pytest.raises(RefusedFile):
        read_metadata(tmp_path)
    assert Metadata.version is None


def test_damaged_and_missing_metadata_are_told_apart(folder, tmp_path):
    with pytest.raises(UsageError, match=r"has no \.metadata"):
        read_metadata(tmp_path)
    data = (folder / ".metadata").read_bytes()
    for cut in (0, 1, 100, len(data) - 1):
        (folder / ".metadata").write_bytes(data[:cut])
        with pytest.raises(RefusedFile, match="damaged"):
            read_metadata(folder)


def test_persistent_ids_and_oversized_files_are_refused(folder, monkeypatch):
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.persistent_id = lambda thing: "x" if thing == 1 else None
    pickler.dump([1])
    (folder / ".metadata").write_bytes(file.getvalue())
    with pytest.raises(RefusedFile, match="objects outside"):
        read_metadata(folder)
    monkeypatch.setattr("nanproof.scan._dcp.MOST_METADATA", 3)
    with pytest.raises(RefusedFile, match="more than 3 bytes"):
        read_metadata(folder)


def test_metadata_written_by_other_versions_is_read(folder, monkeypatch):
    """Enums by name (Python 3.11.0), properties in their old module (torch 2.2), a path as checkpoint_id."""
    from torch.distributed._shard.sharded_tensor import metadata as old
    from torch.distributed.checkpoint import metadata as new

    stock = FileSystemReader(folder).read_metadata()
    wanted = read_metadata(folder).state_dict_metadata
    stock.storage_meta.checkpoint_id = PurePosixPath("/somewhere/else")
    for entry in stock.state_dict_metadata.values():
        if hasattr(entry, "properties"):
            entry.properties = old.TensorProperties(**vars(entry.properties))
    monkeypatch.setattr(
        new._MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self._name_)), raising=False
    )
    monkeypatch.setattr(
        old.MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self._name_)), raising=False
    )
    (folder / ".metadata").write_bytes(pickle.dumps(stock))
    read = read_metadata(folder)
    assert read.state_dict_metadata == wanted
    assert Path(read.storage_meta.checkpoint_id) == Path("/somewhere/else")


def test_a_refusal_can_be_sent_between_ranks():
    sent = pickle.loads(pickle.dumps(RefusedFile("a/b", "why")))
    assert (sent.path, sent.why, str(sent)) == ("a/b", "why", "a/b was refused: why. Nothing in it was executed")
