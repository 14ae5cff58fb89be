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
from nanproof.core.files import reason
from nanproof.core.runner import Runner, Watcher
from nanproof.errors import NanproofError, UsageError
from nanproof.policy import Policy
from nanproof.recover.checkpoints import Checkpoints
from nanproof.recover.rewarm import Rewarm
from nanproof.recover.saver import Saver
from nanproof.recover.sealed import NotWhole
from nanproof.recover.snapshots import Snapshot, Snapshots
from nanproof.recover.state import Part, RunState
from nanproof.recover.store import Saved, Store
from nanproof.recover.supply import Places, Supply
from nanproof.wording import listed

log = logging.getLogger("nanproof")

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


class Recovery(Watcher):
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
        self._rewarm = Rewarm(runner.optimizer, policy.rewarm_steps)
        self.state = RunState(stepper, runner.scheduler, {**parts, "rewarm": self._rewarm})
        self.snapshots = Snapshots(self.state, self._ranks, stepper.parameters.device, policy.snapshot_to == "device")
        self._store: Store | None = None
        self._saver: Saver | None = None
        if checkpoints is not None:
            self._store = Store(checkpoints.folder, checkpoints.keep, self._ranks, _own_group(self._ranks))
            self._saver = Saver(self._store, checkpoints.background, self._ranks.together)
        home = run_dir if run_dir is not None else checkpoints.folder if checkpoints is not None else None
        self.supply = Supply(home, even=self._ranks.together)
        self._taken: list[_Taken] = []
        self._waiting: list[_Taken] = []
        """In a loop of the user's own: good, but the loop has not advanced its schedule yet."""
        self._unscheduled: list[Snapshot] = []
        """The same, good or not."""
        self._copying: Snapshot | None = None
        self._candidates: dict[int, int] = {}
        """Checkpoints that are not proven yet: healthy steps so far."""
        self._due_keep = self._due_save = False
        self._tries, self._last = 0, -1
        self._off = self._resumed = self._refusing = False
        self._settled = True
        self.has_good = False
        """There has been a good state."""
        self._kept_at = self._saved_at = 0
        """The steps at which a copy was last due."""
        self.backs = 0
        """How often the run went back."""
        self._later_schedule: dict[str, Any] | None = None

    @property
    def on(self) -> bool:
        """Whether states are kept at all."""
        return self._policy.snapshot_every > 0 or self._store is not None

    # -- while all is well -----------------------------------------------------------------------------------------------------

    def note_batches(self, attempt: Attempt) -> None:
        """A new step begins: which batches is it made of?"""
        if attempt.step == 0:
            self._check_folder()
            if attempt.batches is not None and self._policy.snapshot_every:
                self._keep_beginning()
        self.supply.note(attempt)

    def _check_folder(self) -> None:
        """A run that begins anew must not find the good states of another, nor leave its own among them."""
        if self._store is None or self._resumed:
            return
        said = self._ranks.gather([any(saved.good for saved in self._store.checkpoints())])
        if any(s[0] for s in said.values()):
            raise UsageError(
                f"{self._store.folder} holds good checkpoints of an earlier run: call guard.resume() before the first step to go "
                "on with it, or choose another folder"
            )

    def gave_up(self) -> None:
        self._rewarm.restore()

    def before_step(self, step: int) -> None:
        """The optimizer is about to write: what is being copied must be copied first, on the device."""
        if self._copying is not None:
            self._copying.order_after()
            self._copying = None
        self.complete()
        self._rewarm.before_step(step)

    def after_step(self, step: int, batches: Sequence[Any] | None) -> None:
        self._rewarm.restore()

    def _keep_beginning(self) -> None:
        """A run may go wrong before its first copy is due: the state it begins with is one to go back to as well."""
        host = self.state.host(0, self._runner.devices)
        host["data"] = self.supply.beginning
        host["random"] = self.supply.random or host["random"]
        snapshot = self._take(0, host)
        if snapshot is not None and snapshot.finite():
            snapshot.confirmed = self.has_good = True
            self.snapshots.keep(snapshot)
            self._copying = snapshot if snapshot.done else None

    def _take(self, step: int, host: dict[str, Any]) -> Snapshot | None:
        """A copy, if it can be made. That it cannot (tensors of an odd kind) is no reason for a run to die; of several ranks one
        cannot go on without the others."""
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

    def stepped(self, next_step: int, own_loop: bool, settled: bool) -> str | None:
        """A step was dispatched; the next one is `next_step`. Returns what is broken, if a copy shows that something is.

        While a jump of the loss is being watched nothing is copied: it may be the beginning of the end.
        """
        if not self.on:
            return None
        self._settled = settled
        if self._refusing:
            return None
        every = self._policy.snapshot_every
        if every > 0 and next_step // every > self._kept_at // every:
            self._due_keep, self._kept_at = True, next_step
        if self._checkpoints is not None and next_step // self._checkpoints.every > self._saved_at // self._checkpoints.every:
            self._due_save, self._saved_at = True, next_step
        if not (self._due_keep or self._due_save) or self._runner.held or not settled:
            return None
        host = self.state.host(next_step, self._runner.devices)
        host["data"] = self.supply.positions()
        snapshot = self._take(next_step, host)
        if snapshot is not None:
            if own_loop:
                self._unscheduled.append(snapshot)
            self._copying = snapshot if snapshot.done else None
            self._taken.append(_Taken(snapshot, self._due_keep, self._due_save, own_loop))
        self._due_keep = self._due_save = False
        return self._confirm(next_step - 1) if not self._runner.pending else None

    def accepted(self, step: int, settled: bool) -> str | None:
        """A step's verdict came: accepted. Returns what a copy shows to be broken, if anything."""
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
        """A step was refused: what was copied after it was copied in the middle of things. It is due again, once a step is
        accepted: copies made while the run stands still would push out those from before it did."""
        self._refusing = True
        self._drop_taken()

    def _drop_taken(self) -> None:
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
                return listed(self._runner.stepper.broken_state() or ["the loss scale, or a tensor of another rank"])
            snapshot.confirmed = self.has_good = True
            if taken.keep:
                self.snapshots.keep(snapshot)
            if taken.own_loop and "next_schedule" not in snapshot.host:
                self._waiting.append(taken)
            else:
                self._finish(taken)
        return None

    def complete(self) -> None:
        """In a loop of the user's own the schedule advances between steps: now it has. A new process goes on from that; a run
        that goes back is in the middle of its loop, which will advance it."""
        for snapshot in self._unscheduled:
            snapshot.host["next_schedule"] = self.state.schedule()
        self._unscheduled.clear()
        for taken in self._waiting:
            self._finish(taken)
        self._waiting.clear()

    def _finish(self, taken: _Taken) -> None:
        if taken.save and self._saver is not None:
            self._candidates[taken.snapshot.step] = 0
            self._saver.save(taken.snapshot, self.snapshots.release)
            self._prove()
        elif not taken.keep:
            self.snapshots.release(taken.snapshot)

    def _prove(self) -> None:
        """Not while a jump of the loss is being watched, whatever was copied before it."""
        if self._saver is None or self._checkpoints is None or not self._settled:
            return
        for step, healthy in list(self._candidates.items()):
            if healthy >= self._checkpoints.prove:
                del self._candidates[step]
                self._saver.promote(step, healthy)

    # -- the way back ----------------------------------------------------------------------------------------------------------

    def go_back(self, most: int, since: int, until: int, *, blame_data: bool) -> Way | None:
        """Back to a good state of before step `most`, where there is one. The batches of steps `since` to `until`, and a margin,
        are stepped over: at once where they are to blame, else where the same data has broken the run at the same step again.
        One that broke, went back and got past that step broke for another reason.

        None where there is no such state, or it has been tried often enough.
        """
        tries = self._tries + 1 if until <= self._last + _FORGIVEN else 1
        if tries > self._policy.max_rollbacks:
            self._tries = tries if self._policy.max_rollbacks else 0
            return None
        source, tensors, host = self._good_state(most, tries - 1)
        if source is None:
            return None
        self._tries = tries
        margin = self._policy.rollback_margin
        again = tries > 1 and until <= self._last + margin
        self._last = max(self._last, until) if self._tries > 1 else until
        step = source.step
        over = self.supply.of_steps(max(since - margin, step), until, margin) if blame_data or again else []
        self._put(tensors, host, over)
        self.backs += 1
        self._later_schedule = host.get("next_schedule")
        self._give_up_after(step)
        self._rewarm.start(step)
        count = max((len(batches) for batches in over), default=0)
        return Way(step, isinstance(source, Snapshot), self._tries, count, host["parts"]["heal"])

    @property
    def exhausted(self) -> bool:
        """The same trouble has sent the run back as often as it may."""
        return self._tries > self._policy.max_rollbacks

    @property
    def has_checkpoints(self) -> bool:
        return self._store is not None

    def _good_state(self, most: int, older: int) -> tuple[Snapshot | Saved | None, Mapping[str, Tensor], dict[str, Any]]:
        """The newest good state of up to step `most`, or one that is older by so many: with every further try of one trouble.
        The oldest, where there are not that many."""
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
        self.state.check_host(host, str(saved.path))
        return tensors, host, own

    def _put(self, tensors: Mapping[str, Tensor], host: Mapping[str, Any], over: Places) -> None:
        """In a running loop: random numbers go back only together with the data, else data made from them would come again."""
        rewindable = self.supply.fits(host["data"])
        self._runner.forget(keep_random=not rewindable)
        self.state.put(tensors)
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
        if self._store is not None and self._saver is not None:
            self._saver.wait()
            self._store.abandon(step)
            said = self._ranks.gather([any(saved.step == step for saved in self._store.checkpoints())])
            if not next(iter(said.values()))[0]:  # it could not be written, or is gone: it is due again
                self._saved_at = step - 1
        self.supply.forget_since(step)

    def catch_up_schedule(self) -> None:
        """The run went back after its own loop had advanced the schedule, and the loop will not do it again."""
        if self._later_schedule is not None:
            self.state.put_schedule(self._later_schedule)

    # -- a new process ---------------------------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Load the newest good checkpoint; 0 if there is none."""
        but, self._resumed = 0, True
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
            if not own or (self._ranks.world if self._ranks.together else 1) != self._world(saved):
                log.warning(
                    "nanproof: %s was written by another number of ranks: every rank goes on from the data position of rank 0",
                    saved.path.name,
                )
            self.supply.resume(host["data"])
            self._kept_at = self._saved_at = int(host["step"])
            # Worth a louder word where something newer was passed over.
            level = logging.INFO if saved.path == self._newest_there() else logging.WARNING
            log.log(level, "nanproof: resumed from %s", saved.path)
            return int(host["step"])
        if self._newest_there() is not None:
            log.warning(
                "nanproof: no checkpoint in %s can be used: the run starts from step 0", self._store and self._store.folder
            )
        return 0

    def _newest_there(self) -> Path | None:
        there = self._store.checkpoints() if self._store is not None else []
        return there[0].path if there else None

    def _world(self, saved: Saved) -> int:
        return len(list(saved.path.glob("host-*.pt")))

    def close(self, alone: bool) -> None:
        """Wait for the disk and let go of memory. `alone`: other ranks may not be coming to write their part, so not for them."""
        self._rewarm.restore()
        try:
            if self._saver is not None and not (alone and self._ranks.together):
                self._saver.close()
        finally:
            if self._store is not None:
                self._store.close()
            self.snapshots.close()


def _own_group(ranks: Any) -> Any:
    """A group for the thread that writes: its collectives must not mix with those of training, and work on host memory."""
    if not ranks.together:
        return None
    return dist.new_group(ranks.members, timeout=timedelta(minutes=10), backend="gloo")
