"""judge: what a story shows, worst first. A false alarm costs as much as a miss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nanproof.logs._story import Segment, Story
from nanproof.logs.judge._crashes import crashes
from nanproof.logs.judge._finding import PROTECT, RUN, SLOWER, UNFILTER, Finding, Likely
from nanproof.logs.judge._nonfinite import announced, nonfinite
from nanproof.logs.judge._parts import parts
from nanproof.logs.judge._scaling import scaling
from nanproof.logs.judge._shape import shapes
from nanproof.logs.judge._standstill import plateau, standstill

__all__ = ["Finding", "Likely", "judge"]

LOST = ("hidden-nan", "nan", "inf", "nan-warnings", "scaler-skipping")
"""After one of these, the curves say nothing more of their own."""
NUMERIC = ("nan", "inf", "eval-nan", "divergence", "plateau", "overfit", "spike")
CHECK_NUMERICS = "tf.debugging.enable_check_numerics()    # names the operation that makes the first NaN or Inf"
FOREIGN = {
    "tensorflow": (CHECK_NUMERICS, "tf.keras.callbacks.TerminateOnNaN()    # stops at the first NaN"),
    "jax": ("jax.config.update('jax_debug_nans', True)    # raises at the operation that makes the first NaN",),
    "paddle": ("FLAGS_check_nan_inf=1 python train.py    # names the operator that makes the first NaN or Inf",),
    "chainer": ("chainer.set_debug(True)    # raises where the first NaN appears",),
    "caffe": ("debug_info: true    # in the solver's file: prints the mean of each blob and gradient",),
    "mxnet": (),
    "mlx": (),
    "darknet": (),
    "lua": (),
}
"""Frameworks that are not PyTorch, with their own means of finding the first NaN."""
BOOSTING = (
    Likely("The learning rate (eta, shrinkage) is too high for this objective", "learning-rate-too-high"),
    Likely("Labels or weights that the objective cannot handle, such as 0 under a logarithm"),
    Likely("A custom objective or metric divides by 0, or has the wrong sign"),
)
OVERFITTED = (Likely("More rounds than the data supports, or trees with too many leaves"),)


def judge(story: Story) -> tuple[Finding, ...]:
    """Each segment by itself; a failure that a later segment got past is a warning."""
    found: list[Finding] = []
    for i, segment in enumerate(story.segments):
        for finding in _of(segment):
            finding = _fitted(finding, segment)
            later = next((s for s in story.segments[i + 1 :] if _passes(s, finding)), None)
            found.append(finding if later is None else _overcome(finding, later))
    return tuple(sorted(_once(found), key=lambda f: (f.rank, f.place.line)))


def _of(segment: Segment) -> Iterator[Finding]:
    lost = list(nonfinite(segment))
    scaled = list(scaling(segment))
    if scaled:  # the same thing, and the scale says it more exactly: such steps are skipped, and the weights are not NaN
        scaled = [_with_loss(f, segment) for f in scaled]
        lost = [f for f in lost if f.kind not in ("scaler-skipping", "nan-gradient", "nan", "inf", "nan-warnings")]
    if not any(f.severity == "failure" for f in lost):
        lost += parts(segment)
    yield from (announced(segment, finding) for finding in lost)
    yield from scaled
    ended = any(f.kind in LOST and f.severity == "failure" for f in lost) or any(f.severity == "failure" for f in scaled)
    if not ended:
        still = list(standstill(segment))
        yield from still
        curves = list(shapes(segment))
        yield from curves
        if not still and not any(finding.kind == "divergence" for finding in curves):
            yield from plateau(segment)
    yield from crashes(segment)


def _fitted(finding: Finding, segment: Segment) -> Finding:
    """Return a finding with the advice that the program can follow: boosting has no batches, and TensorFlow no guard of ours."""
    shown = segment.settings
    if shown.get("rounds"):
        return _for_boosting(finding) if finding.kind in NUMERIC else finding
    if shown.get("transformers"):
        return replace(finding, commands=tuple(dict.fromkeys(PROTECT if c == RUN else c for c in finding.commands)))
    foreign = next((name for name in FOREIGN if shown.get(name)), None)
    if foreign is not None and not shown.get("torch"):
        kept = tuple(command for command in finding.commands if command == SLOWER)
        return replace(finding, commands=kept + FOREIGN[foreign])
    commands = finding.commands if UNFILTER in finding.commands else (RUN if c == PROTECT else c for c in finding.commands)
    return replace(finding, commands=tuple(dict.fromkeys(commands)))


def _for_boosting(finding: Finding) -> Finding:
    """Return a finding with the advice for boosting, which has no batches, weights or checkpoints."""
    if finding.kind == "overfit":
        command = "early stopping on the evaluation metric, fewer leaves, more regularisation    # the first things to try"
        return replace(finding, causes=OVERFITTED, commands=(command,))
    command = "a tenth of the learning rate, and the range of labels and sample weights    # the first things to look at"
    return replace(finding, causes=BOOSTING, commands=(command,))


def _with_loss(finding: Finding, segment: Segment) -> Finding:
    """A loss that is NaN itself says that it is the forward, not the scale."""
    bad = segment.track("loss").bad
    if bad.first is None:
        return finding
    first = bad.since or bad.first
    if bad.since is None:
        return replace(finding, said=f"{finding.said} The loss is not finite on {bad.count} of {bad.looked} lines.")
    said = f"{finding.said} The loss itself is not finite from {first} on: a lower scale does not help."
    earlier = not finding.place.line or first.line < finding.place.line
    return replace(finding, said=said, place=first if earlier else finding.place)


def _passes(segment: Segment, finding: Finding) -> bool:
    """A later part of the log that went further than the place of a finding, with finite losses."""
    loss = segment.track("loss")
    if not loss.count or loss.bad.since is not None or segment.together["hidden"].since is not None:
        return False
    step = finding.place.step
    return step is None or segment.last is None or segment.last.step is None or segment.last.step > step


def _overcome(finding: Finding, later: Segment) -> Finding:
    severity = {"failure": "warning", "warning": "note"}.get(finding.severity, finding.severity)
    start = f" from {later.first}" if later.first else ""
    return replace(
        finding, severity=severity, said=f"{finding.said} The run was started again{start} and trained past this point."
    )


def _once(found: list[Finding]) -> Iterator[Finding]:
    """The same kind in several segments is said once, for the worst and first."""
    seen = set()
    for finding in sorted(found, key=lambda f: (f.rank, f.place.line)):
        if finding.kind not in seen:
            seen.add(finding.kind)
            yield finding
