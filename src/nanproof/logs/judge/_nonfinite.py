"""NaN and Inf in a log, shown or hidden: in the loss, in the gradient norm, behind a loss of 0.0, in the run's own warnings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from nanproof.logs._curve import Place, number
from nanproof.logs._story import Segment, Streak
from nanproof.logs.judge._finding import CHECK, PROTECT, RUN, SCAN, Finding, Likely
from nanproof.logs.judge._hidden import START, hidden
from nanproof.logs.judge._numbers import blown, largest
from nanproof.logs.judge._schedule import skipped_only, skipping, skips

FIRST_STEP, FIRST_EPOCH = 10, 1
"""A log that begins later does not show how the run began."""
OFTEN = 0.3
"""Above this share of the lines, it is no matter that the last ones are good."""
RARE = 0.1
"""The share of the lines that may lack a loss, as those of skipped steps do, in a log that has one on every line."""
FEW = 0.1
"""Below this share of the lines, and with good lines after them, bad gradients are normal with a loss scaler."""
_ENDS = re.compile(
    r"^(?:[\w.]*(?:Error|Exception): )|\b(?:stop(?:ping|ped)?|terminating|abort(?:ing|ed)?|exiting|diverged)\b"
    r"|Encountered ?NaN",
    re.I,
)
"""Matches warnings that say that training stopped."""
_SKIPS = re.compile(r"skip|not updat|do not update|ignor|discard", re.I)
"""A warning that says that the step was skipped."""
_GRADIENT = re.compile(r"^(?!.*\bloss).*\bgrad", re.I)
"""A warning about gradients, as a loss scaler that skips a step has them now and then."""
_ZEROES = re.compile(r"grad\w*\W.{0,40}\b(?:zero|replac|mask)|(?:zero|replac|mask)\w*\W.{0,40}\bgrad|nan_to_num", re.I)
"""A warning that says that NaN in gradients was replaced."""


def nonfinite(segment: Segment) -> Iterator[Finding]:
    """At most one finding of the loss, one of the evaluation, and one of the warnings if nothing else says it."""
    loss, norm = segment.track("loss"), segment.track("grad_norm")
    found = hidden(segment) if not loss.bad.count else None if _placeholder(segment) else _shown(segment)
    if found is None:
        found = missing(segment)
    if found is None and norm.bad.count:
        found = _gradient(segment)
    if found is None:
        found = skipped_only(segment)
    if found is not None:
        yield found
    evaluated = segment.track("eval_loss")
    if evaluated.bad.count and (found is None or found.severity != "failure") and not _in_turn(segment):
        yield _evaluation(segment)
    warned = segment.notes.get("nan-warning")
    if warned is not None and (found is None or found.severity != "failure"):
        yield _warnings(segment)


def announced(segment: Segment, found: Finding) -> Finding:
    """Move a finding to the program's own warning, if that comes right before the first bad value."""
    noted = segment.notes.get("nan-warning")
    if noted is None or noted.place.order != found.place.order or noted.place.line >= found.place.line:
        return found
    said = f'{found.said} Line {noted.place.line} warns of it: "{noted.first[0].text.rstrip(".")}"'
    return replace(found, said=said, place=replace(found.place, line=noted.place.line))


def extent(streak: Streak) -> tuple[Place, str, str]:
    """Return where it began, how severe it is, and how much of the run it takes."""
    assert streak.first is not None and streak.last is not None
    if streak.since is not None:
        if streak.scattered:
            after = streak.looked - streak.before
            return streak.first, "failure", f"on {streak.count} of the {after} lines from there to the end, the last one included"
        every = f"and stays so to the end of the run ({streak.unbroken} lines)" if streak.unbroken > 1 else "on the last line"
        if streak.count == streak.looked:
            every = "on every line that logs it" if streak.looked > 1 else "on the only line that logs it"
        return streak.since, "failure", every
    severity = "failure" if streak.count > OFTEN * streak.looked else "warning"
    return streak.first, severity, f"on {streak.count} of {streak.looked} lines; the last lines are finite"


