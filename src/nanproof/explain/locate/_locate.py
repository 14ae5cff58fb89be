"""Where the trouble was born: from a bad loss or gradient back through bad producers to the operation, then sample and token.

"The first operation with a non-finite output" would blame masks: a constant -inf is a sentinel, and the birth is the operation
that turns it into NaN. So the way goes backwards: from NaN to where it was made, and from there on along an Inf, unless
that Inf was put there on purpose.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanproof._wording import few
from nanproof.core.support._tree import map_tensors, tensors_in
from nanproof.explain.locate._calls import Call, Survey
from nanproof.explain.locate._trace import Op, Operand, Trace
from nanproof.explain.replay._replay import Outcome, Replay

_PUT_THERE = {
    "masked_fill",
    "masked_fill_",
    "fill",
    "fill_",
    "full",
    "full_like",
    "new_full",
    "scalar_tensor",
    "lift_fresh",
    "lift_fresh_copy",
    "where",
    "index_put",
    "index_put_",
    "index_fill",
    "index_fill_",
    "masked_scatter",
    "scatter",
    "scatter_",
    "triu",
    "tril",
    "copy_",
    "cat",
    "constant_pad_nd",
}
"""Operations that place a given number: an Inf that begins with one of them is a sentinel."""


@dataclass(eq=False, slots=True)
class Birth:
    """The operation in which the trouble was born."""

    op: Op
    """The forward operation: the one to change."""
    at: Op
    """Where the bad number appeared: the same, or an operation of its backward."""
    trace: Trace
    turned: Op
    """Where NaN came out at last: the same, or, after an Inf, the operation that could not take it."""
    samples: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()

    @property
    def in_backward(self) -> bool:
        return self.at.backward

    def spot(self) -> tuple[int, ...] | None:
        """Coordinates of the first bad number in the output."""
        value = next((o.value for o in self.at.outputs if o.range.bad and o.value is not None), None)
        return None if value is None or value.dim() == 0 else first_bad(value)

    def input_at_spot(self, which: int = 0) -> float | None:
        """The number that went into the operation where the bad one came out."""
        operands = self.at.inputs
        if which >= len(operands) or operands[which].value is None:
            return None
        value, spot = operands[which].value, self.spot()
        assert value is not None
        if value.numel() == 1:
            return float(value)
        out = next((o for o in self.at.outputs if o.range.bad), None)
        if spot is None or out is None or tuple(value.shape) != out.shape:
            return None
        return float(value[spot])

    def place(self) -> str:
        """ "at sample 3, token 17", as far as it is known."""
        said = []
        if self.samples:
            said.append(f"sample {self.samples[0]}" if len(self.samples) == 1 else f"samples {few(self.samples)}")
        if self.tokens:
            said.append(f"token {self.tokens[0]}" if len(self.tokens) == 1 else f"tokens {few(self.tokens)}")
        return " at " + ", ".join(said) if said else ""


def first_bad(value: Tensor) -> tuple[int, ...]:
    flat = int(bad_places(value).reshape(-1).to(torch.uint8).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), value.shape))


def survey(replay: Replay, forward: bool = True) -> tuple[Survey, Outcome]:
    """Run the step once more and look at every module call. This run is also the control: is it still bad?

    `forward=False` where the loss was finite: then only gradients are looked at, unless the loss turns out bad after all.
    """
    look = Survey(replay.model, forward)
    outcome = replay.run(look.watching(), before_backward=look.backward_begins, backward_of_bad=False)
    if not forward and (outcome.error is not None or not math.isfinite(outcome.loss)):
        return survey(replay)
    return look, outcome


def locate(replay: Replay, look: Survey, outcome: Outcome) -> Birth | None:
    """The birth of what made `outcome` bad; None if it cannot be found."""
    in_forward = outcome.error is not None or not math.isfinite(outcome.loss)
    if outcome.error is not None and outcome.loss == outcome.loss and not look.newly_bad():
        in_forward = False
    suspects = look.newly_bad() if in_forward else _suspects_in_backward(look)
    for calls in ([call.number for call in suspects], None):  # None: everything, when the chosen calls did not hold it
        trace = Trace(replay.model, None if calls is None else set(calls))
        backward = not in_forward or outcome.error is not None
        replay.run(trace.recording(), before_backward=trace.backward_begins, backward=backward)
        for start in _starts(trace, in_forward, calls):
            found = _origin(start, everything=calls is None)
            if found is not None and not _put_there(found[0]):
                birth = Birth(found[0].forward, found[0], trace, found[1])
                birth.samples, birth.tokens = coordinates(birth, replay.batches)
                return birth
    return None


def _suspects_in_backward(look: Survey) -> list[Call]:
    """The calls in which the first bad gradient can have been made: those that took the tensor it belongs to, the ones around
    them; or, when only weights' gradients are bad, the modules that own them."""
    chosen: dict[int, Call] = {}
    for call in look.first_bad_gradients():
        around: Call | None = call
        while around is not None:
            chosen[around.number] = around
            around = around.parent
        places = {place for place in call.outputs if place is not None}
        takers = [other for other in look.calls if places & {place for place in other.inputs if place is not None}]
        chosen |= {other.number: other for other in takers}
    if not chosen:
        chosen = {c.number: c for c in look.calls if any(p.requires_grad for p in c.module.parameters(recurse=False))}
    return list(chosen.values())


