"""The comparison of the arms of vlm-grpo: each claim holds and fails where it should, and nothing is trained twice."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import pytest

from nanproof import NanproofError, UsageError
from nanproof_recipes.comparison.comparison import Comparison, read, write
from nanproof_recipes.vlm_grpo import apart, claims
from nanproof_recipes.vlm_grpo.arms import BROKEN, FIXED, GROUP, GUARDED, GUARDED_GROUP, PATCHED, SETTINGS
from nanproof_recipes.vlm_grpo.claims import checks, clearly
from nanproof_recipes.vlm_grpo.comparing import COLUMNS, arms_of, compare, told
from nanproof_recipes.vlm_grpo.results import Result
from nanproof_recipes.vlm_grpo.running import Workshop
from nanproof_recipes.vlm_grpo.train.warm import Schooling

DIED = "raised RuntimeError: probability tensor contains either `inf`, `nan` or element < 0"
ENDED = {"tensors": 42, "nonfinite": 0, "steps": 100, "scenes": 500, "caption": 0.6, "place": 0.4, "seconds": 12.5}


def incident(cause, action="recorded", verified=True):
    found = {"cause": cause, "confidence": 1.0, "phase": "loss", "fix": "mask before exp", "verified": verified}
    return {"v": 2, "step": 0, "kind": "nonfinite-loss", "action": action, "message": "seen", "diagnosis": found}


OVERFLOW = incident("exp-overflow")
CHANGES = {"steps": 7, "trainer": "loop"}
NOTES = ["its processor replaced NaN at 9 of 12 steps", "its callback found 0 gradients to look at in on_step_end"]


def results():
    """As a run on two cores came out, about."""
    lost = {**ENDED, "ending": DIED, "steps": 1, "nonfinite": 42, "nonfinite_steps": 1, "kl": math.nan, "scenes": 0}
    lost |= {"caption": None, "place": None}
    patched = {"nonfinite": 42, "nonfinite_steps": 100, "bad_rows": 9000, "reward": 0.09, "kl": math.nan, "notes": NOTES}
    group = [incident("std-of-one-sample", "healed"), incident("zero-advantage")]
    found = [
        Result(name="warm", setting={"arm": "warm"}, steps=250, reward=0.55, chance=0.09, greedy=0.8, scenes=500),
        Result(name="broken", setting=BROKEN.to_json(), **lost),
        Result(name="broken-group", setting=GROUP.to_json(), **lost),
        Result(name="patched", setting=PATCHED.to_json(), **{**ENDED, **patched}),
        Result(name="guarded-group", setting=GUARDED_GROUP.to_json(), **ENDED, reward=0.55, incidents=group),
    ]
    for seed, reward in enumerate((0.98, 1.02, 1.0)):
        name = f"-seed-{seed}" if seed else ""
        guarded, fixed = ({**setting.to_json(), "seed": seed} for setting in (GUARDED, FIXED))
        found.append(Result(name=f"guarded{name}", setting=guarded, **ENDED, reward=reward, incidents=[OVERFLOW]))
        found.append(Result(name=f"fixed{name}", setting=fixed, **ENDED, reward=reward + 0.01))
    return {r.name: r for r in found}


def failing(by_name):
    return [check.claim for check in checks(by_name) if not check.holds]


def test_every_claim_holds_of_what_should_be():
    found = list(checks(results()))
    assert [check.claim for check in found if not check.holds] == []
    assert len(found) == 14 and all(check.measured for check in found)
    assert sum(check.claim.startswith("guarded: ") for check in found) == 4


@pytest.mark.parametrize(
    ("name", "change", "claim"),
    [
        ("broken", {"ending": "finished"}, "broken: dies"),
        ("broken", {"ending": "raised RuntimeError: out of memory"}, "broken: dies"),
        ("broken", {"nonfinite_steps": 0}, "broken: dies"),
        ("broken", {"nonfinite": 41}, "broken: dies"),
        ("broken", {"nonfinite": 0, "tensors": 0}, "broken: dies"),
        ("broken-group", {"ending": "halted: too many"}, "broken-group: dies"),
        ("patched", {"ending": DIED}, "patched: does not die"),
        ("patched", {"nonfinite_steps": 98}, "patched: does not die"),
        ("patched", {"bad_rows": 0}, "patched: does not die"),
        ("patched", {"nonfinite": 3}, "patched: does not die"),
        ("patched", {"notes": NOTES[:1]}, "patched: its callback"),
        ("patched", {"notes": ["its callback found 42 gradients to look at in on_step_end"]}, "patched: its callback"),
        ("patched", {"reward": 0.15}, "patched: its reward is at chance"),
        ("patched", {"reward": None}, "patched: its reward is at chance"),
        ("guarded", {"ending": "halted: too many"}, "guarded: every seed finishes"),
        ("guarded-seed-2", {"nonfinite": 1}, "guarded: every seed finishes"),
        ("guarded-seed-1", {"incidents": []}, "guarded: one incident"),
        ("guarded", {"incidents": [OVERFLOW, OVERFLOW]}, "guarded: one incident"),
        ("guarded", {"incidents": [incident("exp-overflow", verified=False)]}, "guarded: one incident"),
        ("guarded", {"incidents": [incident("unknown")]}, "guarded: one incident"),
        ("guarded", {"incidents": [{**OVERFLOW, "diagnosis": None}]}, "guarded: one incident"),
        ("guarded-group", {"ending": "halted: too many"}, "guarded-group: finishes"),
        ("guarded-group", {"incidents": [incident("std-of-one-sample")]}, "guarded-group: names both"),
        ("guarded-group", {"reward": 0.56}, "guarded-group: its reward"),
        ("guarded-group", {"reward": None}, "guarded-group: its reward"),
        ("fixed-seed-1", {"incidents": [OVERFLOW]}, "fixed: every seed finishes without"),
        ("fixed", {"nonfinite_steps": 1}, "fixed: every seed finishes without"),
        ("guarded", {"reward": 1.3}, "guarded: as near to fixed"),
    ],
)
def test_a_claim_fails_when_the_measurement_does(name, change, claim):
    by_name = results()
    by_name[name] = replace(by_name[name], **change)
    (only,) = failing(by_name)
    assert only.startswith(claim)


@pytest.mark.parametrize("arm", ["guarded", "fixed"])
def test_one_seed_that_learned_nothing_is_not_hidden_by_the_others(arm):
    by_name = results()
    for reward in (0.64, None):
        by_name[f"{arm}-seed-1"] = replace(by_name[f"{arm}-seed-1"], reward=reward)
        assert any(claim.startswith(f"{arm}: with every seed the reward is clearly above") for claim in failing(by_name))


def test_a_warm_start_that_says_nothing_right_leaves_nothing_to_fall_from():
    by_name = results()
    by_name["warm"] = replace(by_name["warm"], reward=0.08)
    assert any(claim.startswith("patched: its reward is at chance") for claim in failing(by_name))


def test_on_few_scenes_more_is_asked_for():
    """Three standard errors of a difference, by the slow way: two means of n numbers with the stated deviation."""
    assert clearly(500) == claims.CLEAR == 0.10
    assert clearly(64) == pytest.approx(3 * math.sqrt(claims.SPREAD**2 / 64 + claims.SPREAD**2 / 64))
    few = {name: replace(r, scenes=16 if r.scenes else 0) for name, r in results().items()}
    assert [claim.split(":")[0] for claim in failing(few)] == ["guarded", "fixed"]


def test_arms_that_are_not_there_claim_nothing():
    assert list(checks({})) == []
    assert [check.claim.split(":")[0] for check in checks({"broken": results()["broken"]})] == ["broken"]
    loop = replace(results()["patched"], setting={"arm": "patched", "trainer": "loop"}, notes=[])
    assert len(list(checks({"patched": loop}))) == 1, "the loop has no callback of the Trainer"


def test_the_comparison_says_what_all_arms_share_and_comes_back_from_its_file(tmp_path):
    (tmp_path / "guarded" / "nanproof").mkdir(parents=True)
    found = told(Workshop(tmp_path), results().values())
    arms = {arm.name: arm for arm in found.arms}
    assert found.settings["beta"] == 0.02 and "arm" not in found.settings and "max_norm" not in found.settings
    assert arms["broken"].values["nonfinite"] == "42/42" and math.isnan(arms["broken"].values["kl"])
    assert arms["broken"].values["reward"] is None and arms["broken"].setting == BROKEN.says
    assert arms["guarded-seed-2"].setting == "guarded, with seed 2" and arms["guarded"].run == "guarded/nanproof"
    assert arms["warm"].setting.startswith("the warm start: 250 steps") and arms["warm"].values["refused"] is None
    assert any("0.09" in said for said in arms["warm"].story)
    assert all(set(arm.values) == {column.key for column in COLUMNS} for arm in found.arms)
    write(found, tmp_path)
    assert Comparison.from_json(json.loads(json.dumps(found.to_json()))).to_json() == read(tmp_path).to_json() == found.to_json()


# -- which arms, and where they are trained ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A folder in which every arm has a result; scenes are there and nothing was trained."""
    shop = Workshop(tmp_path_factory.mktemp("done"), train=4, valid=2, schooling=Schooling(steps=30))
    every = results()
    warm = {"arm": "warm", "model": "tiny", "scenes": shop._told(BROKEN)["scenes"]}
    warm |= {name: len(shop.sets[name]) for name in ("train", "valid")}
    warm |= {key: value for key, value in shop._told(BROKEN).items() if key.startswith("sft_")}
    for name, setting in (("warm", warm), *((s.name, shop._told(s)) for s in arms_of(2, CHANGES))):
        (shop.out / name).mkdir()
        replace(every[name], setting=setting).save(shop.out / name)
    return shop


