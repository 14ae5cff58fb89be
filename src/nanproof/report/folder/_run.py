"""Run: a run's folder, read as far as it is written, and again when there is more. For `report`, `watch` and `doctor`. No torch.

A run whose optimizers have verdicts of their own, as in a GAN, has records for each of them: `Run.parts`, as the index in the
folder lists them (`core.support._index`).

Nothing here trusts the files: a line that is cut or is no record is counted in `broken` and passed over.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanproof._access import open_regular
from nanproof._errors import UsageError
from nanproof._records import NOT_A_RECORD, Forecast, Incident, StepRecord, decode, halt
from nanproof._sound import check_action, check_step
from nanproof._text import one_line
from nanproof.core.support._files import LOCK
from nanproof.core.support._index import INDEX, read_index
from nanproof.files._blocks import ABSENT, Block
from nanproof.files._parts import STEPS
from nanproof.report.folder._series import MOST_TERMS, Curves, Heat
from nanproof.report.folder._tails import BlockTail, StepTail, Tail

LONGEST_NAME = 200
"""Characters of the name of a term."""
NEAR = 50
"""Steps on either side of an incident that are kept one by one."""
MOST_GAPS = 20
"""Gaps in the records that are shown."""
MOST_NEAR = 200
"""Incidents of which that is done."""
PORTION = 32 << 20
"""Bytes of steps that one `poll` reads."""
STATES = ("halted", "running", "stopped", "unknown", "ended", "waiting")
"""The first that is true of any optimizer is the state of the run."""


@dataclass(frozen=True, slots=True)
class Brief:
    """A step without its norms."""

    step: int
    loss: float
    grad_norm: float
    lr: float | None
    scale: float | None
    action: str
    terms: tuple[tuple[str, float], ...] = ()
    """Of the loss, as many as are shown."""


class Run:
    """What is known of a run so far. `poll` reads on. Where a run has several optimizers, this is the first of them, and `parts`
    are all; `state` and `total` are about the whole run."""

    def __init__(self, folder: str | Path, *, buckets: int = 2000, whole: bool = True) -> None:
        """`whole`: also read the other optimizers of the run."""
        self.folder = Path(folder)
        self.name = Path(os.path.abspath(self.folder)).name or str(self.folder)
        self.optimizer = ""
        """Its name, where the run has several."""
        self.others: list[Run] = []
        """The other optimizers of the run."""
        self._buckets, self._whole = buckets, whole
        self._index: tuple[int, int, int] | None = None
        self._reset()

    def _reset(self) -> None:
        self.earlier = 0
        """Runs that were begun in this folder before the one that is shown, which was not resumed but started from step 0."""
        self.about: dict[str, Any] = {}
        """Versions, device, optimizer, settings, as of the last time the run was opened; empty for runs of older versions."""
        self.opened: float | None = None
        """When it was opened first, in seconds since 1970."""
        self.closed: float | None = None
        """When it was closed; None while it is open, or if it was killed."""
        self.incidents: list[Incident] = []
        self.forecasts: list[Forecast] = []
        self.broken = 0
        """Lines that are no record."""
        self._when: dict[int, float] = {}
        """When an incident or a forecast, by its identity, was written."""
        self._names: tuple[str, ...] = ()
        self._sites: tuple[str, ...] = ()
        self._reopened: float | None = None
        self._tails = {name: Tail(self.folder / f"{name}.jsonl") for name in ("incidents", "forecasts")}
        self._tails["steps"] = StepTail(self.folder)
        self._no_steps()

    def _no_steps(self) -> None:
        self.curves = Curves(self._buckets)
        self.norms = Heat()
        """Gradient norms of the parameters."""
        self.absmax = Heat()
        """Largest outputs of modules, where the guard observes."""
        self.turns: list[tuple[int, int]] = []
        """(from, to): every time the run went back, or was resumed from an earlier step."""
        self.near: dict[int, Brief] = {}
        """Every step that is close to an incident; taken again, as it was the last time."""
        self.given_up: dict[int, Brief] = {}
        """Of those that were taken again, how it was the first time."""
        self.counts: Counter[str] = Counter()
        """Steps by action; those that were given up and taken again count twice."""
        self.steps = 0
        """Steps that were recorded."""
        self.gaps: list[tuple[int, int, str]] = []
        """First and last step that could not be written, and why: the disk was full, say."""
        self.seconds = 0.0
        """How long it has been training, without the time between a kill and a resume."""
        self._wanted: set[int] = set()
        self._recent: deque[Brief] = deque(maxlen=NEAR)
        self._times: deque[float] = deque(maxlen=NEAR)
        self._last: dict[str, Any] | None = None
        self._next: int | None = None
        self._blocks = BlockTail(self.folder)
        self._next_norms: int | None = None

    def poll(self, portion: int = PORTION) -> bool:
        """Read what is new, at most about so many bytes of it; True if there was anything. A folder that was emptied and written
        anew is read from the start."""
        if any(tail.replaced() for tail in self._tails.values()):
            self._reset()
        new = self._whole and self._look_for_others()
        for name, take in (("incidents", self._incident), ("forecasts", self._forecast), ("steps", self._line)):
            for data in self._tails[name].lines(portion):
                self._take(take, data)
                new = True
        new = self._read_blocks(portion) or new
        for other in self.others:
            new = other.poll(portion) or new
        return new

    def _look_for_others(self) -> bool:
        """Follow the index. Return whether it changed."""
        try:
            found = (self.folder / INDEX).stat()
            now = found.st_ino, found.st_size, found.st_mtime_ns
        except OSError:
            now = None
        if now == self._index:
            return False
        self._index = now
        known = {other.folder: other for other in self.others}
        self.optimizer, self.others = "", []
        for folder, name in read_index(self.folder):
            part = self if folder == self.folder else known.get(folder) or Run(folder, buckets=self._buckets, whole=False)
            part.optimizer = one_line(name, 120)
            self.others += [part] if part is not self else []
        return True

    def read(self) -> Run:
        """Read all of it."""
        while self.poll():
            pass
        return self

    @property
    def parts(self) -> list[Run]:
        """Each optimizer of the run, this one first."""
        return [self, *self.others]

    @property
    def total(self) -> Counter[str]:
        """Steps by action, and "steps", "incidents" and "forecasts", of all optimizers."""
        counts: Counter[str] = Counter()
        for part in self.parts:
            counts.update(part.counts)
            counts.update(steps=part.steps, incidents=len(part.incidents), forecasts=len(part.forecasts))
        return counts

    @property
    def halted(self) -> Incident | None:
        """The incident that halted this optimizer, if it took no step after it."""
        return halt(self.incidents, None if self.newest is None else self.newest.step)

    @property
    def last(self) -> StepRecord | None:
        """The newest step, if all of it can be read. Without norms: they are in `norms`."""
        try:
            return None if self._last is None else StepRecord.from_json(self._last, self._names, self._sites)
        except NOT_A_RECORD:
            return None

    @property
    def newest(self) -> Brief | None:
        """The newest step without its norms, which costs nothing."""
        return self._recent[-1] if self._recent else None

    @property
    def rate(self) -> float | None:
        """Steps a second, over the last fifty."""
        times = self._times
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else None

    @property
    def state(self) -> str:
        """ "running", "halted" (too many steps were refused), "ended" (closed), "stopped" (the process ended without closing),
        "waiting" (nothing is written yet) or "unknown" (written on another machine, and not lately)."""
        return min((part.state_alone for part in self.parts), key=STATES.index)

    @property
    def state_alone(self) -> str:
        """The same for this optimizer alone."""
        if self.halted is not None:
            return "halted"
        if self.closed is not None:
            return "ended"
        if not self.steps and self.opened is None:
            return "waiting"
        alive = _writer_lives(self.folder)
        if alive is None:
            return "running" if _age(self.folder / STEPS) < 120 else "unknown"
        return "running" if alive else "stopped"

    def _take(self, take: Callable[[dict[str, Any]], None], data: Any) -> None:
        """Take in a line, or count it as broken."""
        try:
            if data is None:
                raise ValueError("not JSON")
            if take == self._line or data["kind"] != "gap":
                take(data)
        except NOT_A_RECORD:
            self.broken += 1

    def _line(self, data: dict[str, Any]) -> None:
        kind = data["kind"]
        if kind == "step":
            self._step(data)
        elif kind == "header":
            self._names, self._sites = tuple(map(str, data["names"])), tuple(map(str, data.get("sites", ())))
        elif kind == "opened":
            self.about, self.closed = dict(data["about"]), None
            self._reopened = float(data["time"])
            self.opened = self._reopened if self.opened is None else self.opened
            self._times.clear()
        elif kind == "closed":
            self.closed = float(data["time"])
        elif kind == "gap":
            check_step(data["first"])
            check_step(data["last"])
            self.gaps = [*self.gaps[-MOST_GAPS + 1 :], (data["first"], data["last"], str(data["why"])[:200])]
        elif kind == "thinned":
            for action, count in data["left_out"].items():
                check_action(action)
                check_step(count)
                self.counts[action] += count
                self.steps += count

    def _step(self, data: dict[str, Any]) -> None:
        step, action = data["step"], data["action"]
        check_step(step)
        check_action(action)
        lr = decode(data["lr"][0]) if data["lr"] else None
        scale = None if data["scale"] is None else decode(data["scale"])
        brief = Brief(step, decode(data["loss"]), decode(data["grad_norm"]), lr, scale, action, _terms(data.get("terms")))
        if self._reopened is not None and step == 0 and self._next is not None:
            self._begin_anew(self._reopened)
        self._reopened = None
        if self._next is not None and step < self._next:
            self.turns.append((self._next - 1, step))
            self.curves.go_back(step)
        self._next = step + 1
        self.steps += 1
        self.counts[action] += 1
        self.curves.add(step, (brief.loss, brief.grad_norm, lr, scale), action, brief.terms)
        if "norms" in data or data["v"] in (1, 2):
            self._cells(step, self._names, data["norms"], self._sites, data.get("observed", {}).get("absmax"))
        self._recent.append(brief)
        if step in self._wanted:
            self._keep(brief)
        moment = data.get("time")
        if moment is not None and math.isfinite(moment):
            if self._times:
                self.seconds += max(0.0, moment - self._times[-1])
            self._times.append(moment)
        self._last = data

    def _read_blocks(self, portion: int) -> bool:
        """Read on in `norms.bin`. Return whether there was anything."""
        damaged, new = self._blocks.damaged, False
        for found in self._blocks.steps(portion):
            self._block(*found)
            new = True
        self.broken += max(0, self._blocks.damaged - damaged)
        if new:
            self.norms.close_gaps()
            self.absmax.close_gaps()
        return new

    def _block(self, block: Block, names: tuple[str, ...], sites: tuple[str, ...], columns: dict[str, Any]) -> None:
        """A step in `norms.bin`. Lines and blocks come one after the other, each in their order."""
        if self.opened is not None and block.time is not None and block.time < self.opened and self.earlier:
            return  # of a run before this one
        try:
            check_step(block.step)
            norms, absmax = columns["norms"], columns.get("absmax")
            self._cells(block.step, names, _drawn(norms), sites, None if absmax is None else _drawn(absmax))
        except NOT_A_RECORD:
            self.broken += 1

    def _cells(self, step: int, names: tuple[str, ...], norms: Any, sites: tuple[str, ...], absmax: Any) -> None:
        """Draw a step into the heat maps."""
        if self._next_norms is not None and step < self._next_norms:
            self.norms.go_back(step)
            self.absmax.go_back(step)
        self._next_norms = step + 1
        self.norms.add(step, names, norms)
        if absmax is not None:
            self.absmax.add(step, sites, absmax)

    def _begin_anew(self, opened: float) -> None:
        """A run that was opened again and was not resumed is another one: what came before it is not shown."""
        self.earlier += 1
        self.opened = opened
        self.incidents = [one for one in self.incidents if self._when.get(id(one), opened) >= opened]
        self.forecasts = [one for one in self.forecasts if self._when.get(id(one), opened) >= opened]
        self._when = {id(one): self._when[id(one)] for one in (*self.incidents, *self.forecasts) if id(one) in self._when}
        self._no_steps()
        for incident in self.incidents[:MOST_NEAR]:
            self._look_near(incident)

    def written(self, one: Incident | Forecast) -> float:
        """When an incident or a forecast was written, in seconds since 1970; 0 if that is not known."""
        return self._when.get(id(one), 0.0)

    def _note_when(self, one: Incident | Forecast, data: dict[str, Any]) -> None:
        moment = data.get("time")
        if isinstance(moment, (int, float)) and math.isfinite(moment):
            self._when[id(one)] = moment

    def _forecast(self, data: dict[str, Any]) -> None:
        forecast = Forecast.from_json(data)
        self.forecasts.append(forecast)
        self._note_when(forecast, data)

    def _incident(self, data: dict[str, Any]) -> None:
        incident = Incident.from_json(data)
        self.incidents.append(incident)
        self._note_when(incident, data)
        if len(self.incidents) <= MOST_NEAR:
            self._look_near(incident)

    def _look_near(self, incident: Incident) -> None:
        """Keep the steps around it one by one."""
        self._wanted.update(range(incident.step - NEAR, incident.step + NEAR + 1))
        for brief in self._recent:
            if brief.step in self._wanted and brief is not self.near.get(brief.step):
                self._keep(brief)

    def _keep(self, brief: Brief) -> None:
        """A step that is taken again after an incident does not hide how it was."""
        before = self.near.get(brief.step)
        if before is not None:
            self.given_up.setdefault(brief.step, before)
        self.near[brief.step] = brief


def runs_in(folder: str | Path) -> list[Path]:
    """The run in a folder, or all runs up to three levels below it, newest first."""
    folder = Path(folder)
    if (folder / STEPS).is_file():
        return [folder]
    found: list[Path] = []
    for pattern in (f"*/{STEPS}", f"*/*/{STEPS}", f"*/*/*/{STEPS}"):
        found += [path.parent for path in folder.glob(pattern) if path.is_file()]
    parts = {part for run in found for part, _ in read_index(run) if part != run}
    found = [run for run in found if run not in parts]
    return sorted(found, key=lambda run: (_age(run / STEPS), str(run)))


def one_run(folder: str | Path) -> Path:
    """The only run in a folder."""
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {what}. Give the run_dir of a guard, the folder with {STEPS}; a log is for nanproof doctor")
    runs = runs_in(folder)
    if not runs:
        raise UsageError(f"{folder}: no {STEPS} in it, nor in folders below it. Give the run_dir of a guard")
    if len(runs) > 1:
        named = ", ".join(str(run) for run in runs[:8]) + (f" and {len(runs) - 8} more" if len(runs) > 8 else "")
        raise UsageError(f"{folder} holds {len(runs)} runs: {named}. Name one of them")
    return runs[0]


def _drawn(values: Any) -> Any:
    """The numbers of a column as a heat map has them: Inf where one is not finite. A run that is sound has none."""
    if math.isfinite(sum(values)):
        return values
    return [x if x == ABSENT or math.isfinite(x) else math.inf for x in values]


def _terms(found: Any) -> tuple[tuple[str, float], ...]:
    """The terms of a loss as a line has them. One too many is kept, so that it can be told that there are more."""
    if found is None:
        return ()
    return tuple((name[:LONGEST_NAME], decode(x)) for name, x in list(found.items())[: MOST_TERMS + 1])


def _age(path: Path) -> float:
    """Seconds since it was written to."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return math.inf


def _writer_lives(folder: Path) -> bool | None:
    """Whether the process that holds the folder's lock file lives; None if that cannot be told here."""
    try:
        with open_regular(folder / LOCK) as file:
            words = file.read(1000).decode("utf-8", "replace").split()
        process, host = int(words[1]), words[3]
    except (OSError, ValueError, IndexError):
        return None
    if os.name != "posix" or host != socket.gethostname() or process <= 0:
        return None
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
