"""Pieces of a policy-gradient loss that cannot overflow on tokens that are masked out.

The usual way computes exp(new - old) everywhere and multiplies by the mask afterwards. A masked token whose log-probability is
far off then gives Inf, and Inf * 0 is NaN: one token that does not count ends the run. Here masked positions are 0 before exp,
in the value and in the gradient. At positions that do count nothing is hidden: what is not finite there stays not finite.
Differences and exponentials are taken in fp32 at least, because fp16 overflows at a log-ratio of 11.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from nanproof._errors import UsageError

__all__ = [
    "KL",
    "Advantages",
    "Ratio",
    "Signals",
    "clamped_kl",
    "group_advantages",
    "kl",
    "log_ratio",
    "masked_mean",
    "ratio",
]


def log_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """new - old where the mask is not 0, and exactly 0 elsewhere, whatever stands there."""
    keep = _keep(mask, new, "log_ratio")
    wide = _wide(new, old)
    return torch.where(keep, new.to(wide) - old.to(wide), 0.0)


@dataclass(frozen=True)
class Ratio:
    """Importance ratios, and what the limit did to them."""

    value: Tensor
    """exp of the log-ratio; 1 at masked positions."""
    clamped: Tensor
    """How many positions the limit changed (0-d, on the device)."""
    share: Tensor
    """The same, as a share of the positions that count."""


def ratio(new: Tensor, old: Tensor, mask: Tensor, limit: float | None = None) -> Ratio:
    """Importance ratios. `limit`: the log-ratio is held between -limit and limit, and how often is reported, never silently.
    The limit is for large numbers: a log-ratio that is not finite gives a ratio that is not finite."""
    _check_limit(limit, "ratio")
    difference, clamped, share = _held(log_ratio(new, old, mask), mask, limit)
    return Ratio(_exp(difference), clamped, share)


def kl(new: Tensor, ref: Tensor, mask: Tensor, kind: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """Estimates of the KL divergence of `new` from `ref`, per token, 0 at masked positions. With d = ref - new: k1 is -d, k2 is
    d² / 2, and k3 is exp(d) - d - 1, which is never negative and has no bias. `clamped_kl` is the same with a limit."""
    return _divergence(log_ratio(ref, new, mask), kind, "kl")


@dataclass(frozen=True)
class KL:
    """A divergence per token, and what the limit did to it."""

    value: Tensor
    """As `kl` has it; 0 at masked positions."""
    clamped: Tensor
    """How many positions the limit changed (0-d, on the device)."""
    share: Tensor
    """The same, as a share of the positions that count."""


def clamped_kl(new: Tensor, ref: Tensor, mask: Tensor, limit: float, kind: Literal["k1", "k2", "k3"] = "k3") -> KL:
    """`kl` with the log-ratio held between -limit and limit first, and how often that was. A token that was held has no gradient:
    it does not pull the policy back, so a share that stays above 0 is a policy that has left its reference. What is not finite
    stays not finite. k3 at a log-ratio of 20 is 5e8 already: a limit keeps the number finite, not the training sound."""
    _check_limit(limit, "clamped_kl")
    difference, clamped, share = _held(log_ratio(ref, new, mask), mask, limit)
    return KL(_divergence(difference, kind, "clamped_kl"), clamped, share)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean over positions that count; 0 where none does. `dim=-1` gives one mean per sequence."""
    keep = _keep(mask, x, "masked_mean").expand_as(x)
    kept = torch.where(keep, x.to(_wide(x)), 0.0)
    if dim is None:
        return kept.sum() / keep.sum().clamp(min=1)
    return kept.sum(dim) / keep.sum(dim).clamp(min=1)