@pytest.mark.parametrize("jobs", [1, 2])
def test_arms_that_are_done_are_read(done, jobs):
    found = compare(done, 2, {**CHANGES, "lr": None}, jobs)
    assert [arm.name for arm in found.arms] == ["warm", *(s.name for s in arms_of(2, {}))] and len(found.arms) == 11
    assert all(check.holds for check in found.checks) and found.settings["steps"] == 7


def test_changes_go_to_every_arm_but_groups_of_one_stay_groups_of_one():
    arms = {s.name: s for s in arms_of(1, {"steps": 3, "batch": 16, "group": 4, "rank": 2, "trainer": "loop", "beta": None})}
    assert len(arms) == len(SETTINGS) + 2 and all(s.steps == 3 and s.rank == 2 and s.trainer == "loop" for s in arms.values())
    assert {s.group for name, s in arms.items() if "group" not in name} == {4}
    assert (arms["broken-group"].group, arms["broken-group"].batch) == (1, 16)
    assert {s.batch for s in arms_of(0, {"batch": 64}) if s.variant == "group"} == {32}
    assert (arms["fixed-seed-1"].seed, arms["fixed-seed-1"].max_norm) == (1, FIXED.max_norm)
    with pytest.raises(UsageError, match="do not divide"):
        arms_of(0, {"batch": 10})


