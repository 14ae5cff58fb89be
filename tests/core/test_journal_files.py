"""What the journal's thread makes of a run: `norms.bin`, thinned to a budget, and `steps.jsonl` in parts."""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import random
import signal
import sys
import threading
import time
import zlib
from array import array
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forked
from disks import no_file_larger
from nanproof import StepRecord, read_incidents, read_steps
from nanproof._records import ABSENT, Incident, line
from nanproof.core import _telemetry
from nanproof.core._telemetry import Journal
from nanproof.core.journal import _norms, _steps, _writer
from nanproof.core.journal._norms import log_codes
from nanproof.core.journal._steps import StepFile, chosen, compressed
from nanproof.core.support import _files
from nanproof.files import _parts
from nanproof.files._blocks import (
    HEADER,
    STEP,
    BlockReader,
    decode_logs,
    packed,
    packed_columns,
    stride,
    thinned,
    unpacked_columns,
)
from nanproof.files._parts import THINNED, earlier, part_lines, step_lines
from nanproof.logs.read._sources import find, read
from nanproof.report.folder._run import Run

SMALLEST_FLOAT32, LARGEST_FLOAT32 = 2.0**-149, (2 - 2**-23) * 2.0**127


def record(step: int, count: int = 3, **changes) -> StepRecord:
    rng = random.Random(step)
    norm = math.exp(rng.gauss(0, 0.4))
    values = {
        "step": step,
        "loss": 2 + rng.gauss(0, 0.1),
        "grad_norm": norm,
        "action": "clipped" if norm > 1 else "stepped",
        "clip": max(1.0, norm),
        "lr": (1e-3, 1e-4),
        "scale": None,
        "spike": False,
        "typical": (rng.gauss(0, 0.01), 1.3),
        "spread": (0.3, rng.gauss(0.2, 0.01)),
        "loss_size": 2.0,
        "weights_checked": False,
        "names": names(count),
        "norms": rows(count)[step % 4],
        "time": round(1794787403 + step / 10, 3),
    }
    return StepRecord(**{**values, **changes})


@cache
def names(count: int) -> tuple[str, ...]:
    return tuple(f"layers.{i // 7}.block.{i % 7}.weight" for i in range(count))


@cache
def rows(count: int) -> list[array]:
    rng = random.Random(count)
    return [array("d", [rng.random() for _ in range(count)]) for _ in range(4)]


def as_recorded(one: StepRecord) -> bool:
    """Whether a step has the norms that it was given, or none."""
    given_ = record(one.step, len(one.norms)).norms if one.names else array("d")
    return len(one.names) == len(one.norms) and all(abs(x - y) <= 1.5e-3 * y for x, y in zip(one.norms, given_, strict=True))


def take(journal: Journal, steps, count: int = 3, **changes) -> None:
    for step in steps:
        journal.step(record(step, count, **changes))
        if step % 500 == 499:
            journal.flush()


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(StepFile, "SMALLEST", 4000)
    monkeypatch.setattr(StepFile, "LARGEST", 4000)


# -- numbers ---------------------------------------------------------------------------------------------------------------------


def code_of(x: float) -> int:
    """The slow, obvious way."""
    if x != x or (x < 0 and x != ABSENT):
        return 65534
    if x in (ABSENT, 0, math.inf):
        return {ABSENT: 65535, 0: 0, math.inf: 65533}[x]
    return min(max(round((math.log2(x) + 150) * 235) + 1, 1), 65532)


norms = st.one_of(
    st.floats(min_value=0),
    st.floats(min_value=0, width=32),
    st.sampled_from([ABSENT, math.nan, math.inf, 0.0, SMALLEST_FLOAT32, LARGEST_FLOAT32, 5e-324, 1.7e308]),
)


