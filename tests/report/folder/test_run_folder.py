"""Run reads what a guard wrote, while it is written and after a kill."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

import forked
import nanproof
from nanproof import UsageError, read_steps
from nanproof.report._markdown import markdown
from nanproof.report.folder._run import NEAR, Run, one_run, runs_in
from nanproof.report.page._cards import around
from report import made
from toys import batches, mse, net, poison


def guarded(run_dir, **settings):
    torch.manual_seed(0)
    model = net()
    return nanproof.Guard(model, torch.optim.AdamW(model.parameters(), 1e-2), loss_fn=mse, run_dir=run_dir, **settings)


def test_what_a_guard_wrote_is_read_as_it_is_written(tmp_path):
    run = Run(tmp_path)
    assert run.state == "waiting" and not run.poll() and run.last is None and run.rate is None
    data = batches(12)
    data[4] = poison(data[4])
    with guarded(tmp_path, observe=True) as guard:
        run.poll()
        assert run.state == "running" and run.steps == 0 and run.about["optimizer"] == "AdamW"
        for i, batch in enumerate(data):
            guard.train_step(batch)
            guard.engine.tell.flush()
            assert run.poll() and run.steps == i + 1 and run.last.step == i
        assert not run.poll()
    assert run.poll() and run.state == "ended" and run.seconds > 0
    again = Run(tmp_path).read()
    assert again.last == run.last and again.counts == run.counts and again.counts["skipped"] == 1
    records = list(read_steps(tmp_path))
    assert again.curves.steps == [r.step for r in records]
    assert again.curves.low("loss") == pytest.approx([r.loss for r in records], nan_ok=True)
    norms = [[x if math.isfinite(x) else math.inf for x in r.norms] for r in records]
    assert [list(c) for c in again.norms.columns] == [list(c) for c in run.norms.columns] == norms
    assert again.absmax.names == list(records[0].observed.sites) and len(again.absmax.columns) == 12
    assert [i.step for i in again.incidents] == [4]
    assert sorted(again.near) == sorted(run.near) == list(range(12)) and math.isnan(again.near[4].loss)


def test_the_facts_of_a_run_are_in_it(tmp_path):
    guarded(tmp_path, max_norm=math.inf, policy=nanproof.Policy(lag=1)).close()
    about = Run(tmp_path).read().about
    assert about["versions"]["torch"] == torch.__version__ and about["device"] == "cpu" and about["ranks"] == 1
    assert about["parameters"] == about["trainable"] == sum(p.numel() for p in net().parameters())
    assert about["max_norm"] == "inf" and about["policy"]["lag"] == 1
    assert os.path.expanduser("~") not in str(about)


def test_a_run_that_goes_back_is_read_without_what_it_gave_up(tmp_path):
    with guarded(tmp_path, policy=nanproof.Policy(snapshot_every=5)) as guard:
        for i, batch in enumerate(batches(20)):
            if i == 13:
                next(iter(guard.optimizer.state.values()))["exp_avg"].fill_(math.nan)
            guard.train_step(batch)
    run = Run(tmp_path).read()
    assert [i.action for i in run.incidents] == ["rewound"]
    ((there, back),) = run.turns
    assert back < there and run.curves.steps == list(range(run.last.step + 1))
    final = {r.step: r.loss for r in read_steps(tmp_path)}
    assert run.curves.mean("loss") == pytest.approx([final[s] for s in sorted(final)], nan_ok=True)


def test_a_killed_run_is_stopped_and_its_last_line_left_out(tmp_path):
    script = (
        "import sys, os, torch, nanproof\nfrom toys import batches, mse, net\n"
        "model = net(); g = nanproof.Guard(model, torch.optim.SGD(model.parameters(), 1e-2), loss_fn=mse, run_dir=sys.argv[1])\n"
        "[g.train_step(b) for b in batches(5)]\ng.engine.tell.flush()\nos._exit(9)"
    )
    assert forked.python("-c", script, tmp_path).returncode == 9
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write('{"v":1,"kind":"step","st')
    run = Run(tmp_path).read()
    assert run.state == "stopped" and run.steps == 5 and run.broken == 0


def test_lines_that_are_no_records_are_counted_and_passed_over(tmp_path):
    with guarded(tmp_path) as guard:
        guard.train_step(batches(1)[0])
    with open(tmp_path / "steps.jsonl", "ab") as file:
        file.write(b'nonsense\n[]\n{"kind":"step"}\n{"kind":"step","step":"x"}\n\xff\xfe\nnull\n' + b"[" * 100_000 + b"\n")
    (tmp_path / "incidents.jsonl").write_text('{"step": 1}\n')
    run = Run(tmp_path).read()
    assert run.steps == 1 and run.broken == 8 and run.incidents == []


def test_a_folder_written_anew_is_read_from_the_start(tmp_path):
    with guarded(tmp_path) as guard:
        for batch in batches(8):
            guard.train_step(batch)
    run = Run(tmp_path).read()
    for name in ("steps", "incidents"):
        (tmp_path / f"{name}.jsonl").unlink()
    with guarded(tmp_path) as guard:
        for batch in batches(3):
            guard.train_step(batch)
    run.read()
    assert run.steps == 3 and run.curves.steps == [0, 1, 2]


def test_only_steps_near_incidents_are_kept_one_by_one(tmp_path):
    data = batches(300)
    data[150] = poison(data[150])
    with guarded(tmp_path) as guard:
        for batch in data:
            guard.train_step(batch)
    near = list(range(150 - NEAR, 150 + NEAR + 1))
    assert sorted(Run(tmp_path).read().near) == near


def test_runs_are_found_below_a_folder(tmp_path):
    for name in ("a/nanproof", "b", "c/d/e"):
        guarded(tmp_path / name).close()
    assert {str(p.relative_to(tmp_path)) for p in runs_in(tmp_path)} == {"a/nanproof", "b", "c/d/e"}
    assert one_run(tmp_path / "a") == tmp_path / "a" / "nanproof" and runs_in(tmp_path / "b") == [tmp_path / "b"]
    with pytest.raises(UsageError, match="holds 3 runs"):
        one_run(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no steps\.jsonl"):
        one_run(tmp_path / "empty")
    with pytest.raises(UsageError, match="does not exist"):
        one_run(tmp_path / "nowhere")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
@pytest.mark.parametrize("name", ["steps.jsonl", "incidents.jsonl", "forecasts.jsonl", "lock", "quarantine.jsonl"])
def test_a_pipe_where_a_file_should_be_keeps_nobody_waiting(tmp_path, name):
    """Opening one for reading waits for a writer, for ever: in a process of its own, with an end."""
    made.write_run(tmp_path / "a" / "run", 5, bad=(2,))
    (tmp_path / "a" / "run" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "a" / "run" / name)
    code = "import sys; from nanproof.report.folder._run import *; from nanproof.report._html import data; "
    code += (
        "print(len(runs_in(sys.argv[1])), Run(sys.argv[1] + '/run').read().steps, data(Run(sys.argv[1] + '/run').read())['v'])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True, timeout=20, check=True
    ).stdout
    assert said == ("0 0 1\n" if name == "steps.jsonl" else "1 5 1\n")


def test_the_folder_one_stands_in_has_its_name(tmp_path, monkeypatch):
    made.write_run(tmp_path / "lr-3e-4", 3)
    monkeypatch.chdir(tmp_path / "lr-3e-4")
    assert Run(".").read().name == "lr-3e-4" and Run("../lr-3e-4/").name == "lr-3e-4"


@pytest.mark.parametrize("action", ["x" * 41, "\x1b[2J", 3, None, ["skipped"]])
def test_an_action_is_a_word(tmp_path, action):
    """Anything else is no step: it would be shown, and counted by."""
    line = json.loads(made.step_line(1))
    tmp_path.joinpath("steps.jsonl").write_text(made.step_line(0) + json.dumps({**line, "action": action}) + "\n")
    run = Run(tmp_path).read()
    assert run.broken == 1 and dict(run.counts) == {"stepped": 1}


def test_a_step_taken_again_does_not_hide_how_it_was(tmp_path):
    """The record of an incident's own step is kept beside the one that took its place."""
    lines = [made.step_line(i, loss=math.nan if i == 4 else i, action="skipped" if i == 4 else "stepped") for i in range(5)]
    lines += [made.step_line(i, loss=10 + i) for i in range(2, 8)]
    tmp_path.joinpath("steps.jsonl").write_text("".join(lines))
    tmp_path.joinpath("incidents.jsonl").write_text(made.incident_line(4, action="rewound"))
    run = Run(tmp_path).read()
    rows = [(brief.step, brief.action, again) for brief, again in around(run, 4, 1)]
    assert rows == [(3, "stepped", False), (4, "skipped", False), (4, "stepped", True), (5, "stepped", False)]
    assert math.isnan(run.given_up[4].loss) and run.near[4].loss == 14 and run.near[3].loss == 13
    assert "| **4** | **14.0** | **0.5** | **0.001** |  | **stepped, again** |" in markdown(run)