def _starts(trace: Trace, in_forward: bool, calls: list[int] | None) -> Iterator[Op]:
    """Bad operations from which to walk back, the likeliest first.

    With everything traced, that is the last one: the way from there is whole. Of chosen calls, each is a piece of the way: the
    first piece that holds a birth is it.
    """
    failed = trace.failed
    if failed is not None and failed.name == "_linalg_check_errors" and failed.inputs:
        failed = failed.inputs[0].producer or failed  # it only reads the status that the factorization left
    if failed is not None and not failed.backward:
        bad = [i for i in failed.inputs if i.range.bad]
        yield from (i.producer for i in bad if i.producer is not None)
        if not bad:
            yield failed
        return
    if not in_forward:
        backward = [op for op in trace.ops if op.backward and op.bad]
        if calls is None:
            yield from backward[-1:]
        else:
            yield from (op for op in backward if op.newly_bad and _gets_out(op, trace))
        return
    forward = [op for op in trace.ops if not op.backward and op.bad]
    if calls is not None:
        for number in calls:
            yield from [op for op in forward if op.call is not None and op.call.number == number][-1:]
        forward = [op for op in forward if op.call is None]
    yield from forward[-1:]


def _gets_out(op: Op, trace: Trace) -> bool:
    """The node's last operation is bad too: some nodes make an Inf on the way and mask it themselves."""
    same = [other for other in trace.ops if other.backward and other.of is op.of and other.node == op.node]
    return same[-1].bad


def _put_there(op: Op) -> bool:
    return not op.nan_out and (op.name in _PUT_THERE or not op.inputs)


def _origin(op: Op, everything: bool) -> tuple[Op, Op] | None:
    """Back along NaN to where it was made, then along Inf unless that was put there on purpose. A NaN that no traced operation
    made came in with batch or weights, if everything was traced."""
    seen: set[int] = set()
    while op.nan_out:
        if op.number in seen:
            return None
        seen.add(op.number)
        nan_inputs = [i for i in op.inputs if i.range.nan]
        if not nan_inputs:
            break
        producer = next((i.producer for i in nan_inputs if i.producer is not None and i.producer.nan_out), None)
        if producer is None:
            return (op, op) if everything else None
        op = producer
    born = op
    for operand in born.inputs:
        if operand.range.inf:
            source = _inf_origin(operand)
            if source is not None:
                return source, born
    return born, born


def _inf_origin(operand: Operand) -> Op | None:
    """The operation that computed an Inf; None if it was put there."""
    seen: set[int] = set()
    while (op := operand.producer) is not None and op.inf_out and op.number not in seen:
        seen.add(op.number)
        infinite = [i for i in op.inputs if i.range.inf]
        if not infinite:
            return None if op.name in _PUT_THERE or not op.inputs else op
        operand = next((i for i in infinite if i.producer is not None), infinite[0])
    return None


# -- samples and tokens ----------------------------------------------------------------------------------------------------------


def batch_shape(batch: Any) -> tuple[int, int | None]:
    """(samples, tokens a sample): the commonest first and second dimension of the tensors in a batch; 0 where there are none."""
    shapes = [tuple(t.shape) for _, t in tensors_in(batch) if t.dim() >= 1]
    if not shapes:
        return 0, None
    counts = Counter(shape[0] for shape in shapes)
    samples = max(counts, key=lambda n: (counts[n], n))
    lengths = Counter(shape[1] for shape in shapes if len(shape) >= 2 and shape[0] == samples)
    return samples, lengths.most_common(1)[0][0] if lengths else None


@dataclass(frozen=True, slots=True)
class Extreme:
    """Samples whose numbers are far larger than those of the others."""

    name: str
    """Of the tensor in the batch."""
    samples: tuple[int, ...]
    largest: float
    usual: float
    """The median over the samples of each one's largest number."""


def extreme(batches: Sequence[Any], factor: float) -> Extreme | None:
    """The first tensor of a batch in which some samples are far off."""
    for batch in batches:
        samples, _ = batch_shape(batch)
        for name, t in tensors_in(batch):
            found = far_off(t, factor) if t.dim() and t.shape[0] == samples else None
            if found is not None and bool(found[2].any()):
                sizes, usual, far = found
                return Extreme(name, tuple(torch.nonzero(far).flatten().tolist()), float(sizes.max()), float(usual))
    return None


