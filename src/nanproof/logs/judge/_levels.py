"""Losses that no network that learns can have: absurd by themselves, those of saturated outputs, and single impossible values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

from nanproof.logs._curve import Bucket, number
from nanproof.logs._story import Segment
from nanproof.logs.judge._finding import CHECK, OBSERVE, RUN, SLOWER, Finding, Likely
from nanproof.logs.judge._numbers import ABSURD, impossible, largest, learns, level

HOPELESS = 1e12
"""No unit of the targets explains a loss above this."""
NATS, PER_TOKEN = 200.0, re.compile(r"xent|mlm", re.I)
"""A cross-entropy per token: a uniform guess among a million costs 14."""
PERPLEXITY, PPL = 1e12, re.compile(r"ppl|perplexity", re.I)
CLASSES, CLASSIFIED = 1e4, re.compile(r"(?:^|[\W_])(?:cls|class|classification)[\W_]", re.I)
"""A loss over classes, which may be a sum over anchors."""
SATURATED = {
    87.33654: "the smallest number of fp32",
    103.27893: "the smallest number of fp32, denormal",
    15.942385: "the eps of fp32, 1.19e-7",
    16.118096: "1e-7",
    18.420681: "1e-8",
    20.723266: "1e-9",
    23.025851: "1e-10",
    27.631021: "1e-12",
    34.538776: "1e-15",
    36.043653: "the eps of fp64, 2.2e-16",
    708.39642: "the smallest number of fp64",
}
"""-log of the smallest probability that programs allow, and which number that is."""
UNITS = re.compile(r"mse|mae|rmse|l1|l2|elbo|nll_sum|sum", re.I)
"""Names of losses that grow with the square of the targets, or with the amount of data."""


def saturated(segment: Segment) -> Finding | None:
    """Report a loss that ends at the logarithm of the smallest probability: each prediction is certain, and wrong."""
    tracks = {segment.names.get(metric, metric): segment.track(metric) for metric in ("loss", "eval_loss")}
    tracks |= {name: track for name, track in segment.terms.items() if "loss" in name.lower()}
    for name, track in tracks.items():
        buckets = track.curve.finite()
        stuck = _end(buckets)
        smallest = next((of for value, of in SATURATED.items() if stuck and abs(stuck[0].last - value) <= 2e-5 * value), None)
        if smallest is None or len(stuck) < 2:
            continue
        whole = _end(segment.track("loss").curve.finite())  # on another line, perhaps, as a multiple of it
        place = min(stuck[-1].place, whole[-1].place if len(whole) > 1 else stuck[-1].place, key=lambda place: place.order)
        said = (
            f"{name} is {number(stuck[0].last)} from {place} to the end. That is -log of {smallest}: the probability of every "
            "right answer is 0 there. The outputs have saturated, and the model no longer learns."
        )
        causes = (
            Likely(
                "The learning rate is too high: the outputs grew until softmax or sigmoid saturated", "learning-rate-too-high"
            ),
            Likely("A log of a probability that is computed in two steps: use a loss that takes logits", "log-of-zero"),
            Likely("Inputs are not normalised", "inputs-not-normalised"),
        )
        commands = (SLOWER, CHECK)
        return Finding(
            kind="divergence", severity="failure", place=place, said=said, about=name, causes=causes, commands=commands
        )
    return None


def _end(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the buckets that have the value of the last one, backwards from it."""
    last = buckets[-1].last if buckets else 0.0
    return list(takewhile(lambda b: b.high - b.low <= 1e-5 * last >= abs(b.last - last), reversed(buckets)))


def _limit(name: str) -> float:
    """Return above what a loss of this name has exploded, if it does not fall."""
    kinds = ((PER_TOKEN, NATS), (PPL, PERPLEXITY), (CLASSIFIED, CLASSES))
    return next((most for pattern, most in kinds if pattern.search(name)), ABSURD)


def absurd(segment: Segment, throughout: bool = False) -> Finding | None:
    """Report a loss or a gradient norm that is too large for any network that learns, and does not fall."""
    if segment.settings.get("rounds"):
        return None
    for name, kind in (("loss", "divergence"), ("grad_norm", "exploding-gradient")):
        buckets = segment.track(name).curve.finite()
        values = [b.mean for b in buckets]
        called = segment.names.get(name, name)
        most = _limit(called)
        if len(values) < 2 or level(values[-3:]) < most or min(values[-2:]) < 0.5 * level(values[: max(len(values) // 3, 1)]):
            continue
        if name == "loss" and most == ABSURD and learns(buckets):
            continue
        if throughout and min(values) < most:
            continue
        if UNITS.search(called):
            continue
        place = next(b.place for b in buckets if b.high >= most)
        said = f"{called} is about {number(level(values[-3:]))} at the end of the log. It has exploded"
        units = most == ABSURD and not segment.settings.get("rewards")
        said += ", unless the targets themselves are that large: then scale them." if units else "."
        causes = (
            Likely("The learning rate is too high, or there is no warm-up", "learning-rate-too-high"),
            *((Likely("Inputs or targets are not normalised", "inputs-not-normalised"),) if most == ABSURD else ()),
            Likely("The gradient grows with every layer or time step", "exploding-gradient"),
        )
        severity = "failure" if most != ABSURD or level(values[-3:]) > HOPELESS else "warning"
        commands = (SLOWER, OBSERVE, CHECK)
        return Finding(kind=kind, severity=severity, place=place, said=said, about=called, causes=causes, commands=commands)
    return None


def outlier(segment: Segment) -> Finding | None:
    """Report a value that no loss of this run can have, and from which it came back."""
    buckets = segment.track("loss").curve.finite()
    found = impossible(buckets)
    if found is None:
        return None
    last = found is buckets[-1]
    said = f"The loss is {number(largest(found))} at {found.place}"
    said += ", the last line. " if last else f", and {number(buckets[-1].last)} at {buckets[-1].place}. "
    said += "No batch has such a loss: something overflowed, or divided by almost 0."
    causes = (
        Likely("A division by a count, a variance or a norm that is almost 0", "zero-denominator"),
        Likely("Something overflows, such as exp of a large number", "exp-overflow"),
        Likely("A batch with absurd values", "outlier-batch"),
    )
    kind, severity = ("divergence", "failure") if last else ("spike", "warning")
    return Finding(kind=kind, severity=severity, place=found.place, said=said, causes=causes, commands=(RUN, CHECK))