def _shown(segment: Segment) -> Finding:
    loss = segment.track("loss")
    first, severity, much = extent(loss.bad)
    kind = "nan" if math.isnan(loss.lost) else "inf"
    said = f"The loss is {number(loss.lost)} at {first}, {much}."
    if loss.bad.first != first:
        said += f" It was not finite before that, first at {loss.bad.first}, and came back."
    before = loss.curve.finite(first.order)
    absurd = blown(before)
    if absurd is not None and absurd is not before[-1] and severity == "failure":
        said += f" It was {number(largest(absurd))} already at {absurd.place}."
        first = absurd.place
        before = loss.curve.finite(first.order)
    rose = rising_before(segment, first)
    backward = segment.track("grad_norm").bad.since if severity == "failure" else None
    if backward is not None and backward.order < first.order:
        said += f" grad_norm is not finite already at {backward}, while the loss there is: the backward pass went first."
        first = backward
    else:
        backward = None
    if before and severity == "failure":
        which = "last finite loss" if absurd is None else "loss before that"
        said += f" The {which} is {number(before[-1].last)}, at {before[-1].place}."
    if rose:
        said += f" {rose}"
    norm = segment.track("grad_norm")
    if severity == "failure" and loss.count - first.order > 1 and not segment.settings.get("rounds"):
        if loss.bad.scattered and absurd is None:
            said += " Losses in between are finite, so the weights are too: some of the batches are bad."
        elif norm.count and not norm.bad.count:
            said += " The gradient norm is finite there."
        elif loss.bad.since is not None:
            said += " Once the weights are NaN, every later step is lost."
    return Finding(
        kind=kind,
        severity=severity,
        place=first,
        said=said,
        causes=_of_backward(rose) if backward is not None else _of_loss(segment, kind, first, rose),
        commands=(SCAN, RUN, CHECK),
    )


def _placeholder(segment: Segment) -> bool:
    """Whether NaN says that nothing was logged.

    A loss that is NaN on every line, while the gradient norm and another loss on the same lines are finite, is not a
    loss: Lightning's bar has such an entry where a module takes its own steps.
    """
    loss, norm = segment.track("loss"), segment.track("grad_norm")
    if _in_turn(segment):
        return True  # a row is of training or of an evaluation
    others = [track for name, track in segment.terms.items() if "loss" in name.lower() and track.count == loss.count]
    return loss.bad.count == loss.count == norm.count and not norm.bad.count and any(not track.bad.count for track in others)


def _in_turn(segment: Segment) -> bool:
    """Whether each row of a table has a loss or an evaluation loss, and NaN in the place of the other."""
    loss, evaluated = segment.track("loss"), segment.track("eval_loss")
    return 0 < loss.bad.count < loss.count == evaluated.count == segment.exchanged


def missing(segment: Segment) -> Finding | None:
    """Report a loss that the log no longer contains: Megatron does not print a NaN."""
    first, absent = segment.missing.since, segment.missing
    loss = segment.track("loss")
    if first is None or loss.last_finite is None:
        return None
    if absent.count - absent.unbroken > RARE * (absent.looked - absent.unbroken):
        return None  # it is not logged on every line
    name = segment.names.get("loss", "the loss")
    lines = "the last line" if absent.unbroken == 1 else f"the last {absent.unbroken} lines"
    said = (
        f"From {first} on, the log no longer contains {name} ({lines}). It was {number(loss.last_finite[1])} at "
        f"{loss.last_finite[0]}. Some programs leave out a loss that is NaN: Megatron, pandas, JSON writers."
    )
    norm = segment.track("grad_norm")
    if norm.bad.since is not None:
        said += f" grad_norm is {number(norm.first_bad)} from {norm.bad.since} on."
    causes = (
        Likely("A batch with NaN or Inf", "nonfinite-batch"),
        Likely("Gradients that grow from step to step end in an overflow", "exploding-gradient"),
    )
    return Finding(kind="nan", severity="failure", place=first, said=said, about=name, causes=causes, commands=(SCAN, RUN, CHECK))


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


def _of_backward(rose: str) -> tuple[Likely, ...]:
    """A gradient that is NaN while the loss is finite; the step that takes it makes the weights NaN."""
    causes = [Likely("Gradients that grow from step to step end in an overflow", "exploding-gradient")] if rose else []
    causes.append(Likely("A root, a norm or a masked branch has no finite slope at 0", "sqrt-at-zero"))
    causes.append(Likely("torch.where hides the value of a bad branch, not its gradient", "masked-branch-gradient"))
    causes.append(Likely("The backward pass overflows while the forward is finite", "fp16-gradient-overflow"))
    return tuple(causes)


def _of_loss(segment: Segment, kind: str, place: Place, rose: str) -> tuple[Likely, ...]:
    loss = segment.track("loss")
    early = loss.bad.since is not None and (loss.first_finite is None or place.order == 0) and _at_start(place)
    half = bool(segment.track("scale").count or segment.notes.get("overflow"))
    causes = []
    if rose:
        causes.append(Likely("The loss rose for several steps before it was lost", "learning-rate-too-high"))
        causes.append(Likely("Gradients that grow from step to step end in an overflow", "exploding-gradient"))
    if early and not rose:
        causes.append(
            Likely("It starts with the first lines: the initial weights or the data are bad", "nonfinite-weights-at-start")
        )
    if kind == "inf":
        causes.append(Likely("Inf comes before NaN: something overflows, such as exp of a large number", "exp-overflow"))
    if half:
        causes.append(Likely("The run trains in fp16, where activations above 65504 are Inf", "fp16-activation-overflow"))
    if not rose:
        sudden = (
            "It appeared between two lines, as with a bad sample" if not early and place.order > 2 else "A batch with NaN or Inf"
        )
        causes.append(Likely(sudden, "nonfinite-batch"))
        causes.append(Likely("A division by a count, a variance or a norm that is 0 in one batch", "zero-denominator"))
    return tuple(causes)


