"""`nanproof recipe`: a folder that cannot be used is said in a sentence, and a file's text does not steer the terminal."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from nanproof_recipes.commands import recipe
from nanproof_recipes.commands.shared import show


def test_a_file_in_the_place_of_the_folder(tmp_path):
    """Exit status 2: 1 would say that the weights are not finite."""
    (tmp_path / "out").write_text("not a folder", encoding="utf-8")
    done = CliRunner().invoke(recipe, ["units-sft", "data", "--train", "2", "--valid", "1", "--out", str(tmp_path / "out")])
    assert done.exit_code == 2 and "error: " in done.output and "Traceback" not in done.output
    assert (tmp_path / "out").read_text(encoding="utf-8") == "not a folder"


def test_control_characters_of_a_result_are_not_printed(capsys):
    """A result file may be anybody's: the title of the terminal stays as it is."""
    pytest.importorskip("torch")
    from nanproof_recipes.units_sft.results import Result

    show(Result(name="fixed", setting={}, ending="\x1b]0;mine now\x07\x1b[31mred"), as_json=False)
    said = capsys.readouterr().out
    assert "mine now" in said and "\x1b" not in said and "\x07" not in said