def far_off(t: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """The largest number of each sample, the median of those, and which samples are so many times larger than that; None where
    there is nothing to compare. Where most samples are zero there is no usual size: a mask that is added, of samples some of
    which have padding, is no damage."""
    if not t.is_floating_point() or t.layout is not torch.strided or t.dim() == 0 or len(t) < 3 or not t.numel():
        return None
    sizes = t.detach().abs().reshape(len(t), -1).amax(1)
    usual = sizes.median()
    return sizes, usual, (sizes > factor * usual.clamp(min=1e-6)) & (usual > 0)


def coordinates(birth: Birth, batches: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(samples, tokens) from where the bad numbers are: in the operation that could not take an Inf, or in the guilty one."""
    samples, length = batch_shape(batches[0]) if len(batches) == 1 else (0, None)
    if samples < 2:
        return (), ()
    best: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    for op in (birth.at, birth.turned):
        value = next((o.value for o in op.outputs if o.range.bad and o.value is not None), None)
        if value is None or value.dim() == 0:
            continue
        found, tokens = where_in_batch(bad_places(value), samples, length)
        if 0 < len(found) < samples and (not best[0] or set(found) < set(best[0])):
            best = found, tokens if len(tokens) < (length or 0) else ()
    return best


def bad_places(value: Tensor) -> Tensor:
    """Where it is NaN; where it is infinite if it holds no NaN: beside a NaN, an Inf may be a mask."""
    nan = torch.isnan(value)
    return nan if bool(nan.any()) else torch.isinf(value)


def where_in_batch(bad: Tensor, samples: int, length: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which samples and tokens the marked places belong to, from the shape alone; empty where the shape does not say."""
    shape = bad.shape
    if shape[0] == samples:
        rows = bad.reshape(samples, -1).any(1)
        tokens: Tensor | None = None
        axis = next((d for d in (1, 2) if bad.dim() > d and shape[d] in (length, (length or 0) - 1) and length), None)
        if axis is not None:
            tokens = bad.transpose(0, axis).reshape(shape[axis], -1).any(1)
        return _indices(rows), _indices(tokens) if tokens is not None else ()
    if bad.dim() >= 2 and shape[1] == samples and shape[0] == length:  # time first
        return _indices(bad.transpose(0, 1).reshape(samples, -1).any(1)), _indices(bad.reshape(shape[0], -1).any(1))
    if shape[0] % samples == 0 and shape[0] > 0:
        each = shape[0] // samples
        grid = bad.reshape(samples, each, -1).any(2)
        tokens = grid.any(0) if length is not None and each in (length, length - 1) else None
        return _indices(grid.any(1)), _indices(tokens) if tokens is not None else ()
    return (), ()


def _indices(flags: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.nonzero(flags).flatten())


def guilty_sample(
    replay: Replay, healthy: Sequence[Any], bad: Callable[[Outcome], bool] = lambda outcome: not outcome.finite
) -> tuple[int, ...]:
    """The one sample without which the step is fine, found by putting healthy ones in the place of the others.

    Donors come from an earlier healthy batch of the same shape. Empty where there is none, or where no single sample is guilty.
    """
    if len(replay.batches) != 1:
        return ()
    batch = replay.batches[0]
    samples, _ = batch_shape(batch)
    donor = next((h for h in healthy if _same_shapes(batch, h)), None)
    if samples < 2 or donor is None or bad(replay.run(batches=[donor])):
        return ()
    low, high = 0, samples
    while high - low > 1:
        middle = (low + high) // 2
        if bad(replay.run(batches=[_mixed(batch, donor, samples, range(low, middle))])):
            high = middle
        else:
            low = middle
    alone = replay.run(batches=[_mixed(batch, donor, samples, [low])])
    without = replay.run(batches=[_mixed(batch, donor, samples, [i for i in range(samples) if i != low])])
    return (low,) if bad(alone) and not bad(without) else ()


def _same_shapes(a: Any, b: Any) -> bool:
    mine, theirs = list(tensors_in(a)), list(tensors_in(b))
    return len(mine) == len(theirs) and all(
        x[0] == y[0] and x[1].shape == y[1].shape and x[1].dtype == y[1].dtype for x, y in zip(mine, theirs, strict=True)
    )


def _mixed(batch: Any, donor: Any, samples: int, keep: Any) -> Any:
    """The donor batch with the samples `keep` of this one."""
    theirs = iter([t for _, t in tensors_in(donor)])
    index = torch.tensor(list(keep), dtype=torch.long)

    def change(mine: Tensor) -> Tensor:
        other = next(theirs)
        if mine.dim() == 0 or mine.shape[0] != samples:
            return mine
        out = other.clone()
        places = index.to(mine.device)
        out[places] = mine[places]
        return out

    return map_tensors(batch, change)
