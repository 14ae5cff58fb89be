"""Files that somebody else may have put there."""

import os

import pytest

from nanproof._access import OddFile, create, open_append, open_regular, own_folder, parse_json, read_bytes, read_json


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("opens", [open_regular, read_bytes, read_json, open_append])
def test_a_pipe_is_refused_at_once(pipe, opens):
    with pytest.raises(OddFile, match="not a regular file"):
        opens(pipe)


@pytest.mark.parametrize("opens", [open_regular, read_bytes, read_json])
def test_a_device_is_refused(tmp_path, opens):
    (tmp_path / "endless").symlink_to("/dev/zero")
    with pytest.raises(OddFile, match="not a regular file"):
        opens(tmp_path / "endless")


def test_a_reader_follows_a_link_to_a_file(tmp_path):
    (tmp_path / "real").write_text('{"a": 1}')
    (tmp_path / "link").symlink_to("real")
    assert read_json(tmp_path / "link") == {"a": 1}


def test_a_writer_follows_no_link(tmp_path):
    (tmp_path / "real").write_text("precious")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OddFile, match="symbolic link"):
        open_append(tmp_path / "link")
    with create(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "real").read_text() == "precious"
    assert (tmp_path / "link").read_text() == "new" and not (tmp_path / "link").is_symlink()


def test_a_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "folder").symlink_to("elsewhere")
    with pytest.raises(OddFile, match="symbolic link"):
        own_folder(tmp_path / "folder")
    own_folder(tmp_path / "new")
    assert (tmp_path / "new").is_dir()


def test_reading_is_bounded(tmp_path):
    (tmp_path / "large").write_bytes(b"1" * 100)
    assert read_bytes(tmp_path / "large", 100) == b"1" * 100
    with pytest.raises(OddFile, match="more than 99 bytes"):
        read_bytes(tmp_path / "large", 99)


def test_nesting_too_deep_is_damage():
    with pytest.raises(ValueError, match="nested too deep"):
        parse_json("[" * 200_000)
