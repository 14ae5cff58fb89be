"""Whatever lies in a folder beforehand, nothing is written outside it, and nothing waits for a pipe."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

import nanproof
from nanproof._records import Forecast
from nanproof.cli._report import write
from nanproof.core._telemetry import Journal
from nanproof.explain.bundle._shelf import Parcel, Shelf
from nanproof.integrations.huggingface._tokenizer import keep_tokenizer
from nanproof.integrations.script._autorun import _writable
from nanproof.recover.data._quarantine import Entry, Quarantine
from nanproof.report._out import put
from toys import batches, mse, net, poison

PRECIOUS = "precious\n"


# -- what is done in the folder, in a process under limits of time and memory ----------------------------------------------------


def guarded(folder: str) -> str:
    """Train with a refused step; the message of the UsageError, if there is one."""
    logging.getLogger("nanproof").setLevel(logging.CRITICAL)
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    try:
        with nanproof.Guard(model, optimizer, loss_fn=mse, run_dir=folder) as guard:
            for step, batch in enumerate(batches(6)):
                guard.train_step(poison(batch) if step == 3 else batch)
    except nanproof.UsageError as error:
        return str(error)
    return ""


def foreseen(folder: str) -> str:
    """A forecast, which has a file of its own."""
    try:
        journal = Journal(folder)
    except nanproof.UsageError as error:
        return str(error)
    journal.forecast(Forecast(step=1, kind="divergence", message="soon"))
    journal.close()
    return ""


def quarantined(folder: str) -> str:
    try:
        sample = Entry(index=1, hash=None, size=4, worker=None, workers=None, step=0, cause="x", bundle=None, at="now")
        Quarantine(Path(folder) / "quarantine.jsonl").add([sample])
    except nanproof.UsageError as error:
        return str(error)
    return ""


def checkpointed(folder: str) -> str:
    """Train with checkpoints every second step, enough of them to delete some."""
    logging.getLogger("nanproof").setLevel(logging.CRITICAL)
    torch.manual_seed(0)
    model = net(batch_norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    wanted = nanproof.Checkpoints(folder, every=2, keep=1, prove=1, background=False)
    try:
        with nanproof.Guard(model, optimizer, loss_fn=mse, checkpoints=wanted) as guard:
            for batch in batches(9):
                guard.train_step(batch)
    except nanproof.UsageError as error:
        return str(error)
    return ""


def reported(folder: str, out: str | None = None, form: str = "html") -> str:
    try:
        write(Path(folder), out, form)
    except nanproof.UsageError as error:
        return str(error)
    return ""


def bundled(folder: str) -> list[str]:
    """Two bundles of one step; the names of those that are whole."""
    logging.getLogger("nanproof").setLevel(logging.CRITICAL)
    shelf = Shelf(Path(folder), keep=1)
    written = []
    for _ in range(2):
        free = shelf.free_name(3, "nonfinite-loss")
        shelf.put(Parcel(free, {"format": 1}, {"incident.json": {}}, {"batch.safetensors": {"x": torch.ones(2)}}, 8))
        shelf.flush()
        written += [free] if (Path(folder) / free / "manifest.json").is_file() else []
    shelf.close()
    return written


def own_pid() -> int:
    return os.getpid()


def kept(folder: str) -> None:
    keep_tokenizer(_Trainer, folder)


# -- what lies there -------------------------------------------------------------------------------------------------------------


def lay(path: Path, what: str, outside: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to(outside / "file")
    elif what == "dangling link":
        path.symlink_to(outside / "new")
    elif what == "link to a folder":
        path.symlink_to(outside / "folder")
    elif what == "link to a device":
        path.symlink_to("/dev/full")


@pytest.fixture
def outside(tmp_path):
    """A place that must stay as it is; checked when the test is over."""
    place = tmp_path / "outside"
    (place / "folder" / "step-000001-spike").mkdir(parents=True)
    (place / "folder" / "manifest.json").write_text("{}")
    (place / "folder" / ".step-000001-spike.999999999.partial").mkdir()
    (place / "folder" / ".step-00000001.partial").mkdir()
    (place / "file").write_text(PRECIOUS)
    before = tree(place)
    yield place
    assert tree(place) == before


def tree(place: Path) -> dict[str, str]:
    return {str(path): path.read_text() if path.is_file() else "" for path in sorted(place.rglob("*"))}


ODD = ["link", "dangling link", "link to a folder", "link to a device", "pipe"]


def refused(outcome, path: Path) -> None:
    """One line that names the file, what it is and what to do."""
    assert outcome.error == ""
    said = outcome.value
    assert str(path) in said and ("symbolic link" in said or "regular file" in said), said
    assert "\n" not in said and ". Remove it" in said


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("name", ["lock", "steps.jsonl", "incidents.jsonl", "incidents", "quarantine.jsonl"])
def test_a_guard_refuses_a_run_folder_in_which_a_file_of_its_own_is_a_link_or_a_pipe(name, what, tmp_path, outside, limits):
    path = tmp_path / "run" / name
    lay(path, what, outside)
    refused(limits.call("test_links:guarded", str(tmp_path / "run")), path)


@pytest.mark.parametrize("name", ["steps.jsonl", "incidents.jsonl", "quarantine.jsonl"])
def test_a_file_whose_last_line_never_begins_is_refused(name, tmp_path, limits):
    """A terabyte of holes: somebody would have to look through all of it for the end of a line."""
    path = tmp_path / "run" / name
    path.parent.mkdir()
    path.write_text("{}\n")
    os.truncate(path, 1 << 40)
    outcome = limits.call("test_links:guarded", str(path.parent))
    assert outcome.error == "" and f"{path}: its last line has more than" in outcome.value
    assert path.stat().st_size == 1 << 40


@pytest.mark.parametrize("what", ODD)
def test_a_file_that_is_made_later_is_refused_at_the_start_too(what, tmp_path, outside, limits):
    path = tmp_path / "run" / "forecasts.jsonl"
    lay(path, what, outside)
    refused(limits.call("test_links:foreseen", str(tmp_path / "run")), path)


@pytest.mark.parametrize("what", ODD)
def test_the_quarantine_file_is_not_written_through_a_link(what, tmp_path, outside, limits):
    path = tmp_path / "run" / "quarantine.jsonl"
    lay(path, what, outside)
    refused(limits.call("test_links:quarantined", str(tmp_path / "run")), path)


@pytest.mark.parametrize("what", ODD)
def test_the_lock_of_a_checkpoint_folder_is_not_written_through_a_link(what, tmp_path, outside, limits):
    path = tmp_path / "checkpoints" / "lock"
    lay(path, what, outside)
    refused(limits.call("test_links:checkpointed", str(tmp_path / "checkpoints")), path)


@pytest.mark.parametrize("what", ["link to a folder", "pipe"])
@pytest.mark.parametrize(
    "name", ["..probe.partial", ".probe", ".step-00000002.partial", ".step-00000002.old", "step-00000002", "step-00000008"]
)
def test_what_lies_in_the_place_of_a_checkpoint_is_replaced_or_passed_over(name, what, tmp_path, outside, limits):
    folder = tmp_path / "checkpoints"
    lay(folder / name, what, outside)
    outcome = limits.call("test_links:checkpointed", str(folder))
    assert outcome.error == "" and outcome.value == ""
    good = [path for path in folder.glob("step-*/good.json") if not path.parent.is_symlink()]
    assert [path.parent.name[:13] for path in good] in (["step-00000006"], ["step-00000008"])
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_checkpoint_that_is_a_link_can_be_resumed_from_and_is_never_changed(tmp_path, limits):
    """Somebody may have moved a large one to another disk."""
    folder = tmp_path / "checkpoints"
    assert limits.call("test_links:checkpointed", str(folder)).value == ""
    (good,) = [path.parent for path in folder.glob("step-*/good.json")]
    moved = good.rename(tmp_path / "moved")
    good.symlink_to(moved)
    before = sorted(path.name for path in moved.iterdir())
    model = net(batch_norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    wanted = nanproof.Checkpoints(folder, every=2, keep=1, prove=1, background=False)
    with nanproof.Guard(model, optimizer, loss_fn=mse, checkpoints=wanted) as guard:
        assert guard.resume() == int(good.name[5:13])
        for batch in batches(6):
            guard.train_step(batch)
    assert sorted(path.name for path in moved.iterdir()) == before
    assert not [path.name for path in folder.iterdir() if path.is_symlink()], "it made room for newer ones"


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("name", ["step-000003-nonfinite-loss", ".step-000003-nonfinite-loss.PID.partial"])
def test_what_lies_in_the_place_of_a_bundle_is_passed_over(name, what, tmp_path, outside, limits):
    lay(tmp_path / "incidents" / name.replace("PID", str(limits.call("test_links:own_pid").value)), what, outside)
    outcome = limits.call("test_links:bundled", str(tmp_path / "incidents"))
    assert outcome.error == "" and len(outcome.value) == 2
    real = [path for path in (tmp_path / "incidents").glob("step-*") if path.is_dir() and not path.is_symlink()]
    assert len(real) == 1


def test_a_run_folder_that_is_a_link_itself_is_the_users_own_choice(tmp_path, limits):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    assert limits.call("test_links:guarded", str(tmp_path / "run")).value == ""
    assert (tmp_path / "disk" / "steps.jsonl").is_file() and (tmp_path / "disk" / "incidents").is_dir()
    assert limits.call("test_links:checkpointed", str(tmp_path / "run")).value == ""
    assert limits.call("test_links:reported", str(tmp_path / "run")).value == ""
    assert (tmp_path / "disk" / "report.html").is_file()


def test_nanproof_run_does_not_start_a_script_where_its_lock_would_be_written_elsewhere(tmp_path, outside):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(outside / "file")
    with pytest.raises(nanproof.UsageError, match=r"the script was not started.*/lock: it is a symbolic link.*\. Remove it"):
        _writable(tmp_path / "run", 0)


def test_the_refusal_of_a_file_shows_no_escape(tmp_path, outside, limits):
    folder = tmp_path / "run\x1b[2J\u202e"
    lay(folder / "lock", "link", outside)
    outcome = limits.call("test_links:guarded", str(folder))
    assert r"\x1b[2J\u202e/lock: it is a symbolic link" in outcome.value and outcome.value.isprintable()


def test_the_folder_of_a_second_optimizer_inside_a_runs_folder_is_not_a_link(tmp_path, outside, limits):
    """`nanproof run` gives each optimizer after the first a folder `optimizer-2`, ... inside the run's own."""
    assert limits.call("test_links:guarded", str(tmp_path / "run")).value == ""
    (tmp_path / "run" / "optimizer-2").symlink_to(outside / "folder")
    refused(limits.call("test_links:guarded", str(tmp_path / "run" / "optimizer-2")), tmp_path / "run" / "optimizer-2")


