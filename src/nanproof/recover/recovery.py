"""Recovery: when a state is kept, when it counts as good, and the way back to it.

A state is copied after a step (`stepped`). It counts once every step before it was accepted and every number in it is finite
(`accepted`, with the verdicts, which on CUDA come later). Some copies stay in memory, some go to the disk; there they are
candidates until enough healthy steps have followed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from nanproof.core.attempts import Attempt
from nanproof.core.context import RandomState
from nanproof.core.evidence import listed
from nanproof.core.runner import Runner
from nanproof.policy import Policy
from nanproof.records import Incident
from nanproof.recover.checkpoints import Checkpoints
from nanproof.recover.data import Ticket, WrappedDataset, WrappedLoader, wrap
from nanproof.recover.quarantine import FILE, Entry, Quarantine
from nanproof.recover.saver import Saver
from nanproof.recover.sealed import NotWhole, now
from nanproof.recover.snapshots import Snapshot, Snapshots
from nanproof.recover.state import Part, RunState, encode_random
from nanproof.recover.store import Saved, Store

log = logging.getLogger("nanproof")

_REMEMBERED = 20_000
"""Steps whose batches are remembered by number, for stepping over them."""
_FORGIVEN = 200
"""Accepted steps after a rollback's incident until the next one counts as another."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way back that was taken."""

    step: int
    in_memory: bool
    attempt: int
    stepped_over: int
    healed: dict[str, Any]
    """The remedies that were in force in that state."""

    def __str__(self) -> str:
        place = "the copy in memory" if self.in_memory else "the checkpoint"
        over = f", stepping over {self.stepped_over} batches" if self.stepped_over else ""
        return f"back to {place} of step {self.step}{over} (try {self.attempt})"


@dataclass(slots=True)
class _Taken:
    """A copy of the state whose steps have not all been judged yet."""

    snapshot: Snapshot
    keep: bool
    save: bool
    own_loop: bool


