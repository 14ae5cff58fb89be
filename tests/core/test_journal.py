"""The journal on a disk that is full for a while: nothing is cut, little is lost, and what is lost is said."""

from __future__ import annotations

import json
import logging
import os
from array import array
from pathlib import Path

import pytest
import torch

import nanproof
from disks import fill, no_file_larger, small_disk
from nanproof._records import Forecast, Incident, StepRecord, read_forecasts, read_incidents, read_steps
from nanproof.core._telemetry import Journal
from nanproof.core.journal._lines import LineFile
from nanproof.explain.bundle._shelf import Parcel, Shelf
from nanproof.recover.data._quarantine import Entry, Quarantine
from nanproof.report.folder._run import Run
from toys import batches, mse, net, poison

NAMES = ("embed.weight", "head.weight")


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        loss=1.0 / (step + 1),
        grad_norm=1.0,
        action="stepped",
        clip=1.0,
        lr=(0.1,),
        scale=None,
        spike=False,
        typical=(0.0, 0.0),
        spread=(0.0, 0.0),
        loss_size=1.0,
        weights_checked=False,
        names=NAMES,
        norms=array("d", [1.0, 2.0]),
        time=1000.0 + step,
    )


def incident(step: int) -> Incident:
    return Incident(step=step, kind="spike", action="recorded")


def forecast(step: int) -> Forecast:
    return Forecast(step=step, kind="divergence", message="soon")


def steps(journal: Journal, which) -> None:
    """Steps, each of them written, or kept as there is no room, before the next."""
    for step in which:
        journal.step(record(step))
        journal.flush()


