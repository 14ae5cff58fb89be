"""A NaN loss that the log shows as 0.0: transformers' logging_nan_inf_filter, on by default, omits NaN from its sum."""

from __future__ import annotations

import re

from nanproof.logs._curve import Curve, Place, number
from nanproof.logs._story import Segment
from nanproof.logs.judge._finding import CHECK, PROTECT, SCAN, UNFILTER, Finding, Likely
from nanproof.logs.judge._schedule import NO_SCALE_HELPS, skipping, skips

SURE = 3
"""This many lines of exactly 0.0 at the end are not a coincidence."""
MARGIN = re.compile(r"triplet|hinge|margin|contrast", re.I)
"""Names of losses that are exactly 0 where a margin is kept."""
START = 8
"""Lines at the start in which a loss scaler may look for its scale."""


def hidden(segment: Segment) -> Finding | None:
    streak, loss, norm = segment.together["hidden"], segment.track("loss"), segment.track("grad_norm")
    if not streak.count:
        return _vanished(segment) or _always_zero(segment) or _lone_zeros(segment)
    lasting = streak.since is not None
    if norm.bad.since is not None and 2 * streak.count < norm.bad.unbroken:
        return None  # the loss is a number on most of these lines, and rounds to 0 on the others
    if segment.settings.get("rewards") and not lasting and streak.last is not None and streak.last.order < START:
        return None  # a policy's loss begins at 0, and a scaler's search for its scale at Inf
    first = (norm.bad.since if lasting else None) or streak.since or streak.first
    assert first is not None and streak.last is not None
    if lasting and _rate_stands(segment, first):
        return _all_skipped(segment, first)
    moved = skipping(segment)
    if moved is not None:
        return skips(segment, moved)  # a scaler is at work, and the steps with NaN are those that it skips
    sudden = loss.first_finite is not None and loss.first_finite[1] == 0.0
    said = f"The loss is logged as exactly 0.0 while grad_norm is {number(norm.lost)}, on {streak.count} of {streak.looked} "
    said += "lines. That is a NaN loss: the Trainer's logging_nan_inf_filter shows it as 0.0."
    if lasting:
        rates = [b.last for b in segment.track("lr").curve.buckets if b.place.order >= first.order]
        if len(rates) > 2 and len(set(rates)) == 1 and rates[0] > 0:
            said += f" The learning rate has not changed since {first}: with a schedule, that means every step is skipped."
        else:
            said += f" Since {first} the weights are probably NaN.{_line_before(norm.curve, first)}"
        if len(rates) > 1 and rates[-1] != rates[-2]:
            said += " The learning rate moves on, so those steps were most likely taken."
    else:
        said += " Later lines are finite again: those steps were skipped."
    causes = [
        Likely(
            "NaN from the first line: the weights that were loaded, or the data, are NaN already", "nonfinite-weights-at-start"
        )
        if sudden and norm.bad.count == norm.bad.looked
        else Likely("A batch with NaN or Inf makes the loss NaN, and without a scaler that step is taken", "nonfinite-batch"),
        Likely(
            "Trainable weights in fp16 with a plain Adam: its eps of 1e-8 is 0 in fp16, the first update is 0/0",
            "fp16-optimizer-underflow",
        ),
        Likely("A batch without a supervised token: a mean over nothing is 0/0", "no-supervised-targets"),
    ]
    return Finding(
        kind="hidden-nan",
        severity="failure" if lasting else "warning",
        place=first,
        said=said,
        causes=tuple(causes),
        commands=(SCAN, PROTECT, UNFILTER),
    )


def _rate_stands(segment: Segment, first: Place) -> bool:
    """Whether the learning rate stopped moving there: the trainer advances it only after an optimizer step."""
    rates = [b for b in segment.track("lr").curve.buckets if b.finite]
    since = {b.last for b in rates if b.place.order >= first.order}
    before = [b.last for b in rates if b.place.order < first.order]
    return len(since) == 1 and len(rates) - len(before) >= 3 and len(set(before[-3:])) > 1 and min(since) > 0


def _all_skipped(segment: Segment, first: Place) -> Finding:
    said = (
        f"Since {first} the loss is NaN (logged as 0.0) and so is the gradient, but the learning rate stands still at "
        f"{number(segment.track('lr').curve.buckets[-1].last)}: the loss scaler skips every step. The model no longer learns"
        "; the weights are those of the last good step."
    )
    return Finding(
        kind="scaler-skipping", severity="failure", place=first, said=said, causes=NO_SCALE_HELPS, commands=(PROTECT, CHECK, SCAN)
    )


def _line_before(curve: Curve, first: Place) -> str:
    """The log may have a line for many steps: it began after the last good one."""
    before = curve.finite(first.order)
    if not before or before[-1].place.step is None or first.step is None or first.step - before[-1].place.step <= 1:
        return ""
    return f" It began after step {number(before[-1].place.step)}, which is the last good line."


