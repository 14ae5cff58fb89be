"""Causes that lie in the objective: what is compared with what, and how the parts of a loss are added up.

All of them are silent: every number is finite, and the run learns slowly or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanproof.core.support._tree import tensors_in
from nanproof.explain._case import Case, Trial
from nanproof.explain._cause import Cause, Match
from nanproof.explain._graph import applied_twice, nodes_of
from nanproof.explain.locate._trace import Op, source_of_operation
from nanproof.explain.replay._interventions import Intervention

LARGE_UPDATE = 0.02
"""Size of an update, next to the weights, from which a loss that does not fall may be the fault of too large steps."""
REHEARSED = 24
"""Steps over which two ways to train are compared."""


def rounds(case: Case, steps: int = REHEARSED) -> int:
    """Return how often the recent batches are gone through for so many steps."""
    return max(1, round(steps / max(1, len(case.moments))))


class ActivationAppliedTwice(Cause):
    """A softmax or sigmoid whose output goes into a loss that applies it itself: the loss cannot reach 0."""

    slug = "activation-applied-twice"
    specific = 2
    fix = (
        "Give the loss logits: drop the softmax or sigmoid at the end of the model (keep it for predictions), since "
        "cross_entropy and binary_cross_entropy_with_logits apply it themselves."
    )

    def match(self, case: Case) -> Match | None:
        if case.signal != "activation-twice":
            return None
        inner, outer = case.details["inner"], case.details["outer"]
        floor = "ln(1 + (classes - 1) / e)" if outer == "log_softmax" else "ln(1 + 1/e) = 0.31 for positives, ln 2 for negatives"
        evidence = [f"the output of {inner} goes into {outer}, which takes it for logits: they lie within 0 and 1"]
        evidence.append(f"from such logits the loss cannot fall below {floor}")
        call = _Calls.find(case) if case.replay is not None else None
        return Match(
            confidence=0.96,
            evidence=tuple(evidence),
            phase="loss",
            where="loss_fn",
            op="cross_entropy" if outer == "log_softmax" else outer,
            source=call.source or None if call is not None else None,
            samples=(),
            trial=(lambda: self._without(case, call)) if call is not None and case.moments else None,
            tried=f"that {inner} left out, over the recent batches",
        )

    def _without(self, case: Case, call: _Calls) -> Trial:
        """Train on as it is, and without the activation. Fails where the loss falls as well with it."""
        assert case.replay is not None
        how: dict[str, Any] = {"max_norm": case.max_norm, "rounds": rounds(case)}
        as_is = case.rehearse(**how)
        without = case.rehearse(under=lambda: _Without(call.numbers), **how)
        if as_is is None or without is None:
            return Trial(False, "whole steps cannot be rehearsed here")
        fell = [(losses[0] - losses[-1]) / max(abs(losses[0]), 1e-12) for losses in (as_is, without)]
        held = math.isfinite(without[-1]) and fell[1] > max(1.3 * fell[0], 0)
        said = f"in {len(without) - 1} steps the loss goes from {without[0]:.4g} to {without[-1]:.4g}"
        return Trial(held, f"{said}; as it is, from {as_is[0]:.4g} to {as_is[-1]:.4g}")


class _Without(Intervention):
    """The given calls of softmax and sigmoid, by number, return their input."""

    names = frozenset({"softmax", "sigmoid"})

    def __init__(self, numbers: frozenset[int]) -> None:
        super().__init__()
        self._numbers, self._count = numbers, 0

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        self._count += 1
        if self._count - 1 not in self._numbers:
            return func(*args, **kwargs)
        self.acted += 1
        x = args[0] if args else kwargs["input"]
        return x * 1


class _Calls(Intervention):
    """Numbers the calls of softmax and sigmoid, to find the one that the graph of the loss shows."""

    names = frozenset({"softmax", "sigmoid"})

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, str]] = []
        self.numbers: frozenset[int] = frozenset()
        self.source = ""

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self.made.append((out.grad_fn, source_of_operation()))
        return out

    def read(self, loss: Tensor) -> None:
        guilty = {node for _, node in applied_twice(nodes_of(loss))}
        self.numbers = frozenset(i for i, (node, _) in enumerate(self.made) if node in guilty)
        self.source = next((source for node, source in self.made if node in guilty), "")
        self.made = []

    @classmethod
    def find(cls, case: Case) -> _Calls | None:
        assert case.replay is not None
        calls = cls()
        case.replay.run(calls, before_backward=calls.read, backward=False)
        return calls if calls.numbers else None


class LossBroadcast(Cause):
    """(N, 1) against (N): the loss compares every prediction with every target."""

    slug = "loss-broadcast"
    specific = 2
    fix = (
        "Give predictions and targets the same shape (prediction.squeeze(-1), or target.unsqueeze(-1)): (N, 1) against (N) is "
        "broadcast to N x N pairs, and the best prediction is the mean of the targets."
    )

    def match(self, case: Case) -> Match | None:
        if case.signal != "broadcast":
            return None
        few, many = case.details["prediction"], case.details["result"]
        said = f"predictions of shape {few} and targets are broadcast to {many}: each prediction is compared with every target"
        find = _Aligned()
        if case.replay is not None:
            case.replay.run(find, backward=False)
        return Match(
            confidence=0.93,
            evidence=(said,),
            phase="loss",
            where="loss_fn",
            op=case.details.get("op") or find.name or None,
            source=find.source or None,
            samples=(),
            trial=(lambda: self._shuffled(case)) if case.replay is not None else None,
            tried="targets of the predictions' shape",
        )

    def _shuffled(self, case: Case) -> Trial:
        """Targets in another order do not change a loss over all pairs; they do change one that compares each with its own."""
        assert case.replay is not None
        losses = {}
        for align in (False, True):
            for shuffle in (False, True):
                change = _Aligned(align, shuffle)
                outcome = case.replay.run(change, backward=False)
                if not change.acted or not math.isfinite(outcome.loss):
                    return Trial(False, "no operation broadcasts predictions and targets of different dimensions")
                losses[align, shuffle] = outcome.loss
        pairs, own = (abs(losses[a, True] - losses[a, False]) / max(abs(losses[a, False]), 1e-12) for a in (False, True))
        held = pairs < 1e-4 and own > 1e-3
        said = f"with the targets in another order the loss goes from {losses[True, False]:.4g} to {losses[True, True]:.4g}"
        return Trial(held, f"{said}; as it is, it stays at {losses[False, False]:.4g}")


class _Aligned(Intervention):
    """Where N numbers meet N others and are broadcast to N x N, gives the second the shape of the first, or another order."""

    names = frozenset(
        "mse_loss l1_loss smooth_l1_loss huber_loss sub subtract __sub__ __rsub__ rsub mul multiply __mul__ __rmul__ div "
        "__truediv__ broadcast_tensors".split()
    )

    def __init__(self, align: bool = True, shuffle: bool = False) -> None:
        super().__init__()
        self._align, self._shuffle = align, shuffle
        self.name = self.source = ""

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        a, b = args[0] if args else None, args[1] if len(args) > 1 else None
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.requires_grad == b.requires_grad or not self._spread(a, b):
            return func(*args, **kwargs)
        self.acted += 1
        self.name, self.source = self.name or name.strip("_"), self.source or source_of_operation()
        prediction, target = (a, b) if a.requires_grad else (b, a)
        target = target.roll(1, 0) if self._shuffle else target
        target = target.reshape(prediction.shape) if self._align else target
        pair = (prediction, target) if a.requires_grad else (target, prediction)
        return func(*pair, *args[2:], **kwargs)

    @staticmethod
    def _spread(a: Tensor, b: Tensor) -> bool:
        if a.dim() == b.dim() or not a.numel() == b.numel() > 1 or not a.dim() * b.dim():
            return False
        try:
            return bool(math.prod(torch.broadcast_shapes(a.shape, b.shape)) > a.numel())
        except RuntimeError:
            return False


class IdenticalPair(Cause):
    """Chosen and rejected are the same: the loss is what a tie costs, for ever."""

    slug = "identical-pair"
    specific = 2
    fix = (
        "Look at how the pairs are made: chosen and rejected (or positive and negative) are the same here. Drop such pairs; a "
        "column that is read twice, or a prompt so long that both answers are cut off, makes all of them equal."
    )

    def match(self, case: Case) -> Match | None:
        if case.signal not in ("constant-loss", "loss-at-ln2", "zero-gradients") or case.replay is None:
            return None
        if len(case.replay.batches) != 1 or case.record is None or not case.record.loss > 0:
            return None  # a tie costs something
        pairs = _pairs(case.replay.batches[0])
        if not pairs:
            return None
        loss = case.record.loss
        tie = " = ln 2" if abs(loss - math.log(2)) < 0.01 else ""
        said = f"{pairs[0][0]} are the same in every sample of the batch; the loss is {loss:.4g}{tie}, that of a tie"
        return Match(
            confidence=0.93,
            evidence=(said,),
            phase="data",
            where=pairs[0][0],
            samples=(),
            trial=lambda: self._apart(case, pairs),
            tried="one member of each pair taken from another sample",
        )

    def _apart(self, case: Case, pairs: list[_Pair]) -> Trial:
        """Changed alone, one member must move the loss; changed alike, both must not. Dropout, which tells them apart, is off."""
        assert case.replay is not None and case.record is not None
        trial = Trial(False, "no pair moves the loss")
        for _, one, both in pairs:
            with case.replay.evaluating():
                control = case.replay.run()
                apart, alike = case.replay.run(batches=case.batches_with(one)), case.replay.run(batches=case.batches_with(both))
            near = 1e-3 * max(abs(control.loss), 1e-12)
            stays = alike.error is None and abs(alike.loss - control.loss) < 0.1 * near
            moves = apart.error is None and apart.total > 10 * control.total + 1e-6  # a tie has no gradient
            result = (
                f"the loss is {apart.loss:.6g} instead of {control.loss:.6g}, the gradient norm {apart.total:.3g} instead of "
            )
            trial = Trial(stays and moves, f"{result}{control.total:.3g}; with both changed alike the loss is {alike.loss:.6g}")
            if trial.held:
                break
        return trial


_Pair = tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""Names of the members, and how to change one of them, and both alike."""