@dataclass(frozen=True)
class Advantages:
    """What a group's rewards say about each of its members."""

    value: Tensor
    """One number per reward, in fp32."""
    std: Tensor
    """The standard deviation of each group, before any floor."""
    zero_groups: Tensor
    """How many groups have equal rewards throughout, so that their advantages are exactly 0 and teach nothing."""
    floored_groups: Tensor
    """How many groups were divided by the floor instead of their own, smaller deviation."""
    short_groups: Tensor
    """How many groups had fewer than two valid rows, so that there was nothing to compare: advantage 0, deviation 0."""


def group_advantages(
    rewards: Tensor,
    group_size: int,
    scale: Literal["group", "batch", "none"] = "group",
    floor: float = 0.0,
    valid: Tensor | None = None,
) -> Advantages:
    """Rewards minus their group's mean, over the deviation of the group or of the whole batch.

    Equal rewards give exactly 0, not a rounding error divided by a rounding error. `floor` bounds the deviation from below:
    groups that are equal up to rounding are then not blown up to advantages of ordinary size.

    `valid`: False for a row that says nothing of the policy, such as a completion that sampling had to end because its logits
    were not finite. Its reward is not looked at: it is left out of mean and deviation, and its advantage is exactly 0. A group
    with fewer than two valid rows teaches nothing: it is counted in `short_groups`, and its advantages are 0. A valid reward
    that is not finite stays not finite in any group.
    """
    _check_groups(rewards, group_size, scale, floor, valid)
    groups = rewards.detach().float().view(-1, group_size)
    keep = None if valid is None else (valid != 0).view(-1, group_size)
    centred = _centred(groups, keep, 1)
    std = _std(centred, 1, None if keep is None else keep.sum(1))
    zero = (centred == 0).all(1)
    short = torch.zeros_like(zero) if keep is None else keep.sum(1) < 2
    zero = zero & ~short
    floored = torch.zeros_like(zero)
    value = centred
    if scale != "none":
        batch = scale == "batch"
        divisor = _std(_centred(groups, keep, None), None, None if keep is None else keep.sum()) if batch else std
        floored = (divisor < floor) & ~zero & ~short
        divisor = divisor.clamp(min=floor)
        # 0 / 0 can only be a group of equal rewards, whose advantage is 0; the divisor of NaN stays as it is.
        value = centred / torch.where(divisor == 0, 1.0, divisor).reshape(-1, 1)
        if keep is not None:  # 0 / NaN, beside a reward that is not finite
            value = torch.where(keep, value, 0.0)
    return Advantages(value.reshape(-1), std, zero.sum(), floored.sum(), short.sum())