@given(st.lists(st.lists(norms, max_size=5), max_size=3))
def test_any_norm_comes_back(groups):
    given_ = [x for group in groups for x in group]
    again = decode_logs(log_codes([array("d", group) for group in groups]))
    assert len(again) == len(given_)
    for x, y in zip(given_, again, strict=True):
        if x != x:
            assert y != y
        elif x in (ABSENT, 0, math.inf):
            assert x == y
        else:
            assert math.isfinite(y) and y > 0, "what is finite stays so, and what is not 0 does not become it"
            if SMALLEST_FLOAT32 <= x <= LARGEST_FLOAT32:
                assert y == pytest.approx(x, rel=1.5e-3)


@given(st.lists(norms, min_size=1, max_size=20))
def test_the_fast_codes_are_those_of_the_slow_way(values):
    fast, slow = decode_logs(log_codes([array("d", values)])), [code_of(x) for x in values]
    expected = decode_logs(array("H", slow).tobytes() if sys.byteorder == "little" else b"")
    for x, y in zip(fast, expected, strict=True):
        assert (x != x and y != y) or y == pytest.approx(x, rel=3e-3)  # log2 may round to the code beside it


def test_more_norms_than_torch_computes_in_one_thread():
    values = array("d", [ABSENT, 0.0, 1.5, math.inf] * 20_000)
    again = decode_logs(log_codes([values]))
    assert again.count(ABSENT) == again.count(0.0) == again.count(math.inf) == 20_000 and len(again) == 80_000


numbers = st.floats() | st.sampled_from([0.0, -0.0, 1e16, 123456.7, 1e-5])
pairs = st.lists(st.tuples(st.text(max_size=8), numbers), max_size=3, unique_by=lambda pair: pair[0]).map(tuple)


@given(numbers, numbers, st.lists(numbers, max_size=3), st.none() | numbers, pairs, pairs, st.none() | st.integers(0, 1 << 40))
def test_a_line_is_what_json_dumps_makes_of_it(loss, norm, lr, scale, terms, counters, moment):
    one = record(7, loss=loss, grad_norm=norm, lr=tuple(lr), scale=scale, terms=terms, counters=counters)
    one = replace(one, time=None if moment is None else moment / 1000)
    plain = {key: value for key, value in one.to_json().items() if key != "norms"}
    text = one.to_line()
    assert text.count("\n") == 1 and text.endswith("\n")
    assert json.loads(text, parse_constant=pytest.fail) == plain == json.loads(line(plain))
    assert list(json.loads(text)) == list(plain)


# -- thinning --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age", "every", "dense", "expected"),
    [(0, 1, 0, 1), (0, 8, 0, 8), (10**9, 8, 0, 8), (0, 8, 4, 1), (7, 8, 4, 1), (8, 8, 4, 2), (15, 8, 4, 2), (16, 8, 4, 4),
     (31, 8, 4, 4), (32, 8, 4, 8), (10**6, 8, 4, 8), (10**6, 1 << 40, 4, 1 << 17), (63, 2, 1, 2)],
)  # fmt: skip
def test_how_many_steps_are_kept_by_age(age, every, dense, expected):
    assert stride(age, every, dense) == expected


@pytest.mark.parametrize(
    ("count", "marked", "room", "dense", "kept", "every"),
    [
        (10, [], 100, 0, range(10), 1),
        (10, [], 50, 0, [0, 2, 4, 6, 8], 2),
        (10, [], 49, 0, [0, 4, 8], 4),
        (10, [3], 50, 0, [0, 3, 4, 8], 4),
        (10, [3], 60, 0, [0, 2, 3, 4, 6, 8], 2),
        (16, [], 90, 2, [0, 4, 8, 10, 12, 13, 14, 15], 4),
        (10, range(10), 50, 0, [0, 4, 8, 9], 4),  # of marks alone, the newest that fit into half of the room
        (10, range(10), 0, 0, [0], 1 << 63),  # the first is a multiple of everything
        (0, [], 100, 0, [], 1),
    ],
)
def test_which_steps_are_kept(count, marked, room, dense, kept, every):
    """Ten bytes each."""
    flags = [i in marked for i in range(count)]
    found, found_every = thinned(range(count), [10] * count, flags, room, dense)
    names = [i for i, keep in enumerate(found) if keep]
    if count == 10 and list(marked) == list(range(10)) and room:
        assert set(names) >= {8, 9} and 10 * len(names) <= room
    else:
        assert (names, found_every) == (list(kept), every)


