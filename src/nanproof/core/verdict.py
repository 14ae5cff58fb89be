"""The verdict on a step, made on the device: skip or step, and how much to clip. The host does not wait for it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from nanproof.core.stats import RunningStats
from nanproof.records import ABSENT, StepRecord


@dataclass(frozen=True, slots=True)
class Verdict:
    """Device tensors; `pack` turns them into the one vector that travels to the host."""

    loss: Tensor
    norms: Tensor
    """Of each gradient present, before clipping, loss scale taken out."""
    total: Tensor
    bad: Tensor
    """Bool: this step must not be taken."""
    skip: Tensor
    """Float32, exactly 0 or 1: `bad`, or held because an earlier step was bad. What the fused kernels read."""
    clip: Tensor
    """At least 1: what clipping divides the gradients by."""
    divisor: Tensor | None
    """Float32: clip times loss scale, what the fused kernels divide by; None when there is neither."""
    scale: Tensor | None
    overflow: Tensor
    """Bool: the gradients are non-finite although the loss is finite."""
    spike: Tensor
    point: Tensor
    mean: Tensor
    spread: Tensor
    bad_buffer: Tensor | None
    """Above 0: the forward made a buffer non-finite, whatever loss and gradients say, and which; see BufferKeeper."""
    weights_bad: Tensor | None = None
    """Bool: the step itself made a weight non-finite (looked at for half-precision weights only)."""

    HEAD = 12

    def pack(self) -> Tensor:
        dtype, zero = self.norms.dtype, torch.zeros_like(self.total)
        head = (
            self.loss,
            self.total,
            self.clip,
            self.bad,
            self.spike,
            zero if self.scale is None else self.scale,
            zero if self.bad_buffer is None else self.bad_buffer,
            zero if self.weights_bad is None else self.weights_bad,
        )
        scalars = torch.stack([x.to(self.total.device, dtype, non_blocking=True) for x in head])
        return torch.cat((scalars, self.mean, self.spread, self.norms))


@dataclass(frozen=True, slots=True)
class Reading:
    """A verdict as the host reads it."""

    loss: float
    total: float
    clip: float
    bad: bool
    spike: bool
    scale: float | None
    bad_buffer: int
    weights_bad: bool
    typical: tuple[float, float]
    spread: tuple[float, float]
    norms: list[float]

    @classmethod
    def of(cls, values: list[float], scaled: bool) -> Reading:
        loss, total, clip, bad, spike, scale, bad_buffer, weights_bad, m0, m1, s0, s1 = values[: Verdict.HEAD]
        return cls(
            loss,
            total,
            clip,
            bad > 0,
            spike > 0,
            scale if scaled else None,
            int(bad_buffer),
            weights_bad > 0,
            (m0, m1),
            (s0, s1),
            values[Verdict.HEAD :],
        )

    @property
    def refused(self) -> bool:
        return self.bad or self.weights_bad

    def record(self, step: int, names: tuple[str, ...], present: list[int], lr: tuple[float, ...], checked: bool) -> StepRecord:
        norms = array("d", (ABSENT,)) * len(names)
        for i, norm in zip(present, self.norms, strict=True):
            norms[i] = norm
        clipped = self.clip > 1
        return StepRecord(
            step=step,
            loss=self.loss,
            grad_norm=self.total,
            action="skipped" if self.refused else "clipped" if clipped else "stepped",
            clip=1.0 if self.refused else self.clip,
            lr=lr,
            scale=self.scale,
            spike=self.spike,
            typical=self.typical,
            spread=self.spread,
            weights_checked=checked,
            names=names,
            norms=norms,
        )


def judge(
    loss: Tensor,
    norms: Tensor,
    *,
    also_finite: Tensor | None,
    bad_buffer: Tensor | None,
    loss_decides: bool,
    scale: Tensor | None,
    max_norm: float | str | None,
    stats: RunningStats,
    skip_spikes: bool,
    held: Tensor | None,
) -> Verdict:
    """Judge one step. On several ranks loss and buffers are this rank's own and must not decide (`loss_decides=False`)."""
    if scale is not None:
        norms = norms / scale
    total = torch.linalg.vector_norm(norms)
    loss_finite = torch.isfinite(loss if also_finite is None else loss + also_finite)
    norm_finite = torch.isfinite(total)
    finite = norm_finite & loss_finite if loss_decides else norm_finite
    if bad_buffer is not None and loss_decides:
        finite = finite & (bad_buffer == 0).to(finite.device, non_blocking=True)
    point = stats.point(total, loss if loss_decides else torch.zeros_like(total))
    spike = stats.is_spike(point) & finite
    if held is not None:
        spike = spike & ~held
    bad = ~finite | spike if skip_spikes else ~finite
    clip = torch.ones_like(total)
    if max_norm is not None:
        # The 1e-6 is clip_grad_norm_'s.
        limit: float | Tensor = stats.auto_limit() if isinstance(max_norm, str) else max_norm
        clip = ((total + 1e-6) / limit).clamp(min=1)
    divisor = None
    if max_norm is not None or scale is not None:
        divisor = (clip if scale is None else clip * scale).float()
    return Verdict(
        loss=loss,
        norms=norms,
        total=total,
        bad=bad,
        skip=(bad if held is None else bad | held).float(),
        clip=clip,
        divisor=divisor,
        scale=scale,
        overflow=~norm_finite & loss_finite if loss_decides else ~norm_finite,
        spike=spike,
        point=point,
        mean=stats.mean,
        spread=stats.spread,
        bad_buffer=bad_buffer,
    )