def _vanished(segment: Segment) -> Finding | None:
    """Report a loss well above 0 that is exactly 0.0 from one line to the end, where no gradient norm that changes says more."""
    loss = segment.track("loss")
    before = loss.curve.finite(loss.zero.since.order if loss.zero.since else 0)
    norm = segment.track("grad_norm")
    if (norm.count and not (norm.low == norm.high > 0 and norm.count >= SURE)) or loss.zero.since is None or not before:
        return None
    high = max(b.high for b in before)
    share = 0.1 if loss.zero.unbroken < 2 * SURE else 0.02
    if before[-1].low <= share * high or before[-1].low < 0.01 or loss.low < 0:
        return None
    certain = loss.zero.unbroken >= SURE or norm.count > 0
    if not segment.settings.get("transformers") and len(before) > 1 and before[-1].last < 0.5 * before[-2].last:
        return None  # it was falling that fast before
    if not certain and (before[-1].low < 0.5 or not _same_rate(segment, loss.zero.since)):
        return None
    said = (
        f"The loss falls from {number(before[-1].last)} to exactly 0.0 at {loss.zero.since} and stays there. A loss does not "
        "reach 0.0 like that. A Trainer with logging_nan_inf_filter shows NaN as 0.0, so the weights are probably NaN since then."
    )
    causes = (
        Likely("A batch with NaN or Inf makes the loss NaN, and without a scaler that step is taken", "nonfinite-batch"),
        Likely("Every label is ignored from there on: a loss over nothing", "no-supervised-targets"),
    )
    return Finding(
        kind="hidden-nan",
        severity="failure" if certain else "warning",
        place=loss.zero.since,
        said=said,
        causes=causes,
        commands=(SCAN, UNFILTER, PROTECT),
    )


def _same_rate(segment: Segment, since: Place) -> bool:
    """Whether the learning rate does not change where the loss is 0, or is not logged."""
    rates = segment.track("lr").curve.finite()
    before = [b.last for b in rates if b.place.order < since.order]
    after = [b.last for b in rates if b.place.order >= since.order]
    return not rates or (bool(before and after) and all(rate == before[-1] for rate in after))


def _always_zero(segment: Segment) -> Finding | None:
    """Logs without grad_norm: nothing but 0.0."""
    loss = segment.track("loss")
    if segment.track("grad_norm").count or loss.zero.count < loss.count or loss.zero.first is None:
        return None
    parts = [track for name, track in segment.terms.items() if "loss" in name.lower()]
    if (
        loss.count < (2 if len(parts) >= SURE else SURE if parts else 5)
        or any(part.high > 0 for part in parts)
        or segment.settings.get("rewards")
    ):
        return None
    nothing = Likely("Every label is ignored, or no label was read: a loss over nothing", "no-supervised-targets")
    place = loss.zero.first
    if parts:  # not from transformers' Trainer, which logs one loss
        said = f"Every loss is exactly 0.0 on all {loss.count} lines: there is nothing to learn from."
        return Finding(kind="no-targets", severity="failure", place=place, said=said, causes=(nothing,), commands=(CHECK, SCAN))
    said = (
        f"The loss is exactly 0.0 on all {loss.count} lines. It is a NaN that is shown as 0.0, or there is nothing to learn "
        "from; the log has no grad_norm, which would be NaN or 0.0 and tell them apart."
    )
    causes = (Likely("The Trainer's logging_nan_inf_filter shows NaN as 0.0", "nonfinite-batch"), nothing)
    commands = (UNFILTER, CHECK, SCAN)
    return Finding(kind="hidden-nan", severity="failure", place=place, said=said, causes=causes, commands=commands)


def _lone_zeros(segment: Segment) -> Finding | None:
    """A line or two of exactly 0.0 among losses that are nowhere near 0, with a finite gradient: that loss was NaN."""
    loss = segment.track("loss")
    first, middle = loss.zero.first, sorted(b.mean for b in loss.curve.finite() if b.mean)
    if MARGIN.search(segment.names.get("loss", "")):
        return None
    if first is None or first.order == 0 or not 0 < loss.zero.count <= max(1, 0.1 * loss.count) or len(middle) < 8:
        return None
    if loss.least < 0.2 * middle[len(middle) // 2] or segment.together["nothing"].count:
        return None
    times = "once" if loss.zero.count == 1 else f"on {loss.zero.count} lines"
    said = (
        f"The loss is exactly 0.0 {times}, first at {first}; it is never below {number(loss.least)} elsewhere. Most likely the "
        "loss of that step was NaN, which a Trainer with logging_nan_inf_filter shows as 0.0."
    )
    causes = (
        Likely("One batch with NaN or Inf, whose step was skipped or did no lasting harm", "nonfinite-batch"),
        Likely("A batch without a supervised token: a mean over nothing is 0/0", "no-supervised-targets"),
    )
    return Finding(
        kind="hidden-nan", severity="warning", place=first, said=said, causes=causes, commands=(PROTECT, UNFILTER, SCAN)
    )
