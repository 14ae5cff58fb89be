"""Steps that a loss scaler skipped, as the learning rates in a log show them."""

from __future__ import annotations

from nanproof.logs._curve import number
from nanproof.logs._story import Segment
from nanproof.logs.judge._finding import CHECK, PROTECT, SCAN, Finding, Likely
from nanproof.logs.judge._schedule import Skipping, skipping

NO_SCALE_HELPS = (
    Likely("An output passes 65504 in fp16, at any loss scale", "fp16-activation-overflow"),
    Likely(
        "The model is loaded in fp16: keep trainable weights in fp32, and let autocast do the rest",
        "fp16-weights-with-grad-scaler",
    ),
    Likely("The data holds NaN or Inf, so that no scale helps", "nonfinite-batch"),
)


def skipped_only(segment: Segment) -> Finding | None:
    """Report skipped steps that only the learning rate shows."""
    moved = skipping(segment)
    return None if moved is None else skips(segment, moved)


def skips(segment: Segment, moved: Skipping) -> Finding:
    norm = segment.track("grad_norm")
    said = in_words(moved)
    if norm.bad.count:
        said += f" grad_norm is {number(norm.first_bad)} on {norm.bad.count} of {norm.count} lines."
    share = moved.skipped / moved.tried
    if share > 0.25:
        said += " A scale that is only too high costs a few steps: here the forward or the gradients are NaN at any scale."
    return Finding(
        kind="scaler-skipping",
        severity="failure" if share > 0.25 else "warning",
        place=moved.began,
        said=said,
        causes=NO_SCALE_HELPS,
        commands=(PROTECT, CHECK, SCAN),
    )


def in_words(moved: Skipping) -> str:
    """Return what the learning rates show, as sentences."""
    said = f"The learning rate shows that {moved.skipped} of {moved.tried} optimizer steps were skipped: "
    if moved.base is not None and moved.total is not None:
        said += f"{number(moved.base)} falls over {moved.total} steps, "
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
