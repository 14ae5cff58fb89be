"""138 loops as people write them, each with one fault.

They were written from public code, with their expectations, without sight of how nanproof runs a loop's lines again. The header
of each says what is expected.

    # again: yes                whether the step can be run again from the loop's own lines
    # stops: the line           if not, the line in the way
    # step, kind, cause, sample, line                  what the incident says
"""

from __future__ import annotations

import json
import linecache
from pathlib import Path

import pytest

import forked

HERE = Path(__file__).parent
LOOPS = sorted((HERE / "loops").glob("[0-9]*.py"), key=lambda path: int(path.stem.split("_")[0]))

FALLS_SHORT = {
    "53_ppo_minibatches": "the sample: rows of the rollout and of the minibatch differ in number",
    "62_truncated_bptt": "the sample: time comes first in these tensors",
    "119_group_advantage": "the line: the tensor is filled row by row before the model is called, so its value is an input",
    "101_running_weight_on_self": "the line: it names the second line that writes the attribute",
    "55_reinforce_episode_lists": "the cause: results of earlier forwards are kept in a list",
    "77_exec_without_source": "the cause: there is no source",
    "99_pix2pix_self_state": "the cause: the loss is kept in attributes",
    "129_episode_in_one_function": "the cause: the environment is stepped in between",
}
"""What is expected and not reached, and why."""
DIFFERS = {
    "112_criterion_with_state": "the criterion moves its own state in each call",
    "88_model_training_loss": "a method of the model draws noise after the loop has drawn its batch",
    "126_moco_queue": "the queue is written in place before backward",
    "130_secrets_coin": "a coin of the operating system decides",
}
"""Loops whose lines give another loss when they are run again, although nothing in them says so."""


def header(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines()
    pairs = (line[2:].partition(":") for line in lines if line.startswith("# ") and ":" in line)
    return {key: value.strip() for key, _, value in pairs if key.isidentifier()}


def run(path: Path, *words: str, before: str = "") -> tuple[list[dict], list[dict]]:
    """The incidents of all optimizers, and what `replayed` printed."""
    done = forked.python("-W", "ignore", "-m", "nanproof", "run", "--json", path, *words, before=before)
    lines = done.stderr.splitlines()
    (summary,) = [line for line in lines if line.startswith('{"v"')]
    replayed = [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("replayed ")]
    return [i for one in json.loads(summary)["guarded"] for i in one["incidents"]], replayed


@pytest.mark.parametrize("path", LOOPS, ids=lambda path: path.stem)
def test_a_bad_step_is_refused_and_explained(path):
    """Step, cause, source line and sample; where the lines must not be run again, the line in the way is named, unless what was
    bad shows all the same."""
    wanted = header(path)
    incidents, _ = run(path, "bad")
    steps = {int(wanted["step"]), int(wanted.get("iteration", wanted["step"]))}
    incident = next(i for i in incidents if i["step"] in steps)
    found = incident["diagnosis"]
    named = found["cause"] in wanted["cause"].split(", ")
    if wanted["again"] == "no":
        numbers = [i for i, line in enumerate(path.read_text().splitlines(), 1) if line.strip() == wanted["stops"]]
        evidence = " ".join(found["evidence"])
        reached = named or any(f"{path.name}:{i} " in evidence for i in numbers)
        assert reached is (path.stem not in FALLS_SHORT), found
        return
    file, _, number = (found["source"] or "").rpartition(":")
    text = linecache.getline(str(path.parent / Path(file).name), int(number)).strip() if number else ""
    line = "line" not in wanted or (text and (text in wanted["line"] or wanted["line"] in text)) or "ipykernel" in file
    sample = "sample" not in wanted or found["samples"] == [int(wanted["sample"])]
    assert bool(named and line and sample) is (path.stem not in FALLS_SHORT), (found, text)


@pytest.mark.parametrize("path", LOOPS, ids=lambda path: path.stem)
def test_a_healthy_step_run_again_gives_the_same_bits(path):
    """In every step of a healthy run, the loss of the replay is the recorded one, unless it is known that the lines drew other
    random numbers. Nothing is an incident."""
    incidents, replayed = run(path, before=f"import sys; sys.path.insert(0, {str(HERE)!r}); import replayed")
    assert incidents == []
    if path.stem in DIFFERS:
        return
    assert all(each["now"] == each["then"] for each in replayed if "now" in each and not each["anew"])
    if header(path)["again"] == "yes" and "120" not in path.stem:
        assert sum("now" in each for each in replayed) >= len(replayed) / 2 > 0, replayed[:3]
