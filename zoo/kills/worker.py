"""The training that `campaign.py` kills: what one life of it does, where in it the kill may strike, and what it reports.

Every life is a forked process. It builds the same small run, resumes it, and trains to the end, unless it is killed. It may be
told to kill itself inside an operation: at the n-th call that touches the disk (open, write, fsync, rename, mkdir, unlink, rmdir)
while it saves, promotes, rotates, deletes, goes back, resumes or starts. A write that is struck leaves half of its bytes.
Nothing in the library knows about this: the calls are replaced in the life's own process, and in the one that writes its
checkpoints, which is forked from it. There, the kill strikes either of the two, or both.
"""

from __future__ import annotations

import builtins
import io
import json
import logging
import math
import mmap
import os
import signal
import socket
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

import nanproof
from nanproof.recover._recovery import Recovery
from nanproof.recover.state import _writer
from nanproof.recover.state._apart import serve
from nanproof.recover.state._store import Store

PHASES = ("training", "building", "resuming", "saving", "promoting", "rotating", "deleting", "going back")
STRUCK = {
    "building": (Store, "__init__"),
    "resuming": (Recovery, "resume"),
    "saving": (Store, "write"),
    "promoting": (Store, "promote"),
    "rotating": (Store, "_rotate"),
    "deleting": (Store, "_delete"),
    "going back": (Recovery, "go_back"),
}


@dataclass(frozen=True)
class Spec:
    """A run. Everything in it is decided by these numbers."""

    kind: str
    """poisoned: a weight becomes NaN now and then, and the run goes back to the disk; capped: stretches of bad batches send it
    back to memory, past them; own loop: poisoned too, in a loop that calls backward and step itself, and goes back to a copy in
    memory that may be older than every checkpoint."""
    seed: int
    steps: int
    every: int = 5
    keep: int = 2
    prove: int = 3

    def policy(self) -> nanproof.Policy:
        return nanproof.Policy(
            diagnose="never",
            snapshot_every={"poisoned": 0, "capped": 7, "own loop": 25}[self.kind],
            max_consecutive_skips=2,
            max_skip_rate=1.0,
            max_rollbacks=1000,
            rollback_margin=0,
        )


@dataclass(frozen=True)
class Plan:
    """Where a life ends: in which phase, the how manieth of them, at which call in it. 0: when that phase is over."""

    phase: str
    turn: int
    call: int
    victim: str = "run"
    """Who dies where a process of its own writes: the run, the writer, or both."""


class Rows(Dataset):
    """Samples of a line with noise. The last ones are not finite."""

    def __init__(self, count: int, bad: int) -> None:
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(count + bad, 6, generator=g)
        self.y = self.x @ torch.randn(6, generator=g) + 0.1 * torch.randn(count + bad, generator=g)
        self.x[count:, 1] = math.nan
        self.good = count

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


class BadStretches(Sampler[list[int]]):
    """Shuffled batches; one epoch in three has a stretch of bad ones. Which, its generator decides: it can be repeated."""

    def __init__(self, rows: Rows, seed: int) -> None:
        self.rows, self.generator = rows, torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.rows.good, generator=self.generator).tolist()
        for i in range(0, len(order), 8):
            bad = order[0] % 3 == 0 and 64 <= i < 88  # not before there is a state to go back to
            yield list(range(self.rows.good, len(self.rows))) if bad else order[i : i + 8]

    def __len__(self) -> int:
        return self.rows.good // 8


class Run:
    """The run of a spec, in this process."""

    def __init__(self, spec: Spec, folder: Path | None, rank: int | None = None) -> None:
        torch.manual_seed(spec.seed)
        self.spec = spec
        self.model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
        if rank is not None:
            self.model = nn.parallel.DistributedDataParallel(self.model)
            torch.manual_seed(spec.seed + 100 * rank)  # dropout
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, spec.steps)
        where = None
        if folder is not None:
            where = nanproof.Checkpoints(folder, every=spec.every, keep=spec.keep, prove=spec.prove)
        self.guard = nanproof.Guard(
            self.model, self.optimizer, loss_fn=loss, scheduler=self.scheduler, policy=spec.policy(), checkpoints=where
        )
        rows = Rows(96, 8) if spec.kind == "capped" else Rows(95, 1)
        self.data: Any
        if spec.kind == "capped":
            self.data = DataLoader(rows, batch_sampler=BadStretches(rows, spec.seed))
        else:
            order = torch.Generator().manual_seed(spec.seed + 10 * (rank or 0))
            self.data = DataLoader(rows, 8, shuffle=True, generator=order)

    def train(self, until: int, stepped: Callable[[int], None]) -> None:
        """Epochs until so many steps are taken."""
        guard = self.guard
        while guard.next_step < until:
            for batch in self.data:
                if self.spec.kind == "own loop":
                    self.optimizer.zero_grad()
                    value = loss(self.model, batch)
                    guard.backward(value)
                    guard.step(value)
                    self.scheduler.step()
                else:
                    guard.train_step(batch)
                stepped(guard.next_step)
                if guard.next_step >= until:
                    break

    def poison(self) -> None:
        with torch.no_grad():
            next(self.model.parameters())[0, 0] = math.nan

    def digest(self, buffers: bool = True) -> int:
        """A checksum over weights, buffers, optimizer, schedule and random numbers, taken without the library."""
        parts = self.model.state_dict() if buffers else dict(self.model.named_parameters())
        value = zlib.crc32(repr((self.optimizer.state_dict()["param_groups"], self.scheduler.state_dict())).encode())
        moments = [t for _, state in sorted(self.optimizer.state_dict()["state"].items()) for _, t in sorted(state.items())]
        for t in (*parts.values(), *moments, torch.get_rng_state()):
            value = zlib.crc32(t.detach().contiguous().numpy().tobytes(), value)
        return value


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])