@given(st.integers(1, 400), st.sets(st.integers(0, 400), max_size=5), st.integers(0, 4000), st.sampled_from([0, 1, 4, 64]))
def test_what_was_thinned_before_is_a_part_of_what_a_smaller_room_keeps(count, marks, room, dense):
    """Steps are kept by their number, so that thinning twice is thinning once."""
    steps = list(range(count))
    marked = [step in marks for step in steps]
    once, _ = thinned(steps, [10] * count, marked, 2 * room, dense)
    twice, _ = thinned(steps, [10] * count, marked, room, dense)
    left = [step for step, keep in zip(steps, once, strict=True) if keep]
    again, _ = thinned(left, [10] * len(left), [step in marks for step in left], room, dense)
    ordinary = {step for step, keep in zip(steps, twice, strict=True) if keep} - marks
    assert ordinary <= set(left)
    assert {step for step, keep in zip(left, again, strict=True) if keep} >= ordinary - marks or room < 40


@pytest.mark.parametrize(("count", "steps"), [(50, 12_000), (2000, 20_000)])
def test_a_long_run_takes_a_hundred_bytes_a_step(count, steps, tmp_path):
    """With refused steps, of which everything is kept."""
    bad = {6000: "skipped", 11_000: "skipped"}
    journal = Journal(tmp_path)
    lines = 0
    for step in range(steps):
        journal.step(record(step, count, **({"action": "skipped", "loss": math.nan} if step in bad else {})))
        if step in bad:
            journal.incident(Incident(step=step, kind="nonfinite-loss", action="skipped"))
        if step % 500 == 499:
            journal.flush()
        if step == 9_999:
            lines = size(tmp_path)
    journal.close()
    assert lines <= 100 * 10_000 and size(tmp_path) <= 100 * steps
    found = list(read_steps(tmp_path))
    assert [one.step for one in found] == list(range(steps)), "every line is there"
    whole = {one.step for one in found if one.names}
    for step in bad:
        assert whole >= set(range(step - 2, step + 3))
    assert whole >= {0, steps - 1} and len(whole) >= 50
    gaps = [after - one for one, after in zip(sorted(whole), sorted(whole)[1:], strict=False)]
    assert max(gaps) <= 1024
    assert all(map(as_recorded, found[:: 1 if count < 100 else 97]))
    assert len(list(tmp_path.glob("steps/*"))) < 60


def test_long_lines_are_thinned_and_what_is_left_out_is_counted(tmp_path):
    """Forty terms and random numbers make lines of a thousand bytes."""
    rng = random.Random(0)
    journal = Journal(tmp_path)
    bad = {150, 244, 253, 700}
    for step in range(900):
        terms = tuple((f"t{i}", rng.random()) for i in range(40))
        action = "skipped" if step in bad else "stepped"
        journal.step(record(step, terms=terms, action=action))
        if step % 20 == 0:
            journal.flush()
    journal.close()
    there = [one.step for one in read_steps(tmp_path)]
    assert there == sorted(there) and len(there) < 700
    for step in bad:
        assert set(there) >= set(range(step - 10, step + 11))
    run = Run(tmp_path).read()
    assert run.broken == 0 and run.steps == 900 and run.counts == Counter(stepped=896, skipped=4)
    parts = earlier(tmp_path, 1000)
    assert next(part_lines(parts[0][1]))[0].startswith(THINNED)


