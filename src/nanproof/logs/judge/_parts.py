"""Values of training beside the loss: the parts of a loss, a critic's loss, a KL divergence."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from nanproof.logs._curve import Place, number
from nanproof.logs._points import worst_score
from nanproof.logs._story import Segment
from nanproof.logs.judge._finding import CHECK, RUN, SCAN, Finding, Likely
from nanproof.logs.judge._nonfinite import extent

RATIO = re.compile(r"kl|ratio|logp|entropy", re.I)
"""Names of values that are computed from log-probabilities."""
CRITIC = re.compile(r"critic|value|vf|\bq", re.I)
PLAYER = re.compile(r"(?:^|[\W_])(?:g|d|gen|disc|generator|discriminator|adv)(?:$|[\W_])", re.I)
"""Names of the losses of two networks that work against each other."""
FEW = 3
"""A value that stays the same on this many lines is not a coincidence."""
ENOUGH = 5
EXPLODED = 1e6
ABSURD = 1e9
LOST, WON = 10.0, 1e-3
"""Losses, in nats, of the losing and the winning one of two networks that work against each other."""
ALONE = 0.1
"""A part that is NaN on a smaller share of the lines, and finite again at the end, is a note."""


def parts(segment: Segment) -> Iterator[Finding]:
    """At most one finding: a part that is NaN or Inf, that explodes, or that never changes."""
    found = _bad(segment) or _exploded(segment) or _unchanging(segment) or _silent_player(segment)
    if found is not None:
        yield found


def _bad(segment: Segment) -> Finding | None:
    """Report the part that was lost first. A part that is finite again at the end is a warning or a note."""
    bad = {name: track for name, track in segment.terms.items() if track.bad.count and worst_score(name) is None}
    if not bad:
        return None
    name, track = min(bad.items(), key=lambda item: (item[1].bad.since is None, extent(item[1].bad)[0].order))
    first, severity, much = extent(track.bad)
    if severity != "failure" and track.bad.count <= ALONE * track.count:
        severity = "note"
    kind = "nan" if math.isnan(track.first_bad) else "inf"
    said = f"{name} is {number(track.first_bad)} at {first}, {much}."
    others = [other for other in bad if other != name]
    if others:
        said += f" Also not finite at some point: {_listed(others)}."
    loss = segment.track("loss")
    if loss.zero.since is not None and loss.zero.since.order <= first.order:
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


def _exploded(segment: Segment) -> Finding | None:
    """Report a part that grows a millionfold and stays there, or that is absurdly large throughout."""
    for name, track in segment.terms.items():
        buckets = track.curve.finite()
        if buckets and "loss" in name.lower() and min(b.low for b in buckets) >= ABSURD:
            place, last = buckets[0].place, buckets[-1]
            said = f"{name} is {number(last.last)} at {last.place}: it has exploded, unless its targets are that large."
            causes = _causes(name, "divergence")
            return Finding(
                kind="divergence", severity="warning", place=place, said=said, about=name, causes=causes, commands=(RUN, CHECK)
            )
        if len(buckets) < ENOUGH or worst_score(name) is not None or name == "the printed tensor":
            continue
        sizes = [max(abs(b.low), abs(b.high)) for b in buckets]
        usual = sorted(sizes)[len(sizes) // 2 if len(sizes) > ENOUGH else 1]
        if usual <= 0 or sizes[-1] < EXPLODED * max(usual, 1.0):
            continue
        first = next(i for i in range(len(sizes) - 1, -1, -1) if sizes[i] < EXPLODED * max(usual, 1.0)) + 1
        before, place = buckets[first - 1], buckets[first].place
        said = f"{name} goes from {number(before.last)} to {number(buckets[first].last)} at {place}, and stays there."
        causes = (
            Likely("Gradients that grow from step to step", "exploding-gradient"),
            Likely("The learning rate is too high", "learning-rate-too-high"),
            Likely("A sample with an infinite loss, such as a target longer than its input", "ctc-infeasible"),
        )
        return Finding(
            kind="divergence", severity="failure", place=place, said=said, about=name, causes=causes, commands=(RUN, CHECK)
        )
    return None


def _unchanging(segment: Segment) -> Finding | None:
    """Report parts that are all the same on every line, to the last digit, one of them 0."""
    loss = segment.track("loss")
    tracks = {segment.names.get("loss", "loss"): loss} if loss.count else {}
    tracks |= {name: track for name, track in segment.terms.items() if "loss" in name.lower()}
    if len(tracks) < 2 or any(t.count < FEW or t.bad.count or t.low != t.high for t in tracks.values()):
        return None
    zero = [name for name, track in tracks.items() if track.high == 0]
    others = {name: track.high for name, track in tracks.items() if track.high != 0}
    if not zero or not others:
        return None
    first = tracks[zero[0]]
    place = first.zero.first or Place()
    said = (
        f"{_listed(zero)} {'is' if len(zero) == 1 else 'are'} exactly 0 and {_listed(others)} stays at "
        f"{', '.join(map(number, others.values()))} on all {first.count} lines: no sample has a target."
    )
    causes = (
        Likely("No target is assigned: labels are missing, or the predictions are NaN and match none", "no-supervised-targets"),
        Likely("The weights are NaN, and parts of the loss that compare with NaN come out as 0", "nonfinite-weights-mid-run"),
    )
    return Finding(kind="no-targets", severity="failure", place=place, said=said, causes=causes, commands=(SCAN, CHECK))


def _silent_player(segment: Segment) -> Finding | None:
    """Report two networks of which one has a loss of 0 to the end, and the other a loss far above chance."""
    if segment.track("loss").count:
        return None
    players = {name: track.curve.finite() for name, track in segment.terms.items() if PLAYER.search(name)}
    for winner, won in players.items():
        at = len(won) - next((i for i, b in enumerate(reversed(won)) if max(abs(b.low), abs(b.high)) > WON), len(won))
        if len(won) - at < FEW:
            continue
        since = won[at].place
        for loser, lost in players.items():
            tail = [b.last for b in lost if b.place.order >= since.order]
            if loser == winner or not tail or min(tail) < LOST:
                continue
            said = f"{winner} is 0 from {since} on, {len(won) - at} of {len(won)} lines, while {loser} is {number(tail[-1])}: "
            said += "one network has won, and neither is learning any longer."
            causes = (
                Likely("The learning rate of one network is too high for the other", "learning-rate-too-high"),
                Likely("A sigmoid saturates, and its gradient is 0: use the loss that takes logits", "dead-units"),
            )
            return Finding(
                kind="divergence", severity="failure", place=since, said=said, about=loser, causes=causes, commands=(CHECK, RUN)
            )
    return None


def _listed(names: list[str] | dict[str, float]) -> str:
    shown = [*names][:4] + ["others"] * (len(names) > 4)
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
