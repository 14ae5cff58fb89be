"""Group: optimizers that take one step together, though the loop calls each of them by itself.

Two optimizers belong together if one backward feeds both and no backward comes between their steps:
Muon for the matrices and AdamW for the rest. A GAN's do not: each has a backward of its own. Which
case it is shows in the graph of the loss and in the order of the calls:

- Those that the same first backward reaches begin as one group.
- Once two have stepped without a backward between them, they stay together.
- One that steps after a backward that did not reach those that stepped last is apart from them.
  So are those that only ever take turns.

At the first `step` of a group the engine judges the gradients of all its members and lets the caller
act. The others act on that verdict when they are called. If it is bad, none is.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanproof.core._engine import Engine
from nanproof.core.judge._judge import Norms
from nanproof.core.judge._parameters import local


def leaf_tensors(tensors: Any) -> Iterator[Tensor]:
    """Yield the tensors whose gradients a backward from here would add to."""
    several = [tensors] if isinstance(tensors, Tensor) else [t for t in tensors if isinstance(t, Tensor)]
    yield from (t for t in several if t.requires_grad and t.is_leaf)
    todo = [t.grad_fn for t in several if t.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        variable: Tensor | None = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                todo.append(below)


def leaves_of(tensors: Any) -> set[int]:
    """Return the ids of the tensors whose gradients a backward from here would add to."""
    return {id(leaf) for leaf in leaf_tensors(tensors)}


_groups_of = attrgetter("param_groups")
_params_of = itemgetter("params")
_gradient_of = attrgetter("grad")
_called = methodcaller("__call__")
_is_curious = attrgetter("curious")


def parameters_of(*optimizers: Any) -> list[Tensor]:
    return list(chain.from_iterable(map(_params_of, chain.from_iterable(map(_groups_of, optimizers)))))


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that are there."""
    return [g for g in map(_gradient_of, parameters) if g is not None]


def referents(references: Iterable[weakref.ref[Tensor]]) -> list[Tensor | None]:
    """Return what each reference refers to by now."""
    return list(map(_called, references))


def name_of(optimizers: Iterable[Any]) -> str:
    """Return the classes of optimizers, each with its number: "AdamW and Muon", "24 × Adam"."""
    counts = Counter(type(optimizer).__name__ for optimizer in optimizers)
    return " and ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items())


def has_gradient(optimizer: Any) -> bool:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                return True
    return False


def finite_gradients(optimizers: Iterable[Any]) -> bool:
    """Look at every gradient. Waits for the device."""
    gradients = [local(p.grad) for optimizer in optimizers for p in parameters_of(optimizer) if p.grad is not None]
    values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    return all(bool(torch.isfinite(v).all()) for v in values)


RECENT = 64
"""Backwards whose graph is looked at for optimizers that none of them reaches."""


