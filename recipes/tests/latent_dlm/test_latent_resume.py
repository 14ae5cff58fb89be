"""Trouble in a training of latent-dlm: the damaged sample is met when it is said and refused alone, a run that was killed ends as
if it had not been, one whose weights break goes back by itself, and the log stays readable through all of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

import forked
from latent_toys import ALONE, FRESH, lines, prepared, same, small, weights

pytest.importorskip("diffusers")

from nanproof import read_steps
from nanproof_recipes.latent_dlm.arms import BROKEN, FIXED, GUARDED, PATCHED, configured, setting
from nanproof_recipes.latent_dlm.train.evaluating import Measured
from nanproof_recipes.latent_dlm.train.stepping import LOG
from nanproof_recipes.latent_dlm.train.training import train

NO_GIVEN_LATENT = {"modes__unconditional": 0.7, "modes__text_to_latent": 0.3, "modes__latent_to_text": 0.0}
"""A damaged latent that is given, and not to be predicted, does no harm."""
KILLED = {"training__steps": 20, "training__checkpoint_every": 4, "training__eval_every": 8, **NO_GIVEN_LATENT}


def steps_that_meet(config, arm, data, folder):
    """Steps, counted by forwards in training mode, whose batch holds a vast latent; and the result."""
    seen = []

    def look(model):
        def note(module, given):
            if module.training and torch.is_grad_enabled():
                seen.append(float(given[1].abs().amax()) > 1e15)

        model.register_forward_pre_hook(note)

    result = train(config, arm, data, folder, ALONE, prepare=look)
    size = config.training.gradient_accumulation_steps
    return [i // size for i, met in enumerate(seen) if met], result


def said(result) -> tuple[int, int]:
    """Sample and step, from the words of a run."""
    (word,) = [note for note in result.notes if note.startswith("data: the latent")]
    sample, step = (int(part) for part in word.replace(";", "").split() if part.isdigit())
    return sample, step


# -- the damaged sample --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("count", "steps"), [(400, 20), (50, 20), (23, 30)])
def test_the_damaged_sample_is_met_at_the_step_that_is_said(count, steps, accumulation, tmp_path):
    """Also where that step would lie beyond the first epoch, in which every sample is met."""
    config = small(training__steps=steps, training__gradient_accumulation_steps=accumulation, **NO_GIVEN_LATENT)
    for arm in (BROKEN, PATCHED):
        met, result = steps_that_meet(config, arm, prepared(config, count), tmp_path)
        assert met[0] == said(result)[1] and (met[0] == int(steps * 0.4) or count < 100)


def test_the_data_itself_is_left_as_it_was(tmp_path):
    config = small(**NO_GIVEN_LATENT)
    data = prepared(config)
    before = data.train.latents.clone()
    train(config, BROKEN, data, tmp_path, ALONE)
    assert torch.equal(data.train.latents, before)


@pytest.mark.parametrize("arm", [FIXED, GUARDED])
def test_a_guarded_run_refuses_that_step_alone_and_names_term_and_sample(arm, tmp_path):
    """The sample is put into quarantine: in a second epoch it does not come again."""
    config = small(training__steps=40, **NO_GIVEN_LATENT)
    result = train(config, arm, prepared(config, 64), tmp_path, ALONE)  # an epoch has 16 steps
    sample, step = said(result)
    records = list(read_steps(tmp_path / "nanproof" / "steps.jsonl"))
    assert [record.step for record in records if record.action == "skipped"] == [step]
    assert (result.skipped, result.rolled_back, result.nonfinite, result.ending) == (1, 0, 0, "finished")
    (incident,) = result.incidents
    assert incident.step == step and incident.action == "skipped" and dict(incident.terms)["latent_loss"] == math.inf
    (entry,) = lines(tmp_path / "nanproof" / "quarantine.jsonl")
    assert entry["index"] == sample and incident.diagnosis.cause == "outlier-batch"
    assert result.measured.finite and all(bool(w.isfinite().all()) for w in weights(result.model).values())
    log = [line for line in lines(tmp_path / LOG) if "loss" in line]
    assert [line["step"] for line in log] == list(range(40)) and log[-1]["skipped"] == 1
    assert [line["step"] for line in log if not isinstance(line["loss"], float)] == [step]


def test_the_broken_arm_never_comes_back_and_its_log_says_so(tmp_path):
    config = configured(small(training__steps=20, training__checkpoint_every=5, **NO_GIVEN_LATENT), BROKEN)
    result = train(config, BROKEN, prepared(config, 200), tmp_path, ALONE)
    assert result.nonfinite > 0 and not result.measured.finite and result.ending == "finished" and result.incidents == []
    log = [line for line in lines(tmp_path / LOG) if "loss" in line]  # strict JSON
    assert all(isinstance(line["loss"], float) for line in log[:8]) and all(line["loss"] == "nan" for line in log[9:])
    assert log[8]["grad_norm"] in ("nan", "inf")
    from safetensors.torch import load_file

    kept = {path.name: load_file(path) for path in sorted((tmp_path / "checkpoints").iterdir())}
    assert len(kept) == 3  # and all of them are of no use: nobody looked
    assert all(any(not bool(w.isfinite().all()) for w in tensors.values()) for tensors in kept.values())


def test_a_second_arm_of_the_same_name_can_have_another_seed(tmp_path):
    arm = setting("fixed", seed=5)
    config = configured(small(), arm)
    assert arm.name == "fixed-seed-5" and config.training.seed == 5


# -- killed, and run again -----------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys
from pathlib import Path
import torch
from test_latent_resume import FRESH, once
torch.set_num_threads(1)
once(FRESH, Path(sys.argv[1]), tick=lambda done, said: os._exit(9) if done == 13 else None)
"""


