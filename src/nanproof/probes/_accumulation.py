"""Compare accumulated micro-batches with one large batch.

What the loop calls backward on is `loss_fn(model, micro_batch)`. The batch is cut into micro-batches;
the sum of their gradients must be the gradient of the whole batch. A loss that is a mean over its
batch must be divided by the number of micro-batches for that.
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


def accumulation(probing: Probing) -> Iterator[ProbeResult]:
    """Does accumulating give the gradient of one large batch?"""
    count, loss_fn = probing.accumulate, probing.replay.loss_fn
    samples, _ = batch_shape(probing.batch)
    parts = next((n for n in range(min(count, samples), 1, -1) if samples % n == 0), 0)
    if count < 2 or parts < 2:
        return
    cut = getattr(loss_fn, "micro_batches", None) or _cut
    micro = cut(probing.batch, parts)
    scales: list[list[float]] = []
    whole = _gradients(probing, [probing.batch], scales)
    summed = _gradients(probing, micro, [])
    if not getattr(loss_fn, "weighted", False):
        summed = {name: g * parts for name, g in summed.items()}  # the replay takes the mean
    ratio, alike = _ratio(summed, whole)
    if not alike or ratio == 0:
        return
    did = f"accumulated {parts} micro-batches and took the whole batch at once"
    # What the loop would get, in units of the gradient of the mean loss.
    # Micro-batches with more and fewer tokens than others are no even share: hence the tolerance.
    if _near(ratio, 1, 0.2):
        factor = 1.0
    elif hasattr(loss_fn, "micro_batches"):
        factor = ratio
    elif _near(ratio, parts, 0.2):
        factors = scales[0] if scales else [1.0]
        if any(_near(f * count, 1) for f in factors):
            factor = 1.0
        elif any(_near(f * count * count, 1) for f in factors):
            factor = 1 / count
        elif all(f == 1.0 for f in factors):
            factor = float(count)
        else:
            return
    else:
        return
    if _near(factor, 1):
        yield ProbeResult("accumulation-not-averaged", did, "the gradients are the same size")
        return
    if not any(_near(factor, n, 0.2) or _near(factor * n, 1, 0.2) for n in (count, parts)):
        return
    size = f"{factor:.3g} times" if factor > 1 else f"1/{1 / factor:.3g} of"
    saw = f"the accumulated gradient is {size} that of the whole batch"
    fix = "Divide each micro-batch's loss by their number, or by the samples or tokens of the whole step, exactly once."
    yield finding("accumulation-not-averaged", did, saw, fix, phase="backward")


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


def _gradients(probing: Probing, batches: Sequence[Any], scales: list[list[float]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    replay = probing.replay

    def take() -> None:
        found.update({name: p.grad.detach().float().clone() for name, p in replay.parameters.items() if p.grad is not None})

    before, replay.mode = replay.mode, probing.steady
    try:
        quiet = Recorder(probing.model, no_dropout=True)
        outcome = replay.run(quiet, batches=batches, after=take, before_backward=lambda loss: scales.append(_factors(loss)))
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


def _ratio(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, bool]:
    """How many times larger the first gradients are, and whether they point the same way."""
    names = [name for name in a if name in b and a[name].layout is torch.strided]
    dot = sum(float((a[n] * b[n]).sum()) for n in names)
    left = math.sqrt(sum(float(a[n].square().sum()) for n in names))
    right = math.sqrt(sum(float(b[n].square().sum()) for n in names))
    if not left or not right:
        return 0.0, False
    return dot / right**2, dot / (left * right) > 0.9
