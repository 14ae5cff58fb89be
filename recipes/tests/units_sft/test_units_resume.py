"""A run of units-sft that was killed goes on, also when it was killed while it wrote a checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

pytest.importorskip("peft")

from nanproof_recipes.units_sft.arms import setting
from nanproof_recipes.units_sft.data.questions import make
from nanproof_recipes.units_sft.data.samples import examples
from nanproof_recipes.units_sft.models import tiny
from nanproof_recipes.units_sft.training import last_whole, train


@pytest.mark.parametrize("name", ["fixed", "broken"])
def test_a_half_written_checkpoint_is_passed_over(tmp_path, name):
    """The run goes on from the one before it, and ends with the same numbers; `broken` has nothing but NaN to go on from."""
    arm = replace(setting(name), epochs=2, batch=4)
    rows = examples(tiny(), make(8, 0)["train"], arm)
    kept, killed = tmp_path / "kept", tmp_path / "killed" / "trainer"

    def keep(done, said):  # the Trainer deletes the older ones
        for path in (tmp_path / "whole" / "trainer").glob("checkpoint-2"):
            shutil.copytree(path, kept, dirs_exist_ok=True)

    whole = train(tiny(), rows, arm, tmp_path / "whole", save_every=2, logging_steps=1, tick=keep)
    shutil.copytree(kept, killed / "checkpoint-2")
    half = shutil.copytree(kept, killed / "checkpoint-3")
    (half / "trainer_state.json").unlink()
    (killed / "checkpoint-4").mkdir()
    again = train(tiny(), rows, arm, tmp_path / "killed", save_every=2, logging_steps=1)
    assert any("went on from checkpoint-2" in note for note in again.notes)
    assert again.steps == whole.steps == 4
    for name in ("step", "loss", "grad_norm", "learning_rate"):
        assert [repr(line[name]) for line in again.log] == [repr(line[name]) for line in whole.log]


def test_no_checkpoint_is_none(tmp_path):
    """Neither a folder that is not there, nor one with other things in it."""
    (tmp_path / "checkpoint-x").mkdir()
    assert last_whole(tmp_path) is None and last_whole(tmp_path / "nothing") is None