class Recovery:
    """Keeps good states and goes back to them."""

    def __init__(
        self,
        runner: Runner,
        policy: Policy,
        checkpoints: Checkpoints | None,
        run_dir: str | Path | None,
        parts: Mapping[str, Part],
    ) -> None:
        self._runner, self._policy, self._checkpoints = runner, policy, checkpoints
        stepper = runner.stepper
        self._ranks = stepper.ranks
        self.state = RunState(stepper, runner.scheduler, parts)
        self.snapshots = Snapshots(self.state, self._ranks, stepper.parameters.device, policy.snapshot_to == "device")
        self._store: Store | None = None
        self._saver: Saver | None = None
        if checkpoints is not None:
            self._store = Store(checkpoints.folder, checkpoints.keep, self._ranks, _own_group(self._ranks))
            self._saver = Saver(self._store, checkpoints.background, self._ranks.together)
        home = run_dir if run_dir is not None else checkpoints.folder if checkpoints is not None else None
        self.quarantine = Quarantine(None if home is None else Path(home) / FILE)
        self._loaders: list[WrappedLoader] = []
        self._positions: list[dict[str, Any]] = []
        """Of a resumed run: where its loaders were, for those that are wrapped later."""
        self._beginning: list[dict[str, Any]] = []
        self._random: dict[str, Any] = {}
        """Where loaders and random numbers were before the first step."""
        self._tickets: dict[int, list[list[Ticket]]] = {}
        self._taken: list[_Taken] = []
        self._waiting: list[_Taken] = []
        """In a loop of the user's own: good, but the loop has not advanced its schedule yet."""
        self._copying: Snapshot | None = None
        self._candidates: dict[int, int] = {}
        """Checkpoints that are not proven yet: healthy steps so far."""
        self._due_keep = self._due_save = False
        self._tries, self._last = 0, -1
        self._rewarm_from: int | None = None
        self._lowered: list[Any] = []

    @property
    def on(self) -> bool:
        """Whether states are kept at all."""
        return self._policy.snapshot_every > 0 or self._store is not None

    # -- data ------------------------------------------------------------------------------------------------------------------

    def wrap(self, data: Any) -> WrappedLoader | WrappedDataset:
        wrapped = wrap(data, self.quarantine, even=self._ranks.together)
        if isinstance(wrapped, WrappedLoader) and all(wrapped is not known for known in self._loaders):
            if len(self._loaders) < len(self._positions):
                wrapped.load_state_dict(self._positions[len(self._loaders)])
            self._loaders.append(wrapped)
            self._beginning = [*self._beginning, wrapped.state_dict()]
            self._random = encode_random(RandomState.now(self._runner.devices))
        return wrapped

    def note_batches(self, attempt: Attempt) -> None:
        """A new step begins: which batches is it made of?"""
        if attempt.step == 0 and attempt.batches is not None and self._policy.snapshot_every:
            self._keep_beginning()
        if not self._loaders:
            return
        self._tickets[attempt.step] = attempt.tickets = [loader.taken() for loader in self._loaders]
        self._tickets.pop(attempt.step - _REMEMBERED, None)

    def knows(self, attempt: Attempt) -> bool:
        """Whether it can be told which samples a step is made of."""
        return attempt.batches is not None and any(len(taken) == len(attempt.batches) for taken in attempt.tickets)

    def leave_out(self, attempt: Attempt, incident: Incident) -> int:
        """Put the samples that are to blame into quarantine; how many they were."""
        assert attempt.batches is not None and incident.diagnosis is not None
        entries = []
        for loader, taken in zip(self._loaders, attempt.tickets, strict=True):
            if len(taken) != len(attempt.batches):
                continue
            entries += [
                Entry(
                    index=sample.index,
                    hash=sample.hash,
                    size=loader.size,
                    worker=sample.worker,
                    workers=sample.workers,
                    step=incident.step,
                    cause=incident.diagnosis.cause,
                    bundle=incident.bundle,
                    at=now(),
                )
                for sample in loader.samples_of(taken[incident.micro_batch or 0], incident.diagnosis.samples)
            ]
        self.quarantine.add(entries)
        return len(entries)

    # -- while all is well -----------------------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt) -> None:
        pass

    def before_step(self, step: int) -> None:
        """The optimizer is about to write: what is being copied must be copied first, on the device."""
        if self._copying is not None:
            self._copying.order_after()
            self._copying = None
        self.complete()
        self._restore_rate()
        if self._rewarm_from is not None:
            share = (step - self._rewarm_from + 1) / (self._policy.rewarm_steps + 1)
            if share >= 1:
                self._rewarm_from = None
            else:
                self._lower_rate(max(share, 0.0))

    def after_step(self, step: int, batches: Sequence[Any] | None) -> None:
        self._restore_rate()

    def _keep_beginning(self) -> None:
        """A run may go wrong before its first copy is due: the state it begins with is one to go back to as well."""
        host = self.state.host(0, self._runner.devices)
        host["data"] = self._beginning
        host["random"] = self._random or host["random"]
        snapshot = self.snapshots.take(0, host)
        if snapshot is not None and snapshot.finite():
            snapshot.confirmed = True
            self.snapshots.keep(snapshot)
            self._copying = snapshot if snapshot.done else None

    def stepped(self, next_step: int, own_loop: bool, settled: bool) -> str | None:
        """A step was dispatched; the next one is `next_step`. Returns what is broken, if a copy shows that something is.

        While a jump of the loss is being watched nothing is copied: it may be the beginning of the end.
        """
        if not self.on:
            return None
        every = self._policy.snapshot_every
        self._due_keep |= every > 0 and next_step % every == 0
        self._due_save |= self._checkpoints is not None and next_step % self._checkpoints.every == 0
        if not (self._due_keep or self._due_save) or self._runner.held or not settled:
            return None
        host = self.state.host(next_step, self._runner.devices)
        host["data"] = [loader.state_dict() for loader in self._loaders]
        snapshot = self.snapshots.take(next_step, host)
        if snapshot is not None:
            self._copying = snapshot if snapshot.done else None
            self._taken.append(_Taken(snapshot, self._due_keep, self._due_save, own_loop))
        self._due_keep = self._due_save = False
        return self._confirm(next_step - 1) if not self._runner.pending else None

    def accepted(self, step: int, settled: bool) -> str | None:
        """A step's verdict came: accepted. Returns what a copy shows to be broken, if anything."""
        if step > self._last + _FORGIVEN:
            self._tries = 0
        if not self.on:
            return None
        for candidate in list(self._candidates):
            if step >= candidate:
                self._candidates[candidate] += 1
        self._prove(settled)
        return self._confirm(step)

    def refused(self) -> None:
        """A step was refused: what was copied after it was copied in the middle of things. It is due again."""
        for taken in self._taken:
            self._due_keep |= taken.keep
            self._due_save |= taken.save
            self.snapshots.release(taken.snapshot)
        self._taken.clear()

    def _confirm(self, step: int) -> str | None:
        """The copies that follow this step are good, if they are finite."""
        ready = [taken for taken in self._taken if taken.snapshot.step <= step + 1]
        for taken in ready:
            self._taken.remove(taken)
            snapshot = taken.snapshot
            if not snapshot.finite():
                self.snapshots.release(snapshot)
                return listed(self._runner.stepper.broken_state()) or "a tensor"
            snapshot.confirmed = True
            if taken.keep:
                self.snapshots.keep(snapshot)
            if taken.own_loop:
                self._waiting.append(taken)
            else:
                self._finish(taken)
        return None

    def complete(self) -> None:
        """In a loop of the user's own the schedule advances between steps: now it has. A new process goes on from that; a run
        that goes back is in the middle of its loop, which will advance it."""
        for taken in self._waiting:
            taken.snapshot.host["next_schedule"] = self.state.schedule()
            self._finish(taken)
        self._waiting.clear()

    def _finish(self, taken: _Taken) -> None:
        if taken.save and self._saver is not None:
            self._candidates[taken.snapshot.step] = 0
            self._saver.save(taken.snapshot, self.snapshots.release)
            self._prove(settled=True)
        elif not taken.keep:
            self.snapshots.release(taken.snapshot)

    def _prove(self, settled: bool) -> None:
        if self._saver is None or self._checkpoints is None or not settled:
            return
        for step, healthy in list(self._candidates.items()):
            if healthy >= self._checkpoints.prove:
                del self._candidates[step]
                self._saver.promote(step, healthy)

    # -- the way back ----------------------------------------------------------------------------------------------------------

    def go_back(self, most: int, since: int, until: int, *, blame_data: bool) -> Way | None:
        """Back to a good state of before step `most`, where there is one. The batches of steps `since` to `until`, and a margin,
        are stepped over: at once where they are to blame, else from the second try on.

        None where there is no such state, or it has been tried often enough.
        """
        if until <= self._last + _FORGIVEN and self._tries:
            self._tries += 1
        else:
            self._tries = 1
        if self.exhausted:
            return None
        source = self._source(most)
        if source is None:
            return None
        self._last = max(self._last, until) if self._tries > 1 else until
        step = source.step
        over = self._to_step_over(max(since - self._policy.rollback_margin, step), until) if blame_data or self._tries > 1 else []
        if isinstance(source, Snapshot):
            source.wait()
            tensors, host = source.tensors(), source.host
        else:
            tensors, host, _ = self._load(source)
        self._put(tensors, host, over)
        self._give_up_after(step)
        if self._policy.rewarm_steps:
            self._rewarm_from = step
        count = max((len(batches) for batches in over), default=0)
        return Way(step, isinstance(source, Snapshot), self._tries, count, host["parts"]["heal"])

    @property
    def exhausted(self) -> bool:
        """The same trouble has sent the run back as often as it may."""
        return self._tries > self._policy.max_rollbacks

    @property
    def has_checkpoints(self) -> bool:
        return self._store is not None

    @property
    def has_good(self) -> bool:
        """A good state has been kept in memory."""
        return any(snapshot.confirmed for snapshot in self.snapshots.kept)

    def _source(self, most: int) -> Snapshot | Saved | None:
        """With every further try of the same trouble, an older state."""
        older = self._tries - 1
        memory = [s for s in reversed(self.snapshots.kept) if s.confirmed and s.step <= most]
        if older < len(memory):
            return memory[older]
        saved = self._newest_good(most, older - len(memory))
        if saved is None and memory:
            return memory[-1]
        return saved if saved is not None or not older else self._newest_good(most, 0)

    def _newest_good(self, most: int | None, but: int) -> Saved | None:
        """The same on every rank: the first one looks, and tells the others."""
        if self._store is None or self._saver is None:
            return None
        self._saver.wait()
        said = ""
        if self._ranks.rank == 0 or not self._ranks.together:
            saved, passed = self._store.newest_good(most, but)
            for why in passed:
                log.warning("nanproof: passed over %s", why)
            if saved is not None:
                said = json.dumps([saved.path.name, saved.step, saved.turn])
        if self._ranks.together:
            said = self._ranks.share_text(said, 0)
        if not said:
            return None
        name, step, turn = json.loads(said)
        return Saved(self._store.folder / name, step, turn, True)

    def _load(self, saved: Saved) -> tuple[dict[str, Tensor], dict[str, Any], bool]:
        assert self._store is not None
        tensors, host, own = self._store.load(saved, self.state.targets)
        self.state.check({name: tuple(t.shape) for name, t in tensors.items()}, str(saved.path))
        return tensors, host, own

    def _put(self, tensors: Mapping[str, Tensor], host: Mapping[str, Any], over: list[list[tuple[int, int]]]) -> None:
        """In a running loop: random numbers go back only together with the data, else data made from them would come again."""
        rewindable = bool(self._loaders) and len(host.get("data", ())) == len(self._loaders)
        self._runner.forget()
        self.state.put(tensors)
        self.state.put_host(host, random=rewindable)
        if rewindable:
            for loader, position, batches in zip(self._loaders, host["data"], over or [[] for _ in self._loaders], strict=True):
                loader.rewind(position, batches)

    def _give_up_after(self, step: int) -> None:
        """What was kept of the way that was given up."""
        self.refused()
        self._waiting.clear()
        self._due_keep = self._due_save = False
        self._copying = None
        self.snapshots.drop(lambda s: s.step > step)
        for candidate, healthy in list(self._candidates.items()):
            if candidate > step:
                del self._candidates[candidate]
            else:  # the steps that were given up prove nothing
                self._candidates[candidate] = min(healthy, step - candidate)
        if self._store is not None and self._saver is not None:
            self._saver.wait()
            self._store.abandon(step)
        for later in [s for s in self._tickets if s >= step]:
            del self._tickets[later]

    def _to_step_over(self, since: int, until: int) -> list[list[tuple[int, int]]]:
        """(epoch, batch) of what the steps were made of, and of a margin after them, for each loader."""
        found: list[set[tuple[int, int]]] = [set() for _ in self._loaders]
        for step in range(since, until + 1):
            for places, tickets in zip(found, self._tickets.get(step, ()), strict=False):
                places.update((t.epoch, t.batch) for t in tickets)
        for places in found:
            if places:
                epoch, last = max(places)
                places.update((epoch, last + 1 + i) for i in range(self._policy.rollback_margin))
        return [sorted(places) for places in found]

    # -- a new process ---------------------------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Load the newest good checkpoint; 0 if there is none."""
        but = 0
        while (saved := self._newest_good(None, but)) is not None:
            try:
                tensors, host, own = self._load(saved)
            except (NotWhole, OSError) as why:
                log.warning("nanproof: passed over %s: %s", saved.path.name, why)
                but += 1
                continue
            self._runner.forget()
            self.state.put_remedies(host)
            self.state.put(tensors)
            self.state.put_host(host, random=own)
            if "next_schedule" in host:
                self.state.put_schedule(host["next_schedule"])
            self._positions = list(host.get("data", ()))
            if not own or (self._ranks.world if self._ranks.together else 1) != self._world(saved):
                log.warning(
                    "nanproof: %s was written by another number of ranks: every rank goes on from the data position of rank 0",
                    saved.path.name,
                )
            for loader, position in zip(self._loaders, self._positions, strict=False):
                loader.load_state_dict(position)
            self._tickets.clear()
            log.info("nanproof: resumed from %s", saved.path)
            return int(host["step"])
        return 0

    def _world(self, saved: Saved) -> int:
        return len(list(saved.path.glob("host-*.pt")))

    def close(self) -> None:
        """Wait for the disk and let go of memory."""
        self._restore_rate()
        try:
            if self._saver is not None:
                self._saver.close()
        finally:
            if self._store is not None:
                self._store.close()
            self.snapshots.close()

    # -- the learning rate after a rollback ------------------------------------------------------------------------------------

    def _lower_rate(self, share: float) -> None:
        for group in self._runner.optimizer.param_groups:
            rate = group["lr"]
            self._lowered.append((group, rate.clone() if isinstance(rate, Tensor) else rate))
            if isinstance(rate, Tensor):
                rate.mul_(share)
            else:
                group["lr"] = rate * share

    def _restore_rate(self) -> None:
        for group, rate in self._lowered:
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._lowered.clear()


def _own_group(ranks: Any) -> Any:
    """A group for the thread that writes: its collectives must not mix with those of training, and work on host memory."""
    if not ranks.together:
        return None
    return dist.new_group(ranks.members, timeout=timedelta(minutes=10), backend="gloo")
