"""Causes that lie in an operation of the forward: overflow, 0/0, logarithms of 0, masks that leave nothing."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanproof.explain._case import Case, Trial, living
from nanproof.explain._cause import Cause, Match, at_birth
from nanproof.explain._controls import blown_up, not_an_overflow, rejected, unused
from nanproof.explain.causes._algebra import InsideDomain
from nanproof.explain.causes._raised import raised_at
from nanproof.explain.locate._locate import Birth, batch_shape, where_in_batch
from nanproof.explain.locate._trace import Op
from nanproof.explain.replay._interventions import (
    EXP,
    BoundedExp,
    Fp32,
    Intervention,
    OneMask,
    PositiveLog,
    SafeDivision,
    SafeInput,
    SafeRoot,
    SafeSoftmax,
    SpreadOfOne,
    exp_limit,
)
from nanproof.explain.replay._surroundings import Bf16Autocast, PositiveScale

SOFTMAX = frozenset({"_softmax", "_log_softmax", "_safe_softmax", "softmax", "_masked_softmax", "logsumexp"})
DIVISION = frozenset({"div", "div_", "reciprocal", "true_divide"})
ADDITION = frozenset({"add", "add_", "sub", "sub_", "rsub", "baddbmm", "_to_copy", "mul", "mul_", "addmm"})
LOGS = frozenset({"log", "log2", "log10", "log_", "log1p", "logit", "xlogy"})


def feeds_sampling(birth: Birth) -> bool:
    """The bad numbers went on into a random draw."""
    failed = birth.trace.failed
    return failed is not None and failed.name in ("multinomial", "bernoulli", "categorical")


class AttentionRowFullyMasked(Cause):
    """A softmax over a row that is -inf throughout."""

    slug = "attention-row-fully-masked"
    fix = (
        "Never mask a whole row: leave one key visible (or zero the row's output afterwards), and drop samples that are all "
        "padding."
    )

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.birth is None or feeds_sampling(case.birth) or case.error_is_about_sampling:
            return None
        birth, op = case.birth, case.birth.at
        if op.name in SOFTMAX and op.inputs:
            scores = op.inputs[0]
            if scores.value is None or not op.nan_out or scores.range.high == math.inf or not scores.range.inf:
                return None
            dim = next((s for s in op.scalars if isinstance(s, int) and not isinstance(s, bool)), -1)
            rows = int((scores.value == -torch.inf).all(dim).sum())
            if not rows:
                return None
            said = (
                f"{rows} of {scores.value.numel() // scores.value.shape[dim]} rows of the softmax are -inf "
                f"throughout{birth.place()}"
            )
            return at_birth(birth, 0.96, said, lambda: case.cured_by(SafeSoftmax()), "these rows unmasked", op="softmax")
        if op.name == "sub" and op.nan_out and all(i.range.low == -math.inf for i in op.inputs):
            said = f"a maximum of -inf is subtracted from -inf{birth.place()}: every key of the row is masked"
            return at_birth(
                birth, 0.8, said, lambda: case.cured_by(_FiniteMaximum(), SafeDivision()), "these rows unmasked", op="softmax"
            )
        return None


class _FiniteMaximum(Intervention):
    lived = "a maximum of -inf is taken as 0"
    names = frozenset({"amax", "max", "logsumexp"})

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            return self.where(out.detach() == -torch.inf, 0.0, out)
        if isinstance(out, tuple):
            values = self.where(out[0].detach() == -torch.inf, 0.0, out[0])
            return torch.return_types.max((values, out[1]))
        return out


class MaskOverflow(Cause):
    """finfo.min plus a score, or two additive masks, pass the dtype's range."""

    slug = "mask-overflow"
    fix = (
        "Use one boolean mask (masked_fill or SDPA's attn_mask) instead of adding finfo.min; two additive masks, or one plus "
        "a score, pass the dtype's range."
    )

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.birth is None:
            return None
        birth, op = case.birth, case.birth.at
        if op.name not in ADDITION or op.backward or not op.outputs or not op.outputs[0].range.inf:
            return None
        out = op.outputs[0]
        least = torch.finfo(out.dtype).min
        lows = [i.range.low for i in op.inputs if math.isfinite(i.range.low)]
        lows += [float(s) for s in op.scalars if isinstance(s, float) and math.isfinite(s)]
        deepest = min(lows, default=0.0)
        if out.range.low != -math.inf or deepest > 0.4 * least or not _looks_like_a_mask(op, deepest):
            return None
        kind = str(out.dtype).removeprefix("torch.")
        said = (
            f"{op.name} of numbers down to {deepest:.4g} in {kind} gives -inf: the least it holds is {least:.4g}, and the "
            "mask is at that edge"
        )
        return at_birth(birth, 0.95, said, lambda: self._one_mask(case), "the sum kept inside the dtype's range", op="add")

    def _one_mask(self, case: Case) -> Trial:
        """The control keeps the sum at half of the range: a masked score weighs nothing either way, an activation does."""
        assert case.replay is not None
        trial = case.cured_by(OneMask())
        edge, half = (case.replay.run(OneMask(share), backward=False).loss for share in (1.0, 0.5))
        moves = not math.isclose(edge, half, rel_tol=1e-3, abs_tol=1e-6)
        return rejected(trial, f"at half of the range the loss is {half:.6g} instead of {edge:.6g}: it is not a mask" * moves)