class Group:
    """Optimizers that take one step together, and how far they have got with it."""

    left_alone = False
    """Whether it is not guarded, for good."""

    def __init__(self, members: Iterable[Optimizer]) -> None:
        self._members = [weakref.ref(member) for member in members]
        self._proven: set[int] = set()
        """Members that have stepped together with another."""
        self._fed: set[int] = set()
        """Members that a backward has reached since the last step began."""
        self._blind = False
        """Whether a backward since then was not followed."""
        self._began = -1
        """Backwards that there had been when the last step began."""
        self._acted: set[int] = set()
        self._acted_before: set[int] = set()
        """Members that have acted in the last step, and in the one before."""
        self._due: set[int] = set()
        """Members that have still to act in it."""
        self._judged: dict[int, tuple[int, int]] = {}
        """The gradients that the verdict is about, by parameter: which, and how often written."""
        self.refused = False
        """Whether the last step was refused, where that is known at once."""
        self.fed = 0
        """The last backward that reached it."""
        self.feeds: bool | None = None
        """Whether the graph of the last backward reached it; None if that was not looked at."""
        self._looks = 0

    @property
    def started(self) -> bool:
        """Whether it is guarded."""
        return False

    def can_start(self, at_step: bool) -> bool:
        """Whether it can be guarded from now on."""
        return True

    def follow(self) -> None:
        """Guard the members that there are now; no step is under way."""

    @property
    def stepped(self) -> bool:
        """Whether it has begun a step."""
        return self._began >= 0

    @property
    def curious(self) -> bool:
        """Whether it matters which backward reaches it."""
        return not self.left_alone and (self.undecided or not self.started) and self._looks < RECENT

    @property
    def members(self) -> list[Optimizer]:
        return [member for ref in self._members if (member := ref()) is not None]

    @property
    def parameters(self) -> list[Tensor]:
        return parameters_of(*self.members)

    def overlaps(self, other: Group) -> bool:
        """Whether a parameter is in both."""
        return not {id(p) for p in self.parameters}.isdisjoint(id(p) for p in other.parameters)

    def add(self, members: Iterable[Optimizer]) -> None:
        self._members += [weakref.ref(member) for member in members]

    def remove(self, members: Collection[Optimizer]) -> None:
        gone = {id(member) for member in members}
        self._members = [weakref.ref(member) for member in self.members if id(member) not in gone]
        for ids in (self._proven, self._fed, self._acted, self._acted_before, self._due):
            ids -= gone

    # -- who belongs together ----------------------------------------------------------------------

    @property
    def undecided(self) -> bool:
        """Whether a member has not been seen to step with the others."""
        return len(self._members) > 1 and len(self._proven) < len(self._members)

    def feed(self, leaves: set[int] | None) -> bool:
        """A backward is about to reach these tensors; None if they are not known. Return whether it
        reaches a member."""
        if leaves is None:
            self._blind, self.feeds = True, None
            return False
        self._looks += 1
        fed = {id(member) for member in self.members if any(id(p) in leaves for p in parameters_of(member))}
        self._fed |= fed
        self.feeds = bool(fed)
        return self.feeds

    def apart(self, member: Optimizer) -> list[Optimizer]:
        """A member is about to begin a step. Return the members that this shows to be apart from
        the rest."""
        if not self.undecided or not self._acted:
            return []
        if self._acted_before and not self._acted & (self._acted_before | self._proven):
            return [m for m in self.members if id(m) in self._acted]  # they have taken turns
        loose = id(member) not in self._acted | self._proven
        return [member] if loose and not self._blind and not self._fed & self._acted else []

    # -- a step in parts ---------------------------------------------------------------------------

    def under_way(self, backwards: int) -> bool:
        """Whether a step began after the last backward."""
        return self._began == backwards

    def goes_on(self, member: Optimizer, backwards: int) -> bool:
        """Whether this member's step is a part of the one under way."""
        return self.under_way(backwards) and id(member) not in self._acted

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do in this step."""
        return self.refused or not self._due

    def judge(self, engine: Engine, member: Optimizer, backwards: int, norms: Norms | None) -> Tensor:
        """Begin a step: judge the gradients of all, and let this member act. Returns their norm."""
        self._open(backwards)
        members = self.members
        total = engine.step(norms, acting=None if len(members) == 1 else [member])
        self.refused = engine.refused_at_once()
        if len(members) > 1:
            self._due = {id(m) for m in members if m is member or has_gradient(m)}
            self._judged = {id(p): (id(p.grad), p.grad._version) for p in self.parameters if p.grad is not None}
        self.pass_by(member)
        return total

    def act(self, engine: Engine, member: Optimizer, clipped: Mapping[int, tuple[weakref.ref[Tensor], int, Tensor]]) -> bool:
        """Let another member act in the step under way. `clipped`: gradients that were clipped since
        it was judged, by parameter. Return False if its gradients are others by now, and bad."""
        if not self.refused:
            known = self._judged | {key: (id(ref()), version) for key, (ref, version, _) in clipped.items()}
            there = [p for p in parameters_of(member) if p.grad is not None]
            unknown = any(known.get(id(p)) != (id(p.grad), p.grad._version) for p in there if p.grad is not None)
            if unknown and not finite_gradients([member]):
                return False
            if all(id(p) in self._judged for p in there):
                engine.act(member)
            else:
                member.step()  # it has joined in the middle of this step
        self.pass_by(member)
        return True

    def leave_out(self, backwards: int) -> None:
        """Begin a step in which no member acts."""
        self._open(backwards)
        self.refused, self._due = True, {id(m) for m in self.members}

    def call_again(self, member: Optimizer) -> None:
        """The member's own call in this step is still to come."""
        self._acted.discard(id(member))

    def pass_by(self, member: Optimizer) -> None:
        """A member's turn in this step is over."""
        self._due.discard(id(member))
        self._acted.add(id(member))
        if len(self._acted) > 1:
            self._proven |= self._acted

    def _open(self, backwards: int) -> None:
        self._began, self._blind = backwards, False
        self._acted_before, self._acted, self._fed, self._due = self._acted, set(), set(), set()