def _at_start(place: Place) -> bool:
    """Whether a place is at the start of a run, as far as the log says."""
    if place.step is not None:
        return place.step <= FIRST_STEP
    return place.epoch is None or place.epoch <= FIRST_EPOCH


def _gradient(segment: Segment) -> Finding | None:
    norm = segment.track("grad_norm")
    moved = skipping(segment)
    if moved is not None:
        return skips(segment, moved)
    first, severity, much = extent(norm.bad)
    if norm.bad.since is None:
        severity = "warning"  # the loss is finite: the run recovered
    at_start = norm.bad.last is not None and norm.bad.last.order < START  # where a scaler finds its scale
    if severity == "warning" and (norm.bad.count < FEW * norm.count or at_start):
        severity = "note"
    elif severity == "failure" and norm.bad.unbroken < 3 and norm.count > 10:
        severity = "warning"  # a scaler meets one now and then; the log ends there by chance
    loss = segment.track("loss")
    said = f"grad_norm is {number(norm.lost)} at {first}, {much}, "
    said += "while the logged loss is finite." if loss.count else "and the log has no loss."
    falls = _falls(segment)
    if norm.bad.count > norm.bad.unbroken > 0:
        said += f" It was not finite before that, first at {norm.bad.first}."
    if norm.bad.since is None:
        said += " Later gradients are finite, so those steps were skipped: a loss scaler does that now and then."
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


def _evaluation(segment: Segment) -> Finding:
    evaluated = segment.track("eval_loss")
    first, severity, much = extent(evaluated.bad)
    later = evaluated.last_finite
    if later is not None and evaluated.bad.first is not None and later[0].order > evaluated.bad.first.order:
        severity = "note" if evaluated.bad.unbroken < 0.5 * evaluated.bad.count else "warning"  # or it was not run there
    causes = (
        Likely("Running statistics took in a bad batch: training does not use them, evaluation does", "poisoned-buffer"),
        Likely("The evaluation data holds NaN or Inf", "nonfinite-batch"),
        Likely("An evaluation batch without a supervised token is 0/0", "no-supervised-targets"),
    )
    said = f"The evaluation loss is {number(evaluated.lost)} at {first}, {much}"
    loss = segment.track("loss")
    said += ", while the training loss is finite." if loss.count and not loss.bad.count else "."
    return Finding(
        kind="eval-nan", severity=severity, place=first, said=said, causes=causes, commands=(SCAN, "nanproof check train:build")
    )


def _warnings(segment: Segment) -> Finding:
    noted = segment.notes["nan-warning"]
    first, last = noted.first[0], noted.last
    assert last is not None
    loss = segment.track("loss")
    after = loss.last_finite is not None and loss.last_finite[0].order >= noted.last_order and loss.last_finite[1] != 0
    ended = noted.last_order >= segment.points and _ENDS.search(last.text) is not None
    lasting = ended or (not after and (noted.count > 2 or not loss.count))
    stopped = any(_ENDS.search(note.text) for note in (*noted.first, last))
    skips = [_SKIPS.search(note.text) is not None for note in (*noted.first, last)]
    where = noted.place
    times = "once," if noted.count == 1 else "twice, first" if noted.count == 2 else f"{noted.count} times, first"
    said = f'The run\'s own code warns {times} at {where}: "{first.text.rstrip(".")}"'
    if last.line != first.line:
        said += f", last at {Place(0, last.step, None, last.line)}"
    said += "."
    if ended:
        said += " The run ended there."
    elif any(skips):
        said += " It says that it skipped those steps." if all(skips) else " It says that it skipped some of those steps."
    elif lasting and noted.count > 2 and not stopped:
        since = f"line {first.line}" if first.step is None else f"step {number(first.step)}"
        said += f" The weights are most likely NaN, and everything after {since} is lost."
    zeroes = Likely("Zeroing NaN gradients still lets the optimizer step on its moments, and Inf passes a check for NaN")
    causes = (
        *((zeroes,) if any(_ZEROES.search(note.text) for note in noted.first) else ()),
        Likely("A batch with NaN or Inf, or a term of the loss that is 0/0 for it", "nonfinite-batch"),
        Likely("Something overflows, such as exp of a large number", "exp-overflow"),
    )
    scaler = all(skips) and all(_GRADIENT.search(note.text) for note in noted.first)
    rare = after and scaler and noted.count <= FEW * loss.count
    return Finding(
        kind="nan-warnings",
        severity="failure" if lasting else "note" if rare else "warning",
        place=where,
        said=said,
        causes=causes,
        commands=(SCAN, RUN, "Guard(model, optimizer)    # refuses the step before the weights see it"),
    )