def once(arm, folder, **more):
    config = small(**KILLED)
    return train(config, arm, prepared(config, 64), folder, ALONE, **more)


def interrupted(arm, folder, at):
    def tick(done, said):
        if done == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        once(arm, folder, tick=tick)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """By arm, runs that were not stopped. In that of the arm fixed the damaged sample comes at step 8."""
    torch.set_num_threads(1)
    folders = {arm.damaged: tmp_path_factory.mktemp("undisturbed") for arm in (FRESH, FIXED)}
    results = {arm.damaged: once(arm, folders[arm.damaged]) for arm in (FRESH, FIXED)}
    return {key: (weights(result.model), lines(folders[key] / LOG), result) for key, result in results.items()}


def went_on(result) -> int:
    found = [note for note in result.notes if note.startswith("went on from the checkpoint of step ")]
    return int(found[0].split()[7].rstrip(";")) if found else 0


def without_time(log):
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in log]


def check(result, folder, undisturbed):
    """The same weights, the same numbers, and the log of a run without a break."""
    wanted, log, first = undisturbed
    assert same(weights(result.model), wanted) and result.measured == first.measured and result.ending == "finished"
    assert (result.skipped, len(result.incidents)) == (first.skipped, len(first.incidents))
    assert without_time(lines(folder / LOG)) == without_time(log)
    assert not list(folder.glob(".*partial"))


@pytest.mark.parametrize("at", [2, 7, 8, 9, 15, 20])
def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(at, tmp_path, undisturbed):
    """Before the first checkpoint, at one, between two, and after the last step: bit for bit."""
    interrupted(FRESH, tmp_path, at)
    result = once(FRESH, tmp_path)
    assert went_on(result) % 4 == 0 and at - 8 <= went_on(result) <= at and (at < 6 or went_on(result) > 0)
    check(result, tmp_path, undisturbed[False])


def test_an_incident_before_the_break_is_still_known_after_it(tmp_path, undisturbed):
    interrupted(FIXED, tmp_path, 18)
    result = once(FIXED, tmp_path)
    assert went_on(result) > 8 and result.skipped == 1
    check(result, tmp_path, undisturbed[True])


def test_a_quarantined_sample_does_not_come_again_after_a_break(tmp_path):
    """The run goes on from before the bad step: this time that is taken, without the sample."""
    interrupted(FIXED, tmp_path, 9)
    result = once(FIXED, tmp_path)
    assert 0 < went_on(result) <= 8 and result.ending == "finished" and result.nonfinite == 0
    assert [incident.step for incident in result.incidents] == [8]
    log = [line for line in lines(tmp_path / LOG) if "loss" in line]
    assert [line["step"] for line in log] == list(range(20)) and all(isinstance(line["loss"], float) for line in log)


def test_a_run_that_was_killed_ends_as_if_it_had_not_been(tmp_path, undisturbed):
    """In a process of its own, ended by os._exit, with half a line at the end of its log."""
    done = forked.python("-c", SCRIPT, tmp_path)
    assert done.returncode == 9, done.stderr
    with (tmp_path / LOG).open("a") as file:
        file.write('{"step": 13, "lo')
    result = once(FRESH, tmp_path)
    assert went_on(result) in (8, 12)  # the last may not have been written yet
    check(result, tmp_path, undisturbed[False])


def test_a_run_that_is_finished_can_be_run_again(tmp_path, undisturbed):
    """It goes on from its last good checkpoint."""
    once(FRESH, tmp_path)
    result = once(FRESH, tmp_path)
    assert went_on(result) == 16
    check(result, tmp_path, undisturbed[False])