@dataclass(frozen=True)
class Signals:
    """What tells early that policy-gradient training goes wrong: 0-d tensors on the device, None where it does not apply.

    Ratios and divergences are those before anything is clipped or truncated: afterwards they always look well. A non-finite
    token that counts makes them non-finite.
    """

    group_std_mean: Tensor | None = None
    group_std_min: Tensor | None = None
    zero_advantage_share: Tensor | None = None
    """Share of the groups whose rewards are all equal."""
    reward_nonfinite: Tensor | None = None
    """How many rewards are not finite; their groups are left out of the three above."""
    ratio_max: Tensor | None = None
    ratio_min: Tensor | None = None
    sampler_ratio_max: Tensor | None = None
    """Of the policy at sampling time to what the sampler itself says: how far the two engines are apart."""
    sampler_ratio_min: Tensor | None = None
    sampler_nonfinite: Tensor | None = None
    """How many tokens that count have a log-probability from the sampler that is not finite."""
    kl_max: Tensor | None = None
    kl_mean: Tensor | None = None
    entropy: Tensor | None = None
    masked_overflow: Tensor | None = None
    """How many tokens that do not count have a ratio or a divergence that is not finite: what a loss that masks only after exp
    makes NaN."""

    @classmethod
    def of_rewards(cls, rewards: Tensor, group_size: int, valid: Tensor | None = None) -> Signals:
        """Of the rewards of whole groups, one after the other. Rows that are not `valid` are left out, as `group_advantages` has
        it; so are groups with fewer than two that are."""
        groups = group_advantages(rewards, group_size, scale="none", valid=valid)
        finite = rewards.isfinite()
        if valid is not None:
            finite = finite | (valid == 0)
        whole = finite.view(-1, group_size).all(1)
        if valid is not None:
            whole = whole & ((valid != 0).view(-1, group_size).sum(1) > 1)
        count = whole.sum()
        return cls(
            group_std_mean=torch.where(whole, groups.std, 0.0).sum() / count,
            group_std_min=_extremes(groups.std, whole)[0],
            zero_advantage_share=groups.zero_groups / count,
            reward_nonfinite=(~finite).sum(),
        )

    @classmethod
    def of_tokens(
        cls,
        new: Tensor,
        mask: Tensor,
        *,
        old: Tensor | None = None,
        ref: Tensor | None = None,
        sampler: Tensor | None = None,
        entropy: Tensor | None = None,
        level: Literal["token", "sequence"] = "token",
    ) -> Signals:
        """Of log-probabilities per token. `old`: of the policy that is being improved (None: `new` itself); `ref`: of the
        reference; `sampler`: as the sampling engine reported them; `level`: whether the loss takes ratios of tokens, or of whole
        sequences by the mean of their log-ratios. Nothing here waits for the device."""
        new = new.detach()
        keep = _keep(mask, new, "Signals").expand_as(new)
        found: dict[str, Tensor] = {}
        old = new if old is None else old.detach()
        change, counted = log_ratio(new, old, keep), keep
        if level == "sequence":
            change, counted = masked_mean(change, keep, -1), keep.any(-1)
        found["ratio_min"], found["ratio_max"] = _extremes(_exp(change), counted)
        # As such a loss computes it: no wider, and masked by nobody.
        plain = new - old
        overflows = ~(plain.exp() if level == "token" else plain).isfinite()
        if ref is not None:
            plain = ref.detach() - new
            overflows = overflows | ~(plain.exp() - plain).isfinite()
            divergence = kl(new, ref.detach(), keep)
            found["kl_mean"], found["kl_max"] = masked_mean(divergence, keep), _extremes(divergence, keep)[1]
        if sampler is not None:
            gap = _exp(log_ratio(old, sampler.detach(), keep))
            found["sampler_ratio_min"], found["sampler_ratio_max"] = _extremes(gap, keep)
            found["sampler_nonfinite"] = (keep & ~sampler.isfinite()).sum()
        if entropy is not None:
            found["entropy"] = masked_mean(entropy.detach(), keep)
        found["masked_overflow"] = (overflows & ~keep).sum()
        return cls(**found)

    def present(self) -> dict[str, Tensor]:
        """The signals that apply."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in named if value is not None}

    def read(self) -> dict[str, float]:
        """The numbers, in one transfer. This waits for the device."""
        return read_together(self.present())


def read_together(values: dict[str, Tensor]) -> dict[str, float]:
    """0-d tensors of one device as numbers, in one transfer. This waits for the device."""
    if not values:
        return {}
    numbers = torch.stack([value.detach().to(torch.float32) for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))


def _keep(mask: Tensor, like: Tensor, where: str) -> Tensor:
    if not isinstance(mask, Tensor):
        raise UsageError(f"{where}(mask=...): a tensor is needed, 1 or True where a token counts, not {type(mask).__name__}")
    try:
        torch.broadcast_shapes(mask.shape, like.shape)
    except RuntimeError:
        raise UsageError(f"{where}: a mask of shape {list(mask.shape)} does not fit values of shape {list(like.shape)}") from None
    return mask != 0


def _wide(*tensors: Tensor) -> torch.dtype:
    wide = torch.float32
    for t in tensors:
        wide = torch.promote_types(wide, t.dtype)
    return wide


def _exp(difference: Tensor) -> Tensor:
    """exp, where -inf gives NaN: a token of probability 0 that was sampled all the same is an error, not a ratio of 0."""
    return torch.where(difference == -math.inf, math.nan, difference.exp())


def _extremes(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest of what counts, NaN if there is any; NaN where nothing counts."""
    low, high = torch.where(keep, x, math.inf).amin(), torch.where(keep, x, -math.inf).amax()
    some = keep.any()
    return torch.where(some, low, math.nan), torch.where(some, high, math.nan)


