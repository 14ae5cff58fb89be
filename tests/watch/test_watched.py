"""Runs are found, read on, and survive whatever happens to their folders."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import forked
from nanproof import read_incidents, read_steps
from nanproof.watch import _words as words
from nanproof.watch._plain import Lines, caught_up, now
from nanproof.watch._plot import ASCII, FINE
from nanproof.watch._runs import Watched
from nanproof.watch._table import events_table, runs_table
from report import made
from watch.made import BAD, guard_in, run, train


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def one(watched: Watched):
    (view,) = watched.views.values()
    return view


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return run(tmp_path_factory.mktemp("runs") / "a run")


def test_a_view_says_what_the_records_say(ended):
    watched = Watched([ended])
    caught_up(watched)
    view, records = one(watched), list(read_steps(ended))
    assert (view.state, view.step, view.loss) == ("ended", 39, records[-1].loss)
    assert view.refused == sum(record.action == "skipped" for record in records) == len(BAD)
    assert [entry.event.step for entry in view.incidents] == [i.step for i in read_incidents(ended)] == list(BAD)
    loss = view.series["loss"]
    assert loss.steps == [record.step for record in records]
    assert [not bad for bad in loss.bad] == [math.isfinite(record.loss) for record in records]
    assert [x for x in loss.mean if x == x] == [record.loss for record in records if math.isfinite(record.loss)]
    assert [step for step, kind in words.marked(view) if kind == "refused"] == list(BAD)
    assert json.loads(json.dumps(view.to_json(), allow_nan=False))["counts"]["skipped"] == len(BAD)


def test_nothing_new_is_no_new_view(ended):
    watched = Watched([ended])
    caught_up(watched)
    before = one(watched)
    assert watched.look() is False and one(watched) is before


def test_a_run_is_followed_from_before_it_begins(tmp_path):
    clock = Clock()
    watched = Watched([tmp_path / "later"], clock=clock)
    watched.look()
    assert watched.waiting == (tmp_path / "later",) and not watched.views
    guard = guard_in(tmp_path / "later")
    clock.now += 10
    assert watched.look() and not watched.waiting
    for last in (5, 10, 30):
        train(guard, last - 5, last)
        assert watched.look()
        assert (one(watched).step, one(watched).state) == (len(list(read_steps(tmp_path / "later"))) - 1, "running")
    guard.close()
    assert watched.look() and one(watched).state == "ended" and one(watched).done


def test_a_run_that_stands_still_is_said_to(tmp_path):
    """The process lives and takes no steps: a hang looks like that."""
    guard = guard_in(tmp_path / "run")
    train(guard, 0, 3)
    long_ago = time.time() - 3725
    os.utime(tmp_path / "run" / "steps.jsonl", (long_ago, long_ago))
    watched = Watched([tmp_path / "run"])
    caught_up(watched)
    assert one(watched).state == "running"
    assert "no step for 1:02:05" in words.status(one(watched)) or "no step for 1:02:06" in words.status(one(watched))
    train(guard, 3, 4)
    watched.look()
    assert not any("no step" in part for part in words.status(one(watched)))
    guard.close()


def test_runs_join_as_they_appear_the_newest_first(tmp_path):
    clock = Clock()
    watched = Watched([tmp_path], clock=clock)
    watched.look()
    assert watched.waiting == (tmp_path,)
    for name in ("first", "second", "below/third"):
        run(tmp_path / name, 3)
        clock.now += 10
        watched.look()
    assert [view.name for view in watched.views.values()] == ["below/third", "second", "first"]
    assert watched.waiting == ()


def test_only_the_run_that_is_looked_at_has_all_its_curves(tmp_path):
    """Fifty runs cost fifty curves a second, not two hundred."""
    for name in "ab":
        run(tmp_path / name, 3)
    watched = Watched([tmp_path / "a", tmp_path / "b"])
    for name in "ba":
        watched.close = tmp_path / name
        watched.look()
        assert set(watched.views[tmp_path / name].series) == {"loss", "grad_norm", "lr", "scale"}
        assert "loss" in watched.views[tmp_path / ("a" if name == "b" else "b")].series


@pytest.mark.parametrize("harm", ["removed", "emptied", "begun anew", "half a line", "not JSON", "a folder in its place"])
def test_what_happens_to_a_folder_ends_nothing(harm, ended, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(ended, folder)
    clock = Clock()
    watched = Watched([folder], clock=clock)
    caught_up(watched)
    steps = folder / "steps.jsonl"
    if harm == "removed":
        shutil.rmtree(folder)
    elif harm == "emptied":
        steps.write_text("")
    elif harm == "begun anew":
        shutil.rmtree(folder)
        run(folder, 4)
    elif harm == "half a line":
        with open(steps, "a") as file:
            file.write('{"v":1,"kind":"step","st')
    elif harm == "not JSON":
        with open(steps, "ab") as file:
            file.write(b'\xff\xfe\x00 nonsense\n[1, 2]\n"x"\n' + b'{"kind": "step", "step": "\\u001b[31m"}\n')
    else:
        steps.unlink()
        steps.mkdir()
    for _ in range(3):
        clock.now += 10
        watched.look()
    step = {"emptied": None, "begun anew": 3, "a folder in its place": None}.get(harm, 39)
    assert one(watched).step == step


HOSTILE = "[red]\x1b[31mx\x07[/red]<script>alert(1)</script>\u202e"


def hostile(ended, folder):
    """A run whose texts try to act, and whose fields are of the wrong kind."""
    shutil.copytree(ended, folder)
    with open(folder / "incidents.jsonl", encoding="utf-8") as file:
        first = json.loads(file.readline())
    diagnosis = {"cause": HOSTILE, "confidence": "very", "fix": HOSTILE, "evidence": HOSTILE, "samples": 7}
    with open(folder / "incidents.jsonl", "a", encoding="utf-8") as file:
        for i, extra in enumerate((
            {"message": HOSTILE},
            {"diagnosis": diagnosis},
            {"message": {"a": 1}},
            {"step": "x"},
            {"culprits": [[HOSTILE, 1]]},
            {"remedy": HOSTILE, "undone": [HOSTILE], "restored_step": 3, "restored_from": HOSTILE, "cap": HOSTILE},
            {"same_as": "x"},
            {"undone": HOSTILE},
        )):  # fmt: skip
            apart = {"diagnosis": {**first["diagnosis"], "where": str(i)}}  # so that each has its own entry
            file.write(json.dumps({**first, **apart, **extra}) + "\n")
    return folder


def test_hostile_texts_are_shown_and_do_nothing(ended, tmp_path):
    watched = Watched([hostile(ended, tmp_path / HOSTILE.replace("/", "_"))])
    caught_up(watched)
    view = one(watched)
    texts = [title for title, _ in words.facts(view)]
    for entry in [*view.entries(), *view.groups()]:
        texts += [words.said(words.title(entry)), words.said(words.summary(entry))]
        texts += [line for row in words.wrapped(words.card(entry), 40, FINE) for line in row]
        assert all(line.isascii() for row in words.wrapped(words.card(entry), 40, ASCII) for line in row)
    for marks in (FINE, ASCII):
        heading, items = runs_table([view], 60, marks)
        texts += [text for item in [*items, *events_table(view.groups(), marks)] for line in item.lines for text, _ in line]
        texts += [text for text, _ in heading]
    assert any("[red]\\x1b[31m" in text for text in texts)
    assert all(text.isprintable() for text in texts)


def version_1(folder):
    shutil.copytree(Path(__file__).parent.parent / "version_1", folder)
    return folder


def test_a_run_of_version_1_is_read(tmp_path):
    """Its decisions are in the text of the message, which a card shows whole."""
    watched = Watched([version_1(tmp_path / "run")])
    caught_up(watched)
    view = one(watched)
    assert (view.state, view.step, view.refused) == ("ended", 19, 3)
    assert [(entry.event.step, entry.event.action) for entry in view.incidents] == [
        (4, "rewound"),
        (7, "skipped"),
        (16, "rolled-back"),
    ]
    assert all(entry.origin is None and not entry.again for entry in view.groups())
    seen, done = (dict(words.card(view.groups()[-1])).get(name) for name in ("seen", "done"))
    assert seen.endswith("; healed: a divisor of 0 is taken as 1") and done is None
    assert "step 16: nonfinite-weight, rolled-back. cause: " in "\n".join(now(watched, 100, FINE))


def alike(folder):
    """A run with five incidents that are alike, one that was not diagnosed, and one like the first that ended the run."""
    made.write_run(
        folder,
        60,
        incidents=[
            made.incident_line(39, diagnosis=made.diagnosis(fix="Add an epsilon.")),
            *(made.incident_line(step, same_as=39) for step in (41, 42, 43)),
            made.incident_line(44, message="something else"),
            made.incident_line(50, same_as=39),
            made.incident_line(51, action="halted", same_as=39, cap="max_consecutive_skips", cap_count=11),
        ],
    )
    watched = Watched([folder])
    caught_up(watched)
    return watched


def test_incidents_that_are_alike_are_one_entry(tmp_path):
    """Only where `same_as` says so, and where the same was done; the newest of them says where the entry stands."""
    view = one(alike(tmp_path / "run"))
    halted, first, other = view.groups()
    assert [entry.event.step for entry in (halted, first, other)] == [51, 39, 44]
    more = "as at step 39, 4 more times: steps 41-43, 50"
    assert words.summary(first) == f"cause: zero-denominator. Add an epsilon. {more}."
    assert dict(words.card(first))["again"] == more
    assert words.summary(other) == "something else." and "cause" not in dict(words.card(other))
    cap = "11 steps in a row were refused (max_consecutive_skips)"
    assert words.summary(halted) == f"as at step 39, cause: zero-denominator. the loss is nan. {cap}."
    assert dict(words.card(halted))["done"] == cap
    assert dict(words.card(halted))["cause"] == "zero-denominator (confidence 0.93)", "that of the incident it is like"
    assert len(view.incidents) == len(view.to_json()["incidents"]) == 7


def test_each_incident_alone_has_the_cause_of_the_one_it_is_like(tmp_path):
    """Lines tell incidents as they come, one by one."""
    watched = alike(tmp_path / "run")
    said = []
    Lines(watched, said.append, FINE).round()
    assert [line for line in said if "step 42" in line] == [
        "step 42: nonfinite-loss, skipped. as at step 39, cause: zero-denominator. the loss is nan."
    ]
    assert "step 44: nonfinite-loss, skipped. something else." in said
    assert sum("4 more times" in line for line in now(watched, 100, FINE)) == 1


def test_an_old_incident_still_explains_those_like_it(tmp_path):
    """More incidents came than a view holds."""
    later = [made.incident_line(step, same_as=0, action="rewound" if step % 2 else "skipped") for step in range(1, 700)]
    made.write_run(tmp_path, 10, incidents=[made.incident_line(0, diagnosis=made.diagnosis()), *later])
    watched = Watched([tmp_path])
    caught_up(watched)
    view = one(watched)
    assert len(view.incidents) == 300 and {entry.origin.step for entry in view.incidents} == {0}
    assert [(entry.event.step, len(entry.again)) for entry in view.groups()] == [(1, 349), (0, 349)]


@pytest.mark.parametrize("action", ["healed", "salvaged"])
def test_a_step_that_was_not_taken_as_it_was_is_marked_as_refused(action, tmp_path):
    made.write_run(tmp_path, 10, incidents=[made.incident_line(4, action=action, remedy="x", left_out=[1])])
    watched = Watched([tmp_path])
    caught_up(watched)
    assert words.marked(one(watched)) == [(4, "refused")]
    assert words.title(one(watched).groups()[0]) == f"step 4: nonfinite-loss, {action}"
    assert "healed: x" in words.summary(one(watched).groups()[0])


def test_lists_fit_any_width(ended):
    watched = Watched([ended])
    caught_up(watched)
    for columns in range(20, 200):
        heading, items = runs_table([one(watched)], columns, FINE)
        assert sum(len(text) for text, _ in heading) <= columns
        assert all(sum(len(text) for text, _ in item.lines[0]) <= columns for item in items)


def test_lines_tell_every_incident_once_and_end_with_the_run(tmp_path):
    """A run that is written while it is watched, by this process: nothing is told twice, nothing is left out."""
    clock, said = Clock(), []
    folder = tmp_path / "run"
    tell = Lines(Watched([folder], clock=clock), said.append, FINE, every=15.0)
    guard = guard_in(folder)
    taken = iter(range(0, 40, 5))

    def sleep(_seconds):
        clock.now += 10
        first = next(taken, None)
        if first is None:
            guard.close()
        else:
            train(guard, first, first + 5)

    tell.run(sleep, clock)
    assert [line.split(":")[0] for line in said if "skipped" in line] == [f"step {step}" for step in BAD]
    assert sum("run: running, step" in line for line in said) >= 3
    assert said[-1] == f"run: ended, step 39, loss {words.short(list(read_steps(folder))[-1].loss)}, 2 refused, 2 incidents"


def test_a_run_of_another_process_is_followed_to_its_end(tmp_path):
    """`nanproof watch` without a terminal, started before the run: it waits, tells, and ends by itself."""
    watcher = subprocess.Popen(
        [sys.executable, "-m", "nanproof", "watch", str(tmp_path / "run"), "--every", "1"], stdout=subprocess.PIPE, text=True
    )
    assert watcher.stdout is not None
    assert watcher.stdout.readline() == f"waiting for {tmp_path / 'run'}: there is no run in it yet\n"
    code = "from pathlib import Path; import sys; from watch.made import run; run(Path(sys.argv[1]))"
    assert forked.python("-c", code, tmp_path / "run").returncode == 0
    rest, _ = watcher.communicate(timeout=20)
    assert watcher.returncode == 0
    assert [line.split(":")[0] for line in rest.splitlines() if "skipped" in line] == [f"step {step}" for step in BAD]
    assert rest.splitlines()[-1].startswith("run: ended, step 39")
    assert "\x1b" not in rest


def test_a_run_with_several_optimizers_is_one_view(tmp_path):
    """Counts and incidents are those of all; step and curve those of the first, or of the one that was chosen."""
    lines = [made.incident_line(4), made.incident_line(30, diagnosis=made.diagnosis())]
    made.write_gan(tmp_path / "gan", [made.incident_line(3)], lines)
    watched = Watched([tmp_path])
    caught_up(watched)
    view = one(watched)
    assert (view.total_incidents, sum(view.counts.values()), view.step, view.drawn) == (3, 60, 19, "SGD of Critic")
    assert {(entry.optimizer, entry.event.step) for entry in view.entries()} == {
        ("SGD of Critic", 3),
        ("Adam of Generator", 4),
        ("Adam of Generator", 30),
    }
    assert [step for step, _ in words.marked(view)] == [3]
    assert [i["optimizer"] for i in view.to_json()["incidents"]].count("Adam of Generator") == 2
    text = "\n".join(now(watched, 100, FINE))
    assert "step 30 of Adam of Generator: nonfinite-loss, skipped" in text and "SGD of Critic: running, 20 steps" in text
    watched.drawn = 1
    caught_up(watched)
    assert (one(watched).step, sorted(step for step, _ in words.marked(one(watched)))) == (39, [4, 30])


def test_a_halted_run_is_shown_as_halted_and_done(tmp_path):
    """It was closed, and "ended" would hide how."""
    made.write_run(tmp_path, 5, incidents=[made.incident_line(4, action="halted")])
    watched = Watched([tmp_path])
    caught_up(watched)
    assert (one(watched).state, one(watched).done) == ("halted", True)
    assert words.status(one(watched))[0] == "halted"