G = TypeVar("G", bound=Group)


class Groups(ABC, Generic[G]):
    """All the optimizers of a loop, in groups."""

    def __init__(self) -> None:
        self.backwards = 0
        """So far."""

    @abstractmethod
    def of(self, optimizer: Optimizer) -> G:
        """Return the group of an optimizer."""

    @abstractmethod
    def every(self) -> list[G]:
        """Return all groups, the oldest first."""

    @abstractmethod
    def begin(self, group: G, at_step: bool) -> None:
        """Guard a group from now on."""

    @abstractmethod
    def merge(self, group: G, other: G) -> None:
        """Make two groups one: the first."""

    @abstractmethod
    def split(self, group: G, members: list[Optimizer]) -> None:
        """Put members of a group into one of their own."""

    def start(self, groups: Sequence[G], at_step: bool = False) -> None:
        """Guard these as one group from now on. One that shares a parameter with the first is apart."""
        first, *others = groups
        apart = [other for other in others if first.overlaps(other)]
        for other in others:
            if other not in apart:
                self.merge(first, other)
        if first.started:
            first.follow()
        else:
            self.begin(first, at_step)
        if apart:
            self.start(apart, at_step)

    def at_backward(self, tensors: Any) -> None:
        """A backward begins, and those that it reaches for the first time are started. One that it
        reaches along with a group that has stepped already waits for its own first step: that
        shows whether they step together."""
        self.backwards += 1
        every = self.every()
        for group in every:
            group.follow()
        leaves = leaves_of(tensors) if any(map(_is_curious, every)) else None
        if leaves is None:
            for group in every:
                group.feed(None)
            return
        reached = [group for group in every if group.feed(leaves)]
        waiting = [group for group in reached if not group.started and not group.left_alone and group.can_start(at_step=False)]
        if waiting and not any(group.stepped for group in reached):
            self.start([group for group in reached if group.started] + waiting)

    def at_step(self, optimizer: Optimizer) -> G:
        """An optimizer is about to step. Return the group that it steps in, which may be another
        because of that."""
        group = self.of(optimizer)
        if group.left_alone or group.goes_on(optimizer, self.backwards):
            return group
        while group.started and (members := group.apart(optimizer)):
            self.split(group, members)
            group = self.of(optimizer)
        if not has_gradient(optimizer) or not (group.started or group.can_start(at_step=True)):
            return group
        joined = next((other for other in self.every() if other is not group and self._joins(group, other)), None)
        if joined is not None:
            self.merge(joined, group)
        elif not group.started:
            waiting = [g for g in self.every() if not (g is group or g.started or g.left_alone)]
            self.start([group, *(g for g in waiting if any(map(has_gradient, g.members)) and g.can_start(at_step=True))], True)
        return self.of(optimizer)

    def _joins(self, group: G, other: G) -> bool:
        """Whether a group that is about to step belongs to a step that another has begun."""
        fed_alike = not group.started or group.fed == other.fed
        return other.started and other.under_way(self.backwards) and fed_alike and not group.overlaps(other)
