"""judge: what a story shows, worst first. Silence about healthy runs counts as much as finding what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nanproof.logs._story import Segment, Story
from nanproof.logs.judge._advice import fitted
from nanproof.logs.judge._crashes import crashes
from nanproof.logs.judge._finding import Finding, Likely
from nanproof.logs.judge._nonfinite import announced, nonfinite
from nanproof.logs.judge._parts import parts
from nanproof.logs.judge._scaling import scaling
from nanproof.logs.judge._shape import shapes
from nanproof.logs.judge._standstill import plateau, standstill

__all__ = ["Finding", "Likely", "judge"]

LOST = ("hidden-nan", "nan", "inf", "nan-warnings", "scaler-skipping")
"""After one of these, the curves say nothing more of their own."""


def judge(story: Story) -> tuple[Finding, ...]:
    """Each segment by itself; a failure that a later segment got past is a warning."""
    found: list[Finding] = []
    for i, segment in enumerate(story.segments):
        for finding in _of(segment):
            finding = fitted(finding, segment)
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
        curves = list(shapes(segment, None))
        yield from curves
        if not still and not any(finding.kind == "divergence" for finding in curves):
            yield from plateau(segment)
    yield from crashes(segment)


def _with_loss(finding: Finding, segment: Segment) -> Finding:
    """A loss that is NaN itself says that it is the forward, not the scale."""
    first = segment.track("loss").bad.first
    if first is None:
        return finding
    said = f"{finding.said} The loss itself is not finite from {first} on: it is the forward, not the scale."
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
    return replace(finding, severity=severity, said=f"{finding.said} The run was started again{start}, and got past this.")


def _once(found: list[Finding]) -> Iterator[Finding]:
    """The same kind in several segments is said once, for the worst and first."""
    seen = set()
    for finding in sorted(found, key=lambda f: (f.rank, f.place.line)):
        if finding.kind not in seen:
            seen.add(finding.kind)
            yield finding
