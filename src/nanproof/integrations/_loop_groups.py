"""LoopGroups: the optimizers of a framework's own loop (Accelerate, Fabric, Lightning's manual
optimization), in groups that step together. Each group has a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanproof.core._under_way import UNKNOWN
from nanproof.core.judge._judge import Norms
from nanproof.core.judge._optimizers import bare_optimizer
from nanproof.core.judge._stepper import Stepper
from nanproof.core.support._context import RandomState
from nanproof.core.support._index import next_folder, write_index
from nanproof.explain.lines._lines import Op
from nanproof.explain.lines._recorded import RootRecorder
from nanproof.integrations._groups import Group, Groups, leaves_of, name_of
from nanproof.integrations._protected import ProtectedRun


class LoopGroup(Group):
    """Optimizers that step together in a framework's loop, and their run."""

    def __init__(self, members: Iterable[Optimizer], start: Callable[[LoopGroup, int], None]) -> None:
        super().__init__(members)
        self._start = start
        self.run: ProtectedRun | None = None
        self.changed = False
        """Whether the run has still to follow a change of members."""
        self.recorder: RootRecorder | None = None
        self.norms: Norms | None = None
        """Those of the gradients, where the loop asked for them."""
        self.total: Tensor | None = None
        """The norm of the gradients of the last step, before clipping."""
        self.limit: float | None = None
        """What the loop asked to clip this step to."""
        self.losses: list[Tensor] = []
        """The loss of the next step, if the engine has not seen a backward."""

    @property
    def started(self) -> bool:
        return self.run is not None and self.run.started

    @property
    def guard(self) -> ProtectedRun:
        assert self.run is not None
        return self.run

    @property
    def stepper(self) -> Stepper:
        assert self.guard.parts is not None
        return self.guard.parts.stepper

    def follow(self) -> None:
        if self.changed and self.started:
            self.changed = False
            self._start(self, self.guard.next_step - self.guard.open)

    def begin(self, batch: Any) -> None:
        """The model is called."""
        engine = self.guard.engine
        if self.recorder is not None:
            self.recorder.random = RandomState.now(engine.under_way.devices) if engine.open else None
        engine.begin(batch)

    def loss(self, loss: Tensor, noted: Tensor, then: Iterable[Op] = ()) -> Tensor | None:
        """A backward begins at a loss. `noted`: what it adds to the step. Returns its seed on several
        ranks."""
        self.norms = None
        engine, recorder = self.guard.engine, self.recorder
        again = None if recorder is None else recorder.source_of(loss, then, argument="loss", late=self.guard.late)
        if recorder is None or not recorder.recognised or not engine.open:
            engine.begin(UNKNOWN)
        return engine.loss(noted, () if recorder is None else recorder.calls, again)

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Return the norm of these gradients. If they are all there are, the guard will clip. If they
        are a part of them, they are clipped now."""
        stepper = self.stepper
        ours = stepper.parameters
        all_of_them = {id(ours.tensors[i]) for i in ours.present()} == {id(p) for p in parameters if p.grad is not None}
        if all_of_them and norm_type == 2 and max_norm > 0 and self.complete:
            self.limit, self.norms = float(max_norm), stepper.norms()
            return stepper.unscaled(self.norms.total)
        scale = 1.0 if stepper.scale is None else stepper.scale.value()
        return clip_some([p.grad for p in parameters if p.grad is not None], max_norm, norm_type, scale)

    def step(self, member: Optimizer, backwards: int, clips: bool = True) -> None:
        """In place of the optimizer's step. `clips`: the loop says what to clip to, each time."""
        engine = self.guard.engine
        if not (self.goes_on(member, backwards) and self.act(engine, member, {})):
            self.follow()
            engine = self.guard.engine
            if not engine.open:
                engine.begin(UNKNOWN)
            if not engine.judge.noted:
                for loss in self.losses:
                    engine.loss(loss)
            if clips:
                self.guard.clip_to(self.limit)
            norms, self.norms, self.losses, self.limit = self.norms, None, [], None
            self.total = self.judge(engine, member, backwards, norms)
        if self.complete:
            engine.end()