def test_a_poisoned_checkpoint_is_passed_over(tmp_path, undisturbed, caplog):
    """NaN is written into a tensor of the newest one that counts as good: the one before is gone on from."""
    interrupted(FRESH, tmp_path, 18)
    good = sorted(path.parent for path in (tmp_path / "checkpoints").glob("*/good.json"))
    assert len(good) >= 2
    (file,) = good[-1].glob("*.distcp")
    raw = bytearray(file.read_bytes())
    middle = len(raw) // 2
    raw[middle : middle + 400] = torch.full((100,), math.nan).numpy().tobytes()
    file.write_bytes(bytes(raw))
    with caplog.at_level("INFO", "nanproof"):
        result = once(FRESH, tmp_path)
    assert went_on(result) == int(good[-2].name[5:]) and good[-1].name in caplog.text
    check(result, tmp_path, undisturbed[False])


def test_a_log_of_nothing_but_rubbish_does_not_stop_a_run(tmp_path):
    config = small(training__checkpoint_every=4)
    train(config, FRESH, prepared(config), tmp_path, ALONE)
    (tmp_path / LOG).write_text('[1]\n"x"\nnull\n{"step": "a"}\n{}\nNaN\n\n')
    result = train(config, FRESH, prepared(config), tmp_path, ALONE)
    assert result.ending == "finished" and all(line["step"] >= 4 for line in lines(tmp_path / LOG))


# -- weights that break --------------------------------------------------------------------------------------------------------


def breaking(config, folder, at, times=1, arm=FRESH, count=200):
    """A weight becomes Inf after step `at`; so many times."""
    found, left = {}, [1] * times

    def tick(done, said):
        if done == at and left:
            left.pop()
            with torch.no_grad():
                found["model"].bytes.weight.fill_(math.inf)

    return train(config, arm, prepared(config, count), folder, ALONE, tick=tick, prepare=lambda m: found.update(model=m))


def test_weights_that_become_infinite_send_the_run_back(tmp_path):
    """It ends finite, at its last step, with the weights of a run that nothing happened to; steps are logged twice, and of each
    the later line holds."""
    config = small(training__steps=20, training__checkpoint_every=4)
    result = breaking(config, tmp_path / "a", at=11)
    assert (result.rolled_back, result.nonfinite, result.steps, result.ending) == (1, 0, 20, "finished")
    calm = train(config, FRESH, prepared(config, 200), tmp_path / "b", ALONE)
    assert same(weights(result.model), weights(calm.model)) and result.measured == calm.measured
    steps = [line["step"] for line in lines(tmp_path / "a" / LOG) if "loss" in line]
    falls = [i for i in range(1, len(steps)) if steps[i] <= steps[i - 1]]
    assert len(falls) == 1 and set(steps) == set(range(20))
    later = {line["step"]: line["loss"] for line in lines(tmp_path / "a" / LOG) if "loss" in line}
    wanted = {line["step"]: line["loss"] for line in lines(tmp_path / "b" / LOG) if "loss" in line}
    assert later == wanted
    back = [line["rolled_back"] for line in lines(tmp_path / "a" / LOG) if "loss" in line]
    assert back[0] == 0 and back[-1] == 1


def test_a_run_that_breaks_again_and_again_is_halted_and_that_is_a_result(tmp_path):
    """No exception: the ending says why, and what it was when it stopped is measured."""
    config = small(training__steps=40, training__checkpoint_every=4)
    result = breaking(config, tmp_path, at=9, times=50)
    assert result.ending.startswith("halted: ") and "max_rollbacks" in result.ending and result.steps < 40
    assert isinstance(result.measured, Measured)
    assert lines(tmp_path / LOG)[-1]["step"] == result.steps


def test_a_run_of_nothing_but_bad_data_is_halted(tmp_path):
    config = small(training__steps=60, **NO_GIVEN_LATENT)
    data = prepared(config, 200)
    data.train.latents.fill_(math.nan)
    result = train(config, FRESH, data, tmp_path, ALONE)
    assert result.ending.startswith("halted: ") and result.skipped >= 10 and result.nonfinite == 0 and result.steps < 60
    text = (tmp_path / LOG).read_text()
    assert "NaN" not in text and all(json.loads(line) for line in text.splitlines())


def test_the_documents_loop_counts_what_it_skips_in_the_log(tmp_path):
    config = small(training__steps=20, **NO_GIVEN_LATENT)
    data = prepared(config, 200)
    data.train.latents[::10] = math.nan
    result = train(config, replace(PATCHED, damaged=False), data, tmp_path, ALONE)
    log = [line for line in lines(tmp_path / LOG) if "loss" in line]
    assert 0 < result.skipped < 20 and log[-1]["skipped"] == result.skipped and result.nonfinite == 0
