"""Runs that do not learn: no targets, no gradient, a learning rate of 0, or a loss that has not moved."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise, takewhile

from nanproof.logs._curve import Place, number
from nanproof.logs._points import worst_score
from nanproof.logs._story import Segment
from nanproof.logs.judge._finding import CHECK, Finding, Likely
from nanproof.logs.judge._numbers import level, loss_falls
from nanproof.logs.judge._shape import Form, form

VANISHED = 1e-3
TINY = 1e-30
"""A learning rate below this is 0 in fp32, whatever it is multiplied with."""
EVALUATIONS, DIGITS = 4, 4
"""So many evaluation losses that are the same in so many digits are not a coincidence."""
MANY = 8
"""Lines in which some score improves."""
LONG = 6
"""A score with so many digits is over many samples."""
PERIOD = 4
"""Fewer losses than this may repeat by chance."""
SAME = 1e-5
"""The share of a loss by which chance alone would change it."""
FROZEN = 10
"""Lines with the same loss that are not a coincidence."""
EARLY = 0.3
"""The share of the planned steps in which a loss still moves."""
EPOCHS = 6
"""Means of whole epochs that show whether anything is learned."""
SCHEDULE = (
    Likely("The schedule's total number of steps, its decay, its warm-up or its last value is wrong", "learning-rate-zero"),
)
SCHEDULED = ("print(scheduler.get_last_lr())    # and compare its number of steps with that of the loop",)
LABELS = "print((batch['labels'] != -100).sum(1))    # supervised tokens of each sample"
REWARDS = "print(rewards.view(-1, num_generations).std(1))    # 0: all rewards of a group are equal"


def standstill(segment: Segment) -> Iterator[Finding]:
    """Yield at most one finding: the first that matches explains the others."""
    found = _no_targets(segment) or _rate_zero(segment) or _gradient_zero(segment) or _vanished(segment) or _worst(segment)
    if found is not None:
        yield found


def _no_targets(segment: Segment) -> Finding | None:
    streak, loss = segment.together["nothing"], segment.track("loss")
    if not streak.count or streak.first is None:
        return None
    share = streak.count / streak.looked
    policy = loss.low < 0 or bool(segment.settings.get("rewards"))
    lasting = streak.since is not None and streak.unbroken >= 3
    if not lasting and (share < 0.5 if policy else streak.count < min(2, loss.count)):
        return None
    whole = share == 1 or lasting
    place = (streak.since if lasting else None) or streak.first
    said = f"Loss and grad_norm are both exactly 0.0 on {streak.count} of {streak.looked} lines, first at {place}. "
    said += "Such a step has nothing to learn from." + (" A NaN would show in grad_norm." if not policy else "")
    targets = Likely(
        "Every label is ignored (-100): the answer was cut off by max_length, or the template of the answer was not found",
        "no-supervised-targets",
    )
    equal = Likely("In reinforcement learning: all rewards of a group are equal, so every advantage is 0", "zero-advantage")
    return Finding(
        kind="no-targets",
        severity="failure" if (whole and loss.count > 1) or 1 > share >= 0.9 else "warning",
        place=place,
        said=said,
        causes=(equal, targets) if policy else (targets, equal),
        commands=(CHECK, REWARDS if policy else LABELS),
    )


def _vanished(segment: Segment) -> Finding | None:
    """Report a loss and a gradient that fall to a thousandth between two lines, and stay there."""
    losses, norms = segment.track("loss").curve.finite(), segment.track("grad_norm").curve.finite()
    if len(losses) != len(norms) or len(losses) < 3 or segment.track("loss").low < 0:
        return None
    later = [list(accumulate((b.high for b in reversed(buckets)), max))[::-1] for buckets in (losses, norms)]
    for i in range(1, len(losses) - 1):
        if later[0][i] > VANISHED * losses[i - 1].low or later[1][i] > VANISHED * norms[i - 1].low:
            continue
        place, before = losses[i].place, losses[i - 1].place
        if place.step is None or before.step is None or place.step - before.step > 1:
            continue  # so much can be learned in many steps
        said = (
            f"At {place} the loss drops from {number(losses[i - 1].last)} to {number(losses[i].last)}, and the gradient norm "
            f"from {number(norms[i - 1].last)} to {number(norms[i].last)}. No task is learned in one step: check the "
            "labels."
        )
        causes = (
            Likely("Every target that counts is the same token, or all others are ignored", "no-supervised-targets"),
            Likely("The model sees what it has to predict: labels are shifted twice, or not at all", "labels-shifted-twice"),
        )
        return Finding(kind="no-targets", severity="failure", place=place, said=said, causes=causes, commands=(CHECK, LABELS))
    return None


def _worst(segment: Segment) -> Finding | None:
    """Report a score that is at its worst on every line of a log whose loss does not fall."""
    loss = segment.track("loss")
    values = [b.mean for b in loss.curve.finite()]
    if (
        len(values) < 3
        or segment.settings.get("rewards")
        or min(values[len(values) // 2 :]) < 0.995 * values[0]
        or values[0] <= 0
    ):
        return None
    for name, track in segment.terms.items():
        worst = worst_score(name)
        if worst is None or track.count < (3 if worst else MANY) or not track.low == track.high == worst:
            continue
        place = loss.curve.buckets[0].place
        said = (
            f"{name} is {number(worst)} on all {track.count} lines, and {segment.names.get('loss', 'the loss')} does not fall: "
            f"{number(values[0])} on the first, {number(values[-1])} on the last."
        )
        causes = (
            Likely("The path from the loss to the parameters is cut (detach, no_grad), or they are frozen", "no-gradient-path"),
            Likely("The learning rate is too high: the outputs collapsed to one answer", "learning-rate-too-high"),
            Likely("Labels and inputs do not belong together", "labels-shifted-twice"),
        )
        return Finding(kind="plateau", severity="warning", place=place, said=said, causes=causes, commands=(CHECK,))
    return None


def plateau(segment: Segment) -> Iterator[Finding]:
    """Report a loss that has not moved: at most one finding, where nothing else matched."""
    found = (
        _flat(segment, form(segment))
        or _same_again(segment)
        or _frozen(segment)
        or _flat_epochs(segment)
        or _same_evaluation(segment)
        or _same_score(segment)
    )
    if found is not None:
        yield found


def _unmoved(place: Place, said: str, about: str = "") -> Finding:
    causes = (
        Likely("The path from the loss to the parameters is cut (detach, no_grad), or they are frozen", "no-gradient-path"),
        Likely("The optimizer holds other tensors than the model", "optimizer-foreign-parameters"),
        Likely("Updates round away in half-precision weights", "bf16-update-rounding"),
        Likely("All units of a ReLU are dead", "dead-units"),
    )
    return Finding(kind="plateau", severity="warning", place=place, said=said, about=about, causes=causes, commands=(CHECK,))


def _flat(segment: Segment, f: Form | None) -> Finding | None:
    """Report a loss that is as high as at the start, where its noise is below one percent."""
    if f is None or f.directionless:
        return None
    low, high = min(f.values), max(f.values)
    same = low == high or (high - low < SAME * low and f.values[-1] >= f.values[0])  # nothing that learns is
    if (segment.resumed or _late_start(segment)) and not same:
        return None
    if len(f.values) < 30 and not same:
        return None  # too few to tell, unless every one is the same
    third = len(f.values) // 3
    parts = [level(f.values[:third]), level(f.values[third : 2 * third]), level(f.values[-third:])]
    size, unsure = abs(parts[0]), 1.25 * f.sigma / third**0.5
    if size == 0 or unsure > 0.005 * size or max(parts) - min(parts) > 0.01 * size:
        return None
    if parts[0] - parts[2] > max(2 * unsure, 0.0015 * size):
        return None  # slow, but it learns
    if abs(level(f.values[:3]) - parts[2]) > max(0.01 * size, 3 * f.sigma):
        return None  # it learned within the first third
    lr = segment.track("lr")
    rates = [b.last for b in lr.curve.finite()]
    if rates and rates[-1] == lr.high > rates[2 * len(rates) // 3]:
        return None  # still warming up
    said = f"The loss is {number(parts[0])} in the first third of the log and {number(parts[2])} in the last: it has not moved."
    if lr.count and lr.high > 0:
        said += f" The learning rate is up to {number(lr.high)}."
    return _unmoved(f.buckets[0].place, said)


def _late_start(segment: Segment) -> bool:
    """Whether the log begins in the middle of a run, which may have learned what it can. Early in a run of known length, a loss
    that is flat while its steps double is not learning either."""
    first, last, planned = segment.first, segment.last, segment.settings.get("steps", 0)
    early = last is not None and last.step is not None and last.step < EARLY * planned
    return bool(first and last and first.step and last.step and first.step > (0.5 if early else 0.2) * last.step)


def _same_again(segment: Segment) -> Finding | None:
    """Report losses that repeat those of the epoch before, digit for digit."""
    curve = segment.track("loss").curve
    buckets = curve.finite()
    values = [b.last for b in buckets]
    if curve.each > 1 or len(values) < 2 * PERIOD or len(set(values)) < PERIOD:
        return None
    period = next((i for i in range(PERIOD, min(len(values) - PERIOD, 2 * len(values) // 3) + 1) if values[i] == values[0]), 0)
    if not period or any(a != b for a, b in zip(values, values[period:], strict=False)) or _digits(values[0]) < DIGITS:
        return None
    part = period // 3 or 1
    if level(values[:part]) - level(values[period - part : period]) > (max(values) - min(values)) / 3:
        return None  # the same run, started again
    said = (
        f"From {buckets[period].place} on the losses repeat those of the {period} lines before, digit for digit: "
        f"{number(values[0])}, {number(values[1])}, and so on. The same data gives the same losses, so no weight has changed."
    )
    return _unmoved(buckets[period].place, said)


def _frozen(segment: Segment) -> Finding | None:
    """Report a loss that moved, and then is the same to the last digit until the end, no better than the first."""
    buckets = segment.track("loss").curve.finite()
    same = list(takewhile(lambda b: b.low == b.high == buckets[-1].last, reversed(buckets)))
    if len(buckets) > len(same) >= FROZEN and same[0].last >= buckets[0].mean > 0 and _digits(same[0].last) >= DIGITS:
        place, value = same[-1].place, number(same[0].last)
        return _unmoved(place, f"The loss moves until {place}, and is {value} from there on: the outputs no longer change.")
    return None


def _flat_epochs(segment: Segment) -> Finding | None:
    """Report means of epochs, from the first epoch on, that differ by chance alone."""
    buckets = segment.track("loss").curve.finite()
    epochs = [b.place.epoch for b in buckets if b.place.epoch is not None]
    values = [b.mean for b in buckets]
    if len(values) < EPOCHS or len(epochs) < len(values) or epochs[0] > 2 or any(b - a < 1 for a, b in pairwise(epochs)):
        return None
    spread, half = max(values) - min(values), len(values) // 2
    falls = sum(b < a for a, b in pairwise(values))
    if min(values) <= 0 or spread > 0.002 * min(values) or falls > 0.75 * (len(values) - 1):
        return None
    if level(values[:half]) - level(values[-half:]) > 0.5 * spread:
        return None
    said = (
        f"The loss is {number(values[0])} in epoch {number(epochs[0])} and {number(values[-1])} in epoch {number(epochs[-1])}: "
    )
    said += f"it changes by {spread / min(values):.2%} at most, up as often as down."
    return _unmoved(buckets[0].place, said)


def _same_evaluation(segment: Segment) -> Finding | None:
    """Report an evaluation loss that is the same each time, to the last digit, while the training goes on."""
    evaluated, loss = segment.track("eval_loss"), segment.track("loss")
    if evaluated.count < EVALUATIONS or evaluated.bad.count or evaluated.low != evaluated.high or not loss.count:
        return None
    places = [b.place for b in evaluated.curve.buckets]
    trained = {b.place.order for b in loss.curve.buckets}
    repeated = any(place.order in trained for place in places)  # beside a loss, it may be that of an evaluation long ago
    epochs = {int(place.epoch) for place in places if place.epoch is not None}
    if _digits(evaluated.low) < DIGITS or (repeated and len(epochs) < 3 * EVALUATIONS):
        return None
    name = segment.names.get("eval_loss", "the evaluation loss")
    said = f"{name} is {number(evaluated.low)} at each of {evaluated.count} evaluations, to the last digit: the "
    said += "output of the model does not change between evaluations."
    return _unmoved(places[0], said, name)


def _same_score(segment: Segment) -> Finding | None:
    """Report a score that is the same at each evaluation, to the last digit."""
    for name, track in segment.terms.items():
        if worst_score(name) is None or track.bad.count or track.count < EVALUATIONS or track.low != track.high:
            continue
        if _digits(track.low) < LONG or _of_few(track.low):
            continue
        said = f"{name} is {number(track.low)} on all {track.count} lines, to the last digit: the predictions do not change."
        return _unmoved(track.curve.buckets[0].place, said, name)
    return None


def _of_few(score: float) -> bool:
    """Whether a score may be a share of at most a hundred samples."""
    return any(abs(score * n - round(score * n)) < n * 5 * 10.0 ** -max(_digits(score), LONG) for n in range(1, 101))


def _digits(value: float) -> int:
    """Return how many significant digits a value has."""
    return len(repr(abs(value)).partition("e")[0].replace(".", "").strip("0"))


def _rate_zero(segment: Segment) -> Finding | None:
    lr = segment.track("lr")
    tail = list(takewhile(lambda b: b.high < TINY, reversed(lr.curve.finite())))
    if any(b.high > 0 for b in tail):
        name = segment.names.get("lr", "The learning rate")
        value, began = max(b.high for b in tail), tail[-1].place
        said = f"{name} is {number(value)} or less from {began} on: the weights in this group do not change."
        return Finding(kind="learning-rate-zero", severity="failure", place=began, said=said, causes=SCHEDULE, commands=SCHEDULED)
    if lr.count < 3 or not lr.zero.count or lr.zero.first is None:
        return None
    all_zero = lr.zero.count == lr.count
    ended = lr.zero.since is not None and lr.zero.unbroken >= max(5, 0.1 * lr.count)
    if not (all_zero or ended) or (loss_falls(segment) and all_zero):
        return None
    place = lr.zero.first if all_zero else lr.zero.since
    assert place is not None
    said = (
        f"The learning rate is 0 on all {lr.count} lines: the weights are not updated."
        if all_zero
        else f"The learning rate is 0 from {place} to the end, {lr.zero.unbroken} of {lr.count} lines: nothing is learned there."
    )
    return Finding(
        kind="learning-rate-zero",
        severity="failure" if all_zero else "warning",
        place=place,
        said=said,
        causes=SCHEDULE,
        commands=SCHEDULED,
    )


def _hundredths(value: float) -> bool:
    return abs(100 * value - round(100 * value)) < 1e-6


def _gradient_zero(segment: Segment) -> Finding | None:
    norm, still = segment.track("grad_norm"), segment.together["still"]
    whole = still.count == still.looked - segment.together["gradient"].count  # on every line where it is finite
    if segment.settings.get("coarse_norm") or (0 < norm.high < 1 and all(_hundredths(b.high) for b in norm.curve.finite())):
        return None  # printed with two digits
    if norm.count < 3 or still.count < 2 or still.since is None or still.first is None:
        return None
    if not whole and (still.unbroken < 5 or still.unbroken < 0.1 * still.looked):
        return None
    if loss_falls(segment) and whole:
        return None
    place, count = (still.first, still.count) if whole else (still.since, still.unbroken)
    loss = segment.track("loss")
    said = f"grad_norm is exactly 0.0 from {place} on, {count} of {still.looked} lines, while the loss is not 0"
    said += f" ({number(loss.last_finite[1])})" if loss.last_finite else ""
    causes = (
        Likely(
            "The path from the loss to the parameters is cut (detach, no_grad, argmax), or they are frozen", "no-gradient-path"
        ),
        Likely("All units of a ReLU are dead: nothing behind it gets a gradient", "dead-units"),
        Likely("All rewards of a group are equal, so every advantage is 0", "zero-advantage"),
    )
    return Finding(
        kind="zero-gradient",
        severity="failure",
        place=place,
        said=said + ": the weights are not updated.",
        causes=causes,
        commands=(CHECK,),
    )