# -- what the parent sees of a life --------------------------------------------------------------------------------------------


class Board:
    """A few numbers in memory that outlives the life: where it was when it died, and what it had promised."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 64)

    def wipe(self) -> None:
        self._memory[:] = bytes(64)

    def write(self, place: int, number: int) -> None:
        struct.pack_into("<i", self._memory, 4 * place, number)

    def read(self, place: int) -> int:
        return int(struct.unpack_from("<i", self._memory, 4 * place)[0])

    MAIN, SAVER, PROMOTED, WENT_BACK, STRUCK, CALLS = 0, 1, 2, 3, 4, 5  # from CALLS on: most calls of one phase, by phase

    @property
    def phase(self) -> str:
        """What was struck; of a kill from outside, what was going on, on the disk first."""
        return PHASES[self.read(self.STRUCK) or self.read(self.SAVER) or self.read(self.MAIN)]


class Killer:
    """Replaces the calls that touch the disk, counts them in the planned phase, and kills this process at the planned one."""

    def __init__(self, board: Board, plan: Plan | None) -> None:
        self._board, self._plan = board, plan
        self._turns = dict.fromkeys(PHASES, 0)
        self._open_phases: list[list[Any]] = []
        self._lock = threading.Lock()
        self._run = os.getpid()

    def install(self, struck: dict[str, tuple[Any, str]] = STRUCK) -> None:
        """`struck`: the class and method of each phase."""
        for name in ("fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "open"):
            setattr(os, name, self._counted(getattr(os, name)))
        real = builtins.open

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            self._call()
            made = real(file, mode, *args, **kwargs)
            return _Torn(made, self) if set(mode) & set("wax+") else made

        builtins.open = io.open = opened  # type: ignore[assignment]
        for phase, (cls, name) in struck.items():
            setattr(cls, name, self._phased(phase, getattr(cls, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._call()
            return function(*args, **kwargs)

        return counted

    def _phased(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        number = PHASES.index(phase)

        def phased(*args: Any, **kwargs: Any) -> Any:
            in_main = threading.current_thread() is threading.main_thread() and os.getpid() == self._run
            place = Board.MAIN if in_main else Board.SAVER
            before = self._board.read(place)
            self._board.write(place, number)
            self._turns[phase] += 1
            plan = self._plan
            planned = plan is not None and plan.phase == phase and plan.turn == self._turns[phase]
            entry = [number, planned, 0]
            with self._lock:
                self._open_phases = [*self._open_phases, entry]
            if phase == "going back":  # good ones of the way that is given up may go
                self._board.write(Board.WENT_BACK, self._board.read(Board.WENT_BACK) + 1)
                self._promise(0)
            try:
                made = function(*args, **kwargs)
                if phase == "promoting" and list(args[0].folder.glob(f"step-{args[1]:08d}*/good.json")):
                    self._promise(args[1])
                return made
            finally:
                if planned:  # fewer calls than planned, or none asked for
                    self._strike(number)
                with self._lock:
                    self._open_phases = [known for known in self._open_phases if known is not entry]
                self._board.write(place, before)

        return phased

    def _promise(self, step: int) -> None:
        """From now on the checkpoint of this step must be there; 0: none needs to. What becomes good while the run goes back may
        be given up at once."""
        with self._lock:
            number, times = PHASES.index("going back"), self._board.read(Board.WENT_BACK)
            going_back = any(entry[0] == number for entry in self._open_phases) or self._board.read(Board.MAIN) == number
            self._board.write(Board.PROMOTED, 0 if going_back else max(step, self._board.read(Board.PROMOTED)))
            if self._board.read(Board.WENT_BACK) != times:  # the run's process began to, meanwhile
                self._board.write(Board.PROMOTED, 0)

    def _call(self) -> None:
        """A call to the disk is about to be made."""
        for entry in self._open_phases:
            entry[2] += 1
            place = Board.CALLS + entry[0]
            self._board.write(place, max(self._board.read(place), entry[2]))
            if entry[1] and self._plan is not None and entry[2] == self._plan.call:
                self._strike(entry[0])

    def due(self) -> bool:
        """Like `_call`, for a caller that wants to leave half of something behind first."""
        plan = self._plan if not self._board.read(Board.STRUCK) else None
        return plan is not None and any(planned and calls + 1 == plan.call for _, planned, calls in self._open_phases)

    def written(self, path: Any) -> None:
        """Native code has written this file. A kill that is due leaves half of it."""
        if self.due():
            os.truncate(path, os.stat(path).st_size // 2)
        self._call()

    def _strike(self, number: int) -> None:
        """Once a life: a writer that was struck is replaced by another."""
        if self._board.read(Board.STRUCK):
            return
        self._board.write(Board.STRUCK, number)
        apart, victim = os.getpid() != self._run, self._plan.victim if self._plan is not None else "run"
        if apart and victim != "writer":
            os.kill(self._run, signal.SIGKILL)
        if not apart or victim != "run":
            os.kill(os.getpid(), signal.SIGKILL)


class _Torn:
    """A file whose last write before the kill is done by half."""

    def __init__(self, file: Any, killer: Killer) -> None:
        self._file, self._killer = file, killer

    def write(self, data: Any) -> int:
        if self._killer.due():
            part = data if isinstance(data, str) else bytes(data)
            self._file.write(part[: len(part) // 2])
            self._file.flush()
        self._killer._call()
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Torn:
        return self

    def __exit__(self, *args: Any) -> None:
        self._file.close()


# -- lives ---------------------------------------------------------------------------------------------------------------------


class Told(logging.Handler):
    """What the library logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("nanproof")
        logger.handlers, logger.propagate = [self], False
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def quiet() -> Told:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return Told()


