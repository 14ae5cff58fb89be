"""Values of training beside the loss: the parts of a loss, a critic's loss, a KL divergence."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile

from nanproof.logs._curve import Bucket, Place, number
from nanproof.logs._points import worst_score
from nanproof.logs._story import Segment
from nanproof.logs.judge._finding import CHECK, OBSERVE, RUN, SCAN, SLOWER, Finding, Likely
from nanproof.logs.judge._nonfinite import extent
from nanproof.logs.judge._numbers import learns, level, loss_falls

RATIO = re.compile(r"kl|ratio|logp|entropy", re.I)
"""Names of values that are computed from log-probabilities."""
CRITIC = re.compile(r"critic|value|vf|\bq", re.I)
REBUILT = re.compile(r"l1|l2|mel|rec|idt|ident|feat|fm|cyc|perc|vgg|lpips|kl|gp", re.I)
"""Names of losses that compare with the data: networks that work against each other have them beside their own."""
PLAYER = re.compile(r"(?:^|[\W_])(?:g|d|gen|disc|generator|discriminator|adv)(?:$|[\W_])", re.I)
"""Names of the losses of two networks that work against each other."""
BOXES = re.compile(r"(?:^|[\W_])(?:b?box|dfl|g?iou)(?:$|[\W_])", re.I)
CLASSES = re.compile(r"(?:^|[\W_])(?:cls|class|ce)(?:$|[\W_])", re.I)
FEW = 3
"""A value that stays the same on this many lines is not a coincidence."""
ENOUGH = 5
MANY = 8
"""Lines in which a detector should have met a box."""
CHANCE = 0.6931
"""ln 2: the loss of preference training at its first steps."""
EXPLODED = 1e6
ABSURD = 1e9
LOST, WON = 10.0, 1e-3
"""Losses, in nats, of the losing and the winning one of two networks that work against each other."""
JUMP = 30.0
"""Times the highest value before it. Parts that all jump by more at the same line have exploded."""
UP = 10.0
"""A part below this has not exploded, however small it was."""
RANGE = 10.0
"""Times the usual size: what stays above it has begun to explode."""
ALONE = 0.1
"""A part that is NaN on a smaller share of the lines, and finite again at the end, is a note."""


def parts(segment: Segment) -> Iterator[Finding]:
    """At most one finding: a part that is NaN or Inf, that explodes, or that never changes."""
    found = (
        _bad(segment)
        or _exploded(segment)
        or _jumped(segment)
        or _unchanging(segment)
        or _nothing_in(segment)
        or _unmatched(segment)
        or _silent_player(segment)
    )
    if found is not None:
        yield found


def _bad(segment: Segment) -> Finding | None:
    """Report the part that was lost first. A part that is finite again at the end is a warning or a note."""
    bad = {name: track for name, track in segment.terms.items() if track.bad.count and worst_score(name) is None}
    if not bad:
        return None
    name, track = min(bad.items(), key=lambda item: (item[1].bad.since is None, extent(item[1].bad)[0].order))
    first, severity, much = extent(track.bad)
    loss = segment.track("loss")
    if severity == "failure" and track.count > 10 and track.bad.unbroken < FEW and loss.count and not loss.bad.count:
        severity = "note" if track.bad.scattered or loss_falls(segment) else "warning"  # some lines have none of it
    elif (
        severity != "failure"
        and track.bad.longest < ENOUGH
        and (track.bad.count <= ALONE * track.count or (not loss.bad.count and loss_falls(segment)))
    ):
        severity = "note"
    kind = "nan" if math.isnan(track.lost) else "inf"
    said = f"{name} is {number(track.lost)} at {first}, {much}."
    before = track.curve.finite(first.order)
    onset = _onset(before)
    if severity == "failure" and onset < len(before) and before[-1].high >= EXPLODED:
        said += f" It had grown before, from {number(before[onset].last)} at {before[onset].place} to {number(before[-1].last)}."
        first = before[onset].place
    others = [other for other in bad if other != name]
    if others:
        said += f" Also not finite at some point: {_listed(others)}."
    if segment.settings.get("transformers") and loss.zero.since is not None and loss.zero.since.order <= first.order:
        said += " The loss is logged as exactly 0.0: that is NaN too, which the Trainer's logging_nan_inf_filter shows as 0.0."
    elif loss.last_finite is not None and loss.last_finite[0].order >= first.order and loss.last_finite[1] < ABSURD:
        said += (
            f" {segment.names.get('loss', 'The loss')} is still finite: {number(loss.last_finite[1])} at {loss.last_finite[0]}."
        )
    return Finding(
        kind=kind,
        severity=severity,
        place=first,
        said=said,
        about=name,
        causes=_causes(name, kind),
        commands=(SCAN, RUN, CHECK) if severity == "failure" else (RUN, CHECK),
    )


def _causes(name: str, kind: str) -> tuple[Likely, ...]:
    if RATIO.search(name):
        return (
            Likely("exp of a difference of log-probabilities overflows, on masked tokens too", "exp-overflow"),
            Likely("A row of logits is fully masked", "attention-row-fully-masked"),
            Likely("The log of a probability of 0", "log-of-zero"),
        )
    if CRITIC.search(name):
        return (
            Likely("The critic's targets grow without bound: rewards or returns are not normalised", "exploding-gradient"),
            Likely("An observation or a reward is NaN or Inf", "nonfinite-batch"),
            Likely("The learning rate is too high for the critic", "learning-rate-too-high"),
        )
    if "ctc" in name.lower():
        return (Likely("A target is longer than its input: no path can produce it", "ctc-infeasible"),)
    if kind == "inf":
        return (
            Likely("Something overflows, such as exp of a large number", "exp-overflow"),
            Likely("The loss of a sample that cannot be aligned is Inf", "ctc-infeasible"),
        )
    return (
        Likely("A division by a count, a variance or a norm that is 0", "zero-denominator"),
        Likely("The log of a probability of 0", "log-of-zero"),
        Likely("A batch with NaN or Inf", "nonfinite-batch"),
    )


def _onset(buckets: Sequence[Bucket]) -> int:
    """Return where the sizes leave their usual range for good: the number of buckets if they do not."""
    sizes = [max(abs(b.low), abs(b.high)) for b in buckets]
    usual, at = level(sizes[: max(len(sizes) // 4, 2)]), len(sizes)
    while at > 1 and usual > 0 and sizes[at - 1] > RANGE * usual:
        at -= 1
    return at


def _exploded(segment: Segment) -> Finding | None:
    """Report a part that grows a millionfold and stays there, or that is absurdly large throughout."""
    for name, track in segment.terms.items():
        buckets = track.curve.finite()
        if buckets and "loss" in name.lower() and buckets[-1].low >= ABSURD and not learns(buckets):
            absurd = list(takewhile(lambda b: b.low >= ABSURD, reversed(buckets)))
            last, whole, onset = buckets[-1], len(absurd) == len(buckets), _onset(buckets)
            place = (buckets[onset] if not whole and onset < len(buckets) else absurd[-1]).place
            began = "unless its targets are that large" if whole else f"from {number(buckets[0].last)} at {buckets[0].place}"
            said = f"{name} is {number(last.last)} at {last.place}: it has exploded, {began}."
            causes, severity = _causes(name, "divergence"), "warning" if whole else "failure"
            return Finding(
                kind="divergence", severity=severity, place=place, said=said, about=name, causes=causes, commands=(RUN, CHECK)
            )
        if len(buckets) < ENOUGH or worst_score(name) is not None or name == "the printed tensor":
            continue
        sizes = [max(abs(b.low), abs(b.high)) for b in buckets]
        usual = sorted(sizes)[len(sizes) // 2 if len(sizes) > ENOUGH else 1]
        if usual <= 0 or sizes[-1] < EXPLODED * max(usual, 1.0):
            continue
        first = next(i for i in range(len(sizes) - 1, -1, -1) if sizes[i] < EXPLODED * max(usual, 1.0)) + 1
        first = min(first, _onset(buckets))
        before, place = buckets[first - 1], buckets[first].place
        then = ", and stays there" if first + 1 < len(buckets) else ", on the last line"
        said = f"{name} goes from {number(before.last)} to {number(buckets[first].last)} at {place}{then}."
        causes = (
            Likely("Gradients that grow from step to step", "exploding-gradient"),
            Likely("The learning rate is too high", "learning-rate-too-high"),
            Likely("A sample with an infinite loss, such as a target longer than its input", "ctc-infeasible"),
        )
        return Finding(
            kind="divergence", severity="failure", place=place, said=said, about=name, causes=causes, commands=(SLOWER, OBSERVE)
        )
    return None


def _jumped(segment: Segment) -> Finding | None:
    """Report parts that all jump at the same line, to many times the highest value before it, and stay up."""
    if segment.settings.get("rewards") or loss_falls(segment):
        return None
    curves = {name: track.curve.finite() for name, track in segment.terms.items() if worst_score(name) is None}
    jumps = {name: at for name, buckets in curves.items() if (at := _jump(buckets)) is not None}
    first = min((curves[name][at].place for name, at in jumps.items()), key=lambda place: place.order, default=Place())
    names = [name for name, at in jumps.items() if curves[name][at].place.order == first.order]
    if len(names) < 2 or min(curves[name][-1].last for name in names) < UP:
        return None
    low, high = curves[names[0]][0].last, curves[names[0]][-1].last
    then = "on the last line" if curves[names[0]][-1].place.order == first.order else "and stay up"
    said = f"{_listed(names)} jump at {first} {then}, {names[0]} from {number(low)} to {number(high)}."
    causes = (
        Likely("The learning rate is too high", "learning-rate-too-high"),
        Likely("Gradients that grow from step to step", "exploding-gradient"),
        Likely("A bad stretch of data, from which the run did not come back", "outlier-batch"),
    )
    return Finding(
        kind="divergence", severity="failure", place=first, said=said, about=names[0], causes=causes, commands=(SLOWER, OBSERVE)
    )


def _jump(buckets: Sequence[Bucket]) -> int | None:
    """Return where positive values jump for good."""
    if len(buckets) < 3 or min(b.low for b in buckets) <= 0:
        return None
    tops = list(accumulate((b.high for b in buckets), max))
    at = next((i for i in range(2, len(buckets)) if buckets[i].low > JUMP * tops[i - 1]), None)
    return None if at is None or min(b.low for b in buckets[at:]) < JUMP / 2 * tops[at - 1] else at


def _nothing_in(segment: Segment) -> Finding | None:
    """Report a part of the loss that is exactly 0 on every line, where a score is at its worst on every line."""
    worst = [name for name, track in segment.terms.items() if track.count >= FEW and track.low == track.high == worst_score(name)]
    zero = [name for name, t in segment.terms.items() if "loss" in name.lower() and t.count >= FEW and t.low == t.high == 0]
    if loss_falls(segment):
        zero = [name for name in zero if "ctc" in name.lower()]  # other parts may start later
    if not worst or not zero:
        return None
    track = segment.terms[zero[0]]
    said = f"{zero[0]} is exactly 0 on all {track.count} lines and {worst[0]} is {number(segment.terms[worst[0]].low)}: "
    said += "no target reaches this part of the loss, or zero_infinity hides an Inf."
    causes = (
        Likely("No target reaches this part of the loss", "no-supervised-targets"),
        Likely("A target is longer than its input: the loss is Inf, and zero_infinity makes it 0", "ctc-infeasible"),
    )
    place = track.zero.first or Place()
    return Finding(kind="no-targets", severity="warning", place=place, said=said, about=zero[0], causes=causes, commands=(CHECK,))


def _unchanging(segment: Segment) -> Finding | None:
    """Report parts of the loss that never change, at least one of which is 0."""
    loss = segment.track("loss")
    tracks = {segment.names.get("loss", "loss"): loss} if loss.count else {}
    tracks |= {name: track for name, track in segment.terms.items() if "loss" in name.lower()}
    if len(tracks) < 2 or any(t.count < FEW or t.bad.count or t.low != t.high for t in tracks.values()):
        return None
    zero = [name for name, track in tracks.items() if track.high == 0]
    others = {name: track.high for name, track in tracks.items() if track.high != 0}
    if not zero or not others or all(abs(value - CHANCE) < 1e-4 for value in others.values()):
        return None
    first = tracks[zero[0]]
    place = first.zero.first or Place()
    said = (
        f"{_listed(zero)} {'is' if len(zero) == 1 else 'are'} exactly 0 and {_listed(others)} "
        f"{'stays' if len(others) == 1 else 'stay'} at "
        f"{', '.join(map(number, others.values()))} on all {first.count} lines: no target is matched to a prediction."
    )
    causes = (
        Likely("No target is assigned: labels are missing, or the predictions are NaN and match none", "no-supervised-targets"),
        Likely("The weights are NaN, and parts of the loss that compare with NaN come out as 0", "nonfinite-weights-mid-run"),
    )
    return Finding(kind="no-targets", severity="failure", place=place, said=said, causes=causes, commands=(CHECK,))


def _unmatched(segment: Segment) -> Finding | None:
    """Report a detector whose losses of boxes are exactly 0 while its loss of classes is not: no box has a target."""
    boxes = {name: track for name, track in segment.terms.items() if BOXES.search(name)}
    classes = {name: track for name, track in segment.terms.items() if CLASSES.search(name) and track.low > 0}
    if segment.names.get("loss") and BOXES.search(segment.names["loss"]):
        boxes[segment.names["loss"]] = segment.track("loss")
    if len(boxes) < 2 or not classes or any(t.count < MANY or t.zero.count < t.count for t in boxes.values()):
        return None
    name, track = next(iter(classes.items()))
    place = next(iter(boxes.values())).zero.first or Place()
    said = f"{_listed(list(boxes))} are exactly 0 from {place} on, while {name} is {number(track.high)}: no box has a label."
    causes = (Likely("No target is assigned: labels are missing, or of another scale or format", "no-supervised-targets"),)
    return Finding(kind="no-targets", severity="warning", place=place, said=said, causes=causes, commands=(CHECK,))


def _silent_player(segment: Segment) -> Finding | None:
    """Report two networks of which one has a loss of 0 to the end, and the other a loss far above chance."""
    if segment.track("loss").count:
        return None
    players = {
        name: track.curve.finite() for name, track in segment.terms.items() if PLAYER.search(name) and not REBUILT.search(name)
    }
    for winner, won in players.items():
        at = len(won) - next((i for i, b in enumerate(reversed(won)) if max(abs(b.low), abs(b.high)) > WON), len(won))
        if len(won) - at < FEW:
            continue
        since = won[at].place
        for loser, lost in players.items():
            tail = [b.last for b in lost if b.place.order >= since.order]
            if loser == winner or not tail or min(tail) < LOST:
                continue
            said = f"{winner} is at most {WON} from {since} on, {len(won) - at} of {len(won)} lines, while {loser} is "
            said += f"{number(tail[-1])}: one network dominates, and training has stalled."
            causes = (
                Likely("The learning rate of one network is too high for the other", "learning-rate-too-high"),
                Likely("A sigmoid saturates, and its gradient is 0: use the loss that takes logits", "dead-units"),
            )
            return Finding(
                kind="divergence",
                severity="failure",
                place=since,
                said=said,
                about=loser,
                causes=causes,
                commands=(SLOWER, OBSERVE),
            )
    return None


def _listed(names: list[str] | dict[str, float]) -> str:
    shown = [*names][:4] + ["others"] * (len(names) > 4)
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