_EDGES = frozenset(torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32))


def _looks_like_a_mask(op: Op, deepest: float) -> bool:
    """The same number in many places, at the edge of some dtype: put there by hand, where an activation happens to be large."""
    if any(math.isclose(deepest, edge, rel_tol=1e-3) and deepest < -1e5 for edge in _EDGES):
        return True
    values = [i.value for i in op.inputs if i.value is not None]
    return any(int((v == v.min()).sum()) > max(1, v.numel() // 64) and float(v.min()) < -1e3 for v in values)


class Fp16ActivationOverflow(Cause):
    """An output passes 65504 in fp16."""

    slug = "fp16-activation-overflow"
    specific = 0
    fix = (
        "Run in bf16, or keep this module and the residual stream after it in fp32: casting its output back to fp16 "
        "overflows again."
    )

    def match(self, case: Case) -> Match | None:
        if case.signal in ("zero-gradients", "dead-parameters", "collapsed", "constant-loss"):
            return self._hidden(case)
        if not case.nonfinite or case.birth is None or case.birth.in_backward:
            return None
        birth, op = case.birth, case.birth.at
        out = next((o for o in op.outputs if o.range.bad), None)
        if out is None or out.dtype != torch.float16:
            return None
        special = (op.name in DIVISION and _zero_divisor(op)) or op.name in EXP or op.name in LOGS or op.name in SOFTMAX
        size = max((i.range.size for i in op.inputs if math.isfinite(i.range.size)), default=math.nan)
        said = (
            f"{op.name} in {op.path} gives {'Inf' if out.range.inf else 'NaN'} in fp16 from inputs up to "
            f"{size:.4g}{birth.place()}; fp16 ends at 65504"
        )
        return at_birth(birth, 0.4 if special else 0.92, said, lambda: self._wider(case), "every fp16 argument in fp32")

    def _hidden(self, case: Case) -> Match | None:
        """An Inf that the next operations turn into 0, as 1 / sqrt(mean square) does: nothing is NaN, and no gradient is left."""
        for op in case.trace.ops if case.trace is not None else ():
            out = next((o for o in op.outputs if o.range.inf and o.dtype == torch.float16), None)
            if out is None or op.backward or any(i.range.bad for i in op.inputs) or op.name in ("masked_fill", "full", "where"):
                continue
            size = max((i.range.size for i in op.inputs if math.isfinite(i.range.size)), default=math.nan)
            said = (
                f"{op.name} in {op.path} gives Inf in fp16 from inputs up to {size:.4g}, and 1 / Inf is 0: nothing gets through"
            )
            return Match(
                confidence=0.9,
                evidence=(said,),
                phase="forward",
                where=op.path,
                op=op.name.strip("_"),
                source=op.source or None,
                samples=(),
                trial=lambda: self._gets_through(case),
                tried="every fp16 argument in fp32",
            )
        return None

    def _gets_through(self, case: Case) -> Trial:
        """Gradients where there were none."""
        assert case.replay is not None
        before, after = case.replay.run(), case.replay.run(change := Fp32())
        dead = [name for name, norm in before.norms.items() if norm == 0]
        alive = [name for name in dead if after.norms.get(name, 0.0) > 0]
        held = after.finite and bool(alive)
        return Trial(held, f"{len(alive)} of {len(dead)} parameters get a gradient again", living(change) if held else ())

    def _wider(self, case: Case) -> Trial:
        """bf16 costs a run less than fp32, so it is asked as well: where it holds, it is the first remedy."""
        trial = case.cured_by(Fp32())
        if trial.held and case.birth is not None:
            trial = rejected(trial, not_an_overflow(case, case.birth) or blown_up(case))
        if not trial.held or not case.healing:
            return trial
        return replace(trial, remedies=(*case.cured_by(Bf16Autocast()).remedies, *trial.remedies))


class LogOfZero(Cause):
    """log(0), log(softmax), 0 * log(0)."""

    slug = "log-of-zero"
    fix = "Use log_softmax for log(softmax), torch.xlogy for p*log(p), or clamp the input of log above 0."

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.birth is None:
            return None
        birth, op = case.birth, case.birth.op
        if op.name in LOGS:
            which = -1 if op.name == "xlogy" else 0
            at = birth.input_at_spot(which % len(op.inputs)) if not birth.in_backward else None
            low = op.inputs[which].range.low
            shown = at if at is not None else low
            edge = -1 if op.name == "log1p" else 0
            steep = birth.in_backward and low - edge < 1 / torch.finfo(op.inputs[which].dtype).max  # 1/x overflows
            if not low <= edge and not steep and not (op.name == "logit" and op.inputs[0].range.high >= 1):
                return None
            infinite = f"-Inf at {edge}" if shown >= edge else f"NaN below {edge}"
            infinite = f"so steep that its gradient overflows near {edge}" if low > edge and steep else infinite
            said = f"input of {op.name} was {shown:.4g}{birth.place()}; {op.name} is {infinite}"
            return at_birth(birth, 0.93, said, lambda: self._above_0(case), "the input of log clamped above 0")
        if birth.at.name in ("mul", "mul_") and birth.at.nan_out and any(i.range.inf for i in birth.at.inputs):
            said = f"0 is multiplied by an infinite logarithm{birth.place()}: 0 * -inf is NaN"
            return at_birth(birth, 0.85, said, lambda: case.cured_by(_ZeroTimesInf()), "0 * -inf taken as 0", op="mul")
        if _divergence_of_impossible(birth.at):
            said = (
                f"log-probabilities of -inf are subtracted from each other{birth.place()}, and weighted with a probability of 0"
            )
            changes = (_ZeroTimesInf(), _SameInfinity())
            return at_birth(birth, 0.85, said, lambda: case.cured_by(*changes), "0 * -inf taken as 0", op="mul")
        return None

    def _above_0(self, case: Case) -> Trial:
        """The controls: negative inputs moved alone must not be enough, and its result must count in the loss."""
        assert case.birth is not None
        trial = case.cured_by(PositiveLog())
        if not trial.held:
            return trial
        base, edge = case.birth.op.inputs[-1].range, -1.0 if case.birth.op.name == "log1p" else 0.0
        negative = base.low < edge - 1e-6 * max(base.size, 1.0)  # beyond rounding
        if negative and case.cured_by(InsideDomain()).held:
            return rejected(trial, "with negative inputs moved and zeros left it is finite, too: no 0 is to blame")
        return rejected(trial, unused(case, PositiveLog(), _OneForZero()))


class _OneForZero(SafeInput):
    def __init__(self) -> None:
        super().__init__(LOGS, lambda x: x <= 1e-30, 1.0)

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == "logit":
            return func(self.where((args[0] <= 0) | (args[0] >= 1), 0.5, args[0]), *args[1:], **kwargs)
        if name == "xlogy":
            return torch.xlogy(args[0], self.where(args[1].detach() <= 1e-30, 1.0, args[1]))
        return super().change(name, func, args, kwargs)


def _divergence_of_impossible(op: Op) -> bool:
    """p * (log p - log q), as in kl_div, where both logarithms are -inf."""
    if op.name != "sub" or not op.nan_out or not all(i.range.low == -math.inf for i in op.inputs):
        return False
    products = [c for c in op.consumers if c.name in ("mul", "mul_")]
    return any(i.producer is not None and i.producer.name == "exp" for c in products for i in c.inputs)


class _SameInfinity(Intervention):
    names = frozenset({"sub", "subtract", "__sub__"})

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        a, b = args[0], args[1] if len(args) > 1 else kwargs.get("other")
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point() and b.is_floating_point():
            a, b = torch.broadcast_tensors(a, b)
            same = torch.isneginf(a.detach()) & torch.isneginf(b.detach())
            a, b = self.where(same, 0.0, a), self.where(same, 0.0, b)
        return torch.sub(a, b)


class _ZeroTimesInf(Intervention):
    lived = "0 times an infinite logarithm is 0"
    names = frozenset({"mul", "multiply", "__mul__", "__rmul__", "__imul__", "kl_div"})

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == "kl_div":
            logs = 2 if kwargs.get("log_target") else 1
            least = math.log(1e-30)
            return func(*(self.where(torch.isneginf(x.detach()), least, x) for x in args[:logs]), *args[logs:], **kwargs)
        a, b = args[0], args[1] if len(args) > 1 else kwargs.pop("other")
        if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.is_floating_point() or b.is_floating_point()):
            a, b = torch.broadcast_tensors(a, b)
            a = self.where(torch.isinf(a.detach()) & (b.detach() == 0), 0.0, a)
            b = self.where(torch.isinf(b.detach()) & (a.detach() == 0), 0.0, b)
        return torch.mul(a, b)


class ExpOverflow(Cause):
    """exp of a log-variance, a log-ratio, a KL term; also when it is clamped only afterwards."""

    slug = "exp-overflow"
    fix = (
        "Clamp before exp (log-variances to about [-30, 20], log-ratios to [-20, 20]), or mask with torch.where before exp, "
        "not after."
    )

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.birth is None:
            return None
        birth = case.birth
        op = birth.op
        if op.name not in EXP and op.name != "exp_":
            return None
        limit = exp_limit(op.inputs[0].dtype)
        value = birth.input_at_spot() if not birth.at.backward else None
        value = op.inputs[0].range.high if value is None or not value > limit / 2 else value
        after = {c.name for c in op.consumers}
        clamped = bool(after & {"clamp", "clamp_max", "minimum", "hardtanh"})
        said = f"input of {op.name} was {value:.4g}{birth.place()}; {op.name} overflows above {limit:.4g}"
        if clamped:
            said += "; its output is clamped, which keeps the loss finite and makes the gradient 0 * Inf"
        return at_birth(birth, 0.96, said, lambda: self._bounded(case), "the input of exp clamped")

    def _bounded(self, case: Case) -> Trial:
        """The controls: its result must count in the loss, and weights of the size they began with must not be enough."""
        trial = case.cured_by_either((BoundedExp(),), (BoundedExp(5.0),))
        if not trial.held:
            return trial
        return rejected(trial, unused(case, BoundedExp(5.0), BoundedExp(-20.0)) or blown_up(case))


def _zero_divisor(op: Op) -> bool:
    if op.name != "reciprocal" and len(op.inputs) == 1:
        return any(isinstance(s, (int, float)) and s == 0 for s in op.scalars)
    divisor = op.inputs[-1]
    return bool((divisor.value == 0).any()) if divisor.value is not None else divisor.range.low == divisor.range.high == 0


def _norms(op: Op) -> Tensor | None:
    """The lengths of the vectors of a weight norm."""
    v, dim = op.inputs[0].value, next((s for s in op.scalars if isinstance(s, int)), 0)
    return None if v is None else v.transpose(0, dim).reshape(v.shape[dim], -1).norm(dim=1)


def _negative_power_of_0(op: Op) -> bool:
    exponent = next((s for s in op.scalars if isinstance(s, (int, float))), 0)
    base = op.inputs[0]
    zero = bool((base.value == 0).any()) if base.value is not None else base.range.low <= 0 <= base.range.high
    return len(op.inputs) == 1 and exponent < 0 and zero


class ZeroDenominator(Cause):
    """0/0 or x/0: no variance, an empty mask, no signal."""

    slug = "zero-denominator"
    fix = "Add an epsilon to the divisor, or clamp a count to at least 1; filter the samples for which it is 0."

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.birth is None:
            return None
        birth, op = case.birth, case.birth.op
        if birth.in_backward:
            return None
        if op.name in ("rsqrt", "rsqrt_") and op.inputs[0].range.low == 0:
            said = f"rsqrt of 0{birth.place()}: the variance is 0"
            return at_birth(birth, 0.8, said, lambda: case.cured_by(SafeRoot()), "an epsilon under the root")
        if op.name == "_weight_norm_interface" and (norms := _norms(op)) is not None and bool((norms == 0).any()):
            said = f"weight norm divides v by its length, which is 0 for {int((norms == 0).sum())} of {norms.numel()} vectors"
            return at_birth(birth, 0.96, said, lambda: case.cured_by(SafeDivision()), "a length of 0 replaced by 1")
        if op.name in ("pow", "pow_") and _negative_power_of_0(op):
            said = f"a negative power of 0{birth.place()}: x/0"
            return at_birth(birth, 0.93, said, lambda: case.cured_by(SafeDivision()), "a base of 0 replaced by 1")
        if op.name not in DIVISION or not _zero_divisor(op):
            return None
        above = op.inputs[0].range if op.name != "reciprocal" else None
        shown = "0/0" if above is not None and op.nan_out else "x/0"
        said = f"the divisor is exactly 0{birth.place()}: {shown}"
        if op.inputs[-1].producer is not None:
            said += f"; it comes from {op.inputs[-1].producer.name} at {op.inputs[-1].producer.source}"
        return at_birth(birth, 0.93, said, lambda: case.cured_by(SafeDivision()), "a divisor of 0 replaced by 1")


class StdOfOneSample(Cause):
    """The standard deviation of a single element is NaN."""

    slug = "std-of-one-sample"
    fix = "Have two or more in every group, or take the standard deviation with unbiased=False (correction=0) and an epsilon."

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.birth is None or case.birth.op.name not in ("std", "var", "std_mean", "var_mean"):
            return None
        birth = case.birth
        if not birth.at.nan_out or birth.in_backward:
            return None
        said = f"{birth.op.name} over a single element of shape {list(birth.op.inputs[0].shape)}: n - 1 is 0, the result NaN"
        return at_birth(
            birth,
            0.97,
            said,
            lambda: case.cured_by_either((SpreadOfOne(),), (SpreadOfOne(), SafeDivision())),
            "the deviation of a single element taken as 1",
        )


class NonpositiveStd(Cause):
    """A distribution is given a scale that is not above 0, and raises."""

    slug = "nonpositive-std"
    fix = "Make the scale positive by construction: softplus(x) + 1e-3, or exp of a clamped log-std."

    def match(self, case: Case) -> Match | None:
        text = str(case.error or "")
        about_scale = "parameter scale" in text or "std >= 0" in text or "std >= 0.0" in text or "expects std" in text
        about_scale = about_scale or ("parameter" in text and "GreaterThan" in text)
        if case.error is None or not about_scale or case.replay is None:
            return None
        if case.birth is not None and case.birth.at.nan_out:
            return None  # the scale is NaN: what made it so is the cause
        line = next((x for x in text.splitlines() if x.strip()), "")
        value = _least(text)
        shown = (
            f"a distribution was given a scale of {value:.4g}"
            if value is not None
            else "a distribution was given a scale that is not above 0"
        )
        return Match(
            confidence=0.95,
            evidence=(shown, line[:160]),
            phase="forward",
            where=raised_at(case.error),
            op=case.birth.op.name if case.birth is not None else "Normal",
            source=raised_at(case.error),
            samples=_rows(case),
            trial=lambda: case.cured_by_either((PositiveScale(),), (PositiveScale(), PositiveLog(), SafeDivision())),
            tried="the scale clamped above 0",
        )


def _rows(case: Case) -> tuple[int, ...]:
    """The samples whose scale is not positive."""
    frame = case.error.__traceback__ if case.error is not None else None
    scale = None
    while frame is not None:
        found = frame.tb_frame.f_locals.get("scale", frame.tb_frame.f_locals.get("std"))
        scale = found if isinstance(found, Tensor) and found.is_floating_point() else scale
        frame = frame.tb_next
    if scale is None or case.replay is None or len(case.replay.batches) != 1 or scale.dim() == 0:
        return ()
    samples, length = batch_shape(case.replay.batches[0])
    if samples < 2:
        return ()
    rows = where_in_batch(~(scale.detach() > 0), samples, length)[0]
    return rows if len(rows) < samples else ()


def _least(text: str) -> float | None:
    inside = text[text.find("tensor(") :] if "tensor(" in text else ""
    numbers = [float(x) for x in re.findall(r"-?\d+\.\d*(?:e[+-]?\d+)?", inside)]
    return min(numbers) if numbers else None
