"""Recovery: when a state is kept, when it counts as good, and the way back to it.

A state is copied after a step (`stepped`). It counts once every step before it was accepted and
every number in it is finite (`accepted`, with the verdicts, which on CUDA come later). Some copies
stay in memory, some go to the disk; there they are candidates until enough healthy steps have
followed.
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

from nanproof._errors import NanproofError, UsageError
from nanproof._policy import Policy
from nanproof._records import Incident
from nanproof.core import _contracts as contracts
from nanproof.core._contracts import Restored
from nanproof.core._decide import GoBack
from nanproof.core._under_way import Attempt, UnderWay
from nanproof.core.judge._stepper import Stepper
from nanproof.core.support._files import reason
from nanproof.recover._checkpoints import Checkpoints
from nanproof.recover._rewarm import Rewarm
from nanproof.recover._salvage import rest_of
from nanproof.recover.data._supply import Places, Supply
from nanproof.recover.state._saver import Saver
from nanproof.recover.state._snapshots import Snapshot, Snapshots
from nanproof.recover.state._state import Part, RunState
from nanproof.recover.state._store import Saved, Store
from nanproof.recover.state._writer import possible
from nanproof.scan._manifest import NotWhole

log = logging.getLogger("nanproof")

_FORGIVEN = 200
"""Accepted steps after a rollback's incident until the next one counts as another."""


@dataclass(slots=True)
class _Taken:
    """A copy of the state whose steps have not all been judged yet."""

    snapshot: Snapshot
    keep: bool
    save: bool
    own_loop: bool