def _check_limit(limit: float | None, where: str) -> None:
    if limit is not None and not limit > 0:
        raise UsageError(f"{where}(limit={limit!r}): a number above 0 is needed, such as 20.0; None leaves the log-ratio alone")


def _held(difference: Tensor, mask: Tensor, limit: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Log-ratios between -limit and limit, how many of them were not, and that as a share of the positions that count."""
    clamped = torch.zeros((), dtype=torch.int64, device=difference.device)
    if limit is not None:
        far = (difference.abs() > limit) & difference.isfinite()
        clamped = far.sum()
        difference = torch.where(far, difference.clamp(-limit, limit), difference)
    return difference, clamped, clamped / (mask != 0).sum().clamp(min=1)


def _divergence(difference: Tensor, kind: str, where: str) -> Tensor:
    if kind == "k1":
        return -difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        return difference.expm1() - difference
    raise UsageError(f'{where}(kind={kind!r}): "k1", "k2" or "k3" is needed')


def _centred(groups: Tensor, keep: Tensor | None, dim: int | None) -> Tensor:
    """Minus the mean of those that count, in each row or over all of them; 0 where one does not count."""
    # From the least reward on, so that equal rewards are exactly 0 apart and large ones cancel before they are added up.
    if keep is None:
        above = groups - (groups.amin() if dim is None else groups.amin(dim, keepdim=True))
        return above - (above.mean() if dim is None else above.mean(dim, keepdim=True))
    over = (0, 1) if dim is None else (dim,)
    least = torch.where(keep, groups, math.inf).amin(over, keepdim=True)
    above = torch.where(keep, groups - least, 0.0)
    return torch.where(keep, above - above.sum(over, keepdim=True) / keep.sum(over, keepdim=True), 0.0)


def _std(centred: Tensor, dim: int | None, counted: Tensor | None = None) -> Tensor:
    """Of numbers around 0. Scaled to 1 first, so that squares neither overflow nor vanish. `counted`: how many of them there are,
    where the others are exactly 0."""
    size = centred.abs().amax() if dim is None else centred.abs().amax(dim, keepdim=True)
    size = torch.where(size == 0, 1.0, size)
    count = centred.numel() if dim is None else centred.shape[dim]
    less: int | Tensor = count - 1 if counted is None else (counted - 1).clamp(min=1)
    scaled = centred / size
    total = scaled.square().sum() if dim is None else scaled.square().sum(dim)
    return (total / less).sqrt() * (size if dim is None else size.squeeze(dim))


def _check_groups(rewards: Any, group_size: int, scale: str, floor: float, valid: Any) -> None:
    where = "group_advantages"
    if not isinstance(rewards, Tensor) or rewards.dim() != 1 or not rewards.numel():
        raise UsageError(f"{where}(rewards=...): a tensor with one number per completion is needed, group after group")
    if group_size < 2:
        raise UsageError(f"{where}(group_size={group_size}): a group of one has no mean to differ from; sample at least 2")
    if rewards.numel() % group_size:
        raise UsageError(f"{where}: {rewards.numel()} rewards do not divide into groups of {group_size}")
    if scale not in ("group", "batch", "none"):
        raise UsageError(f'{where}(scale={scale!r}): "group", "batch" or "none" is needed')
    if not 0 <= floor < math.inf:
        raise UsageError(f"{where}(floor={floor!r}): a number of at least 0 is needed")
    if valid is not None and (not isinstance(valid, Tensor) or valid.shape != rewards.shape):
        what = f"one of shape {list(valid.shape)}" if isinstance(valid, Tensor) else type(valid).__name__
        raise UsageError(f"{where}(valid=...): a tensor with True or False per completion is needed, not {what}")