def test_lines_near_what_happened_are_kept():
    lines = [b'{"v":3,"kind":"opened"}\n', *(record(step).to_line().encode() for step in range(400))]
    steps = [None, *range(400)]
    lines[151] = record(150, spike=True).to_line().encode()
    kept = [step for step, keep in zip(steps, chosen(lines, steps, {300}, 64), strict=True) if keep]
    assert kept == [None, *range(9), 64, 128, *range(140, 161), 192, 256, *range(290, 311), 320, 384, *range(390, 400)]


# -- parts -----------------------------------------------------------------------------------------------------------------------


def test_parts_are_read_in_order_by_all_readers(tmp_path, small_parts):
    journal = Journal(tmp_path)
    for step in range(300):
        journal.step(record(step))
        if step % 10 == 0:
            journal.flush()
    journal.close()
    assert len(list(tmp_path.glob("steps/*.jsonl.gz"))) > 10
    assert (
        [one.step for one in read_steps(tmp_path)]
        == [one.step for one in read_steps(tmp_path / "steps.jsonl")]
        == list(range(300))
    )
    assert all(one.names for one in read_steps(tmp_path))
    run = Run(tmp_path).read()
    assert run.steps == 300 and run.broken == 0 and run.state == "ended" and run.curves.steps == list(range(300))
    (source,) = find([tmp_path])
    assert source.format == "nanproof" and source.path == str(tmp_path / "steps.jsonl")
    points = [point for item in read(source) for point in (item if isinstance(item, list) else [item])]
    assert [point.step for point in points] == list(range(300))
    assert [point.step for point in read(find([tmp_path / "steps.jsonl"])[0])] == list(range(300))


@pytest.mark.parametrize("portion", [1, 3000, 1 << 20])
def test_a_follower_reads_every_step_once_while_the_run_rotates(portion, tmp_path, small_parts):
    journal, run = Journal(tmp_path), Run(tmp_path)
    for step in range(200):
        journal.step(record(step))
        if step % 7 == 0:
            journal.flush()
            run.poll(portion)
    journal.close()
    assert len(list(tmp_path.glob("steps/*"))) > 5
    while run.poll(portion):
        pass
    assert run.steps == 200 and run.turns == [] and run.broken == 0 and run.curves.steps == list(range(200))
    assert run.curves.mean("loss") == pytest.approx([float(f"{record(step).loss:.6g}") for step in range(200)])
    assert run.norms.steps == list(range(200))


def test_a_part_of_lines_that_are_too_long_is_read_as_far_as_a_part_may_go(tmp_path, monkeypatch):
    """They cost time, though nothing comes of them."""
    monkeypatch.setattr(_parts, "MOST_PART", 10_000)
    path = tmp_path / "000001.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}\n" + (b" " * 12_000 + b"\n") * 50))
    assert [text for text, _ in part_lines(path)] == [b"{}\n"]


def test_a_follower_sees_norms_once_while_they_are_thinned(tmp_path, monkeypatch):
    monkeypatch.setattr(_writer, "WHOLE", 30_000)
    journal, run = Journal(tmp_path), Run(tmp_path)
    for step in range(600):
        journal.step(record(step, 20))
        if step % 9 == 0:
            journal.flush()
            run.poll()
    journal.close()
    run.read()
    assert (tmp_path / "norms.bin").stat().st_size < 90_000 and run.broken == 0
    assert len(run.norms.names) == 20 and run.norms.steps[0] == 0
    assert all(max(column) <= 1 for column in run.norms.columns)


def test_a_follower_of_a_part_that_was_thinned_goes_on_with_what_is_newer(tmp_path):
    """It had read half of the part when the part was put away."""
    head = line({"v": 3, "kind": "opened", "time": 1.0, "about": {}})
    texts = [record(step).to_line() for step in range(100)]
    (tmp_path / "steps.jsonl").write_text(head + "".join(texts[:50]))
    run = Run(tmp_path).read()
    note = line({"v": 3, "kind": "thinned", "every": 2, "left_out": {"stepped": 50}, "time": 2.0})
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "000001.jsonl").write_text(note + head + "".join(texts[::2]))
    (tmp_path / "steps.jsonl").write_text(line({"v": 3, "kind": "part", "part": 2, "time": 3e9}) + record(100).to_line())
    run.read()
    assert run.curves.steps == [*range(50), *range(50, 100, 2), 100] and run.turns == []