def test_a_run_begun_anew_in_the_same_folder_is_another_run(tmp_path):
    """Not resumed, started again from step 0: the one before it, its incidents too, is not shown as steps that were given up."""
    for bad in (3, 5):
        data = batches(8)
        data[bad] = poison(data[bad])
        with guarded(tmp_path) as guard:
            for batch in data:
                guard.train_step(batch)
    run = Run(tmp_path).read()
    assert run.earlier == 1 and run.steps == 8 and run.turns == [] and run.counts["skipped"] == 1
    assert [i.step for i in run.incidents] == [5] and math.isnan(run.near[5].loss) and math.isfinite(run.near[3].loss)
    live = Run(tmp_path)
    while live.poll(portion=500):
        pass
    assert live.earlier == 1 and live.counts == run.counts and [i.step for i in live.incidents] == [5]


def test_the_optimizers_that_the_index_names_are_parts_of_the_run(tmp_path):
    """A folder that is not in the index is from an earlier run, and no run of its own."""
    made.write_gan(tmp_path / "gan", others=[made.incident_line(7)])
    made.write_run(tmp_path / "gan" / "optimizer-3", 5)
    run = Run(tmp_path / "gan").read()
    assert [(part.optimizer, part.steps) for part in run.parts] == [("SGD of Critic", 20), ("Adam of Generator", 40)]
    assert (run.total["steps"], run.total["incidents"], run.steps) == (60, 1, 20)
    (tmp_path / "gan" / "optimizer-3" / "steps.jsonl").unlink()
    assert runs_in(tmp_path) == [tmp_path / "gan"], "an optimizer is not a run"
    part = Run(tmp_path / "gan" / "optimizer-2").read()
    assert (part.optimizer, part.others, part.steps) == ("", [], 40), "alone, if one asks for it"


def test_an_index_that_comes_later_is_followed(tmp_path):
    """The second optimizer of a live run begins after the first."""
    made.write_run(tmp_path, 20)
    run = Run(tmp_path).read()
    assert (run.optimizer, run.others) == ("", [])
    made.write_gan(tmp_path)
    assert [part.optimizer for part in run.read().parts] == ["SGD of Critic", "Adam of Generator"]
    (tmp_path / "optimizers.json").unlink()
    assert run.read().parts == [run] and run.optimizer == ""


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_run_is_halted_if_one_of_its_optimizers_is(which, tmp_path):
    """Until it takes a step again."""
    halted = [made.incident_line(19 if which == "first" else 39, action="halted")]
    made.write_gan(tmp_path, *((halted, ()) if which == "first" else ((), halted)))
    assert Run(tmp_path).read().state == "halted"
    folder = tmp_path if which == "first" else tmp_path / "optimizer-2"
    with open(folder / "steps.jsonl", "a") as file:
        file.write(made.step_line(40))
    assert Run(tmp_path).read().state == "running"