class _Trainer:
    class processing_class:
        class backend_tokenizer:
            @staticmethod
            def to_str() -> str:
                return '{"own": true}'

    @staticmethod
    def is_world_process_zero() -> bool:
        return True


@pytest.mark.parametrize("what", ["link", "dangling link", "link to a device", "pipe"])
@pytest.mark.parametrize("name", ["tokenizer.json", ".tokenizer.json.partial"])
def test_the_tokenizer_replaces_what_lies_in_its_place(name, what, tmp_path, outside, limits):
    lay(tmp_path / "run" / name, what, outside)
    assert limits.call("test_links:kept", str(tmp_path / "run")).error == ""
    written = tmp_path / "run" / "tokenizer.json"
    assert written.read_text() == '{"own": true}' and not written.is_symlink()


# -- reports --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, limits):
    folder = tmp_path_factory.mktemp("recorded") / "run"
    assert limits.call("test_links:guarded", str(folder)).value == ""
    return folder


@pytest.fixture
def run(recorded, tmp_path):
    """A run's folder of this test's own."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("steps.jsonl", "incidents.jsonl"):
        (folder / name).write_bytes((recorded / name).read_bytes())
    return folder


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("form", ["html", "json"])
def test_a_report_is_not_written_through_a_link_in_the_runs_folder(form, what, run, outside, limits):
    lay(run / "report.html", what, outside)
    out = None if form == "html" else str(run / "report.html")
    refused(limits.call("test_links:reported", str(run), out, form), run / "report.html")


def test_a_report_is_not_written_through_a_linked_folder_in_the_runs_folder(run, outside, limits):
    (run / "more").symlink_to(outside / "folder")
    refused(limits.call("test_links:reported", str(run), str(run / "more" / "report.html")), run / "more")


def test_the_partial_file_of_a_report_is_the_reports_own(run, outside):
    (run / f".report.html.{os.getpid()}.partial").symlink_to(outside / "file")
    put(run / "report.html", "text", run)
    assert (run / "report.html").read_text() == "text" and not (run / "report.html").is_symlink()


def test_links_and_pipes_that_the_user_names_elsewhere_are_followed(run, tmp_path):
    """A link to the web server's folder, `/dev/stdout`, a named pipe: whoever names it wants it."""
    (tmp_path / "www").mkdir()
    (tmp_path / "latest.html").symlink_to(tmp_path / "www" / "index.html")
    put(tmp_path / "latest.html", "text", run)
    assert (tmp_path / "www" / "index.html").read_text() == "text" and (tmp_path / "latest.html").is_symlink()
    (run / ".." / "web").symlink_to(tmp_path / "www")
    put(run / ".." / "web" / "second.html", "text", run)
    assert (tmp_path / "www" / "second.html").read_text() == "text"
    put(Path("/dev/null"), "text", run)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    put(tmp_path / "pipe", "text", run)
    assert os.read(reader, 10) == b"text"
    os.close(reader)
