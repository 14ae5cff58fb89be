"""A folder of arms: nothing is done twice, nothing that is not of the recipe is touched, a model comes back as it was saved."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nanproof import UsageError
from nanproof_recipes.units_sft import workshop as module
from nanproof_recipes.units_sft.arms import FIXED, setting
from nanproof_recipes.units_sft.comparing import rft
from nanproof_recipes.units_sft.data.questions import load, make
from nanproof_recipes.units_sft.workshop import Workshop

QUICK = replace(FIXED, epochs=1, batch=4)


def small(folder: Path, **more) -> Workshop:
    return Workshop(folder, "tiny", **{"train": 8, "valid": 4, **more})


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def no_training(monkeypatch):
    monkeypatch.setattr(module, "train", lambda *args, **kwargs: pytest.fail("an arm was trained"))


@pytest.fixture(scope="module")
def trained(language, tmp_path_factory):
    """A folder with one arm that is done."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, small(folder).arm(QUICK)


def test_an_arm_that_is_done_is_not_trained_again(trained, no_training):
    folder, result = trained
    before = tree(folder)
    assert small(folder).arm(QUICK).to_json() == result.to_json()
    assert tree(folder) == before
    assert {"adapter/adapter_config.json", "result.json", "setting.json", "trainer_state.json", "nanproof/steps.jsonl"} <= {
        name.removeprefix("fixed/") for name in before
    }


@pytest.mark.parametrize(
    ("change", "more", "named"),
    [
        ({"lr": 1e-3}, {}, "lr"),
        ({"seed": 1, "epochs": 2}, {}, "epochs, seed"),
        ({}, {"valid": 3}, "questions"),
        ({}, {"train": 6, "data_seed": 1}, "questions"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused_by_name(trained, no_training, change, more, named):
    folder, _ = trained
    before = tree(folder)
    with pytest.raises(UsageError) as caught:
        small(folder, **more).arm(replace(QUICK, **change))
    assert f"{folder / 'fixed'} was made with other settings ({named}). `train --again` does it anew" in str(caught.value)
    assert tree(folder) == before


def test_an_arm_that_was_begun_with_other_settings_is_refused_too(tmp_path, no_training):
    (tmp_path / "fixed").mkdir()
    asked = small(tmp_path)._asked()
    begun = {**QUICK.to_json(), "lr": 1.0, "model": "tiny", "questions": asked}
    (tmp_path / "fixed" / "setting.json").write_text(json.dumps(begun))
    with pytest.raises(UsageError, match=r"other settings \(lr\)"):
        small(tmp_path).arm(QUICK)


@pytest.mark.parametrize("again", [False, True])
def test_two_processes_do_not_work_on_one_arm(language, tmp_path, no_training, again):
    """The second is turned away before it trains anything, and nothing of the first is touched."""
    folder = tmp_path / "fixed"
    shop = small(tmp_path)
    shop.begin(QUICK)
    code = (
        "import sys, pathlib; from nanproof.core.support._files import FolderLock\n"
        "FolderLock(pathlib.Path(sys.argv[1]), 'it'); print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        before = tree(tmp_path)
        with pytest.raises(UsageError, match="fixed is in use by another process"):
            shop.arm(QUICK, again=again)
        assert tree(tmp_path) == before
    finally:
        other.communicate()


def test_again_replaces(language, tmp_path):
    """Nothing of the arm that was there is left."""
    one = small(tmp_path).arm(QUICK)
    (tmp_path / "fixed" / "left").write_text("over")
    two = small(tmp_path).arm(replace(QUICK, seed=5), again=True)
    assert not (tmp_path / "fixed" / "left").exists()
    assert two.setting["seed"] == 5 and two.valid_loss != one.valid_loss
    assert json.loads((tmp_path / "fixed" / "result.json").read_text())["valid_loss"] == two.valid_loss


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("name", "text"), [("thesis.tex", "years of work"), ("setting.json", '{"volume": 11}'), ("setting.json", "{")]
)
def test_a_folder_of_somebody_else_is_not_touched(tmp_path, no_training, again, name, text):
    (tmp_path / "fixed").mkdir()
    (tmp_path / "fixed" / name).write_text(text)
    with pytest.raises(UsageError, match=r"not of this recipe\. Choose another --out"):
        small(tmp_path).arm(QUICK, again=again)
    assert tree(tmp_path / "fixed") == {name: text.encode()}


def test_rejection_sampling_begins_nothing_without_the_arm_it_starts_from(tmp_path):
    with pytest.raises(UsageError, match=r"has no adapters\. `nanproof recipe units-sft train --arm fixed --out "):
        rft(small(tmp_path))
    assert not (tmp_path / "rft").exists()


def test_nothing_is_begun_where_the_model_is_missing(tmp_path):
    with pytest.raises(UsageError, match=r"--model .*gone\.gguf: there is no such file"):
        Workshop(tmp_path / "out", str(tmp_path / "gone.gguf"), train=4, valid=2).arm(QUICK)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data"]


def test_questions_are_made_once_and_kept(language, tmp_path):
    found = small(tmp_path).sets
    assert found == {name: qs for name, qs in make(8, 4).items() if name != "more"}
    assert load(tmp_path / "data" / "train.jsonl") == found["train"]
    fewer = small(tmp_path, train=5, valid=2).sets
    assert fewer == {"train": found["train"][:5], "valid": found["valid"][:2]}


@pytest.mark.parametrize("more", [{"train": 9}, {"valid": 5}])
def test_questions_of_another_size_are_refused(tmp_path, more):
    small(tmp_path).make_data()
    with pytest.raises(UsageError) as caught:
        _ = small(tmp_path, **more).sets
    wanted = {"train": 8, "valid": 4, **more}
    assert f"has 8 questions to train on and 4 to ask, not {wanted['train']} and {wanted['valid']}." in str(caught.value)
    assert f"`nanproof recipe units-sft data --out {tmp_path}` makes them anew" in str(caught.value)


def test_a_model_that_is_loaded_again_says_what_it_said(shop):
    """Trained over fp32 weights, and healed from fp16 ones."""
    for arm in ("fixed", "guarded"):
        result = shop.arm(setting(arm))
        again = shop.test(arm)
        assert again.to_json() == result.to_json()
        assert [sample["said"] for sample in again.samples] == [sample["said"] for sample in result.samples]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("fixed", "train --arm fixed"),
        ("patched-001", "train --arm patched --variant 001"),
        ("rft", "rft"),
    ],
)
def test_a_model_that_was_not_trained_comes_with_the_command(tmp_path, name, command):
    with pytest.raises(UsageError) as caught:
        small(tmp_path).load(name)
    assert f"has no adapters. `nanproof recipe units-sft {command} --out {tmp_path}` trains them" in str(caught.value)


def test_the_model_as_it_was_loaded_is_asked_once(language, tmp_path, monkeypatch):
    shop = small(tmp_path)
    plain, shots = shop.unmodified(), shop.unmodified(shots=2)
    assert (plain.name, shots.name, plain.ending) == ("unmodified", "unmodified-2-shot", "not trained")
    assert plain.questions == 4 and len(plain.samples) == 4 and plain.tensors is None
    monkeypatch.setattr(module, "replies", lambda *args, **kwargs: pytest.fail("it was asked again"))
    assert small(tmp_path).unmodified().to_json() == plain.to_json()
    with pytest.raises(UsageError, match=r"other settings \(questions\)"):
        small(tmp_path, valid=3).unmodified()