def tell(pipe: int, what: str, **facts: Any) -> None:
    os.write(pipe, (json.dumps({"what": what, **facts}) + "\n").encode())


def reference(pipe: int, spec: Spec) -> None:
    """The run that nothing happens to: its checksum at every step. Without checkpoints; without the wrapped loader where it can
    do without. A step that came twice counts as it was the last time."""
    quiet()
    run = Run(spec, None)
    if spec.kind == "capped":
        run.data = run.guard.wrap(run.data)
    table = {0: run.digest()}
    run.train(spec.steps, lambda step: table.update({step: run.digest()}))
    tell(pipe, "reference", table=table, refused=sum(i.action == "skipped" for i in run.guard.incidents))


class Forked:
    """A process that was forked to write checkpoints: what the library uses of `subprocess.Popen`."""

    def __init__(self, channel: socket.socket, folder: Path, keep: int) -> None:
        run = os.getpid()
        self._status: int | None = None
        self.pid = os.fork()
        if not self.pid:
            try:
                serve(channel.fileno(), run, str(folder), keep)
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        return self._end(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        status = self._end(0)
        assert status is not None
        return status

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def _end(self, options: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, options)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


def fork_writers() -> None:
    """From here on the process that writes is forked: it begins in milliseconds, and what was replaced here is replaced there."""
    _writer.launch = Forked


def life(pipe: int, spec: Spec, folder: Path, board: Board, plan: Plan | None, poison_after: int) -> None:
    """Resume, report, train to the end, report."""
    told = quiet()
    Killer(board, plan).install()
    fork_writers()
    run = Run(spec, folder)
    start = run.guard.resume()
    run.data = run.guard.wrap(run.data)
    tell(pipe, "resumed", step=start, digest=run.digest(), said=told.lines)
    taken = 0

    def stepped(step: int) -> None:
        nonlocal taken
        taken += 1
        if taken >= poison_after > 0 and step < spec.steps and spec.kind != "capped" and _can_go_back(run):
            taken = -(10**9)  # once a life
            run.poison()

    run.train(spec.steps, stepped)
    run.guard.close()
    tell(pipe, "finished", digest=run.digest(), incidents=[i.action for i in run.guard.incidents], said=told.lines)


def _can_go_back(run: Run) -> bool:
    recovery = run.guard.parts.recovery
    return any(s.confirmed for s in recovery.snapshots.kept) or any(saved.good for saved in recovery.store.checkpoints())
