"""`nanproof recipe latent-dlm`: the whole recipe from the command line, what each command prints, and how it ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

import forked
from latent_small import ARMS, WORDS
from nanproof.cli import app
from nanproof_recipes.latent_dlm import running

for package in ("diffusers", "yaml", "safetensors"):
    pytest.importorskip(package)


def run(*words, code=0):
    result = CliRunner().invoke(app, ["recipe", "latent-dlm", *map(str, words)])
    assert result.exit_code == code, result.output
    return result


def strict(text):
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not strict JSON"))


def test_every_command_has_help_and_none_of_it_imports_torch():
    code = (
        "import sys; from typer.testing import CliRunner as R; import nanproof.cli as c\n"
        "for words in ([], ['train'], ['eval'], ['sample'], ['compare']):\n"
        "    found = R().invoke(c.app, ['recipe', 'latent-dlm', *words, '--help'])\n"
        "    assert found.exit_code == 0 and 'Usage' in found.output, (words, found.output)\n"
        "    assert words != ['train'] or 'torchrun --nproc-per-node 2 -m nanproof' in ' '.join(found.output.split())\n"
        "bad = [m for m in ('torch', 'numpy', 'diffusers', 'yaml') if m in sys.modules]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compare_says_what_every_arm_came_to_and_every_check_holds(small_comparison):
    found = small_comparison.said
    told = strict((small_comparison.out / "comparison.json").read_text())
    assert found.exit_code == 0, found.output
    assert [arm["name"] for arm in told["arms"]] == list(ARMS)
    assert len(told["checks"]) == 9 and all(check["holds"] for check in told["checks"]), told["checks"]
    assert "DOES NOT HOLD" not in found.stdout and found.stdout.count("holds: ") == 9
    assert found.stdout.rstrip().endswith(f"page: {small_comparison.trained / 'comparison.html'}")
    assert found.stderr.count("model: 392,417 parameters") == len(ARMS)
    for arm in told["arms"]:
        guarded = arm["name"].startswith(("guarded", "fixed"))
        assert (small_comparison.out / arm["name"] / "nanproof" / "report.html").exists() == guarded == (arm["run"] is not None)


def test_compare_a_second_time_trains_nothing(small_comparison, monkeypatch):
    before = (small_comparison.out / "comparison.json").read_text()
    monkeypatch.setattr(running, "train", lambda *args, **kwargs: pytest.fail("an arm was trained again"))
    begun = time.process_time()
    found = run("compare", *WORDS, "--seeds", 2, "--out", small_comparison.out, "--json")
    assert time.process_time() - begun < 10
    assert strict(found.stdout) == strict(before) == strict((small_comparison.out / "comparison.json").read_text())


def test_a_claim_that_was_not_seen_ends_with_status_1(small_comparison):
    path = small_comparison.out / "patched" / "result.json"
    kept = path.read_text()
    try:
        path.write_text(json.dumps({**json.loads(kept), "latent_loss": 0.5}))
        found = run("compare", *WORDS, "--seeds", 2, "--out", small_comparison.out, code=1)
        assert found.stdout.count("DOES NOT HOLD: ") == 1 and "DOES NOT HOLD: patched: lives" in found.stdout
    finally:
        path.write_text(kept)
        run("compare", *WORDS, "--seeds", 2, "--out", small_comparison.out)


def test_train_tells_an_arm_that_is_done_and_ends_by_its_weights(small_comparison):
    out = small_comparison.out
    told = strict(run("train", *WORDS, "--out", out, "--json").stdout)
    assert told == strict((out / "fixed" / "result.json").read_text()) and told["nonfinite"] == 0
    lines = run("train", "--arm", "broken", *WORDS, "--out", out, code=1).stdout
    assert "1 of 69 parameters not finite" in lines and "latent loss nan" in lines


def test_other_settings_in_the_folder_end_with_status_2(small_comparison):
    found = run("train", *WORDS, "--set", "optimizer.lr=1e-3", "--out", small_comparison.out, code=2)
    assert "was made with other settings (optimizer.lr)" in found.stderr and "hint: `train --again` does it anew" in found.stderr


@pytest.mark.parametrize("arm", ARMS)
def test_eval_measures_what_the_training_measured(small_comparison, arm):
    """To the last digit: the saved model is the trained one. NaN ends with status 1."""
    kept = strict((small_comparison.out / arm / "result.json").read_text())
    told = strict(run("eval", "--arm", arm, "--out", small_comparison.out, "--json", code=int(arm == "broken")).stdout)
    assert told.pop("arm") == arm and set(told) >= {"text_loss", "latent_loss_given_text"}
    assert told == {name: kept[name] for name in told}
    assert (told["latent_loss"] == "nan") == (arm == "broken")


def test_eval_for_a_person(small_comparison):
    kept = strict((small_comparison.out / "fixed" / "result.json").read_text())
    lines = run("eval", "--out", small_comparison.out).stdout.splitlines()
    assert lines[0] == "fixed:" and f"held-out text loss {kept['text_loss']:.4g}" in lines[1]


@pytest.mark.parametrize("mode", ["unconditional", "text-to-latent", "latent-to-text"])
def test_sample_draws_the_same_for_the_same_seed(small_comparison, mode):
    words = ["sample", "--mode", mode, "--count", 2, "--steps", 8, "--out", small_comparison.out, "--json"]
    one, two = (strict(run(*words, "--seed", 3).stdout) for _ in range(2))
    assert one == two and len(one["samples"]) == 2
    assert one != strict(run(*words, "--seed", 4).stdout)
    assert all(-1 <= sample["agreement"] <= 1 for sample in one["samples"])
    assert all(("given" in sample) == (mode != "unconditional") for sample in one["samples"])


@pytest.mark.parametrize("how", ["ddim", "ddpm"])
def test_sample_takes_a_text(small_comparison, how):
    """For a latent, or for the latent of it; what is too long is cut to a window."""
    words = ["--text", "Return the number of " + 60 * "x", "--count", 1, "--steps", 4, "--how", how, "--temperature", 0]
    for mode in ("text-to-latent", "latent-to-text"):
        said = run("sample", "--mode", mode, *words, "--out", small_comparison.out).stdout
        assert (
            said.startswith(f"-- 1: {mode}, agreement ") and "Return the number of " + 43 * "x" in said and 44 * "x" not in said
        )


def test_sample_of_weights_that_are_not_finite(small_comparison):
    found = run("sample", "--arm", "broken", "--out", small_comparison.out, code=1)
    assert found.stdout == ""
    assert found.stderr.startswith("error: broken: the model predicts numbers that are not finite")


def test_what_a_model_draws_does_not_steer_the_terminal(small_comparison, monkeypatch):
    from nanproof_recipes.latent_dlm import showing
    from nanproof_recipes.latent_dlm.model.sampling import Drawn

    ids = torch.tensor([list(b"\x1b]0;mine\x07\nnext".ljust(32))])
    monkeypatch.setattr(showing, "draw", lambda *args, **kwargs: Drawn(ids, torch.zeros(1, 4, 16), [0.5]))
    said = run("sample", "--count", 1, "--out", small_comparison.out).stdout
    assert "mine" in said and "\nnext" in said and "\x1b" not in said and "\x07" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--arm", "fxied"], "hint: Choose broken, patched, guarded or fixed"),
        (["train", "--arm", "fixed-seed-"], "error: --arm fixed-seed- is unknown"),
        (["train", "--arm", "\x1b[31mred"], "is unknown"),
        (["train", "--config", "huge"], "hint: Give the path of a YAML file, or one of tiny, base"),
        (["train", "--set", "optimizer.lt=1"], "hint: The nearest key: optimizer.lr"),
        (["compare", "--set", "training.steps"], "a change is written section.key=value"),
        (["compare", "--set", "data.text=not/there"], "error: data.text: not/there is not there"),
        (["compare", "--set", "training.train_batch_size=100000"], "error: training.train_batch_size=100000"),
        (["eval"], "holds no trained model"),
        (["sample", "--arm", "patched"], "recipe latent-dlm train --arm patched --out"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_begun(tmp_path, words, said):
    found = run(*words, "--out", tmp_path / "out", code=2)
    assert said in found.stderr and "Traceback" not in found.output and "\x1b" not in found.output
    assert found.stdout == "" and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mode", "both"], "hint: Choose unconditional, text-to-latent or latent-to-text"),
        (["--steps", 2000], "error: --steps 2000: a whole number from 1 to 1000 is needed"),
        (["--temperature", -1], "error: --temperature -1.0: a number of 0 or more is needed"),
        (["--temperature", "nan"], "error: --temperature nan: a number of 0 or more is needed"),
        (["--seed", 2**64], "error: --seed 18446744073709551616: a whole number from 0 to 2**63 - 1 is needed"),
        (["--text", "x"], "hint: Choose text-to-latent or latent-to-text"),
        (["--mode", "latent-to-text", "--text", ""], "error: --text is empty"),
    ],
)
def test_what_cannot_be_drawn_is_said(small_comparison, words, said):
    found = run("sample", *words, "--out", small_comparison.out, code=2)
    assert said in found.stderr and "Traceback" not in found.output and found.stdout == ""


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_file_in_the_place_of_the_folder(tmp_path, command):
    (tmp_path / "out").write_text("not a folder", encoding="utf-8")
    found = run(command, *WORDS, "--out", tmp_path / "out", code=2)
    assert "error: " in found.stderr and "Traceback" not in found.output
    assert (tmp_path / "out").read_text(encoding="utf-8") == "not a folder"


@pytest.mark.parametrize("gone", ["diffusers", "yaml", "msgspec"])
def test_what_is_not_installed_is_named_with_the_command(tmp_path, monkeypatch, gone):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == gone else real(name, *more))
    found = run("train", "--out", tmp_path, code=2)
    lines = [
        f"error: this installation of nanproof-recipes is broken: {gone} not found",
        "hint: Repair it: pip install nanproof-recipes",
    ]
    assert found.stderr.splitlines() == lines
    assert list(tmp_path.iterdir()) == []


def two_programs(*words):
    """Two ranks, each of them a program from its start to its end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *map(str, words)]
    ranks = [subprocess.Popen(command, env={**env, "RANK": rank, "LOCAL_RANK": rank}, **pipes) for rank in "01"]
    said = [rank.communicate(timeout=120) for rank in ranks]
    return [subprocess.CompletedProcess(command, rank.returncode, *told) for rank, told in zip(ranks, said, strict=True)]


