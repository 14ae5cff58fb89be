"""A folder of arms of latent-dlm: nothing is done twice, nothing that is not of the recipe is touched, a stopped run goes on, and
the model comes back as it was saved.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from latent_small import ARMS, KEYS, SMALL

pytest.importorskip("diffusers")

from safetensors.torch import load_file, save_file

from nanproof import UsageError
from nanproof_recipes.latent_dlm import running
from nanproof_recipes.latent_dlm.arms import FIXED, configured, setting
from nanproof_recipes.latent_dlm.config import Config
from nanproof_recipes.latent_dlm.results import MEASURES, Result
from nanproof_recipes.latent_dlm.running import Studio, curves, scans_word
from nanproof_recipes.latent_dlm.showing import window_of
from nanproof_recipes.latent_dlm.train import keeping
from nanproof_recipes.latent_dlm.train.team import Team

CPU = torch.device("cpu")


def studio(folder: Path, *more: str) -> Studio:
    return Studio(folder, Config.load("tiny", [*SMALL, *more]), chosen=[*KEYS, *(change.partition("=")[0] for change in more)])


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def no_training(monkeypatch):
    monkeypatch.setattr(running, "train", lambda *args, **kwargs: pytest.fail("an arm was trained"))


# -- results -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS)
def test_a_result_comes_back_with_all_digits_and_every_nan(small_comparison, tmp_path, arm):
    text = (small_comparison.out / arm / "result.json").read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not strict JSON"))
    there = Result.load(small_comparison.out / arm)
    there.save(tmp_path)
    assert (tmp_path / "result.json").read_text() == text and repr(Result.load(tmp_path)) == repr(there)
    assert math.isnan(there.latent_loss) == (arm == "broken")
    assert there.steps == 60 and there.tensors == 69 and there.tokens_per_second > 0
    assert all(getattr(there, name) is not None for name in MEASURES)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "x", "setting": {}, "text_loss": "much"}', '{"setting": {}}'])
def test_a_damaged_result_is_named(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(UsageError, match=r"result\.json is not a result of this recipe"):
        Result.load(tmp_path)


def test_the_lines_for_a_person(small_comparison):
    lines = "\n".join(Result.load(small_comparison.out / "guarded").lines())
    assert "guarded: finished" in lines and "0 of 69 parameters not finite" in lines and "1 steps skipped" in lines
    assert "step 24: nonfinite-loss, skipped." in lines and "model: 392,417 parameters" in lines
    empty = Result(name="x", setting={}).lines()
    assert empty[1] == "  held-out text loss none, accuracy none, latent loss none"


# -- what an arm leaves --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS)
def test_curves_are_the_log(small_comparison, arm):
    """Every line is there, at its step; a NaN is a NaN, and what was not measured is None."""
    found = Result.load(small_comparison.out / arm).curves
    lines = [json.loads(line) for line in (small_comparison.out / arm / "training_log.jsonl").read_text().splitlines()]
    assert found["step"] == sorted(line["step"] for line in lines) and len({len(values) for values in found.values()}) == 1
    for line in lines:
        at = found["step"].index(line["step"])
        for name in ("loss", "text_loss", "latent_loss", "grad_norm", "eval_text_loss", "eval_latent_loss"):
            if name in line:
                assert repr(found[name][at]) == repr(float(line[name]))
    evaluated = [x for x in found["eval_text_loss"] if x is not None]
    assert len(evaluated) == 3 and evaluated[-1] == pytest.approx(Result.load(small_comparison.out / arm).text_loss, rel=1e-5)


def test_curves_of_a_run_that_went_back(tmp_path):
    """What came after is replaced, its evaluations too; a log that is not there gives empty lists."""
    steps = [(9, "loss", 1.0), (10, "eval", 5.0), (19, "loss", "nan"), (20, "eval", 6.0), (14, "loss", 2.0), (15, "eval", 7.0)]
    names = {"loss": "loss", "eval": "eval_text_loss"}
    lines = [json.dumps({"step": step, names[kind]: value}) for step, kind, value in steps]
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    found = curves(tmp_path / "log")
    assert found["step"] == [9, 10, 14, 15]
    assert found["loss"] == [1.0, None, 2.0, None] and found["eval_text_loss"] == [None, 5.0, None, 7.0]
    assert set(map(len, curves(tmp_path / "none").values())) == {0}


def test_notes_say_what_doctor_and_scan_say(small_comparison):
    broken, guarded = (Result.load(small_comparison.out / arm).notes for arm in ("broken", "guarded"))
    assert "step 24: the norm of the gradients was inf; that is not nan, and the step was taken" in broken
    assert "from step 24 on no loss was finite" in broken
    assert any(note.startswith("doctor on its log: inf. The loss is inf at step 24") for note in broken)
    assert "scan: 3 of 3 checkpoints hold a weight that is not finite" in broken
    assert "doctor on its log: nothing wrong" in guarded
    assert "scan: none of 4 checkpoints holds a weight that is not finite; 3 are proven good" in guarded
    assert sum(note.startswith("model: 392,417 parameters") for note in guarded) == 1


def test_scan_counts_one_bad_checkpoint(tmp_path):
    for step, value in ((1, 1.0), (2, math.inf)):
        save_file({"w": torch.tensor([value])}, tmp_path / f"step-{step}.safetensors")
    assert scans_word(tmp_path) == ["scan: 1 of 2 checkpoints holds a weight that is not finite"]
    assert scans_word(tmp_path / "none") == []


def test_samples_of_every_arm(small_comparison):
    """Two of each mode, the same windows given to every arm; where weights are not finite, that is said."""
    found = {arm: Result.load(small_comparison.out / arm).samples for arm in ARMS}
    assert [sample["mode"] for sample in found["fixed"]] == [
        mode for mode in ("unconditional", "text_to_latent", "latent_to_text") for _ in range(2)
    ]
    assert [s["given"] for s in found["fixed"]] == [s["given"] for s in found["patched"]]
    assert found["fixed"][0]["drawn"] != found["fixed-seed-1"][0]["drawn"]
    assert all("not finite" in sample["drawn"] for sample in found["broken"])
    assert all(-1 <= float(sample["agreement"]) <= 1 for sample in found["guarded"])


# -- the model -----------------------------------------------------------------------------------------------------------------


def test_the_model_comes_back_with_its_dtype_and_configuration(small_comparison):
    for arm, dtype in (("guarded", torch.bfloat16), ("fixed", torch.float32)):
        kept = keeping.load(small_comparison.out / arm, CPU)
        weights = load_file(small_comparison.out / arm / "model.safetensors")
        assert {name: tensor.dtype for name, tensor in kept.model.state_dict().items()} == dict.fromkeys(weights, dtype)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in kept.model.state_dict().items())
        assert kept.config == configured(studio(Path()).config, setting(arm), frozenset(KEYS))
        assert (kept.precision is None) == (arm == "guarded")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.safetensors", b"nothing"),
        ("model.safetensors", None),
        ("scale.json", b"{"),
        ("scale.json", b"[]"),
        ("scale.json", b'{"mean": [0], "std": [-1]}'),
        ("scale.json", b'{"mean": [0], "std": [1]}'),
        ("scale.json", None),
        ("config.yaml", None),
        ("config.yaml", b"size: tiny\nmodel: {width: 32, heads: 4}"),
        ("config.yaml", b"modle: 3"),
    ],
)
def test_a_damaged_model_is_named(small_comparison, tmp_path, name, text):
    for part in ("model.safetensors", "scale.json", "config.yaml"):
        (tmp_path / part).write_bytes((small_comparison.out / "fixed" / part).read_bytes())
    keeping.load(tmp_path, CPU)
    (tmp_path / name).unlink() if text is None else (tmp_path / name).write_bytes(text)
    with pytest.raises(UsageError):
        keeping.load(tmp_path, CPU)


def test_a_window_of_a_text():
    found = window_of("ab", 4, 3)
    assert found.tolist() == [[97, 98, 256, 258]] * 3
    assert window_of("abcdef", 4, 1).tolist() == [[97, 98, 99, 100]]


def test_a_model_is_not_measured_on_other_text(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(97, 123)) * 200)
    quick = (f"data.text={text}", "data.valid_share=0.1", "training.steps=2", "training.eval_every=2")
    result = studio(tmp_path / "out", *quick).run(replace(FIXED, damaged=False))
    alone = Team(place=CPU)
    assert running.evaluated(tmp_path / "out" / "fixed", alone).text_loss == result.text_loss
    text.write_bytes(bytes(range(97, 123)) * 199 + b"other words are held out.")
    with pytest.raises(UsageError, match="was trained with other text"):
        running.evaluated(tmp_path / "out" / "fixed", alone)


# -- folders -------------------------------------------------------------------------------------------------------------------


def test_an_arm_that_is_done_is_not_trained_again(small_comparison, no_training):
    before = tree(small_comparison.out / "fixed")
    assert studio(small_comparison.out).run(FIXED).to_json() == Result.load(small_comparison.out / "fixed").to_json()
    assert tree(small_comparison.out / "fixed") == before
    wanted = {"config.yaml", "model.safetensors", "result.json", "scale.json", "setting.json", "training_log.jsonl"}
    assert wanted | {"nanproof/steps.jsonl"} <= set(before)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("optimizer.lr=0.1", "optimizer.lr"),
        ("training.seed=3", "training.seed"),
        ("data.seed=1", "data, data.seed"),
        ("model.latent_width=8", "data, model.latent_width"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused_by_name(small_comparison, no_training, change, named):
    folder = small_comparison.out / "fixed"
    before = tree(folder)
    with pytest.raises(UsageError) as caught:
        studio(small_comparison.out, change).run(FIXED)
    assert f"{folder} was made with other settings ({named}). `train --again` does it anew" in str(caught.value)
    assert tree(folder) == before


def test_numbers_that_the_device_does_not_have_leave_no_folder(tmp_path, no_training):
    """A folder that was begun with them would refuse the arm as it should have been called."""
    config = Config.load("tiny", [*SMALL, "training.dtype=fp16"])
    with pytest.raises(UsageError, match="fp16"):
        Studio(tmp_path, config, team=Team(place=CPU)).run(FIXED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("name", "text"), [("thesis.tex", "years of work"), ("setting.json", '{"volume": 11}')])
def test_a_folder_of_somebody_else_is_not_touched(tmp_path, no_training, again, name, text):
    (tmp_path / "fixed").mkdir()
    (tmp_path / "fixed" / name).write_text(text)
    with pytest.raises(UsageError, match=r"not of this recipe\. Choose another --out"):
        studio(tmp_path).run(FIXED, again=again)
    assert tree(tmp_path / "fixed") == {name: text.encode()}


@pytest.mark.parametrize("again", [False, True])
def test_two_processes_do_not_work_on_one_arm(tmp_path, no_training, again):
    """The second is turned away before it trains or clears anything."""
    shop = studio(tmp_path)
    folder = running.begin(tmp_path / "fixed", shop._told(FIXED, shop.configured(FIXED)))
    code = (
        "import sys, pathlib; from nanproof.core.support._files import FolderLock\n"
        "FolderLock(pathlib.Path(sys.argv[1]), 'it'); print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        before = tree(tmp_path)
        with pytest.raises(UsageError, match="fixed is in use by another process"):
            shop.run(FIXED, again=again)
        assert tree(tmp_path) == before
    finally:
        other.communicate()


def test_a_stopped_run_goes_on_and_again_replaces(tmp_path, monkeypatch):
    """A guarded run that was killed goes on from a good checkpoint and ends where it would have; `again` leaves nothing of it."""
    quick = ("training.steps=12", "training.eval_every=6", "training.checkpoint_every=2", "training.prove_steps=1")
    quiet = replace(FIXED, damaged=False)
    whole = studio(tmp_path / "whole", *quick).run(quiet)

    class Killed(BaseException):
        pass

    def until(done, said):
        if done == 10:
            raise Killed

    real = running.train
    monkeypatch.setattr(running, "train", lambda *args, **more: real(*args, **{**more, "tick": until}))
    with pytest.raises(Killed):
        studio(tmp_path / "killed", *quick).run(quiet)
    assert not (tmp_path / "killed" / "fixed" / "result.json").exists()
    monkeypatch.setattr(running, "train", real)
    result = studio(tmp_path / "killed", *quick).run(quiet)
    assert any(note.startswith("went on from the checkpoint of step ") for note in result.notes)
    assert result.steps == 12 and result.text_loss == whole.text_loss and result.latent_loss == whole.latent_loss
    assert repr(result.curves["eval_text_loss"]) == repr(whole.curves["eval_text_loss"])
    (tmp_path / "killed" / "fixed" / "left").write_text("over")
    other = studio(tmp_path / "killed", *quick, "training.seed=5").run(quiet, again=True)
    assert not (tmp_path / "killed" / "fixed" / "left").exists() and other.text_loss != whole.text_loss


def test_an_arm_that_is_done_leaves_no_model_in_memory(tmp_path, monkeypatch):
    """Seven arms in one process have to fit beside the data."""
    seen, real = [], running.train

    def noting(*args, **more):
        trained = real(*args, **more)
        seen.append(weakref.ref(trained.model))
        return trained

    monkeypatch.setattr(running, "train", noting)
    studio(tmp_path, "training.steps=4").run(setting("guarded"))
    assert len(seen) == 1 and seen[0]() is None


# -- arms ----------------------------------------------------------------------------------------------------------------------


def test_an_arm_by_its_name_and_seed():
    assert setting("fixed-seed-3") == replace(FIXED, seed=3) and setting("fixed-seed-3").name == "fixed-seed-3"
    for wrong in ("fixed-seed-", "fixed-seed-x", "fixed-seed-\u0663", "fixed-sead-1", "", "fixed-seed-" + 30 * "9"):
        with pytest.raises(UsageError, match="is unknown"):
            setting(wrong)


def test_a_further_seed_stays_its_own_where_a_seed_was_chosen():
    """`compare --set training.seed=5` does not make all seeds of fixed the same run."""
    config = Config.load("tiny", ["training.seed=5"])
    found = configured(config, setting("fixed", seed=6), frozenset({"training.seed"}))
    assert found.training.seed == 6 and configured(config, FIXED, frozenset({"training.seed"})).training.seed == 5
