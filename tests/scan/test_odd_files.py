"""What lies in a folder beside checkpoints, and is none that can be read: one line each, and exit status 2."""

import json
import os
import pickle
import socket
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import nanproof


@pytest.fixture
def folder(tmp_path):
    """A folder with a checkpoint that is fine."""
    save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    return tmp_path


def pipe(path):
    os.mkfifo(path)


def listening(path):
    where = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(where)


ODD = {
    "pipe": pipe,
    "socket": listening,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "circle": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".bin"])
@pytest.mark.parametrize("kind", ODD)
def test_what_cannot_be_read_is_reported(folder, kind, suffix):
    ODD[kind](folder / f"b{suffix}")
    report = nanproof.scan([folder])
    assert {file.path.name: file.status for one in report.checkpoints for file in one.files} == {
        "a.safetensors": "clean",
        f"b{suffix}": "unreadable",
    }


def test_a_file_whose_name_is_not_utf8_is_read(folder):
    name = os.fsdecode(b"b\xff.pt")
    torch.save({"w": torch.full((3,), float("nan"))}, folder / "b.pt")
    (folder / "b.pt").rename(folder / name)
    assert nanproof.scan([folder]).status == "bad"


def test_an_index_that_names_its_own_folder_is_refused_or_unreadable(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "."}}))
    (index,) = (f for c in nanproof.scan([folder]).checkpoints for f in c.files if f.path.name.endswith(".json"))
    assert index.status in ("refused", "unreadable")


def shared_key():
    """A dictionary whose key holds another tuple twice, sixty deep: to hash it takes 2^60 steps."""
    program = b"\x80\x02}q\x00)"
    for _ in range(60):
        program += b"2\x86"  # the same twice, as a tuple
    return program + b"K\x01s."


def test_shared_tuples_as_a_key_are_refused(folder, limits):
    (folder / "b.pt").write_bytes(old_torch_file(shared_key()))
    outcome = limits.call("scan.test_odd_files:statuses", str(folder))
    assert outcome.error == "" and outcome.value == ["clean", "refused"]


def test_a_protocol_that_does_not_exist_is_unreadable(folder):
    (folder / "b.pt").write_bytes(old_torch_file(b"\x80\xc8}."))
    assert statuses(folder) == ["clean", "unreadable"]


def old_torch_file(program):
    head = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True, "protocol_version": 1001, "type_sizes": {}}]
    return b"".join(pickle.dumps(part, 2) for part in head) + program + pickle.dumps([], 2) + struct.pack("<q", 0)


def statuses(folder):
    return [file.status for one in nanproof.scan([folder]).checkpoints for file in one.files]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not look")
def test_a_folder_that_may_not_be_looked_into_is_one_line():
    import torch.distributed.checkpoint  # as root: the interpreter may lie where others may not look either

    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are root's alone
        folder = Path(name)
        folder.chmod(0o755)
        save_file({"w": torch.ones(3)}, folder / "a.safetensors")
        (folder / "a.safetensors").chmod(0o644)
        (folder / "locked").mkdir(mode=0o700)
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.setresuid(65534, 65534, 65534)
                os.write(writes, repr(statuses(folder)).encode())
            except BaseException as error:
                os.write(writes, repr(error).encode())
            finally:
                os._exit(0)
        os.close(writes)
        os.waitpid(child, 0)
        with os.fdopen(reads) as pipe:
            assert pipe.read() == "['clean', 'unreadable']"