def lines(path: Path) -> list[dict]:
    """Every line, all of them whole."""
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Every line is an attempt, so that tests do not wait."""
    monkeypatch.setattr(LineFile, "PAUSE", 0.0)


def little_memory(monkeypatch, size: int) -> None:
    monkeypatch.setattr(LineFile, "KEPT", size)


@pytest.mark.parametrize("more", [0, 1, 40, 200, 333, 555])
def test_steps_go_on_where_there_is_room_again_and_none_is_lost(more, tmp_path, caplog):
    """The disk is full in the middle of any line."""
    journal = Journal(tmp_path)
    steps(journal, range(10))
    with no_file_larger((tmp_path / "steps.jsonl").stat().st_size + more):
        steps(journal, range(10, 20))
        assert (tmp_path / "steps.jsonl").read_bytes().endswith(b"\n"), "half a line does not stay"
    steps(journal, range(20, 30))
    journal.close()
    assert [one["kind"] for one in lines(tmp_path / "steps.jsonl")] == ["opened", *["step"] * 30, "closed"]
    assert [one.step for one in read_steps(tmp_path)] == list(range(30))
    assert len(caplog.messages) == 2 and "File too large" in caplog.messages[0] and "written again" in caplog.messages[1]


def test_what_does_not_fit_into_memory_either_is_named_by_a_line(tmp_path, monkeypatch, caplog):
    little_memory(monkeypatch, 600)
    journal = Journal(tmp_path)
    steps(journal, range(10))
    with no_file_larger((tmp_path / "steps.jsonl").stat().st_size + 100):
        steps(journal, range(10, 50))
    steps(journal, range(50, 60))
    journal.close()
    found = lines(tmp_path / "steps.jsonl")
    (gap,) = [one for one in found if one["kind"] == "gap"]
    there = [one.step for one in read_steps(tmp_path)]
    assert there == sorted({*range(60)} - {*range(gap["first"], gap["last"] + 1)})
    assert gap["lines"] == gap["last"] - gap["first"] + 1 and gap["last"] == 49 and gap["why"] == "File too large"
    assert len(caplog.messages) == 2 and f"{gap['lines']} are missing" in caplog.messages[1]


def test_incidents_and_forecasts_are_late_not_lost(tmp_path, caplog):
    journal = Journal(tmp_path)
    with no_file_larger(0):
        for step in range(5):
            journal.incident(incident(step))
            journal.forecast(forecast(step))
        journal.flush()
    journal.incident(incident(5))
    journal.forecast(forecast(5))
    journal.close()
    assert [one.step for one in read_incidents(tmp_path)] == [0, 1, 2, 3, 4, 5]
    assert [one.step for one in read_forecasts(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_a_disk_that_is_full_when_the_run_is_opened(tmp_path):
    """Without any room the run is not opened. With room for the lock alone it is, and its first line is late."""
    with no_file_larger(0), pytest.raises(nanproof.UsageError, match=r"File too large.*\. Choose"):
        Journal(tmp_path)
    with no_file_larger(100):
        journal = Journal(tmp_path)
        steps(journal, [0])
    journal.step(record(1))
    journal.close()
    assert [one["kind"] for one in lines(tmp_path / "steps.jsonl")] == ["opened", "step", "step", "closed"]


def test_what_was_kept_is_written_when_the_run_is_closed(tmp_path):
    journal = Journal(tmp_path)
    with no_file_larger(0):
        journal.incident(incident(1))
        journal.flush()
    journal.close()
    assert [one.step for one in read_incidents(tmp_path)] == [1]


def test_a_run_that_is_closed_on_a_full_disk_says_what_is_missing(tmp_path, caplog):
    journal = Journal(tmp_path)
    with no_file_larger(0):
        journal.incident(incident(1))
        journal.close()
    assert any("incidents.jsonl is incomplete: File too large. 1 records are missing" in said for said in caplog.messages)
    again = Journal(tmp_path)
    again.step(record(0))
    again.close()
    assert [one.step for one in read_steps(tmp_path)] == [0]


def test_a_disk_that_is_full_again_and_again_is_not_a_warning_each_time(tmp_path, caplog):
    journal = Journal(tmp_path)
    for step in range(0, 40, 2):
        with no_file_larger((tmp_path / "steps.jsonl").stat().st_size):
            steps(journal, [step])
        steps(journal, [step + 1])
    journal.close()
    assert [one.step for one in read_steps(tmp_path)] == list(range(40))
    assert len(caplog.messages) == 2


def test_while_the_disk_is_full_an_attempt_is_made_once_a_second(tmp_path, monkeypatch):
    monkeypatch.undo()
    attempts = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: attempts.append(handle) or write(handle, data))
    journal = Journal(tmp_path)
    with no_file_larger(0):
        attempts.clear()
        steps(journal, range(2000))
        assert len(attempts) < 10
    journal.close()
    assert [one.step for one in read_steps(tmp_path)] == list(range(2000))


def test_the_report_says_that_steps_are_missing(tmp_path, monkeypatch):
    from nanproof.report._markdown import markdown
    from nanproof.report.page._contents import summary
    from nanproof.watch._runs import Watched
    from nanproof.watch._words import facts

    little_memory(monkeypatch, 0)
    journal = Journal(tmp_path)
    steps(journal, [0])
    with no_file_larger(0):
        for step in range(1, 5):
            journal.step(record(step))
            journal.incident(incident(step))
        journal.flush()
    journal.step(record(5))
    journal.incident(incident(5))
    journal.close()
    run = Run(tmp_path).read()
    assert run.broken == 0 and run.steps == 2 and [one.step for one in run.incidents] == [5]
    assert "Steps 1 to 4 are not in the records: File too large" in summary(run)
    assert "are not in the records" in markdown(run)
    watched = Watched([tmp_path])
    watched.look()
    assert ("missing", "steps 1 to 4: File too large") in facts(watched.views[tmp_path])


def test_doctor_reads_a_journal_with_a_gap(tmp_path, monkeypatch):
    from nanproof.logs.read._sources import find, read

    little_memory(monkeypatch, 0)
    journal = Journal(tmp_path)
    steps(journal, [0])
    with no_file_larger(0):
        steps(journal, [1])
    journal.step(record(2))
    journal.close()
    (source,) = find([tmp_path / "steps.jsonl"])
    assert [point.step for point in read(source) if hasattr(point, "step")] == [0, 2]


# -- a real file system ---------------------------------------------------------------------------------------------------------


def test_a_whole_run_on_a_disk_that_is_full_for_a_while(tmp_path, caplog):
    """Steps, an incident and its bundle, checkpoints: training goes on, nothing half written stays, later ones are written."""
    caplog.set_level(logging.WARNING, "nanproof")
    with small_disk(tmp_path / "disk", "1m") as disk:
        torch.manual_seed(0)
        model = net(batch_norm=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        wanted = nanproof.Checkpoints(disk / "checkpoints", every=4, keep=1, prove=1, background=False)
        guard = nanproof.Guard(model, optimizer, loss_fn=mse, run_dir=disk / "run", checkpoints=wanted)
        for step, batch in enumerate(batches(30)):
            if step == 10:
                ballast = fill(disk)
            if step == 20:
                ballast.unlink()
            guard.train_step(poison(batch) if step in (12, 25) else batch)
        guard.close()
        assert [one.step for one in read_steps(disk / "run")] == list(range(30))
        assert [one.step for one in read_incidents(disk / "run")] == [12, 25]
        bundles = sorted(path.name for path in (disk / "run" / "incidents").iterdir())
        # A thread writes them: a slow one gets to the first when there is room again.
        assert bundles in (["step-000025-nonfinite-loss"], ["step-000012-nonfinite-loss", "step-000025-nonfinite-loss"])
        there = sorted(path.name for path in (disk / "checkpoints").iterdir())
        assert there == ["lock", "step-00000028"]
        assert (disk / "checkpoints" / "step-00000028" / "good.json").is_file()
    said = [record.getMessage() for record in caplog.records if record.name == "nanproof"]  # DCP has a logger of its own
    texts = [text for text in said if "No space left on device" in text]
    assert 3 <= len(texts) <= 8


def test_quarantined_samples_are_written_when_there_is_room_again(tmp_path, caplog):
    def entry(index: int) -> Entry:
        return Entry(index=index, hash=None, size=9, worker=None, workers=None, step=1, cause="x" * 70, bundle=None, at="now")

    path = tmp_path / "quarantine.jsonl"
    quarantine = Quarantine(path)
    quarantine.add([entry(0)])
    with no_file_larger(path.stat().st_size + 50):
        quarantine.add([entry(1), entry(2)])
        assert len(lines(path)) == 1
    quarantine.refresh()
    quarantine.add([entry(3)])
    assert [one["index"] for one in lines(path)] == [0, 1, 2, 3]
    assert [one.index for one in Quarantine(path)] == [0, 1, 2, 3]
    assert len([text for text in caplog.messages if "was not written" in text]) == 1


@pytest.mark.parametrize("room", [0, 100, 1500, 3000])
def test_a_bundle_for_which_there_is_no_room_leaves_nothing_behind(room, tmp_path):
    shelf = Shelf(tmp_path / "incidents", keep=5)

    def put(step: int) -> None:
        name = shelf.free_name(step, "spike")
        shelf.put(Parcel(name, {"format": 1}, {"incident.json": {}}, {"batch.safetensors": {"x": torch.ones(500)}}, 2000))
        shelf.flush()

    with no_file_larger(room):
        put(1)
    put(2)
    shelf.close()
    whole = ["step-000002-spike"] if room < 3000 else ["step-000001-spike", "step-000002-spike"]
    assert sorted(path.name for path in (tmp_path / "incidents").iterdir()) == whole
