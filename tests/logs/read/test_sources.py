"""Which files are logs, what they are, and in which order they are read."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanproof import UsageError
from nanproof.logs._points import Point, singly
from nanproof.logs.read._sources import FORMATS, Source, find, format_of, read

LOG = "".join(f"step {n} loss={n}.5\n" for n in range(5))
STEPS = [0, 1, 2, 3, 4]


def steps(source: Source) -> list[float | None]:
    return [item.step for item in singly(read(source)) if isinstance(item, Point)]


def names(found: list[Source], folder: Path) -> list[str]:
    return [os.path.relpath(source.path, folder).replace(os.sep, "/") for source in found]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_encodings(encoding, packed, end, tmp_path):
    """PowerShell's `>` writes UTF-16. Packed or not, whatever the file is called."""
    bom = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}.get(encoding, b"")
    data = bom + LOG.replace("\n", end).encode(encoding)
    path = tmp_path / "log.txt"
    path.write_bytes(gzip.compress(data) if packed else data)
    (source,) = find([path])
    assert (source.format, steps(source)) == ("text", STEPS)
    path.write_bytes(gzip.compress(data)[:-12] if packed else data[: len(data) // 2 * 2 - 2])  # still being written
    assert steps(find([path])[0])[:4] == STEPS[:4]


def test_other_encodings_and_rubbish(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes("Début à 10 h\n".encode("latin-1") + b"\x00\x00" + LOG.encode() + b"\xff\xfe\x00")
    assert steps(find([path])[0]) == STEPS
    path.write_bytes(b"")
    assert steps(find([path])[0]) == []


def test_a_folder(tmp_path):
    """Logs by name, and files that may be data only if they start like a log."""
    for name in ("train.log", "a/slurm-1.out", "a/slurm-1.err", "a/b/metrics.txt", "notes.md", "venv/x.log", ".git/y.log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(LOG)
    (tmp_path / "vocab.txt").write_text(LOG)
    (tmp_path / "data.txt").write_text("It was the best of times, it was the worst of times.\n" * 100)
    (tmp_path / "data.jsonl").write_text('{"text": "hello"}\n' * 100)
    (tmp_path / "more.jsonl.gz").write_bytes(gzip.compress(b'{"step": 1, "loss": 2}\n'))
    (tmp_path / "prices.csv").write_text("day,price\n1,2\n")
    (tmp_path / "image.txt").write_bytes(b"\x00\x01loss=2.5 step=3\n" * 100)
    expected = ["a/b/metrics.txt", "a/slurm-1.err", "a/slurm-1.out", "more.jsonl.gz", "train.log"]
    assert sorted(names(find([tmp_path]), tmp_path)) == expected
    assert len(find([tmp_path, tmp_path / "train.log"])) == len(expected)  # nothing twice
    assert names(find([tmp_path / "notes.md"]), tmp_path) == ["notes.md"]  # whatever is named is read


def test_links_in_a_circle_end(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.log").write_text(LOG)
    try:
        (tmp_path / "run" / "again").symlink_to(tmp_path, target_is_directory=True)
        (tmp_path / "latest.log").symlink_to(tmp_path / "run" / "train.log")
    except OSError:
        pytest.skip("links cannot be made here")
    (source,) = find([tmp_path])
    assert steps(source) == STEPS


def test_nothing_found_says_what_was_looked_for(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"no log was found in .*trainer_state.json, .*\.wandb"):
        find([tmp_path])
    with pytest.raises(UsageError, match="does not exist"):
        find([tmp_path / "train.log"])


def test_of_several_checkpoints_the_newest_counts(tmp_path):
    """By the step that is in them: 1000 comes after 500, and a file beside the checkpoints may be older than they are."""
    for run in ("a", "b"):
        for step in (500, 1000):
            folder = tmp_path / run / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            history = [{"step": n, "loss": 1.0} for n in range(0, step + 1, 250)]
            (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": history}, indent=2))
    (tmp_path / "a" / "trainer_state.json").write_text(
        json.dumps({"global_step": 1100, "log_history": [{"step": 1100, "loss": 1.0}]})
    )
    (tmp_path / "b" / "trainer_state.json").write_text(json.dumps({"global_step": 700, "log_history": []}))
    assert names(find([tmp_path]), tmp_path) == ["a/trainer_state.json", "b/checkpoint-1000/trainer_state.json"]


def test_rotated_logs_are_one(tmp_path):
    """The oldest first, the highest number, packed or not."""
    parts = {"run.log.2.gz": [0, 1], "run.log.1": [2], "run.log": [3, 4]}
    for name, part in parts.items():
        text = "".join(f"step {n} loss={n}.5\n" for n in part).encode()
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    (source,) = find([tmp_path])
    assert steps(source) == STEPS
    (source,) = find(sorted(tmp_path.iterdir()))
    assert steps(source) == STEPS and source.size == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize("packed", [False, True])
def test_standard_input(packed, monkeypatch):
    data = LOG.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(data) if packed else data)))
    (source,) = find(["-"])
    assert (source.path, source.format, source.size, steps(source)) == ("-", "text", None, STEPS)


def test_a_pipe_that_comes_in_small_pieces():
    """A format is told by a whole head, though a pipe hands out a few bytes at a time."""
    code = (
        "from nanproof.logs._points import singly\nfrom nanproof.logs.read._sources import find, read\n"
        "(source,) = find(['-'])\nprint(source.format, [int(p.step) for p in singly(read(source))])"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    for n in range(3):
        child.stdin.write(b'{"step": ')
        child.stdin.flush()
        child.stdin.write(b'%d, "loss": 1.5}\n' % n)
        child.stdin.flush()
    assert child.communicate(timeout=60)[0].decode().split(" ", 2) == ["JSON", "lines", "[0, 1, 2]" + os.linesep]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_is_read_if_named_and_not_waited_for_in_a_folder(tmp_path):
    """`doctor <(zcat train.log.gz)` opens what can be opened once."""
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "train.log").write_text(LOG)
    assert names(find([tmp_path]), tmp_path) == ["train.log"]
    with subprocess.Popen(["sh", "-c", 'cat "$0" > "$1"', tmp_path / "train.log", tmp_path / "pipe.log"]):
        (source,) = find([tmp_path / "pipe.log"])
        assert steps(source) == STEPS


def test_patterns_are_expanded(tmp_path):
    """Windows' shell leaves that to the program."""
    for n in range(3):
        (tmp_path / f"rank{n}.log").write_text(LOG)
    assert names(find([str(tmp_path / "rank*.log")]), tmp_path) == ["rank0.log", "rank1.log", "rank2.log"]


def test_formats_are_told_by_content():
    assert format_of(b'{"v":1,"kind":"opened","time":1}\n{"v":1') == "nanproof"
    assert format_of(b'{"v":1,"kind":"header","names":["' + b"x" * 100_000) == "nanproof"
    assert format_of(b'{"best": null,\n "log_history": [') == "transformers trainer_state"
    assert format_of(b'{"best": null, "log_history": [], "max_steps": 3}') == "transformers trainer_state"
    assert format_of(b"\n\n{'loss': 1}") == format_of(b"") == format_of(b"{") == format_of(b"[1, 2]") == "text"
    assert set(FORMATS) >= {format_of(x) for x in (b":W&B\x01", b"step,loss\n1,2\n", b'[{"loss": 1}]', b'{"loss": 1}\n')}


def test_reading_needs_no_torch_and_no_numpy():
    code = (
        "import sys\nfrom nanproof.logs.read import _sources as sources\n"
        "bad = {'torch', 'numpy', 'transformers', 'tensorboard', 'wandb'} & set(sys.modules)\nassert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
