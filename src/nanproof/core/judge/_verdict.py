"""The verdict on a step, made on the device: skip or step, and how much to clip. The host does not wait for it."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar

import torch
from torch import Tensor

from nanproof._records import ABSENT, StepRecord
from nanproof.core.judge._parameters import moved
from nanproof.core.judge._stats import RunningStats


@dataclass(slots=True)
class Verdict:
    """Device tensors. The optimizer reads `skip` and `divisor`; `packed` travels to the host, where it becomes a `Reading`."""

    HEAD: ClassVar[int] = 14
    """Numbers in `packed` before the norms: loss, total norm, clip, bad, spike, loss scale, bad buffer, the optimizer's part;
    what was usual before this step: means and deviations of norm and loss, size of the loss; and whether the step was held."""
    TOTAL: ClassVar[int] = 1
    CLIP: ClassVar[int] = 2
    OPTIMIZER: ClassVar[int] = 7
    """0, or what the optimizer would make non-finite, or has made so."""
    WEIGHTS_BAD: ClassVar[int] = 1
    SETTING_BAD: ClassVar[int] = 2

    skip: Tensor
    """Float32, exactly 0 or 1: the step is bad, or held because an earlier one was. What the fused kernels read."""
    divisor: Tensor | None
    """Float32: clip times loss scale, what the gradients are divided by; None when there is neither."""
    packed: Tensor
    learned: Learned | None = None
    """What the statistics still have to take; None when the kernel has done that already."""


@dataclass(slots=True)
class Learned:
    """What follows from a verdict after the optimizer's step, when it is known whether that made the weights bad."""

    point: Tensor
    loss: Tensor
    spike: Tensor
    overflow: Tensor
    """Bool: the gradients are non-finite although the loss is finite."""


@dataclass(slots=True)
class Reading:
    """A verdict as the host reads it."""

    loss: float
    total: float
    clip: float
    bad: bool
    spike: bool
    scale: float | None
    bad_buffer: int
    """Above 0: the forward made a buffer non-finite, whatever loss and gradients say, and which; see BufferKeeper."""
    weights_bad: bool
    """The optimizer made weights or state non-finite."""
    typical: tuple[float, float]
    spread: tuple[float, float]
    loss_size: float
    held: bool
    """Not taken because an earlier step was bad, whatever it was itself."""
    norms: list[float]
    terms: tuple[tuple[str, float], ...] = ()
    """Name and value of each term of the loss, where they are known."""
    counters: tuple[tuple[str, float], ...] = ()
    """Name and value of what the loop counts itself."""
    bad_setting: bool = False
    """A learning rate, or another setting of the optimizer, is non-finite."""

    @classmethod
    def of(cls, values: list[float], scaled: bool, terms: tuple[str, ...] = (), counters: tuple[str, ...] = ()) -> Reading:
        """`terms`, `counters`: names of those that stand behind the norms, in this order."""
        last = len(values) - len(counters)
        end = last - len(terms)
        loss, total, clip, bad, spike, scale, bad_buffer, optimizer, m0, m1, s0, s1, size, held = values[: Verdict.HEAD]
        return cls(
            loss,
            total,
            clip,
            bad > 0,
            spike > 0,
            scale if scaled else None,
            int(bad_buffer),
            optimizer == Verdict.WEIGHTS_BAD,
            (m0, m1),
            (s0, s1),
            size,
            held > 0,
            values[Verdict.HEAD : end],
            tuple(zip(terms, values[end:last], strict=True)),
            tuple(zip(counters, values[last:], strict=True)),
            optimizer == Verdict.SETTING_BAD,
        )

    @property
    def refused(self) -> bool:
        return self.bad or self.weights_bad

    def record(self, step: int, names: tuple[str, ...], present: list[int], lr: tuple[float, ...], checked: bool) -> StepRecord:
        norms = array("d", self.norms)
        if len(present) != len(names):
            norms = array("d", map(dict(zip(present, self.norms, strict=True)).get, range(len(names)), repeat(ABSENT)))
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
            loss_size=self.loss_size,
            weights_checked=checked,
            names=names,
            norms=norms,
            terms=self.terms,
            counters=self.counters,
            time=round(time.time(), 3),
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
    bad_setting: Tensor | None = None,
) -> Verdict:
    """Judge one step. On several ranks loss and buffers are this rank's own and must not decide (`loss_decides=False`)."""
    if scale is not None:
        norms = norms / scale
    total = torch.linalg.vector_norm(norms)
    loss_finite = torch.isfinite(loss if also_finite is None else loss + also_finite)
    norm_finite = torch.isfinite(total)
    finite = norm_finite & loss_finite if loss_decides else norm_finite
    if bad_buffer is not None and loss_decides:
        finite = finite & moved(bad_buffer == 0, finite.device)
    if bad_setting is not None:
        finite = finite & ~bad_setting
    own_loss = loss if loss_decides else torch.zeros_like(total)
    point = stats.point(total, own_loss)
    spike = stats.is_spike(point) & finite
    if held is not None:
        spike = spike & ~held
    bad = ~finite | spike if skip_spikes else ~finite
    clip = torch.ones_like(total)
    if max_norm is not None:
        # The 1e-6 is clip_grad_norm_'s.
        limit: float | Tensor = stats.auto_limit() if isinstance(max_norm, str) else max_norm
        clip = (total + 1e-6) / limit
        clip = torch.where(clip > 1, clip, 1)
    divisor = None
    if max_norm is not None or scale is not None:
        divisor = (clip if scale is None else clip * scale).float()
    zero = torch.zeros_like(total)
    last = (zero if held is None else held.to(total.dtype)).reshape(1)
    head: tuple[Tensor, ...] = (
        loss,
        total,
        clip,
        bad,
        spike,
        zero if scale is None else scale,
        zero if bad_buffer is None else bad_buffer,
    )
    head = (*head, zero if bad_setting is None else bad_setting * Verdict.SETTING_BAD)
    scalars = torch.stack([moved(x, total.device, total.dtype) for x in head])
    return Verdict(
        skip=(bad if held is None else bad | held).float(),
        divisor=divisor,
        packed=torch.cat((scalars, stats.mean, stats.spread, stats.size.reshape(1), last, norms)),
        learned=Learned(point, own_loss, spike, ~norm_finite & loss_finite if loss_decides else ~norm_finite),
    )
