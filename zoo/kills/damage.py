"""Checkpoints damaged in every way a disk, a copy or a hand damages files; and disks that are full, read-only, gone, or shared.

What must come of a damaged checkpoint: it is passed over with a reason, and the newest other good one is loaded. Where the damage
hit nothing that matters (a digit of the date in `good.json`), the state that is loaded must still be the right one, bit for bit.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import nanproof
from zoo.kills.campaign import Child, Tally, good_on_disk, newest, remains, table_of
from zoo.kills.worker import Board, Run, Spec, fork_writers, life, quiet, tell

SAVED, ALL = 60, 64
"""Steps of the run whose checkpoints are damaged, and of the run that goes on from them."""

Damage = Callable[[random.Random, Path, Path], None]
"""(chance, the checkpoint, another checkpoint)"""


def _file(chance: random.Random, path: Path) -> Path:
    return chance.choice(sorted(p for p in path.iterdir() if p.is_file()))


def truncated(chance: random.Random, path: Path, other: Path) -> None:
    file = _file(chance, path)
    os.truncate(file, chance.randrange(file.stat().st_size))


def flipped(chance: random.Random, path: Path, other: Path) -> None:
    file = _file(chance, path)
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def deleted(chance: random.Random, path: Path, other: Path) -> None:
    _file(chance, path).unlink()


def zeros(chance: random.Random, path: Path, other: Path) -> None:
    file = _file(chance, path)
    file.write_bytes(bytes(file.stat().st_size))


def noise(chance: random.Random, path: Path, other: Path) -> None:
    file = _file(chance, path)
    start = chance.randrange(file.stat().st_size)
    with open(file, "r+b") as stream:
        stream.seek(start)
        stream.write(chance.randbytes(64))


def longer(chance: random.Random, path: Path, other: Path) -> None:
    with open(_file(chance, path), "ab") as stream:
        stream.write(b"\n" * chance.randint(1, 100))


def swapped(chance: random.Random, path: Path, other: Path) -> None:
    """A file of another checkpoint in the place of its own, and the other way round."""
    mine = _file(chance, path)
    theirs, aside = other / mine.name, path / "aside"
    mine.rename(aside)
    theirs.rename(mine)
    aside.rename(theirs)


def exchanged(chance: random.Random, path: Path, other: Path) -> None:
    """Two whole checkpoints under each other's name."""
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def a_folder(chance: random.Random, path: Path, other: Path) -> None:
    """A folder in the place of a file."""
    file = _file(chance, path)
    file.unlink()
    file.mkdir()


def emptied(chance: random.Random, path: Path, other: Path) -> None:
    for file in path.iterdir():
        file.unlink()


DAMAGES: tuple[Damage, ...] = (truncated, flipped, deleted, zeros, noise, longer, swapped, exchanged, a_folder, emptied)


def damaged(count: int, seed: int) -> Tally:
    """The checkpoints of one run, damaged in one way after the other; each time a new process goes on from what is left."""
    tally, chance, board = Tally(), random.Random(seed), Board()
    spec = Spec("poisoned", seed, ALL, keep=3)
    table = table_of(spec)
    with tempfile.TemporaryDirectory() as home:
        saved = Path(home, "saved")
        Child(stopped, spec, saved, SAVED).end(120)
        for number in range(count):
            folder = Path(home, "damaged")
            shutil.copytree(saved, folder)
            good = list(good_on_disk(folder))
            damage = DAMAGES[number % len(DAMAGES)]
            # The newest one mostly; now and then the two newest; now and then all of them.
            victims = good[-1:] if chance.random() < 0.75 else good[-2:] if chance.random() < 0.7 else good
            for name in victims:
                damage(chance, folder / name, folder / good[0 if name != good[0] else 1])
            where = f"{damage.__name__}, {len(victims)} of {len(good)}, trial {number}"
            left = good_on_disk(folder)
            said = Child(life, spec, folder, board, None, 0).end(60)
            tally.trials += 1
            tally.details[damage.__name__] += 1
            if "finished" not in said:
                tally.problems.append(f"{where}: {said}")
            else:
                tally.resumed(said["resumed"], newest(left), table, where)
                tally.ended(said["finished"], table[ALL], where)
                heard = said["resumed"]["said"]
                passed = [name for name in good if name not in left and int(name[5:13]) > newest(left)]
                if not all(any(f"passed over {name}: " in line for line in heard) for name in passed):
                    tally.problems.append(f"{where}: {passed} were passed over without a word: {heard}")
                after = good_on_disk(folder)
                if len(after) < spec.keep:
                    tally.gone(f"{where}: good before {sorted(left)}, at the end {sorted(after)}")
            shutil.rmtree(folder)
    return tally


