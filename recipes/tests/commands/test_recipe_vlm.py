"""`nanproof recipe vlm-grpo`: every command says what it needs, and runs end to end on the tiny model."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
import warnings

import pytest
import torch
from typer.testing import CliRunner

from nanproof.cli import app
from nanproof_recipes.commands.quiet import quiet
from nanproof_recipes.vlm_grpo import apart
from nanproof_recipes.vlm_grpo.arms import GROUP, changed
from nanproof_recipes.vlm_grpo.comparing import arms_of
from nanproof_recipes.vlm_grpo.data import scenes
from nanproof_recipes.vlm_grpo.running import Workshop
from nanproof_recipes.vlm_grpo.train.warm import Schooling

for package in ("transformers", "peft", "accelerate", "trl", "datasets", "PIL"):
    pytest.importorskip(package)

FEW = ["--train", 120, "--valid", 12, "--sft-steps", 12]
SHORT = ["--steps", 3, "--batch", 16, "--group", 4]


def run(*words, code=0):
    result = CliRunner().invoke(app, ["recipe", "vlm-grpo", *map(str, words)])
    assert result.exit_code == code, result.output
    return result


def strict(text):
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not strict JSON"))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A folder with a warm start, which every test begins with."""
    folder = tmp_path_factory.mktemp("vlm-grpo")
    torch.set_num_threads(1)
    found = run("sft", *FEW, "--out", folder, "--json")
    told = strict(found.stdout)
    assert told["name"] == "warm" and told["steps"] == 12 and 0 <= told["reward"] <= 2 and told["chance"] is not None
    assert "Writing model shards" not in found.stderr
    return folder


