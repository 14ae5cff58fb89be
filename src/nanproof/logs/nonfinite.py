"""NaN and Inf in a log, shown or hidden: in the loss, in the gradient norm, behind a loss of 0.0, in the run's own warnings."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nanproof.logs.curve import Curve, Place, number
from nanproof.logs.finding import CHECK, PROTECT, RUN, SCAN, UNFILTER, Finding, Likely
from nanproof.logs.schedule import Skipping, skipping
from nanproof.logs.story import Segment, Streak

FEW = 0.1
"""Below this share of the lines, and with good lines after them, bad gradients are what a loss scaler meets now and then."""


def nonfinite(segment: Segment) -> Iterator[Finding]:
    """At most one finding of the loss, one of the evaluation, and one of the warnings if nothing else says it."""
    loss, norm = segment.track("loss"), segment.track("grad_norm")
    found = _hidden(segment) if not loss.bad.count else _shown(segment)
    if found is None and norm.bad.count:
        found = _gradient(segment)
    if found is None:
        found = _skipped_only(segment)
    if found is not None:
        yield found
    evaluated = segment.track("eval_loss")
    if evaluated.bad.count and (found is None or found.severity != "failure"):
        yield _evaluation(segment)
    warned = segment.notes.get("nan-warning")
    if warned is not None and (found is None or found.severity != "failure"):
        yield _warnings(segment)


def _since(streak: Streak) -> tuple[Place, str, str]:
    """Where it began, how severe it is, and how much of the run it takes."""
    assert streak.first is not None and streak.last is not None
    if streak.since is not None:
        lines = f"all {streak.unbroken} lines" if streak.unbroken > 1 else "the last line"
        every = "on every line of the log" if streak.count == streak.looked else f"and so on {lines} from there to the end"
        return streak.since, "failure", every
    return streak.first, "warning", f"on {streak.count} of {streak.looked} lines, not on the last ones"


def _hidden(segment: Segment) -> Finding | None:
    streak, loss, norm = segment.together["hidden"], segment.track("loss"), segment.track("grad_norm")
    if not streak.count:
        return _vanished(segment)
    lasting = streak.since is not None
    first = (norm.bad.since if lasting else None) or streak.since or streak.first
    assert first is not None and streak.last is not None
    sudden = loss.first_finite is not None and loss.first_finite[1] == 0.0
    said = f"The loss is logged as exactly 0.0 while grad_norm is {number(norm.first_bad)}, on {streak.count} of {streak.looked} lines. "
    said += "That is a NaN loss: the Trainer's logging_nan_inf_filter shows it as 0.0. " + (
        f"Since {first} the weights are probably NaN." if lasting else "Later lines are finite again: those steps were skipped."
    )
    said += _line_before(norm.curve, first)
    moved = skipping(segment)
    if moved is not None:
        said += " " + told(moved)
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


def _line_before(curve: Curve, first: Place) -> str:
    """The log may have a line for many steps: it began after the last good one."""
    before = curve.finite(first.order)
    if not before or before[-1].place.step is None or first.step is None or first.step - before[-1].place.step <= 1:
        return ""
    return f" It began after step {number(before[-1].place.step)}, which is the last good line."


def _vanished(segment: Segment) -> Finding | None:
    """Logs without grad_norm: a loss that was well above 0 and is exactly 0.0 from one line to the next, to the end."""
    loss = segment.track("loss")
    before = [b for b in loss.curve.finite(loss.zero.since.order if loss.zero.since else 0)]
    if segment.track("grad_norm").count or loss.zero.since is None or loss.zero.unbroken < 3 or not before:
        return None
    if before[-1].low <= 0.1 * max(b.high for b in before) or loss.low < 0:
        return None
    said = (
        f"The loss falls from {number(before[-1].last)} to exactly 0.0 at {loss.zero.since} and stays there. A loss does not "
        "reach 0.0 like that: the Trainer's logging_nan_inf_filter shows NaN as 0.0, so the weights are probably NaN since then."
    )
    causes = (
        Likely("A batch with NaN or Inf makes the loss NaN, and without a scaler that step is taken", "nonfinite-batch"),
        Likely("Every label is ignored from there on: a loss over nothing", "no-supervised-targets"),
    )
    return Finding(
        kind="hidden-nan", severity="failure", place=loss.zero.since, said=said, causes=causes, commands=(SCAN, UNFILTER, PROTECT)
    )


def _shown(segment: Segment) -> Finding:
    loss = segment.track("loss")
    first, severity, much = _since(loss.bad)
    kind = "nan" if math.isnan(loss.first_bad) else "inf"
    said = f"The loss is {number(loss.first_bad)} at {first}, {much}."
    if loss.bad.first != first:
        said += f" It was not finite before that, first at {loss.bad.first}, and came back."
    before = [b for b in loss.curve.finite(first.order)][-6:]
    rose = rising_before(segment, first)
    if before and severity == "failure":
        said += f" The last finite loss is {number(before[-1].last)}, at {before[-1].place}."
    if rose:
        said += f" {rose}"
    if severity == "failure" and loss.count - first.order > 1:
        said += " Once the weights are NaN every later step is lost."
    return Finding(
        kind=kind,
        severity=severity,
        place=first,
        said=said,
        causes=_of_loss(segment, kind, first, rose),
        commands=(SCAN, RUN, CHECK),
    )


def rising_before(segment: Segment, place: Place) -> str:
    """A sentence on a loss or a gradient norm that rose before it was lost; empty if both were calm."""
    for name, shown in (("loss", "The loss"), ("grad_norm", "The gradient norm")):
        before = segment.track(name).curve.finite(place.order)
        if len(before) < 4:
            continue
        calm = sorted(b.mean for b in before[:-1])[len(before) // 3]
        top = max(before[-4:], key=lambda b: b.high)
        if calm > 0 and top.high > 5 * calm:
            return f"{shown} had risen before: from {number(calm)} to {number(top.high)} at {top.place}."
    return ""


def _of_loss(segment: Segment, kind: str, place: Place, rose: str) -> tuple[Likely, ...]:
    early = place.order <= 1
    half = bool(segment.track("scale").count or segment.notes.get("overflow"))
    causes = []
    if rose:
        causes.append(Likely("It rose over several steps before it was lost", "learning-rate-too-high"))
        causes.append(Likely("Gradients that grow from step to step end in an overflow", "exploding-gradient"))
    if early and not rose:
        causes.append(Likely("It is so from the first lines: weights or data are bad already", "nonfinite-weights-at-start"))
    if kind == "inf":
        causes.append(Likely("Inf comes before NaN: something overflows, such as exp of a large number", "exp-overflow"))
    if half:
        causes.append(Likely("The run trains in fp16, where activations above 65504 are Inf", "fp16-activation-overflow"))
    if not rose:
        causes.append(Likely("It came from one step to the next, as a bad sample does", "nonfinite-batch"))
        causes.append(Likely("A division by a count, a variance or a norm that is 0 in one batch", "zero-denominator"))
    return tuple(causes)


def _gradient(segment: Segment) -> Finding | None:
    norm = segment.track("grad_norm")
    moved = skipping(segment)
    if moved is not None:
        return _skipping(segment, moved)
    first, severity, much = _since(norm.bad)
    if severity == "warning" and norm.bad.count < FEW * norm.count:
        severity = "note"
    elif severity == "failure" and norm.bad.unbroken < 3 and norm.count > 10:
        severity = "warning"  # a scaler meets one now and then; the log ends there by chance
    loss = segment.track("loss")
    said = f"grad_norm is {number(norm.first_bad)} at {first}, {much}, while the logged loss is finite."
    falls = _falls(segment)
    if severity == "note":
        said += " With a loss scaler those steps are skipped, and a few are normal; without one they were taken."
    elif falls:
        said += " The loss goes on falling, so the steps were probably skipped or the norm alone overflows."
    elif loss.count:
        said += " Either a scaler skips each of these steps and nothing is learned, or they are taken and the weights are NaN."
    causes = (
        Likely("The backward pass overflows while the forward is finite", "fp16-gradient-overflow"),
        Likely("Every gradient is finite and their norm is not: the sum of squares overflows", "gradient-norm-overflow"),
        Likely("A root, a norm or a masked branch has no finite slope at 0", "sqrt-at-zero"),
    )
    commands = (RUN, CHECK) if severity == "note" else (SCAN, PROTECT, CHECK)
    return Finding(kind="nan-gradient", severity=severity, place=first, said=said, causes=causes, commands=commands)


def _falls(segment: Segment) -> bool:
    values = [b.mean for b in segment.track("loss").curve.finite()]
    third = len(values) // 3
    return third >= 2 and max(values[-third:]) < min(values[:third])


def _skipped_only(segment: Segment) -> Finding | None:
    """The learning rate alone shows steps that were left out."""
    moved = skipping(segment)
    return None if moved is None else _skipping(segment, moved)


def _skipping(segment: Segment, moved: Skipping) -> Finding:
    norm = segment.track("grad_norm")
    said = told(moved)
    if norm.bad.count:
        said += f" grad_norm is {number(norm.first_bad)} on {norm.bad.count} of {norm.count} lines."
    share = moved.skipped / moved.tried
    if share > 0.25:
        said += " A scale that is only too high costs a few steps: here the forward or the gradients are NaN at any scale."
    causes = (
        Likely("An output passes 65504 in fp16, at any loss scale", "fp16-activation-overflow"),
        Likely(
            "The model itself is loaded in fp16: keep trainable weights in fp32 and let autocast do the rest",
            "fp16-weights-with-grad-scaler",
        ),
        Likely("The data holds NaN or Inf, so that no scale helps", "nonfinite-batch"),
    )
    return Finding(
        kind="scaler-skipping",
        severity="failure" if share > 0.25 else "warning",
        place=moved.began,
        said=said,
        causes=causes,
        commands=(PROTECT, CHECK, SCAN),
    )


def told(moved: Skipping) -> str:
    """The reading of the learning rates in a sentence."""
    said = f"The learning rate says that {moved.skipped} of {moved.tried} optimizer steps were left out: "
    if moved.base is not None and moved.total is not None:
        said += f"{number(moved.base)} falls linearly over {moved.total} steps, "
    taken = 0
    at = []
    for stretch in moved.stretches[:6]:
        taken += stretch.taken
        at.append(taken)
    few = ", ".join(map(str, at)) + (", ..." if len(moved.stretches) > 6 else "")
    said += f"and the schedule had moved {few} steps at the logged lines."
    if moved.each is not None:
        said += (
            f" (Read with a line every {moved.each} steps and {number(moved.epochs or 0)} epochs, which the log does not say.)"
        )
    return said


def _evaluation(segment: Segment) -> Finding:
    evaluated = segment.track("eval_loss")
    first, severity, much = _since(evaluated.bad)
    causes = (
        Likely("Running statistics took in a bad batch: training does not use them, evaluation does", "poisoned-buffer"),
        Likely("The evaluation data holds NaN or Inf", "nonfinite-batch"),
        Likely("An evaluation batch without a supervised token is 0/0", "no-supervised-targets"),
    )
    said = f"The evaluation loss is {number(evaluated.first_bad)} at {first}, {much}, while the training loss is finite."
    return Finding(
        kind="eval-nan", severity=severity, place=first, said=said, causes=causes, commands=(SCAN, "nanproof check train:build")
    )


def _warnings(segment: Segment) -> Finding:
    noted = segment.notes["nan-warning"]
    first, last = noted.first[0], noted.last
    assert last is not None
    loss = segment.track("loss")
    after = loss.last_finite is not None and loss.last_finite[0].order >= noted.last_order and loss.last_finite[1] != 0
    lasting = not after and (noted.count > 2 or not loss.count)
    where = Place(noted.first_order, first.step, None, first.line)
    said = f'The run\'s own code warns of NaN or Inf {noted.count} times, first at {where}: "{first.text}"'
    if last.line != first.line:
        said += f", last at {Place(0, last.step, None, last.line)}"
    said += "."
    if lasting and noted.count > 2:
        said += f" It never stopped: the weights are NaN, and everything after {f'step {number(first.step)}' if first.step is not None else f'line {first.line}'} is lost."
    causes = (
        Likely("A guard that zeroes NaN gradients still lets the optimizer step on its moments, and an Inf passes isnan", None),
        Likely("A batch with NaN or Inf, or a term of the loss that is 0/0 for it", "nonfinite-batch"),
        Likely("Weights in bf16 or fp16 drift until something overflows: keep fp32 weights", "fp16-activation-overflow"),
    )
    return Finding(
        kind="nan-warnings",
        severity="failure" if lasting else "warning",
        place=where,
        said=said,
        causes=causes,
        commands=(SCAN, RUN, "Guard(model, optimizer)    # refuses the step before the weights see it"),
    )
