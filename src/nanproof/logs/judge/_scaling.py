"""Loss scale and skipped steps as a log states them: a scale that falls without end, steps that are all skipped."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise

from nanproof.logs._curve import Bucket, number
from nanproof.logs._story import Segment
from nanproof.logs.judge._finding import CHECK, PROTECT, SCAN, Finding, Likely
from nanproof.logs.judge._numbers import loss_falls

FORWARD = (
    Likely("An output passes 65504 in fp16: the forward is Inf at any loss scale", "fp16-activation-overflow"),
    Likely("The data or the weights hold NaN, so that no scale helps", "nonfinite-batch"),
    Likely("The gradient grows with every layer or step until any scale is too high", "exploding-gradient"),
)
BACKWARD = (
    FORWARD[-1],
    Likely("The backward pass overflows while the forward is finite", "fp16-gradient-overflow"),
    Likely("The data hold NaN on some steps", "nonfinite-batch"),
)
SUNK = 1 / 64
"""A scale below this is a collapse, however the log begins."""
LOW = 128.0
"""A scaler that searches for its scale at the start comes from 65536 or more, and stays far above this."""
APART = 8
"""Points from one halving to the next that are one fall."""
HALVED = 3
"""This many overflows at the end of a log are not a coincidence where the scale is low."""
COMMANDS = (PROTECT, CHECK, SCAN)


def scaling(segment: Segment) -> Iterator[Finding]:
    """At most one."""
    found = (
        _collapse(segment)
        or _at_minimum(segment)
        or _overflows(segment)
        or _counted(segment)
        or _sunk(segment)
        or _halving(segment)
    )
    if found is not None:
        yield found


def _collapse(segment: Segment) -> Finding | None:
    scale = segment.track("scale")
    values = scale.curve.finite()
    if len(values) < 2 or scale.last_finite is None:
        return None
    last, high = scale.last_finite[1], scale.high
    grew = any(b.last > a.last for a, b in zip(values[len(values) // 2 :], values[len(values) // 2 + 1 :], strict=False))
    if last > 1.0 or high < 16 * max(last, 1e-30) or grew:
        return None
    fell = next(i for i, b in enumerate(values) if b.last <= 1.0)
    while fell and high > values[fell - 1].last > values[fell].last and _near(values[fell - 1], values[fell]):
        fell -= 1
    began = values[fell].place
    said = (
        f"The loss scale falls from {number(high)} to {number(last)}, beginning at {began}, and does not come back. Each halving "
        "is a skipped step."
    )
    said += " Gradients that overflow at a scale of 1 overflow without a scaler too."
    return Finding(kind="scale-collapse", severity="failure", place=began, said=said, causes=_causes(segment), commands=COMMANDS)


def _causes(segment: Segment) -> tuple[Likely, ...]:
    """Return what is likely: where losses are logged and all finite, it is the backward pass that overflows."""
    loss = segment.track("loss")
    return BACKWARD if loss.count and not loss.bad.count and not loss.zero.count else FORWARD


def _near(before: Bucket, after: Bucket) -> bool:
    return after.place.order - before.place.order <= APART


def _sunk(segment: Segment) -> Finding | None:
    """Report a scale below 1, which makes gradients smaller instead of larger, also where the log begins there."""
    scale = segment.track("scale")
    if scale.last_finite is None or not 0 <= scale.last_finite[1] < 1 or scale.first_finite is None:
        return None
    if scale.last_finite[1] == 0 and "overflow" not in segment.notes:
        return None  # a run without a scaler may log 0
    last, first = scale.last_finite[1], scale.first_finite[1]
    steady = scale.low == scale.high and "overflow" not in segment.notes
    if steady and loss_falls(segment):
        return None
    buckets = scale.curve.finite()
    if last >= SUNK and any(b.last > a.last for a, b in pairwise(buckets)):
        return None  # it goes up again in between, so most steps are taken
    place = next(b.place for b in buckets if b.low < 1)
    falls = last <= first / 4
    said = f"The loss scale is {number(last)}"
    said += (
        f" at the end, from {number(first)} at {scale.first_finite[0]}." if falls else f" at the end, below 1 from {place} on."
    )
    said += " A scale below 1 makes gradients smaller: it was lowered at every overflow, and each of those steps was skipped."
    severity = "failure" if falls or last < SUNK else "warning"
    return Finding(kind="scale-collapse", severity=severity, place=place, said=said, causes=_causes(segment), commands=COMMANDS)


def _halving(segment: Segment) -> Finding | None:
    """Report a scale that is low and still falls where the log ends, or steps that overflow at a scale of 1."""
    scale, noted = segment.track("scale"), segment.notes.get("overflow")
    values = [b.last for b in scale.curve.finite()]
    if noted is None or noted.last is None or scale.curve.each > 1:
        return None
    hopeless = bool(values) and values[-1] <= 1
    enough = 1 if hopeless else HALVED - _jumps(segment)
    if min(noted.count, len(values)) < enough or noted.last_order < segment.points - 2 or values[-1] > LOW:
        return None
    if any(b > a for a, b in pairwise(values[-enough:])):
        return None
    many = "a step overflows and is" if noted.count == 1 else f"{noted.count} steps overflow and are"
    said = f"The loss scale is {number(values[-1])} at the end of the log: {many} skipped, from {noted.place} on."
    said += (
        " Gradients that overflow at a scale of 1 overflow without a scaler too."
        if hopeless
        else " At this rate it reaches its minimum within a few steps."
    )
    severity = "failure" if hopeless else "warning"
    return Finding(
        kind="scale-collapse", severity=severity, place=noted.place, said=said, causes=_causes(segment), commands=COMMANDS
    )


def _jumps(segment: Segment) -> bool:
    """Whether the last loss is twice as high as any before it."""
    losses = segment.track("loss").curve.finite()
    return len(losses) > 1 and losses[-1].low > 2 * max(bucket.high for bucket in losses[:-1]) > 0


def _at_minimum(segment: Segment) -> Finding | None:
    noted = segment.notes.get("scale-at-minimum")
    if noted is None:
        return None
    overflow = segment.notes.get("overflow")
    low = (b.place for b in segment.track("scale").curve.finite() if b.low < SUNK)
    begins = [noted.place, *([overflow.place] if overflow else []), *islice(low, 1)]
    place = min(begins, key=lambda begin: begin.line)
    more = f", after {overflow.count} overflow{'s' * (overflow.count != 1)}" if overflow else ""
    said = f'The loss scale has reached its minimum{more}: "{noted.first[0].text}".'
    said += f" Overflows began at {place}." if overflow else ""
    return Finding(kind="scale-collapse", severity="failure", place=place, said=said, causes=_causes(segment), commands=COMMANDS)


def _overflows(segment: Segment) -> Finding | None:
    """Overflow after overflow in the words of a scaler, to the end of the log."""
    noted = segment.notes.get("overflow")
    if noted is None or noted.count < 8 or noted.last is None:
        return None
    loss = segment.track("loss")
    span = max(loss.count - noted.place.order, 1)
    ended = noted.last_order >= segment.points - max(2, 0.1 * segment.points)
    if not ended or noted.count < 0.5 * span:
        return None
    place = noted.place
    scale = segment.track("scale")
    falls = scale.count > 1 and scale.last_finite is not None and scale.last_finite[1] < scale.high / 64
    said = f"{noted.count} steps overflow and are skipped, from {place} to the end of the log"
    said += (
        f": the loss scale falls from {number(scale.high)} to {number(scale.low)}." if falls else ". The model no longer learns."
    )
    kind = "scale-collapse" if falls else "scaler-skipping"
    return Finding(kind=kind, severity="failure", place=place, said=said, causes=_causes(segment), commands=COMMANDS)


def _counted(segment: Segment) -> Finding | None:
    """The log's own count of skipped steps."""
    skipped = segment.track("skipped")
    values = skipped.curve.finite()
    anything = segment.names.get("skipped", "").lower() == "skipped" and segment.track("loss").count
    if anything and not segment.track("scale").count and "overflow" not in segment.notes:
        return None  # samples, perhaps
    if len(values) < 2 or segment.last is None or segment.last.step is None:
        return None
    if segment.skipped_in_all:
        steps = segment.last.step
        count = values[-1].last
        half = values[len(values) // 2]
        late, later = values[-1].last - half.last, segment.last.step - (half.place.step or 0)
        stood = max((i for i, (a, b) in enumerate(pairwise(values)) if a.last == b.last), default=-1)
        began = values[min(stood + 2, len(values) - 1)].place
    else:
        count, steps = segment.skipped_sum, segment.last.step - (segment.first.step or 0 if segment.first else 0)
        tail = values[len(values) // 2 :]
        late, later = sum(b.total for b in tail), segment.last.step - (tail[0].place.step or 0)
        stood = max((i for i, b in enumerate(values) if b.high == 0), default=-1)
        began = values[min(stood + 1, len(values) - 1)].place
    if count < 8 or later <= 0 or late < 0.25 * later:
        return None
    share = late / later
    said = (
        f"The loss scaler skipped {number(count)} of {number(steps)} steps, {share:.0%} of those in the second half of the log. "
        "A scale that is only too high costs a few steps at the start."
    )
    return Finding(kind="scaler-skipping", severity="failure", place=began, said=said, causes=_causes(segment), commands=COMMANDS)
