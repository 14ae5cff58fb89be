"""The index of a run with several optimizers: which folders hold its records."""

from __future__ import annotations

import json

import pytest

from nanproof.core.support._index import INDEX, next_folder, read_index, write_index


def test_what_is_written_is_read(tmp_path):
    parts = [(tmp_path, "SGD of Critic"), (tmp_path / "optimizer-2", "Adam of Generator")]
    write_index(tmp_path, parts)
    assert read_index(tmp_path) == parts
    assert json.loads((tmp_path / INDEX).read_text())["optimizers"][0] == {"name": "SGD of Critic", "folder": "."}


def test_a_run_with_one_optimizer_has_no_index(tmp_path):
    """That of an earlier run is removed."""
    write_index(tmp_path, [(tmp_path, "SGD"), (tmp_path / "optimizer-2", "Adam")])
    write_index(tmp_path, [(tmp_path, "SGD")])
    assert not (tmp_path / INDEX).exists() and read_index(tmp_path) == []


def test_names_are_unique(tmp_path):
    write_index(
        tmp_path, [(tmp_path, "Adam of Net"), (tmp_path / "optimizer-2", "Adam of Net"), (tmp_path / "optimizer-3", "SGD")]
    )
    assert [name for _, name in read_index(tmp_path)] == ["Adam of Net (1)", "Adam of Net (2)", "SGD"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"optimizers": 3}', '{"optimizers": [3]}', '{"optimizers": [{"folder": "optimizer-2", "name": "a"}]}'],
)
def test_what_is_not_an_index_is_none(text, tmp_path):
    (tmp_path / INDEX).write_text(text)
    assert read_index(tmp_path) == []


@pytest.mark.parametrize("folder", ["..", "/etc", "optimizer-2/../..", "optimizer-0", "optimizer-2/x", "", 7, ["."]])
def test_folders_elsewhere_are_not_followed(folder, tmp_path):
    entries = [{"folder": ".", "name": "a"}, {"folder": folder, "name": "b"}]
    (tmp_path / INDEX).write_text(json.dumps({"v": 1, "optimizers": entries}))
    assert all(path == tmp_path for path, _ in read_index(tmp_path))


def test_a_folder_is_used_once(tmp_path):
    """Also where an optimizer in between has gone."""
    assert next_folder(tmp_path, []) == tmp_path
    assert next_folder(tmp_path, [None, tmp_path]) == tmp_path / "optimizer-2"
    assert next_folder(tmp_path, [tmp_path, tmp_path / "optimizer-3"]) == tmp_path / "optimizer-2"
    assert next_folder(tmp_path, [tmp_path, tmp_path / "optimizer-2"]) == tmp_path / "optimizer-3"


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    write_index(tmp_path / "gone", [(tmp_path / "gone", "a"), (tmp_path / "gone" / "optimizer-2", "b")])
    assert "optimizers.json cannot be written" in caplog.text


def test_names_are_there_and_folders_have_an_end(tmp_path):
    entries = [{"folder": "." if i == 1 else f"optimizer-{i}", "name": "" if i == 1 else f"{i}"} for i in range(1, 100)]
    (tmp_path / INDEX).write_text(json.dumps({"v": 1, "optimizers": entries}))
    names = [name for _, name in read_index(tmp_path)]
    assert len(names) == 64 and names[:2] == ["(1)", "2"]