def test_every_command_has_help_and_none_of_it_imports_torch():
    names = ["data", "sft", "train", "test", "smoke", "compare"]
    code = (
        "import sys; from typer.testing import CliRunner as R; import nanproof.cli as c\n"
        f"for name in {names!r}:\n"
        "    found = R().invoke(c.app, ['recipe', 'vlm-grpo', name, '--help'])\n"
        "    assert found.exit_code == 0 and 'Usage' in found.output, (name, found.output)\n"
        "bad = [m for m in ('torch', 'numpy', 'transformers', 'trl') if m in sys.modules]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_data_makes_both_sets_and_pictures_with_their_masks(tmp_path):
    """A picture has the pixels of its scene, each eight times; its mask is white exactly where the scene's is."""
    from PIL import Image

    told = strict(run("data", "--out", tmp_path, "--train", 6, "--valid", 3, "--seed", 4, "--pictures", 2, "--json").stdout)
    made = scenes.make(6, 3, 4)
    assert scenes.load(tmp_path / "data" / "train.jsonl") == made["train"] and told["scenes"] == {"train": 6, "valid": 3}
    assert scenes.load(tmp_path / "data" / "valid.jsonl") == made["valid"]
    folder = tmp_path / "data" / "pictures"
    assert told["pictures"] == [str(folder / "000.png"), str(folder / "001.png")] and len(list(folder.iterdir())) == 4
    for number, scene in enumerate(made["train"][:2]):
        picture, mask = (Image.open(folder / f"{number:03}{end}.png") for end in ("", "-mask"))
        pixels, inside = scene.pixels(), scene.mask
        assert picture.size == mask.size == (256, 256)
        for y, x in ((0, 0), (17, 100), (128, 64), (255, 255), (90, 200)):
            assert picture.getpixel((x, y)) == tuple(pixels[y // 8, x // 8])
            assert mask.getpixel((x, y)) == (255 if inside[y // 8, x // 8] else 0)
    shown = run("data", "--out", tmp_path, "--train", 6, "--valid", 3, "--seed", 4).stdout
    assert made["train"][0].answer in shown and not any("pictures" in line for line in shown.splitlines()[:3])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--arm", "fxied"], "hint: Choose broken, patched, guarded or fixed"),
        (["train", "--group", 1], "error: --group 1: a group of one has no mean to differ from; sample at least 2 replies"),
        (["train", "--batch", 20], "error: --batch 20: replies do not divide into groups of 8"),
        (["train", "--arm", "patched", "--variant", "group"], "error: --arm patched has no variant 'group'"),
        (["train", "--trainer", "ppo"], "error: --trainer ppo is unknown"),
        (["train", "--precision", "int4"], "int4"),
        (["train", "--model", "no-such-folder"], "error: --model no-such-folder: no such folder"),
        (["compare", "--batch", 20], "error: --batch 20: replies do not divide into groups of 8"),
        (["test", "--arm", "guarded"], "has no warm start"),
        (["smoke", "--fault", "loss"], "hint: Choose none, logits, gradient or reward"),
        (["smoke", "--fault", "reward", "--steps", 2], "error: --steps 2: a fault is put into the second step"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_trained(tmp_path, words, said):
    found = run(*words, "--out", tmp_path / "out", code=2)
    assert said in found.stderr and "Traceback" not in found.output and found.stdout == ""
    assert not [path for path in tmp_path.glob("out/*") if path.name != "data"]


@pytest.mark.parametrize("command", ["train", "compare", "smoke"])
def test_without_trl_it_says_what_to_install_and_that_the_loop_needs_none(tmp_path, monkeypatch, command):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "trl" else real(name, *more))
    found = run(command, "--out", tmp_path, code=2)
    assert found.stderr.startswith("error: this installation of nanproof-recipes is broken: trl not found\n")
    assert "pip install nanproof-recipes" in found.stderr
    assert "--trainer loop" in found.stderr and list(tmp_path.iterdir()) == []


def test_train_by_trl_and_test_again(out):
    """`fixed` ends with 0; asked again, its model says the same. A second call trains nothing."""
    found = run("train", *SHORT, *FEW, "--out", out, "--json")
    told = strict(found.stdout)
    assert told["name"] == "fixed" and told["setting"]["trainer"] == "trl" and told["steps"] == 3 and told["nonfinite"] == 0
    for noise in ("rollout_func", "Loading weights", "Setting accelerator", "it/s]"):
        assert noise not in found.stderr
    assert strict(run("test", "--out", out, "--json").stdout)["reward"] == told["reward"]
    again = run("train", *SHORT, *FEW, "--out", out)
    assert "fixed: done already" in again.stderr and "fixed: finished" in again.stdout
    other = run("train", *SHORT, "--lr", 0.5, *FEW, "--out", out, code=2)
    assert "was made with other settings (lr)" in other.stderr and "train --again" in other.stderr
    warmer = run("train", *SHORT, *FEW[:-1], 13, "--again", "--out", out, code=2)
    assert "warm was made with other settings (sft_steps)" in warmer.stderr and "`sft --again` does it anew" in warmer.stderr
    assert (out / "fixed" / "result.json").exists(), "what is refused costs no result"
    assert "Give --train and --valid as they are there" in run("train", "--out", out, code=2).stderr
    more = run("data", "--seed", 1, "--train", 120, "--valid", 12, "--out", out, code=2)
    assert "has models that were trained with other scenes" in more.stderr
    assert run("data", "--train", 120, "--valid", 12, "--out", out).exit_code == 0, "the same ones again"


def test_a_warm_start_that_was_stopped_is_begun_anew(tmp_path):
    """Its records are of one run alone."""
    words = ["sft", "--train", 8, "--valid", 2, "--sft-steps", 2, "--out", tmp_path]
    run(*words)
    records = tmp_path / "warm" / "nanproof" / "steps.jsonl"
    (tmp_path / "warm" / "result.json").unlink()
    before = len(records.read_text().splitlines())
    run(*words)
    assert len(records.read_text().splitlines()) == before


def test_an_arm_that_dies_ends_with_status_1_and_so_does_asking_it(out):
    found = run("train", "--arm", "broken", *SHORT, *FEW, "--out", out, code=1)
    assert "broken: raised RuntimeError: probability tensor contains" in found.stdout
    assert "42 of 42 trainable tensors not finite" in found.stdout
    assert "cannot be sampled from" in run("test", "--arm", "broken", "--out", out, code=1).stdout


def test_the_warm_start_can_be_asked(out):
    asked = strict(run("test", "--arm", "warm", "--out", out, "--json").stdout)
    assert asked["reward"] == strict((out / "warm" / "result.json").read_text())["reward"]


# -- smoke ---------------------------------------------------------------------------------------------------------------------


def smoked(out, *words, code):
    return strict(run("smoke", *words, "--steps", 3, "--batch", 16, "--out", out, "--json", code=code).stdout)


def test_smoke_is_healthy_where_nothing_bad_was_met(out):
    before = (out / "warm" / "result.json").read_text()
    found = smoked(out, "--trainer", "loop", code=0)
    assert found["outcome"] == "healthy" and found["taken"] == 3 and found["rewards"] == 48 and found["rows"] >= 48
    assert not any(found[name] for name in ("bad_losses", "bad_gradients", "bad_rows", "bad_rewards", "nonfinite", "refused"))
    assert (out / "warm" / "result.json").read_text() == before, "the warm start that is there was used"
    assert not (out / "smoke" / "warm").exists()


@pytest.mark.parametrize(("fault", "met"), [("logits", "bad_rows"), ("gradient", "bad_gradients"), ("reward", "bad_rewards")])
def test_smoke_is_handled_where_a_guard_met_something(out, fault, met):
    found = smoked(out, "--trainer", "loop", "--fault", fault, code=1)
    assert found["outcome"] == "handled" and found["fired"] and found[met] == 1 and found["nonfinite"] == 0
    assert found["skipped"] == (0 if fault == "logits" else 1) == 3 - found["taken"]
    assert found["first_bad_row"] == ("in generation 1, row 0, token 2" if fault == "logits" else None)
    assert "this is not fine" in found["advice"][0]


def test_smoke_by_trl_is_handled_and_names_the_row(out):
    found = run("smoke", "--fault", "logits", "--steps", 3, "--batch", 16, "--out", out, code=1)
    assert found.stdout.startswith("handled: fixed, trl, fault logits\n") and "row 0 of generation 1, position 2" in found.stdout


@pytest.mark.parametrize("arm", ["broken", "patched"])
def test_smoke_has_failed_where_nobody_handled_it(out, arm):
    """`broken` dies; `patched` goes on, and goes on with NaN."""
    found = smoked(out, "--arm", arm, "--trainer", "loop", "--fault", "gradient", code=3)
    assert found["outcome"] == "failed" and found["nonfinite"] == found["tensors"] == 42
    assert (found["ending"] == "finished") == (arm == "patched") and found["advice"][0] == "Do not start a long run."


def test_smoke_keeps_a_small_warm_start_of_its_own_apart(tmp_path):
    """An arm that is trained in the same folder later must not begin with it."""
    smoked(tmp_path, "--trainer", "loop", "--sft-steps", 1, code=0)
    assert [path.name for path in tmp_path.iterdir()] == ["smoke"] and (tmp_path / "smoke" / "warm" / "result.json").exists()


def test_only_what_is_expected_is_kept_from_the_terminal():
    log, seen = logging.getLogger("DeepSpeed"), []
    keep = logging.Handler()
    keep.emit = lambda record: seen.append(record.getMessage())
    log.addHandler(keep)
    try:
        with quiet():
            log.warning("Setting accelerator to CPU. If you have GPU ...")
            log.warning("a real problem")
            warnings.warn("std(): degrees of freedom is <= 0. Correction should be ...", stacklevel=1)  # an error in a test
            with pytest.raises(UserWarning, match="something else"):
                warnings.warn("std(): something else", stacklevel=1)
    finally:
        log.removeHandler(keep)
    assert seen == ["a real problem"]


# -- arms in processes of their own --------------------------------------------------------------------------------------------


def test_the_command_of_a_process_stands_for_exactly_its_setting(out, monkeypatch):
    """Else the result would be refused: it would be of another setting."""
    shop = Workshop(out, train=120, valid=12, schooling=Schooling(steps=12))
    asked = []

    def instead(self, setting, again=False):
        asked.append((self._told(setting), self.out))
        raise OSError("nothing is trained here")

    monkeypatch.setattr(Workshop, "arm", instead)
    settings = arms_of(1, {"steps": 3, "batch": 16, "group": 4, "lr": 0.1 + 0.2, "beta": 1e-9})
    for setting in settings:
        words = apart.command(shop, setting)
        assert words[:5] == [sys.executable, "-m", "nanproof", "recipe", "vlm-grpo"]
        run(*words[5:], code=2)
    assert asked == [(shop._told(setting), out) for setting in settings]


def test_an_arm_in_a_process_of_its_own_leaves_its_result(out):
    shop = Workshop(out, train=120, valid=12, schooling=Schooling(steps=12))
    apart.train_apart(shop, [changed(GROUP, batch=8, steps=2)], 2)
    found = shop.arm(changed(GROUP, batch=8, steps=2))
    assert found.nonfinite == found.tensors and "probability tensor" in found.ending


def test_a_shortened_comparison_shows_everything_but_what_takes_a_hundred_steps(tmp_path):
    """Every arm, and every claim seen but one: in five steps nobody is clearly above the warm start."""
    few = ["--train", 200, "--valid", 64, "--sft-steps", 40]
    short = ["--steps", 5, "--batch", 16, "--group", 4]  # that nothing is learned at all is found after four
    found = run("compare", *few, *short, "--seeds", 0, "--out", tmp_path, "--json", code=1)
    told = strict(found.stdout)
    names = ["warm", "broken", "broken-group", "patched", "guarded", "guarded-group", "fixed"]
    assert sorted(arm["name"] for arm in told["arms"]) == sorted(names)
    unseen = [check["claim"] for check in told["checks"] if not check["holds"]]
    assert [claim.partition(":")[0] for claim in unseen] == ["guarded", "fixed"], unseen
    assert all("clearly above the warm start" in claim for claim in unseen), unseen
    page = (tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert "exp-overflow" in page and "std-of-one-sample" in page and "probability tensor" in page
    assert (tmp_path / "guarded" / "nanproof" / "report.html").is_file()