class Recovery(contracts.Recovery):
    """Keeps good states in memory and on disk."""

    possible = True

    def __init__(
        self,
        stepper: Stepper,
        under_way: UnderWay,
        policy: Policy,
        checkpoints: Checkpoints | None,
        run_dir: str | Path | None,
        parts: Mapping[str, Part],
    ) -> None:
        self._stepper, self._under_way, self._policy, self._checkpoints = stepper, under_way, policy, checkpoints
        self._ranks, self._structure = stepper.ranks, stepper.structure
        self._rewarm = Rewarm(stepper.optimizer, policy.rewarm_steps)
        self.state = RunState(stepper, under_way.scheduler, {**parts, "rewarm": self._rewarm})
        apart = checkpoints is not None and checkpoints.background and not self._ranks.together and possible()
        on_device = policy.snapshot_to == "device"
        self.snapshots = Snapshots(self.state, self._ranks, stepper.parameters.device, on_device, shared=apart)
        self.store: Store | None = None
        self.saver: Saver | None = None
        if checkpoints is not None:
            self.store = Store(checkpoints.folder, checkpoints.keep, self._ranks, _own_group(self._ranks))
            self.saver = Saver(self.store, checkpoints.background, self._ranks.together, apart)
        home = run_dir if run_dir is not None else checkpoints.folder if checkpoints is not None else None
        self.supply = Supply(home, even=self._ranks.together)
        self._taken: list[_Taken] = []
        self._waiting: list[_Taken] = []
        """In a loop of the user's own: good, but the loop has not advanced its schedule yet."""
        self._unscheduled: list[Snapshot] = []
        """The same, good or not."""
        self._copying: Snapshot | None = None
        self._last_copy: Snapshot | None = None
        """What a signal made the run keep, until it is written."""
        self._candidates: dict[int, int] = {}
        """Checkpoints that are not proven yet: healthy steps so far."""
        self._due_keep = self._due_save = False
        self._tries, self._last = 0, -1
        self._off = self._resumed = self._refusing = False
        self._settled = True
        self.has_good = False
        self._kept_at = self._saved_at = 0
        """The steps at which a copy was last due."""
        self.backs = 0
        self._later_schedule: dict[str, Any] | None = None

    @property
    def on(self) -> bool:  # type: ignore[override]
        return self._policy.snapshot_every > 0 or self.store is not None

    # -- while all is well -----------------------------------------------------------------------------------------------------

    def begun(self, attempt: Attempt) -> None:
        """Which batches is the step made of?"""
        if attempt.step == 0:
            self._check_folder()
            if attempt.batches is not None and self._policy.snapshot_every:
                self._keep_beginning()
        if self.supply.wrapped:
            self.supply.note(attempt)

    def _check_folder(self) -> None:
        """A run that begins anew must not find the good states of another, nor leave its own among
        them."""
        if self.store is None or self._resumed:
            return
        said = self._ranks.gather([any(saved.good for saved in self.store.checkpoints())])
        if any(s[0] for s in said.values()):
            raise UsageError(
                f"{self.store.folder} holds good checkpoints of an earlier run: call guard.resume() before the first step to go "
                "on with it, or choose another folder"
            )

    def dropped(self) -> None:
        self._rewarm.restore()

    def before(self, attempt: Attempt) -> None:
        """The optimizer is about to write: what is being copied must be copied first, on the
        device."""
        if self._copying is not None:
            self._copying.order_after()
            self._copying = None
        self.complete()
        if self._policy.rewarm_steps:
            self._rewarm.before_step(attempt.step)

    def after(self, attempt: Attempt) -> None:
        if self._policy.rewarm_steps:
            self._rewarm.restore()

    def _keep_beginning(self) -> None:
        """A run may go wrong before its first copy is due: the state it begins with is one to go
        back to as well."""
        host = self.state.host(0, self._under_way.devices)
        host["data"] = self.supply.beginning
        host["random"] = self.supply.random or host["random"]
        snapshot = self._take(0, host)
        if snapshot is not None and snapshot.finite():
            snapshot.confirmed = self.has_good = True
            self.snapshots.keep(snapshot)
            self._copying = snapshot if snapshot.done else None

    def _take(self, step: int, host: dict[str, Any]) -> Snapshot | None:
        """A copy, if it can be made. That it cannot (tensors of an odd kind) is no reason for a run
        to die; of several ranks one cannot go on without the others."""
        if self._off:
            return None
        try:
            return self.snapshots.take(step, host)
        except Exception as error:
            if self._ranks.together:
                raise
            self._off = True
            log.warning("nanproof: the run's state cannot be copied, so nothing is kept or saved: %s", reason(error))
            return None

    def stepped(self, next_step: int, own_loop: bool, settled: bool) -> list[str] | None:
        """While a jump of the loss is being watched nothing is copied: it may be the beginning of
        the end."""
        if not self.on:
            return None
        self._settled = settled
        if self._refusing:
            return None
        every = self._policy.snapshot_every
        if every > 0 and next_step // every > self._kept_at // every:
            self._due_keep, self._kept_at = True, next_step
        if self._checkpoints is not None and self.saver is not None:
            if 2 * (next_step % self._checkpoints.every) >= self._checkpoints.every:
                self.saver.warm_up()
            if next_step // self._checkpoints.every > self._saved_at // self._checkpoints.every:
                self._due_save, self._saved_at = True, next_step
        if not (self._due_keep or self._due_save) or self._under_way.held or not settled:
            return None
        host = self.state.host(next_step, self._under_way.devices)
        host["data"] = self.supply.positions()
        snapshot = self._take(next_step, host)
        if snapshot is not None:
            if own_loop:
                self._unscheduled.append(snapshot)
            self._copying = snapshot if snapshot.done else None
            self._taken.append(_Taken(snapshot, self._due_keep, self._due_save, own_loop))
        self._due_keep = self._due_save = False
        return self._confirm(next_step - 1) if not self._under_way.pending else None

    def accepted(self, step: int, settled: bool) -> list[str] | None:
        self._refusing = False
        if step > self._last + _FORGIVEN:
            self._tries = 0
        if not self.on:
            return None
        self._settled = settled
        for candidate in list(self._candidates):
            if step >= candidate:
                self._candidates[candidate] += 1
        self._prove()
        return self._confirm(step)

    def refused(self) -> None:
        """A step was refused: what was copied after it was copied in the middle of things. It is
        due again, once a step is accepted: copies made while the run stands still would push out
        those from before it did."""
        self._refusing = True
        self._drop_taken()

    def followed(self) -> str:
        """Copies of another model cannot be put back: the next one is due at once."""
        before, self._structure = self._structure, self._stepper.structure
        if self._structure.holds(before):
            return ""
        had = bool(self.snapshots.kept or self._taken)
        self._drop_taken()
        self._waiting.clear()
        self._unscheduled.clear()
        self.snapshots.drop(lambda _: True)
        self.has_good = self.store is not None and self.has_good
        self._due_keep = self._policy.snapshot_every > 0
        return "the copies of its state in memory do not fit any more and are dropped" if had else ""

    def _drop_taken(self) -> None:
        for taken in self._taken:
            self._due_keep |= taken.keep
            self._due_save |= taken.save
            self.snapshots.release(taken.snapshot)
        self._taken.clear()

    def _confirm(self, step: int) -> list[str] | None:
        """The copies that follow this step are good, if they are finite."""
        ready = [taken for taken in self._taken if taken.snapshot.step <= step + 1]
        for taken in ready:
            self._taken.remove(taken)
            snapshot = taken.snapshot
            if not snapshot.finite():
                self.snapshots.release(snapshot)
                return self._stepper.broken_state() or ["the loss scale, or a tensor of another rank"]
            snapshot.confirmed = self.has_good = True
            if taken.keep:
                self.snapshots.keep(snapshot)
            if taken.own_loop and "next_schedule" not in snapshot.host:
                self._waiting.append(taken)
            else:
                self._finish(taken)
        return None

    def complete(self) -> None:
        """In a loop of the user's own the schedule advances between steps: now it has. A new
        process goes on from that; a run that goes back is in the middle of its loop, which will
        advance it."""
        for snapshot in self._unscheduled:
            snapshot.host["next_schedule"] = self.state.schedule()
        self._unscheduled.clear()
        for taken in self._waiting:
            self._finish(taken)
        self._waiting.clear()

    def _finish(self, taken: _Taken) -> None:
        if taken.save and self.saver is not None:
            self._candidates[taken.snapshot.step] = 0
            self.saver.save(taken.snapshot, self.snapshots.release)
            self._prove()
        elif not taken.keep:
            self.snapshots.release(taken.snapshot)

    def keep_last(self, next_step: int, own_loop: bool) -> None:
        host = self.state.host(next_step, self._under_way.devices)
        host["data"] = self.supply.positions()
        snapshot = self._take(next_step, host)
        if snapshot is None:
            return
        if not snapshot.finite():
            self.snapshots.release(snapshot)
            log.warning("nanproof: the state at step %d is not finite, so it is not saved", next_step)
            return
        if own_loop:
            self._unscheduled.append(snapshot)
        self._last_copy = snapshot

    def write_last(self) -> None:
        snapshot, self._last_copy = self._last_copy, None
        if snapshot is None or self.saver is None or self.store is None:
            return
        self.complete()
        self.saver.save(snapshot, self.snapshots.release)
        self.saver.promote(snapshot.step, self._candidates.pop(snapshot.step, 0), preempted=True)
        self.saver.wait()
        if snapshot.step not in self.saver.failed and self._ranks.rank == 0:
            log.warning("nanproof: saved step %d in %s; guard.resume() goes on from it", snapshot.step, self.store.folder)

    def _prove(self) -> None:
        """Not while a jump of the loss is being watched, whatever was copied before it."""
        if self.saver is None or self._checkpoints is None or not self._settled:
            return
        for step, healthy in list(self._candidates.items()):
            if healthy >= self._checkpoints.prove:
                del self._candidates[step]
                self.saver.promote(step, healthy)

    # -- the way back ----------------------------------------------------------------------------------------------------------

    def go_back(self, decision: GoBack) -> Restored | None:
        """The batches of the steps that are concerned, and a margin, are stepped over: at once
        where they are to blame, else where the same data has broken the run at the same step again.
        One that broke, went back and got past that step broke for another reason."""
        since, until = decision.since, decision.until
        tries = self._tries + 1 if until <= self._last + _FORGIVEN else 1
        if tries > self._policy.max_rollbacks:
            self._tries = tries if self._policy.max_rollbacks else 0
            return None
        source, tensors, host = self._good_state(decision.before, tries - 1)
        if source is None:
            return None
        self._tries = tries
        margin = self._policy.rollback_margin
        again = tries > 1 and until <= self._last + margin
        self._last = max(self._last, until) if self._tries > 1 else until
        step = source.step
        over = self.supply.of_steps(max(since - margin, step), until, margin) if decision.blame_data or again else []
        self._put(tensors, host, over)
        self.backs += 1
        self._later_schedule = host.get("next_schedule")
        self._give_up_after(step)
        self._rewarm.start(step)
        count = max((len(batches) for batches in over), default=0)
        place = "memory" if isinstance(source, Snapshot) else source.path.name
        return Restored(step, place, self._tries, count, host["parts"]["heal"])

    @property
    def exhausted(self) -> bool:  # type: ignore[override]
        return self._tries > self._policy.max_rollbacks

    @property
    def has_checkpoints(self) -> bool:
        return self.store is not None

    def _good_state(self, most: int, older: int) -> tuple[Snapshot | Saved | None, Mapping[str, Tensor], dict[str, Any]]:
        """The newest good state of up to step `most`, or one that is older by so many: with every
        further try of one trouble. The oldest, where there are not that many."""
        memory = [s for s in reversed(self.snapshots.kept) if s.confirmed and s.step <= most]
        if older < len(memory):
            memory[older].wait()
            return memory[older], memory[older].tensors(), memory[older].host
        but = older - len(memory)
        while (saved := self._newest_good(most, but)) is not None:
            try:
                tensors, host, _ = self._load(saved)
                return saved, tensors, host
            except (NanproofError, OSError) as why:
                log.warning("nanproof: passed over %s: %s", saved.path.name, why)
                but += 1
        if memory:
            memory[-1].wait()
            return memory[-1], memory[-1].tensors(), memory[-1].host
        return self._good_state(most, 0) if older else (None, {}, {})

    def _newest_good(self, most: int | None, but: int) -> Saved | None:
        """The same on every rank: the first one looks, and tells the others."""
        if self.store is None or self.saver is None:
            return None
        self.saver.wait()
        said = ""
        if self._ranks.rank == 0 or not self._ranks.together:
            saved, passed = self.store.newest_good(most, but)
            for why in passed:
                log.warning("nanproof: passed over %s", why)
            if saved is not None:
                said = json.dumps([saved.path.name, saved.step, saved.turn])
        if self._ranks.together:
            said = self._ranks.share_text(said, 0)
        if not said:
            return None
        name, step, turn = json.loads(said)
        return Saved(self.store.folder / name, step, turn, True)

    def _load(self, saved: Saved) -> tuple[dict[str, Tensor], dict[str, Any], bool]:
        assert self.store is not None
        tensors, host, own = self.store.load(saved, self.state.targets)
        self.state.check({name: tuple(t.shape) for name, t in tensors.items()}, str(saved.path))
        self.state.check_host(host, str(saved.path))
        trouble = "" if host["step"] == saved.step else f"its host part is that of step {host['step']}"
        if not trouble and (broken := self.state.nonfinite(tensors)):
            trouble = f"{broken[0]} holds NaN or Inf"
        if trouble := self._anywhere(trouble):
            raise NotWhole(trouble)
        return tensors, host, own

    def _put(self, tensors: Mapping[str, Tensor], host: Mapping[str, Any], over: Places) -> None:
        """In a running loop: random numbers go back only together with the data, else data made
        from them would come again."""
        rewindable = self.supply.fits(host["data"])
        self._under_way.forget(keep_random=not rewindable)
        self.state.put(tensors, host)
        self.state.put_host(host, random=rewindable)
        if rewindable:
            self.supply.rewind(host["data"], over)

    def _give_up_after(self, step: int) -> None:
        """What was kept of the way that was given up."""
        self._drop_taken()
        self._refusing = False
        self._waiting.clear()
        self._unscheduled.clear()
        self._due_keep = self._due_save = False
        self._kept_at = self._saved_at = step
        self._copying = None
        self.snapshots.drop(lambda s: s.step > step)
        for candidate, healthy in list(self._candidates.items()):
            if candidate > step:
                del self._candidates[candidate]
            else:  # the steps that were given up prove nothing
                self._candidates[candidate] = min(healthy, step - candidate)
        if self.store is not None and self.saver is not None:
            self.saver.wait()
            self.store.abandon(step)
            said = self._ranks.gather([any(saved.step == step for saved in self.store.checkpoints())])
            if not next(iter(said.values()))[0]:  # it could not be written, or is gone: it is due again
                self._saved_at = step - 1
        self.supply.forget_since(step)

    def catch_up(self, backs: int) -> None:
        """Where the run went back after its own loop had advanced the schedule, the loop will not
        do it again."""
        if self.backs > backs and self._later_schedule is not None:
            self.state.put_schedule(self._later_schedule)
        self.complete()

    # -- samples ---------------------------------------------------------------------------------------------------------------

    def wrap(self, data: Any) -> Any:
        """Return the data so that it skips quarantined samples and knows its position."""
        return self.supply.wrap(data, self._under_way.devices)

    def wants_samples(self) -> bool:
        """Whether samples are wanted of every bad step: to salvage the rest, or for wrapped data to
        skip them."""
        return self._policy.salvage or self.supply.wrapped

    def knows_samples(self, attempt: Attempt) -> bool:
        return self.supply.knows(attempt)

    def rest_of(self, attempt: Attempt, micro_batch: int | None, rows: Sequence[int]) -> Attempt | None:
        return rest_of(attempt, micro_batch, rows)

    def quarantine(self, attempt: Attempt, incident: Incident) -> tuple[int, ...]:
        return tuple(index for index in self.supply.leave_out(attempt, incident) if index is not None)

    # -- a new process ---------------------------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Load the newest good checkpoint; 0 if there is none."""
        but, self._resumed, touched = 0, True, False
        while (saved := self._newest_good(None, but)) is not None:
            try:
                tensors, host, own = self._load(saved)
            except (NotWhole, OSError) as why:
                log.warning("nanproof: passed over %s: %s", saved.path.name, why)
                but += 1
                continue
            if trouble := self._put_new(tensors, host, own):
                log.warning("nanproof: passed over %s: its state cannot be put back: %s", saved.path.name, trouble)
                but, touched = but + 1, True
                continue
            if not own or (self._ranks.world if self._ranks.together else 1) != self._world(saved):
                log.warning(
                    "nanproof: %s was written by another number of ranks: every rank goes on from the data position of rank 0",
                    saved.path.name,
                )
            self._kept_at = self._saved_at = int(host["step"])
            # Worth a louder word where something newer was passed over.
            level = logging.INFO if saved.path == self._newest_there() else logging.WARNING
            log.log(level, "nanproof: resumed from %s", saved.path)
            return int(host["step"])
        if touched:
            raise UsageError(
                f"no checkpoint in {self.store and self.store.folder} can be used, and the model now holds part of one. "
                "Build it anew"
            )
        if self._newest_there() is not None:
            log.warning("nanproof: no checkpoint in %s can be used: the run starts from step 0", self.store and self.store.folder)
        return 0

    def _put_new(self, tensors: Mapping[str, Tensor], host: Mapping[str, Any], own: bool) -> str:
        """Put a state into a new process. Returns what went wrong on this rank or on another: a checkpoint that was tampered
        with can have every field and still not fit."""
        trouble = ""
        try:
            self._under_way.forget()
            self.state.put_remedies(host)
            self.state.put(tensors, host)
            self.state.put_host(host, random=own)
            if "next_schedule" in host:
                self.state.put_schedule(host["next_schedule"])
            self.supply.resume(host["data"])
        except Exception as error:
            trouble = reason(error)
        return self._anywhere(trouble)

    def _anywhere(self, trouble: str) -> str:
        """This rank's trouble, or that another rank has some. A collective."""
        said = self._ranks.gather([float(bool(trouble))])
        return trouble or ("another rank cannot use its part" if any(failed for (failed,) in said.values()) else "")

    def _newest_there(self) -> Path | None:
        there = self.store.checkpoints() if self.store is not None else []
        return there[0].path if there else None

    def _world(self, saved: Saved) -> int:
        return len(list(saved.path.glob("host-*.pt")))

    def close(self, alone: bool = False) -> None:
        """Wait for the disk and let go of memory. `alone`: other ranks may not be coming to write
        their part, so not for them."""
        self._rewarm.restore()
        try:
            if self.saver is not None and not (alone and self._ranks.together):
                self.saver.close()
        finally:
            if self.store is not None:
                self.store.close()
            self.snapshots.close()


def _own_group(ranks: Any) -> Any:
    """A group for the thread that writes: its collectives must not mix with those of training, and
    work on host memory."""
    if not ranks.together:
        return None
    return dist.new_group(ranks.members, timeout=timedelta(minutes=10), backend="gloo")