@pytest.mark.parametrize("portion", [1, 30_000, 1 << 25])
def test_a_follower_counts_every_step_once_while_lines_are_left_out(portion, tmp_path):
    """It has read most of a part when that is thinned. Who reads the same in portions later sees what is left."""
    rng = random.Random(0)
    journal, run = Journal(tmp_path), Run(tmp_path)
    for step in range(900):
        journal.step(record(step, terms=tuple((f"t{i}", rng.random()) for i in range(40)), action="stepped"))
        if step % 23 == 0:
            journal.flush()
            run.poll()
    journal.close()
    assert run.read().steps == 900 and run.counts == Counter(stepped=900) and run.broken == 0
    late, whole = Run(tmp_path), Run(tmp_path).read()
    while late.poll(portion):
        pass
    assert late.steps == 900 and late.curves.steps == whole.curves.steps


@pytest.mark.parametrize("version", [1, 2])
def test_a_folder_of_an_older_version_is_read_and_gone_on_with(version, tmp_path, small_parts):
    old = {**record(0).to_json(), "v": version, "norms": [1.0, "nan", None]}
    header = {"v": version, "kind": "header", "names": list(names(3))}
    steps = [line({**old, "step": step}) for step in range(20)]
    (tmp_path / "steps.jsonl").write_text(line(header) + "".join(steps))
    (first, *_) = read_steps(tmp_path)
    assert first.norms[0] == 1 and math.isnan(first.norms[1]) and first.norms[2] == ABSENT and first.names == names(3)
    journal = Journal(tmp_path)
    take(journal, range(20, 60))
    journal.close()
    there = list(read_steps(tmp_path))
    assert [one.step for one in there] == list(range(60)) and all(one.names == names(3) for one in there)
    run = Run(tmp_path).read()
    assert run.steps == 60 and run.norms.steps == list(range(60)) and run.broken == 0


def test_a_large_file_of_an_older_version_is_moved_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(_steps, "MOST_PART", 10_000)
    monkeypatch.setattr(StepFile, "SMALLEST", 5000)
    old = line({"v": 2, "kind": "header", "names": list(names(3))}) + "".join(
        line({**record(step).to_json(), "v": 2}) for step in range(60)
    )
    (tmp_path / "steps.jsonl").write_text(old)
    journal = Journal(tmp_path)
    take(journal, range(60, 90))
    journal.close()
    assert (tmp_path / "steps" / "000001.jsonl").read_text().startswith(old)
    assert [one.step for one in read_steps(tmp_path)] == list(range(90))


# -- what goes wrong -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [lambda text: '{"v":2,"kind":"st\n' + text, lambda text: text[text.index("\n") + 1 :]])
def test_parts_outlive_a_file_that_does_not_say_which_part_it_is(damage, tmp_path, small_parts):
    journal = Journal(tmp_path)
    for start in range(0, 100, 10):
        take(journal, range(start, start + 10))
        journal.flush()
    journal.close()
    before, path = {part: part.read_bytes() for _, part in earlier(tmp_path, 1000)}, tmp_path / "steps.jsonl"
    assert len(before) > 2
    path.write_text(damage(path.read_text()))
    journal = Journal(tmp_path)
    take(journal, range(100, 200))
    journal.close()
    assert before == {part: part.read_bytes() for part in before}
    assert [one.step for one in read_steps(tmp_path)] == list(range(200))


def test_a_journal_can_be_collected_in_the_thread_that_writes_it():
    """That thread may hold the lock of the event at this moment, and would wait for itself."""

    class Held:
        def set(self):
            raise AssertionError("it is held")

    writer = SimpleNamespace(jobs=SimpleQueue(), urgent=Held())
    _telemetry._finish(writer, threading.current_thread(), os.getpid())
    assert writer.jobs.get_nowait() is None