def _pairs(batch: Any) -> list[_Pair]:
    """Return the tensors, or halves of a tensor, of a batch that hold the same numbers."""
    tensors = [(name, t) for name, t in tensors_in(batch) if t.dim() and t.numel() > 3 and t.layout is torch.strided]
    varied = [(name, t) for name, t in tensors if len(t) > 1 and bool((t != t[:1]).any())]
    found: list[_Pair] = []
    for i, (name, t) in enumerate(varied):
        for other, u in varied[i + 1 :]:
            if t is not u and t.shape == u.shape and t.dtype == u.dtype and bool((t == u).all()):
                found.append((f"{name} and {other}", partial(_if_among, (u,), _moved), partial(_if_among, (t, u), _repeated)))
    for name, t in varied:
        half = len(t) // 2
        if len(t) >= 4 and len(t) % 2 == 0 and bool((t[:half] == t[half:]).all()):
            found.append((f"both halves of {name}", *_in_halves(t, half)))
        elif t.dim() > 1 and t.shape[1] == 2 and len(t) > 1 and bool((t[:, 0] == t[:, 1]).all()):
            found.append((f"both columns of {name}", *_in_columns(t)))
    return found


def _if_among(those: tuple[Tensor, ...], change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return change(x) if any(x is t for t in those) else x


def _moved(x: Tensor) -> Tensor:
    """Other numbers of the same kind in each sample: those of another one, in another order or with the other sign."""
    if x.is_floating_point():
        return -x.roll(1, 0)
    return x.roll(1, 0).roll(1, -1) if x.dim() > 1 else x.roll(1, 0)


def _repeated(x: Tensor) -> Tensor:
    """The first sample in place of each. A tie stays a tie; any other loss, as of inputs that are their own labels, changes."""
    return x[:1].expand_as(x).clone()


def _in_halves(t: Tensor, half: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    one = torch.cat((t[:half], _moved(t[half:])))
    both = torch.cat((_repeated(t[:half]), _repeated(t[half:])))
    return lambda x: one if x is t else x, lambda x: both if x is t else x


def _in_columns(t: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    one = torch.stack((t[:, 0], _moved(t[:, 1])), 1)
    return lambda x: one if x is t else x, lambda x: _repeated(t) if x is t else x


class AccumulationNotAveraged(Cause):
    """The losses of k micro-batches are added up and not divided by k: the effective rate is k times the one that was meant."""

    slug = "accumulation-not-averaged"
    specific = 2
    fix = "Divide the loss of each micro-batch by their number before backward, and once only."

    def match(self, case: Case) -> Match | None:
        if case.replay is None or not (case.kind == "divergence" or case.nonfinite or case.signal in ("stuck", "collapsed")):
            return None
        if case.signal and case.details.get("moved", 0.0) < LARGE_UPDATE:
            return None
        if case.nonfinite and (case.bad_weights or any(not bad.only_negative for bad in case.bad_batch)):
            return None  # whatever the loss is divided by, it is not finite
        terms = _terms(case)
        if len(terms) < 2 or not case.moments:
            return None
        said = f"the loss is the sum of {len(terms)} terms that the same line computes, and is not divided by {len(terms)}"
        return Match(
            confidence=0.85,
            evidence=(said,),
            phase="loss",
            where=terms[0].path,
            op="add",
            source=terms[0].source or None,
            samples=(),
            trial=lambda: self._averaged(case, len(terms)),
            tried=f"the loss divided by {len(terms)}, over the recent batches",
        )

    def _averaged(self, case: Case, count: int) -> Trial:
        """From fresh weights, so that a run that has blown up already can be judged, and from where it is now. Fails where the
        run learns as well with the sum, as it does under Adam."""
        assert case.replay is not None
        how: dict[str, Any] = {"max_norm": case.max_norm, "rounds": rounds(case)}
        trial = Trial(False, "nothing was tried")
        for fresh in (True, False):
            as_is = case.rehearse(from_start=fresh, **how)
            mean = case.rehearse(from_start=fresh, loss_factor=1 / count, **how)
            trial = compared(as_is, mean, fresh)
            if trial.held:
                break
        return trial


OVERSHOOT = 4.0
"""Times its start that a loss reaches in steps that are too large."""


def compared(as_is: list[float] | None, changed: list[float] | None, fresh: bool = True) -> Trial:
    """Whether the run learns with the change, and does not as it is. Before a run there is one batch only, which is soon learned
    by heart: then a loss that shoots up at once counts as well."""
    if as_is is None or changed is None:
        return Trial(False, "whole steps cannot be rehearsed here")
    ends = [_end(losses) for losses in (as_is, changed)]
    start = changed[0]
    most = max((x for x in as_is if math.isfinite(x)), default=math.inf)
    if not fresh and most > OVERSHOOT * abs(start) and max(changed) < 1.5 * abs(start) and ends[1] < start:
        said = f"in {len(changed) - 1} steps the loss goes from {start:.4g} to {ends[1]:.4g}"
        return Trial(True, f"{said}; as it is, it shoots up to {most:.4g} first")
    fails = not ends[0] < 0.9 * as_is[0] or ends[0] > 0.7 * abs(start)
    held = math.isfinite(ends[1]) and ends[1] < 0.9 * start and ends[1] < 0.8 * ends[0] and fails
    began = " from fresh weights" if fresh else ""
    said = f"in {len(changed) - 1} steps{began} the loss goes from {start:.4g} to {ends[1]:.4g}"
    return Trial(held, f"{said}; as it is, to {ends[0]:.4g}")


def better(as_is: list[float] | None, changed: list[float] | None) -> Trial:
    """Whether the loss falls further with the change than without."""
    if as_is is None or changed is None:
        return Trial(False, "whole steps cannot be rehearsed here")
    ends = [_end(losses) for losses in (as_is, changed)]
    said = f"in {len(changed) - 1} steps the loss goes from {changed[0]:.4g} to {ends[1]:.4g}; as it is, to {ends[0]:.4g}"
    return Trial(math.isfinite(ends[1]) and ends[1] < 0.95 * ends[0], said)


def _end(losses: list[float]) -> float:
    """The mean of the last quarter; infinite where the run broke."""
    last = losses[-max(1, len(losses) // 4) :]
    return math.fsum(last) / len(last) if all(map(math.isfinite, losses)) else math.inf


def _terms(case: Case) -> list[Op]:
    """Return the terms that the last additions of the loss sum up, if one line computes them all and nothing averages them."""
    if case.look is None or not case.look.added_up:
        return []  # its graph says so, and every operation needs not be looked at
    trace = case.forward_trace
    ops = [op for op in trace.ops if not op.backward and op.name != "ones_like"] if trace is not None else []
    scalar = [op for op in ops if op.outputs and op.outputs[0].shape == () and op.outputs[0].dtype.is_floating_point]
    if not scalar or scalar[-1].name not in ("add", "add_", "sum"):
        return []
    todo, terms = [scalar[-1]], list[Op]()
    while todo:
        op = todo.pop()
        for operand in op.inputs:
            if operand.producer is None or operand.shape != ():
                continue
            (todo if operand.producer.name in ("add", "add_") else terms).append(operand.producer)
    if any(term.name in ("div", "mul", "div_", "mul_") for term in terms):
        return []
    first = terms[0] if terms else None
    return terms if first is not None and all((t.name, t.source) == (first.name, first.source) for t in terms) else []
