"""Marks in a trainer's checkpoint folders."""

import os

from nanproof.integrations._saved import begin, delete, mark


def test_a_folder_that_is_saved_to_again_holds_no_pipes_and_links(tmp_path):
    """The trainer would wait for the pipe forever, and write through the link."""
    folder, elsewhere = tmp_path / "checkpoint-3", tmp_path / "precious"
    folder.mkdir()
    elsewhere.write_text("precious")
    os.mkfifo(folder / "optimizer.pt")
    (folder / "scheduler.pt").symlink_to(elsewhere)
    (folder / "trainer_state.json").write_text("{}")
    begin(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["nanproof.json", "trainer_state.json"]
    assert elsewhere.read_text() == "precious" and mark(folder)["state"] == "saving"


def test_a_checkpoint_with_a_pipe_in_it_is_deleted(tmp_path):
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    os.mkfifo(folder / "optimizer.pt")
    delete(folder, "trainer_state.json")
    assert not folder.exists()