def test_a_folder_that_cannot_be_flushed_loses_nothing(tmp_path, small_parts, monkeypatch):
    """The new file is in its place by then: what comes next goes there."""

    def sync(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(_files, "sync", sync)
    monkeypatch.setattr(_norms, "sync", sync)
    monkeypatch.setattr(_writer, "WHOLE", 30_000)
    journal = Journal(tmp_path)
    for step in range(600):
        journal.step(record(step, 20))
        if step % 9 == 0:
            journal.flush()
    journal.close()
    there = list(read_steps(tmp_path))
    assert [one.step for one in there] == list(range(600)) and len(earlier(tmp_path, 1000)) > 5
    assert there[-1].names and len([one for one in there if one.names]) > 30


def killed(folder: Path, text: str) -> None:
    """A process that writes 2,000 steps and is killed when something is done the third time."""
    program = f"""
import os, signal, sys
from pathlib import Path
from core.test_journal_files import record
from nanproof.core import _telemetry
from nanproof.core.journal import _norms, _steps, _writer
from nanproof.core.support import _files
_writer.WHOLE = 40_000
_steps.StepFile.SMALLEST = _steps.StepFile.LARGEST = 9000
count = 0
def third(*given, **named):
    global count
    count += 1
    if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)
def before(module, name):
    inner = getattr(module, name)
    setattr(module, name, lambda *given, **named: (third(), inner(*given, **named))[1])
def after(module, name):
    inner = getattr(module, name)
    setattr(module, name, lambda *given, **named: (inner(*given, **named), third())[0])
{text}
journal = _telemetry.Journal(sys.argv[1])
for step in range(2000):
    journal.step(record(step, 30))
    if step % 25 == 0:
        journal.flush()
        print(step, flush=True)
"""
    done = forked.python("-c", program, folder)
    assert done.returncode == -signal.SIGKILL, done.stderr
    flushed = int(done.stdout.split()[-1])
    there = [one.step for one in read_steps(folder)]
    assert there == list(range(len(there))) and there[-1] >= flushed, "what was written is there, once"


@pytest.mark.parametrize(
    "when",
    [
        'after(_steps, "write_whole")',  # between putting the part away and beginning the next, and in between
        'before(_steps, "write_whole")',
        'after(_files, "create")',  # a partial file is left
        'after(_norms, "create")',
        'before(_norms, "sync")',
        'before(_steps.LineFile, "reopen")',
    ],
)
def test_a_kill_at_any_moment_loses_no_written_line(when, tmp_path):
    killed(tmp_path, when)
    before = list(read_steps(tmp_path))
    journal = Journal(tmp_path)
    take(journal, range(len(before), len(before) + 200), 30)
    journal.close()
    there = list(read_steps(tmp_path))
    assert [one.step for one in there] == list(range(len(before) + 200)) and there[-1].names
    run = Run(tmp_path).read()
    assert run.steps == len(there) and run.broken == 0 and run.turns == []
    assert all(map(as_recorded, there))


def test_a_kill_loses_a_second_of_steps_at_most(tmp_path):
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            journal = Journal(tmp_path)
            for step in range(10_000):
                journal.step(record(step))
                os.write(writes, b"%d %.3f\n" % (step, time.monotonic()))
                if step == 5:
                    journal.incident(Incident(step=5, kind="spike", action="recorded"))
                time.sleep(0.01)
        finally:
            os._exit(1)
    os.close(writes)
    time.sleep(2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reads) as pipe:
        taken = [text.split() for text in pipe.read().splitlines()]
    newest = max(one.step for one in read_steps(tmp_path))
    end = float(taken[-1][1])
    assert all(end - float(moment) < 1 for step, moment in taken if int(step) > newest)
    assert [one.step for one in read_incidents(tmp_path)] == [5]


def test_an_incident_is_written_at_once_and_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(_writer.Writer, "PAUSE", 60.0)
    journal = Journal(tmp_path)
    take(journal, range(5))
    started = time.monotonic()
    journal.incident(Incident(step=4, kind="spike", action="recorded"))
    while not list(read_incidents(tmp_path)):
        assert time.monotonic() - started < 5
        time.sleep(0.002)
    assert [one.step for one in read_steps(tmp_path)] == list(range(5)), "the steps before it are written before it"
    journal.close()


def test_a_process_that_ends_writes_what_is_left(tmp_path):
    program = (
        "import sys\nfrom core.test_journal_files import *\nj = Journal(sys.argv[1])\ntake(j, range(50))\n" + "raise ValueError"
    )
    done = forked.python("-c", program, tmp_path)
    assert done.stderr.rstrip().endswith("ValueError")
    assert [one.step for one in read_steps(tmp_path)] == list(range(50))


def test_a_journal_that_is_dropped_writes_what_is_left(tmp_path):
    journal = Journal(tmp_path)
    take(journal, range(20))
    del journal
    assert [one.step for one in read_steps(tmp_path)] == list(range(20))


def test_a_forked_process_writes_nothing_and_does_not_hang(tmp_path):
    """With lines on their way, of which only the process of the run writes any."""
    journal = Journal(tmp_path)
    take(journal, range(30))
    child = os.fork()
    if not child:
        signal.alarm(10)
        status = 1
        try:
            take(journal, range(30, 40))
            journal.incident(Incident(step=1, kind="spike", action="recorded"))
            journal.flush()
            journal.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    take(journal, range(30, 35))
    journal.close()
    assert [one.step for one in read_steps(tmp_path)] == list(range(35)) and list(read_incidents(tmp_path)) == []


def test_training_does_not_wait_for_a_disk_that_hangs(tmp_path, monkeypatch):
    """Steps beyond what may wait are lost, and a line says which."""
    monkeypatch.setattr(Journal, "MOST", 40)
    hung = _writer.threading.Event()
    write = _writer.Writer.work
    monkeypatch.setattr(_writer.Writer, "work", lambda self, jobs: (hung.wait(30), write(self, jobs))[1])
    hung.set()
    journal = Journal(tmp_path)
    hung.clear()
    started = time.monotonic()
    for step in range(2000):
        journal.step(record(step))
    assert time.monotonic() - started < 2
    hung.set()
    journal.flush()
    journal.step(record(2000))
    journal.close()
    texts = [json.loads(text) for text in step_lines(tmp_path / "steps.jsonl")]
    (gap,) = [one for one in texts if one["kind"] == "gap"]
    there = [one.step for one in read_steps(tmp_path)]
    assert there == sorted({*range(2001)} - {*range(gap["first"], gap["last"] + 1)}) and gap["last"] == 1999
    assert gap["lines"] == gap["last"] - gap["first"] + 1
    assert Run(tmp_path).read().gaps == [(gap["first"], 1999, "The disk was too slow")]


def test_a_rotation_for_which_there_is_no_room_is_put_off(tmp_path, small_parts):
    journal = Journal(tmp_path)
    (tmp_path / "steps").write_text("in the way")
    for step in range(100):
        journal.step(record(step))
        if step % 10 == 0:
            journal.flush()
    (tmp_path / "steps").unlink()
    take(journal, range(100, 150))
    journal.flush()
    with no_file_larger((tmp_path / "steps.jsonl").stat().st_size // 9):
        take(journal, range(150, 160))
        journal.flush()
    take(journal, range(160, 200))
    journal.close()
    assert [one.step for one in read_steps(tmp_path)] == list(range(200))
    assert not [path.name for path in tmp_path.rglob(".*")]


# -- damaged files ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    journal = Journal(folder)
    take(journal, range(20))
    journal.close()
    return folder


def with_norms(folder: Path, data: bytes, tmp_path: Path) -> list[int]:
    (tmp_path / "steps.jsonl").write_bytes((folder / "steps.jsonl").read_bytes())
    (tmp_path / "norms.bin").write_bytes(data)
    there = list(read_steps(tmp_path))
    assert [one.step for one in there] == list(range(20)), "lines need no norms"
    assert all(map(as_recorded, there))
    run = Run(tmp_path).read()
    assert run.steps == 20 and run.norms.steps == [one.step for one in there if one.names]
    return [one.step for one in there if one.names]


def test_a_file_cut_anywhere_is_read_up_to_its_end_and_gone_on_with(whole, tmp_path):
    data = (whole / "norms.bin").read_bytes()
    for cut in [*range(0, len(data), 31), len(data) - 1]:
        there = with_norms(whole, data[:cut], tmp_path)
        assert there == list(range(len(there)))
        journal = Journal(tmp_path)
        journal.step(record(20))
        journal.close()
        assert [one.step for one in read_steps(tmp_path) if one.names] == [*there, 20]
        for path in ("steps.jsonl", "norms.bin", "incidents.jsonl"):
            (tmp_path / path).unlink()


def test_a_flipped_bit_costs_one_block(whole, tmp_path):
    data = (whole / "norms.bin").read_bytes()
    rng = random.Random(0)
    header = 200
    for _ in range(60):
        at = rng.randrange(header, len(data))
        broken = bytearray(data)
        broken[at] ^= 1 << rng.randrange(8)
        there = with_norms(whole, bytes(broken), tmp_path)
        assert len(there) >= 18


def test_a_block_is_checked(whole):
    payload = packed_columns([("norms", "l", b"\0\0")])
    assert list(unpacked_columns(payload)) == ["norms"]
    for broken in (payload[:-1], payload + b"\x09", payload + payload, b"\xff" * 9, packed_columns([("norms", "l", b"\0")])):
        with pytest.raises(ValueError):
            unpacked_columns(broken)


def test_blocks_of_other_names_are_no_norms(whole, tmp_path):
    """A header with fewer names than a block has norms, one that is missing, and one that is no JSON."""
    header = zlib.compress(json.dumps({"names": ["a"], "sites": []}).encode())
    step = record(0)
    payload = packed_columns([("norms", "l", log_codes([step.norms]))])
    blocks = [
        packed(HEADER, header, header=1, number=1),
        packed(HEADER, b"nonsense", header=2, number=2),
        *(packed(STEP, payload, header=h, number=3 + h, step=0, time=step.time) for h in (1, 2, 3)),
    ]
    assert with_norms(whole, b"".join(blocks), tmp_path) == []


def test_a_reader_asks_for_no_more_than_is_there(tmp_path):
    """Lengths are claims."""
    for length in (1 << 20, (8 << 20) + 1, 0xFFFFFFFF):
        path = tmp_path / "norms.bin"
        path.write_bytes(b"NPB1\x02\0\0\0" + length.to_bytes(4, "little") + bytes(200))
        with open(path, "rb") as file:
            assert list(BlockReader().blocks(file)) == []


def test_a_part_that_is_damaged_is_read_as_far_as_it_can_be(tmp_path, small_parts):
    journal = Journal(tmp_path)
    for step in range(100):
        journal.step(record(step))
        journal.flush()
    journal.close()
    first = tmp_path / "steps" / "000002.jsonl.gz"
    data = first.read_bytes()
    for broken in (data[: len(data) // 2], b"", b"\x1f\x8b nonsense", data[:60] + bytes(60) + data[120:]):
        first.write_bytes(broken)
        there = [one.step for one in read_steps(tmp_path)]
        assert there == sorted(there) and there[0] == 0 and there[-1] == 99 and len(there) > 70
        assert Run(tmp_path).read().steps == len(there)


def test_compressing_is_exact_where_there_is_room():
    import gzip

    data = b"".join(record(step).to_line().encode() for step in range(200))
    assert gzip.decompress(compressed(data, set)) == data
