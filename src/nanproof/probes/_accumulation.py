"""Compare accumulated micro-batches with one large batch.

The loop cuts a batch into k micro-batches and averages their losses, as `guard.train_step([...])`
does. That gives the gradient of the whole batch if the loss is a mean over its batch. A sum gives
1/k of it. A Trainer weighs its micro-batches itself; Lightning divides each loss by k.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nanproof.core.support._tree import map_tensors, tensors_in
from nanproof.explain.locate._locate import batch_shape
from nanproof.probes._contract import ProbeResult, finding
from nanproof.probes._probing import DoesNotApply, Probing
from nanproof.probes._recorder import Recorder

Gradients = dict[str, Tensor]


def accumulation(probing: Probing) -> Iterator[ProbeResult]:
    """Does accumulating give the gradient of one large batch?"""
    count, loss_fn = probing.accumulate, probing.replay.loss_fn
    samples, _ = batch_shape(probing.batch)
    parts = next((n for n in range(min(count, samples), 1, -1) if samples % n == 0), 0)
    if count < 2 or parts < 2:
        return
    whole = _gradients(probing, [probing.batch])
    did = f"accumulated {parts} micro-batches and took the whole batch at once"
    cut = getattr(loss_fn, "micro_batches", None)
    if cut is not None:
        factor, alike = _ratio(_gradients(probing, cut(probing.batch, parts)), whole)
        if not alike:
            return
        # Micro-batches with more tokens than others are not an even share: hence the tolerance.
        factor = 1.0 if _near(factor, 1, 0.2) else factor
    else:
        known = _mean_factor(probing, _cut(probing.batch, parts), whole)
        if known is None:
            return
        factor = known / count if known == 1 and _divided_twice(probing, count) else known
    if _near(factor, 1):
        yield ProbeResult("accumulation-not-averaged", did, "the gradients are the same size")
        return
    if not any(_near(factor, n, 0.2) or _near(factor * n, 1, 0.2) for n in (count, parts)):
        return
    size = f"{factor:.3g} times" if factor > 1 else f"1/{1 / factor:.3g} of"
    saw = f"the accumulated gradient is {size} that of the whole batch"
    if cut is None and factor < 1 and known != 1:
        fix = "Return the mean over the micro-batch, not the sum: the loop divides by the number of micro-batches."
    else:
        fix = "Divide each micro-batch's loss by their number, or by the samples or tokens of the whole step, exactly once."
    yield finding("accumulation-not-averaged", did, saw, fix, phase="backward")


def _mean_factor(probing: Probing, micro: Sequence[Any], whole: Gradients) -> float | None:
    """Return how large the mean of the micro-batches' gradients is, compared with the gradient of the
    whole batch: 1 for a mean, 1/k for a sum. None if it is neither.

    A micro-batch without targets has no gradient, so the others add up to the whole batch although
    the loss is a mean. Only gradients that all have a share in the sum show that it is one.
    """
    summed: Gradients = {name: torch.zeros_like(g) for name, g in whole.items()}
    sizes: list[float] = []
    for batch in micro:
        part = _gradients(probing, [batch])
        sizes.append(_size(part))
        for name in summed.keys() & part.keys():
            summed[name] += part[name]
    ratio, alike = _ratio(summed, whole)
    if not alike:
        return None
    # Micro-batches with more tokens than others are not an even share: hence the tolerance.
    if _near(ratio, len(micro), 0.2):
        return 1.0
    apart = _size({name: summed[name] - g for name, g in whole.items()}) / _size(whole)
    # Micro-batches draw other noise than the whole batch.
    same = apart < 0.02 or (probing.base.draws and _near(ratio, 1, 0.2))
    return 1 / len(micro) if same and min(sizes) > 0.1 * max(sizes) else None


def _divided_twice(probing: Probing, count: int) -> bool:
    """Whether the user's loss is divided by the number of micro-batches although Lightning does that."""
    if not getattr(probing.replay.loss_fn, "divides", False):
        return False
    factors: list[float] = []
    probing.replay.run(backward=False, before_backward=lambda loss: factors.extend(_factors(loss)))
    return not any(_near(f * count, 1) for f in factors) and any(_near(f * count * count, 1) for f in factors)


def _near(a: float, b: float, tolerance: float = 0.02) -> bool:
    return math.isclose(a, b, rel_tol=tolerance)


def _cut(batch: Any, parts: int) -> list[Any]:
    samples, _ = batch_shape(batch)
    size = samples // parts

    def part(i: int) -> Any:
        return map_tensors(batch, lambda t: t[i * size : (i + 1) * size] if t.dim() and t.shape[0] == samples else t)

    if any(t.is_sparse for _, t in tensors_in(batch)):
        raise DoesNotApply("sparse tensors")
    return [part(i) for i in range(parts)]


def _gradients(probing: Probing, batches: Sequence[Any]) -> Gradients:
    found: Gradients = {}
    replay = probing.replay

    def take() -> None:
        dense = {name: p.grad for name, p in replay.parameters.items() if p.grad is not None and p.grad.layout is torch.strided}
        found.update({name: g.detach().float().clone() for name, g in dense.items()})

    before, replay.mode = replay.mode, probing.steady
    try:
        quiet = Recorder(probing.model, no_dropout=True)
        outcome = replay.run(quiet, batches=batches, after=take)
    finally:
        replay.mode = before
    if outcome.error is not None:
        raise DoesNotApply(str(outcome.error))
    return found


def _factors(loss: Tensor) -> list[float]:
    """What the loss is multiplied by at its end, for each of its terms."""
    todo: list[tuple[Any, float]] = [(loss.grad_fn, 1.0)]
    found: list[float] = []
    while todo and len(found) < 16:
        node, factor = todo.pop()
        name = type(node).__name__
        if name.startswith(("MulBackward", "DivBackward")):
            other = getattr(node, "_saved_other", None)
            below = [n for n, _ in node.next_functions if n is not None]
            if isinstance(other, Tensor) and other.numel() == 1 and float(other) != 0 and len(below) == 1:
                todo.append((below[0], factor / float(other) if name.startswith("Div") else factor * float(other)))
                continue
        elif name.startswith(("AddBackward", "ToCopyBackward", "ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward")):
            todo += [
                (n, factor) for n, _ in node.next_functions if n is not None and not type(n).__name__.startswith("Accumulate")
            ]
            continue
        found.append(factor)
    return found


def _ratio(a: Gradients, b: Gradients) -> tuple[float, bool]:
    """How many times larger the first gradients are, and whether they point the same way."""
    names = [name for name in a if name in b]
    dot = sum(float((a[n] * b[n]).sum()) for n in names)
    left, right = _size({n: a[n] for n in names}), _size({n: b[n] for n in names})
    if not left or not right:
        return 0.0, False
    return dot / right**2, dot / (left * right) > 0.9


def _size(gradients: Gradients) -> float:
    return math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