def stopped(pipe: int, spec: Spec, folder: Path, steps: int) -> None:
    """A run that stops in the middle, with everything on the disk."""
    quiet()
    run = Run(spec, folder)
    run.data = run.guard.wrap(run.data)
    run.train(steps, lambda step: None)
    run.guard.parts.recovery.close(alone=False)


# -- disks ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(size: int) -> Iterator[Path | None]:
    """A disk of so many bytes; None where this process may not mount one."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]
        try:
            mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            mounted = False
        try:
            yield Path(folder) if mounted else None
        finally:
            if mounted:
                subprocess.run(["umount", folder], check=True)


def full_for_a_while(pipe: int, spec: Spec, folder: Path, how: str) -> None:
    """Train while nothing can be written for a third of the time. Reports what is good and what lies around before, while and
    after it is so."""
    told = quiet()
    fork_writers()
    run = Run(spec, folder / "checkpoints")
    run.data = run.guard.wrap(run.data)
    filler, unlimited = folder / "filler", resource.getrlimit(resource.RLIMIT_FSIZE)
    looks = []

    def look() -> None:
        assert run.guard.parts.recovery.saver is not None
        run.guard.parts.recovery.saver.wait()
        looks.append([list(good_on_disk(folder / "checkpoints")), remains(folder / "checkpoints")])

    def fill() -> None:
        if how == "small disk":
            with suppress(OSError), open(filler, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        else:
            limit((1000, unlimited[1]))

    def make_room() -> None:
        if how == "small disk":
            filler.unlink()
        else:
            limit(unlimited)

    def limit(to: tuple[int, int]) -> None:
        """Here, and in the process that writes."""
        assert run.guard.parts.recovery.saver is not None
        writer = run.guard.parts.recovery.saver.writer
        for pid in (0, *((writer.pid,) if writer is not None and writer.pid is not None else ())):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, to)

    moments = {spec.steps // 3: fill, 2 * spec.steps // 3: make_room, spec.steps: lambda: None}

    def stepped(step: int) -> None:
        if step in moments:
            look()
            moments.pop(step)()

    run.train(spec.steps, stepped)
    run.guard.close()
    tell(pipe, "finished", digest=run.digest(), looks=looks, said=told.lines)


def gone_for_a_while(pipe: int, spec: Spec, folder: Path) -> None:
    """The folder is moved away in the middle of training, and comes back."""
    told = quiet()
    fork_writers()
    run = Run(spec, folder / "checkpoints")
    run.data = run.guard.wrap(run.data)
    looks = []
    moves = {spec.steps // 3: ("checkpoints", "aside"), 2 * spec.steps // 3: ("aside", "checkpoints"), spec.steps: None}

    def stepped(step: int) -> None:
        if step in moves:
            run.guard.parts.recovery.saver.wait()
            looks.append([list(good_on_disk(folder / "checkpoints")), remains(folder)])
            move = moves.pop(step)
            if move is not None:
                (folder / move[0]).rename(folder / move[1])

    run.train(spec.steps, stepped)
    run.guard.close()
    tell(pipe, "finished", digest=run.digest(), looks=looks, said=told.lines)


def refuses(pipe: int, spec: Spec, folder: Path, as_nobody: bool) -> None:
    """Make a guard over a folder that cannot be had; the error it raises."""
    quiet()
    if as_nobody and os.geteuid() == 0:
        os.setgroups([])
        os.seteuid(65534)
    try:
        Run(spec, folder)
    except nanproof.UsageError as error:
        tell(pipe, "refused", why=str(error))


def disks(seed: int) -> Tally:
    """Full, read-only, gone for a while: training goes on, and what was good stays good."""
    tally = Tally()
    spec = Spec("poisoned", seed, 90, keep=2)
    table = table_of(spec)
    ways: list[tuple[str, Callable[[Path], Child]]] = [
        ("files may not grow", lambda folder: Child(full_for_a_while, spec, folder, "limit")),
        ("folder gone for a while", lambda folder: Child(gone_for_a_while, spec, folder)),
    ]
    for name, start in ways:
        with tempfile.TemporaryDirectory() as home:
            _trouble(tally, name, start(Path(home)), table, Path(home, "checkpoints"), spec)
    with small_disk(700_000) as disk:
        if disk is None:
            tally.details["full disk: not tried, mounting is not allowed"] += 1
        else:
            child = Child(full_for_a_while, spec, disk, "small disk")
            _trouble(tally, "full disk", child, table, disk / "checkpoints", spec)
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o755)
        folder = Path(home, "read-only")
        folder.mkdir(mode=0o555)
        said = Child(refuses, spec, folder, True).end(60)
        tally.trials += 1
        tally.details["read-only folder"] += 1
        if "cannot be written" not in said.get("refused", {}).get("why", ""):
            tally.problems.append(f"read-only folder: {said}")
    return tally


def _trouble(tally: Tally, name: str, child: Child, table: dict[int, int], folder: Path, spec: Spec) -> None:
    said = child.end(120)
    tally.trials += 1
    tally.details[name] += 1
    if "finished" not in said:
        tally.problems.append(f"{name}: {said}")
        return
    report = said["finished"]
    (before, _), (during, lying), (after, later) = report["looks"]
    tally.ended(report, table[spec.steps], name)
    if name != "folder gone for a while" and (len(during) < len(before) or during[-1] < before[-1]):
        tally.gone(f"{name}: good before {before}, during {during}")
    if lying or later:
        tally.problems.append(f"{name}: half-written things stayed: {lying} {later}")
    if not any("was not written" in line for line in report["said"]):
        tally.problems.append(f"{name}: nothing was said: {report['said']}")
    if len(after) < spec.keep or max(after) <= max(before):
        tally.gone(f"{name}: saving did not go on: {before} {during} {after}")
    there = newest(good_on_disk(folder))
    again = Child(life, spec, folder, Board(), None, 0).end(60)
    tally.resumed(again.get("resumed", {"step": -1, "digest": 0, "said": again}), there, table, f"{name}: a new process")


# -- two processes in one folder -----------------------------------------------------------------------------------------------


def two_at_once(seed: int, count: int = 5) -> Tally:
    """While one trains, others want its folder: each is turned away, and the one is not disturbed."""
    tally, board = Tally(), Board()
    spec = Spec("capped", seed, 150)
    table = table_of(spec)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        first = Child(life, spec, folder, board, None, 0)
        while not (folder / "lock").exists() or not (folder / "lock").read_text():
            time.sleep(0.005)
        for _ in range(count):
            said = Child(refuses, spec, folder, False).end(60)
            tally.trials += 1
            if "in use by another process" not in said.get("refused", {}).get("why", ""):
                tally.problems.append(f"a second process was not turned away: {said}")
        said = first.end(120)
        if "finished" not in said:
            tally.problems.append(f"the first process was disturbed: {said}")
        else:
            tally.ended(said["finished"], table[spec.steps], "the first process")
            if len(good_on_disk(folder)) < spec.keep:
                tally.gone(f"the first process: good are {good_on_disk(folder)}")
    return tally