@pytest.mark.parametrize(
    ("parallel", "start"),
    [
        pytest.param("ddp", forked.two_ranks_of, id="ddp"),
        pytest.param("fsdp2", forked.two_ranks_of, id="fsdp2"),
        pytest.param("ddp", two_programs, id="programs", marks=pytest.mark.slow),  # importing takes longer than all the rest
    ],
)
def test_two_processes_train_one_arm_and_the_first_alone_speaks(tmp_path, parallel, start):
    """`broken` meets the damaged sample on one rank, and is lost on both; all of its weights are in one file."""
    quick = ["--set", "training.steps=10", "--set", "training.eval_every=5", "--set", "training.checkpoint_every=5"]
    words = ["recipe", "latent-dlm", "train", "--arm", "broken", *WORDS, *quick, "--set", f"training.parallel={parallel}"]
    asked = [*words, "--out", tmp_path, "--json"]
    zero, one = start("-m", "nanproof", *asked)
    assert [zero.returncode, one.returncode] == [1, 0], (zero, one)
    told = strict(zero.stdout)
    assert one.stdout == "" and "parameters" not in one.stderr
    assert told["setting"]["processes"] == 2 and told["nonfinite"] >= 1 and told["infinite"] == 4
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "broken" / "model.safetensors")
    assert len(weights) == told["tensors"] and sum(tensor.numel() for tensor in weights.values()) == 392_417
    run("eval", "--arm", "broken", "--out", tmp_path, code=1)


def test_what_is_wrong_with_the_call_is_said_by_the_first_process_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, said in (("0", "error: --arm nix is unknown"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        found = run("train", "--arm", "nix", "--out", tmp_path / "out", code=2)
        assert found.stderr.partition("\n")[0] == said and found.stdout == ""