class LoopGroups(Groups[LoopGroup]):
    """The optimizers of one loop. Nothing is guarded before the first backward, except a single
    optimizer."""

    def __init__(
        self, optimizers: Iterable[Any], run: ProtectedRun, start: Callable[[LoopGroup, int], None], first_step: int = 0
    ) -> None:
        """
        Args:
            run: the first group's. The others get runs like it, which share its list of incidents.
            start: puts the guard around a group, at this step; also again, when its members change.
        """
        super().__init__()
        self.runs = [run]
        self._names: dict[int, str] = {}
        """By place in `runs`: the optimizers, and their model."""
        self._start, self._first_step = start, first_step
        self._optimizers = [bare_optimizer(optimizer) for optimizer in optimizers]
        self._groups = [LoopGroup([optimizer], start) for optimizer in self._optimizers]
        run.on_close(self._let_go)
        if len(self._groups) == 1:
            self.start(self._groups)

    def of(self, optimizer: Optimizer) -> LoopGroup:
        return next(group for group in self._groups if any(member is optimizer for member in group.members))

    def has(self, optimizer: Any) -> bool:
        return any(known is optimizer for known in self._optimizers)

    def every(self) -> list[LoopGroup]:
        return list(self._groups)

    @property
    def started(self) -> list[LoopGroup]:
        return [group for group in self._groups if group.started]

    def concerned(self, tensors: Any, noted: Tensor) -> list[LoopGroup]:
        """A backward begins. Return the groups that it feeds; the others may turn out to be fed."""
        self.at_backward(tensors)
        started = self.started
        if len(started) > 1 and any(group.feeds is None for group in started):
            leaves = leaves_of(tensors)
            for group in started:
                group.feed(leaves)
        for group in self._groups:
            if group.feeds is False or not group.started:
                group.losses = [noted]
        return [group for group in started if group.feeds is not False]

    def begin(self, group: LoopGroup, at_step: bool) -> None:
        if any(other.run is self.runs[0] for other in self._groups):
            self.runs.append(self._another())
        group.run = self.runs[-1]
        self._start(group, self._first_step)
        self._write_index()

    def _another(self) -> ProtectedRun:
        first = self.runs[0]
        folders = [None if run.run_dir is None else Path(run.run_dir) for run in self.runs]
        folder = None if folders[0] is None else next_folder(folders[0], folders)
        return ProtectedRun(policy=first.policy, run_dir=folder, loop=first.loop, incidents=first.incidents)

    def _write_index(self) -> None:
        """Write which optimizers the run's folder holds, as far as that is known now."""
        for place, run in enumerate(self.runs):
            members = [member for group in self._groups if group.run is run for member in group.members]
            if members and run.started:
                self._names[place] = f"{name_of(members)} of {type(run.model).__name__}"
        first = self.runs[0]
        if first.run_dir is not None and first.started and first.engine.judge.ranks.rank == 0:
            kept = [(run, name) for place, name in self._names.items() if (run := self.runs[place]).next_step or not run.closed]
            write_index(Path(first.run_dir), [(Path(run.run_dir), name) for run, name in kept if run.run_dir is not None])

    def merge(self, group: LoopGroup, other: LoopGroup) -> None:
        members = other.members
        self._groups.remove(other)
        if other.run is not None:
            other.run.close()
        group.add(members)
        group.changed = group.started
        self._write_index()

    def split(self, group: LoopGroup, members: list[Optimizer]) -> None:
        apart = LoopGroup(members, self._start)
        apart.losses = group.losses = [loss for loss, _ in group.guard.engine.judge.noted] or group.losses
        self._groups.append(apart)
        group.remove(members)
        group.changed = True
        group.follow()

    def _let_go(self) -> None:
        """The loop is over."""
        for group in self._groups:
            if group.recorder is not None:
                group.recorder.close()
        for run in self.runs[1:]:
            run.close()


def clip_some(gradients: list[Tensor], max_norm: float, norm_type: float, scale: Any) -> Tensor:
    """Clip a part of the gradients in place, or by another norm. What is not finite stays as it is,
    and what is with it: else the step could not be told from a good one, or its culprit not from
    the others."""
    if not gradients:
        return torch.zeros(())
    norms = [torch.linalg.vector_norm(g.detach().float(), norm_type) for g in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), norm_type) / scale
    factor = torch.where(torch.isfinite(total), (max_norm / (total + 1e-6)).clamp(max=1.0), 1.0)
    for g in gradients:
        g.detach().mul_(factor.to(g.device, g.dtype))
    return total
