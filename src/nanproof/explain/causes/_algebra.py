"""Causes that lie in what is computed: powers of negative numbers, masked classes that are averaged, equal singular values, a
weight of 0 on an infinite term, memory that was never written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanproof.explain._case import Case, Trial
from nanproof.explain._cause import Cause, Match, at_birth
from nanproof.explain._controls import PRODUCTS, ProductTaken, added_to_the_rest, weighted_by_0
from nanproof.explain.locate._calls import CallStack, Range
from nanproof.explain.locate._locate import Birth, batch_shape, where_in_batch
from nanproof.explain.locate._matrices import ChangedMatrix, values_apart
from nanproof.explain.locate._trace import Op
from nanproof.explain.locate._uninitialised import Allocation, FilledMemory
from nanproof.explain.replay._interventions import LOG, Intervention
from nanproof.explain.replay._replay import Outcome

_DOMAIN = {"log1p": -1.0, **dict.fromkeys(("log", "log2", "log10", "log_", "xlogy", "sqrt", "sqrt_", "rsqrt", "pow"), 0.0)}
"""Below these numbers the result is NaN."""


class PowerOfNegative(Cause):
    """A fractional power, root or logarithm of a negative number is NaN."""

    slug = "power-of-negative"
    specific = 2
    fix = (
        "Clamp the input to its domain (x.clamp(min=1e-6)), or make it positive by construction (softplus, exp, square); "
        "sign(x) * |x|**p keeps the sign."
    )

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.birth is None or case.birth.op.name not in _DOMAIN or not case.birth.op.inputs:
            return None
        birth, op = case.birth, case.birth.op
        base = _base(birth)
        if base is None or (birth.in_backward and op.name != "pow"):
            return None
        name, edge = op.name.strip("_"), _DOMAIN[op.name]
        # Rounding around 0 is log-of-zero or sqrt-at-zero.
        margin = {"pow": 0.0, "rsqrt": 0.0, "sqrt": 1e-4 * max(base.size, 1e-2)}.get(name, 1e-6 * max(base.size, 1.0))
        if not base.low < edge - margin:
            return None
        at = birth.input_at_spot() if not birth.in_backward and name != "xlogy" else None
        value = at if at is not None and at < edge else base.low
        below = f"{name} is NaN below {edge:g}"
        if name == "pow":
            below = "a fractional power of a negative number is NaN"
        if birth.in_backward:
            below = "the exponent's gradient needs the logarithm of the base, which is NaN below 0"
        said = f"input of {name} was {value:.4g}{birth.place()}; {below}"
        return at_birth(
            birth, 0.95, said, lambda: case.cured_by(InsideDomain()), f"negative inputs of {name} moved into its domain"
        )


def _base(birth: Birth) -> Range | None:
    """The numbers of which the power, root or logarithm is taken; None where no power of them is NaN."""
    op = birth.op
    if op.name != "pow":
        return op.inputs[-1 if op.name == "xlogy" else 0].range
    if birth.in_backward:
        learned = len(op.inputs) == 2 and op.inputs[1].requires_grad
        return op.inputs[0].range if learned else None
    if len(op.inputs) == 2:
        return op.inputs[0].range
    number = next((float(s) for s in op.scalars if isinstance(s, (int, float))), math.nan)
    if number.is_integer():
        return Range(number, number) if number < 0 and op.nan_out else None  # a number to the power of a tensor
    return op.inputs[0].range


class InsideDomain(Intervention):
    """Inputs of roots, fractional powers and logarithms that are below their domain are moved to its edge. Zeros stay."""

    names = LOG | {"log1p", "xlogy", "sqrt", "rsqrt", "pow", "__pow__", "__rpow__", "float_power"}
    lived = "an input of a root, fractional power or logarithm that is negative is taken as 1e-6"

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == "__rpow__":
            base = args[1]
            if isinstance(base, (int, float)) and base < 0:
                self.acted += 1
                base = 1e-6
            return torch.pow(base, args[0])
        if name == "xlogy":
            return torch.xlogy(args[0], self._inside(args[1], 0.0))
        if name in ("pow", "__pow__", "float_power"):
            exponent = args[1] if len(args) > 1 else kwargs["exponent"]
            whole = isinstance(exponent, (int, float)) and float(exponent).is_integer()
            return torch.pow(args[0] if whole else self._inside(args[0], 0.0), exponent)
        return getattr(torch, name)(self._inside(args[0], _DOMAIN[name]))

    def _inside(self, x: Any, edge: float) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return self.where(x.detach() < edge, edge + 1e-6, x)


class LabelSmoothingOverMaskedLogits(Cause):
    """Label smoothing averages the log-probabilities of masked classes, which are -inf."""

    slug = "label-smoothing-over-masked-logits"
    specific = 2
    fix = (
        "Smooth over the allowed classes only, or mask with a large negative number such as -1e4 instead of -inf: smoothing "
        "gives every class a share, and a share of -inf is infinite."
    )

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.birth is None or case.birth.in_backward or case.replay is None or case.error is not None:
            return None
        masked = [op for op in case.birth.trace.ops if op.name == "_log_softmax" and op.inf_out and not op.nan_out]
        if not masked:
            return None
        change = _SmoothingOfAllowed()
        case.replay.run(change, backward=False)
        if not change.acted:
            return None
        op = masked[-1]
        logits = op.inputs[0].value
        count = (
            f"{int(torch.isneginf(logits).sum())} of {logits.numel()} logits are -inf"
            if logits is not None
            else "logits are -inf"
        )
        return Match(
            confidence=0.97,
            evidence=(f"{count}, and {change.said}: the smoothing term is infinite",),
            phase="forward",
            where=op.path,
            op=change.op,
            source=op.source or None,
            samples=_masked_samples(case, logits),
            trial=lambda: case.cured_by(_SmoothingOfAllowed()),
            tried="masked classes left out of the smoothing term, and nothing else changed",
        )


def _masked_samples(case: Case, logits: Tensor | None) -> tuple[int, ...]:
    """The samples whose logits are masked; none where that is all of them."""
    assert case.replay is not None
    if logits is None or len(case.replay.batches) != 1:
        return ()
    samples, length = batch_shape(case.replay.batches[0])
    rows = where_in_batch(torch.isneginf(logits), samples, length)[0] if samples > 1 and logits.dim() else ()
    return rows if len(rows) < samples else ()


_NEGATIONS = frozenset({"neg", "__neg__", "negative"})
_REDUCTIONS = frozenset({"mean", "sum"})
_MOST = 0.5
"""A class with at least this share is the target itself; with less, smoothing gave it its share."""


class _SmoothingOfAllowed(Intervention):
    """The smoothing term of a cross entropy, or a sum or mean over log-probabilities, leaves masked classes out. The
    log-probability of the target stays as it is, so a target that is masked itself stays infinite."""

    names = _NEGATIONS | PRODUCTS | _REDUCTIONS | {"cross_entropy_loss", "log_softmax", "kl_div"}

    def __init__(self) -> None:
        super().__init__()
        self.said = ""
        self.op = ""
        self._masked: dict[int, Tensor] = {}
        """Log-probabilities of masked classes, and multiples of them, by id."""
        self._targets: dict[int, Tensor] = {}
        """By the same id, the places of targets: those are not smoothing, and stay infinite."""

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == "cross_entropy_loss":
            return self._cross_entropy(func, args, kwargs)
        known = any(id(a) in self._masked for a in args)
        if name in _REDUCTIONS:
            if not known:
                return func(*args, **kwargs)
            self.said, self.op = f"{name} is taken over the log-probabilities of all classes", name
            masked = torch.isinf(args[0].detach())
            if id(args[0]) in self._targets:
                masked = masked & ~self._targets[id(args[0])]
            return func(self.where(masked, 0.0, args[0]), *args[1:], **kwargs)
        if name == "kl_div":
            return self._kl_div(func, args, kwargs)
        out = func(*args, **kwargs)
        if name == "log_softmax":
            known = bool(torch.isneginf(out.detach()).any()) and not bool(torch.isneginf(out.detach()).all())
        if known and isinstance(out, Tensor):
            self._masked[id(out)] = out
            self._note_targets(out, args)
        return out

    def _note_targets(self, out: Tensor, args: Any) -> None:
        shares = [a for a in args if isinstance(a, Tensor) and id(a) not in self._masked and a.dim()]
        before = next((self._targets[id(a)] for a in args if id(a) in self._targets), None)
        if shares:
            self._targets[id(out)] = (shares[0].detach() >= _MOST).expand(out.shape)
        elif before is not None:
            self._targets[id(out)] = before

    def _kl_div(self, func: Any, args: Any, kwargs: Any) -> Any:
        logs, target = args[0], args[1]
        shared = torch.isneginf(logs.detach()) & (target > 0) & (target < _MOST)
        if kwargs.get("log_target") or not bool(shared.any()):
            return func(*args, **kwargs)
        self.said, self.op = "the targets give masked classes a share", "kl_div"
        return func(self.where(shared, 0.0, logs), self.where(shared, 0.0, target), *args[2:], **kwargs)

    def _cross_entropy(self, func: Any, args: Any, kwargs: Any) -> Any:
        logits, target = args[0], args[1]
        dim = min(1, logits.dim() - 1)
        smoothing = args[5] if len(args) > 5 else kwargs.get("label_smoothing", 0.0)
        reduction = args[3] if len(args) > 3 else kwargs.get("reduction", 1)
        masked = torch.isneginf(logits.detach())
        soft = target.is_floating_point()
        shared = masked & (target > 0) & (target < _MOST) if soft else masked
        if not bool(shared.any()) or not (soft or smoothing > 0):
            return func(*args, **kwargs)
        self.acted += 1
        self.op = "cross_entropy"
        self.said = "the targets give masked classes a share" if soft else f"label_smoothing is {smoothing:g}"
        logs = torch.where(shared, torch.zeros((), dtype=logits.dtype, device=logits.device), torch.log_softmax(logits, dim))
        if soft:
            return _reduced(-(target * logs).sum(dim), reduction, None)
        ignored = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
        plain = func(logits, target, *args[2:5], 0.0) if len(args) > 5 else func(*args, **{**kwargs, "label_smoothing": 0.0})
        spread = -logs.sum(dim) / (~masked).sum(dim)
        return (1 - smoothing) * plain + smoothing * _reduced(spread, reduction, target != ignored)


def _reduced(each: Tensor, reduction: int, counted: Tensor | None) -> Tensor:
    """`reduction` as torch numbers them: 0 none, 1 mean, 2 sum."""
    each = each if counted is None else each * counted
    if reduction == 0:
        return each
    return each.sum() if reduction == 2 else each.sum() / (each.numel() if counted is None else counted.sum())


_DECOMPOSED = {"_linalg_svd": "svd", "linalg_svd": "svd", "_linalg_eigh": "eigh", "linalg_qr": "qr", "linalg_eig": "eig"}
_EQUAL = 1e-6
"""Singular values whose distance is less than this share of the largest count as equal."""


class DegenerateDecomposition(Cause):
    """The gradient of an SVD, eigendecomposition or QR is infinite at equal or zero singular values."""

    slug = "degenerate-decomposition"
    specific = 2
    fix = (
        "Use only the singular values, or an invariant such as a trace or a projection; or break the tie with a small random "
        "jitter before the decomposition. Never backpropagate through the vectors of equal values."
    )

    def match(self, case: Case) -> Match | None:
        birth = case.birth if case.nonfinite else None
        if birth is None or not birth.in_backward or birth.op.name not in _DECOMPOSED:
            return None
        what, matrix = _DECOMPOSED[birth.op.name], birth.op.inputs[0].value
        if matrix is None or not bool(torch.isfinite(matrix).all()):
            return None
        gap, least = _gaps(what, matrix)
        if min(gap, least) > _EQUAL:
            return None
        tie = f"differ by {gap:.2g} of the largest" if gap <= _EQUAL else f"reach down to {least:.2g} of the largest"
        kind = "eigenvalues" if what in ("eigh", "eig") else "singular values"
        said = f"{kind} of the matrix {tie}{birth.place()}: the gradient of {what} divides by that"
        return at_birth(
            birth, 0.95, said, lambda: self._apart(case), "a small ramp added to the diagonal, which sets them apart", op=what
        )

    def _apart(self, case: Case) -> Trial:
        """The control changes the matrix as well, but keeps equal values equal: it must stay bad."""
        assert case.replay is not None
        trial = case.cured_by(ChangedMatrix(values_apart))
        if not trial.held:
            return trial
        kept = case.replay.run(ChangedMatrix(lambda x: x * 2))
        result = f"{trial.result}; doubled, which keeps equal values equal: {kept}"
        return Trial(not kept.finite, result)


def _gaps(what: str, matrix: Tensor) -> tuple[float, float]:
    """The smallest distance of two values, and the smallest value where it matters, as shares of the largest."""
    x = matrix.double()
    values = torch.linalg.eigvalsh(x) if what == "eigh" else torch.linalg.svdvals(x)
    largest = values.abs().amax().clamp(min=1e-300)
    gap = float(values.sort(-1).values.diff(dim=-1).abs().amin() / largest) if values.shape[-1] > 1 and what != "qr" else math.inf
    return gap, math.inf if what == "eigh" else float(values.abs().amin() / largest)


class InfiniteTermWithWeight0(Cause):
    """A term of the loss is infinite and its weight is 0: 0 * Inf is NaN."""

    slug = "infinite-term-with-weight-0"
    specific = 2
    fix = (
        "Skip a term whose weight is 0 (if weight: loss = loss + weight * term), as numerics.losses.weighted_sum does, and find "
        "out why the term is infinite before its weight rises."
    )

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.birth is None or case.replay is None or case.error is not None:
            return None
        op = case.birth.turned
        if op.backward or op.name not in ("mul", "mul_") or not op.nan_out:
            return None
        term = weighted_by_0(op)
        if term is None or (op.call is not None and math.prod(term.shape) != 1):
            return None
        value = term.range.low if math.isinf(term.range.low) else term.range.high
        said = f"a term of the loss is {value:g} and its weight is 0: 0 * Inf is NaN"
        if term.producer is not None:
            said += f"; the term comes from {case.birth.at.name.strip('_')} at {case.birth.at.source}"
        return Match(
            confidence=0.975,
            evidence=(said,),
            phase="loss",
            where=op.path,
            op="mul",
            source=op.source or None,
            samples=case.birth.samples or None,
            trial=lambda: self._skipped(case),
            tried="the term left out",
        )

    def _skipped(self, case: Case) -> Trial:
        """Left out, the rest must be finite. The control: it must be a term that is added to the rest."""
        assert case.replay is not None
        without = case.replay.run(change := ProductTaken(0.0))
        additive = added_to_the_rest(case)
        said = f"{without}; " + ("the term is added to the rest" if additive else "it is not a term that is added")
        return Trial(bool(change.acted) and without.finite and additive, said)


_SOURCES = 8
"""Lines that allocate memory of which each is tried alone, at the most."""


class CustomKernelUninitialisedOutput(Cause):
    """A custom Function or kernel leaves part of its output unwritten: whatever was in that memory reaches the loss."""

    slug = "custom-kernel-uninitialised-output"
    specific = 2
    fix = (
        "Allocate with torch.zeros instead of torch.empty, or write every element (check the grid, the mask and the last block "
        "of the kernel); torch.utils.deterministic.fill_uninitialized_memory shows such reads."
    )

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.replay is None or case.control is None or case.error is not None:
            return None
        if case.signal or case.weights_broke or case.bad_buffer or case.bad_weights or case.bad_buffers:
            return None
        if any(not bad.only_negative for bad in case.bad_batch):
            return None
        if not case.control.finite and case.birth is not None and not _from_nowhere(case.birth.at):
            return None
        made = self._guilty(case)
        if not made:
            return None
        first = made[0]
        unwritten, size = sum(a.unwritten for a in made), sum(a.tensor.numel() for a in made)
        owner = f"{first.function} " if first.function else ""
        said = f"{owner}allocates shape {list(first.tensor.shape)} at {first.source} without filling it, and "
        said += f"{unwritten} of {size} elements are never written: with NaN in that memory, the step is not finite"
        again = (
            "run again, the step happens to be finite" if case.control.finite else "the NaN was in memory before it was allocated"
        )
        return Match(
            confidence=0.965,
            evidence=(said, again),
            phase="backward" if first.backward else "forward",
            where=first.where,
            op=first.function or "empty",
            source=first.source or None,
            trial=lambda: self._zeros(case, first.source),
            tried="that memory filled with zeros",
        )

    def _guilty(self, case: Case) -> list[Allocation]:
        """The allocations of the first line whose memory, filled with NaN, makes the step bad; none where there is none."""
        everything, outcome = self._filled(case, lambda _: math.nan)
        sources = list(dict.fromkeys(a.source for a in everything)) if not outcome.finite else []
        for source in sources[:_SOURCES]:
            made, outcome = self._filled(case, _nan_at(source))
            if not outcome.finite:
                return [a for a in made if a.source == source]
        return []

    def _filled(self, case: Case, fill: Callable[[str], float]) -> tuple[list[Allocation], Outcome]:
        assert case.replay is not None
        memory = FilledMemory(fill, CallStack(case.replay.model))
        outcome = case.replay.run(*memory.watching())
        return memory.made, outcome

    def _zeros(self, case: Case, source: str) -> Trial:
        """With zeros everywhere the step is finite; the control has NaN in the memory of this line alone, and is not."""
        _, zeros = self._filled(case, lambda _: 0.0)
        _, control = self._filled(case, _nan_at(source))
        bad = not control.finite
        return Trial(zeros.finite and bad, f"{zeros}; filled with NaN: {'not finite' if bad else 'finite as well'}")


def _nan_at(source: str) -> Callable[[str], float]:
    """Fill the memory of one line with NaN, all other with 0."""
    return lambda line: math.nan if line == source else 0.0


def _from_nowhere(op: Op) -> bool:
    """Something bad went in that no operation of the step made."""
    return any(i.range.bad and i.producer is None for i in op.inputs)