def test_a_process_that_fails_is_told_with_its_last_words_and_the_others_are_ended(done, monkeypatch):
    """Status 1 without a result is a failure too: a traceback ends with it."""
    begun = []

    def command(workshop, setting):
        if setting.name == "broken":
            return [sys.executable, "-c", "import sys; sys.exit('no room \\x1b[2J left')"]
        return [sys.executable, "-c", "import time; time.sleep(60)"]

    real = apart._begun
    monkeypatch.setattr(apart, "command", command)
    monkeypatch.setattr(apart, "_begun", lambda *args: begun.append(real(*args)) or begun[-1])
    (done.out / "broken" / "result.json").rename(done.out / "kept.json")
    try:
        with pytest.raises(NanproofError, match=r"broken: its process ended with status 1:\nno room \\x1b\[2J left"):
            apart.train_apart(done, [FIXED, BROKEN, GROUP], 2)
    finally:
        (done.out / "kept.json").rename(done.out / "broken" / "result.json")
    assert [job.setting.name for job in begun] == ["fixed", "broken"], "the third waited"
    assert all(job.process.returncode is not None for job in begun) and all(job.said.closed for job in begun)


def test_ctrl_c_ends_the_processes(done, monkeypatch):
    begun, real = [], apart._begun
    monkeypatch.setattr(apart, "command", lambda workshop, setting: [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(apart, "_begun", lambda *args: begun.append(real(*args)) or begun[-1])

    def pressed(seconds):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(apart.time, "sleep", pressed)
    with pytest.raises(KeyboardInterrupt):
        apart.train_apart(done, [FIXED, GROUP], 2)
    assert len(begun) == 2 and all(job.process.returncode is not None for job in begun)


def test_a_warm_start_that_the_command_cannot_make_is_refused(tmp_path):
    with pytest.raises(UsageError, match="takes the steps alone"):
        apart.train_apart(Workshop(tmp_path, schooling=Schooling(lr=1e-4)), [FIXED], 2)
