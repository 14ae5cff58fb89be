"""Causes of reinforcement learning and of generation: advantages, temperatures, tokens that may not be sampled."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanproof.core.support._tree import tensors_in
from nanproof.explain._case import Case, Trial, living
from nanproof.explain._cause import Cause, Match, at_birth
from nanproof.explain._controls import rejected
from nanproof.explain.causes._forward import SOFTMAX, feeds_sampling
from nanproof.explain.locate._locate import batch_shape, where_in_batch
from nanproof.explain.locate._trace import Op
from nanproof.explain.replay._interventions import CoolLogits, Fp32, Intervention, SafeDivision, SafeSoftmax


class ZeroAdvantage(Cause):
    """A whole group has the same reward: loss 0, gradient 0."""

    slug = "zero-advantage"
    fix = (
        "Use a graded reward, sample more diverse completions, or leave out groups whose rewards are all equal: their "
        "advantage is exactly 0."
    )

    def match(self, case: Case) -> Match | None:
        if case.signal != "zero-gradients" or case.replay is None:
            return None
        spread = next((op for op in _ops(case, ("std", "var", "std_mean", "var_mean")) if _all_zero(op)), None)
        centred = next((op for op in _ops(case, ("sub",)) if _centred(op)), None)
        guilty = spread or centred
        if guilty is None:
            return None
        names = self._constant(case)
        what = f"the rewards{f' ({names[0]})' if names else ''} are equal throughout every group"
        said = f"{guilty.name} of shape {list(guilty.inputs[0].shape)} is exactly 0: {what}, so every advantage is 0"
        return Match(
            confidence=0.93,
            evidence=(said, "loss gradients are exactly 0 at every parameter"),
            phase="data",
            where=guilty.path,
            op=guilty.name,
            source=guilty.source,
            samples=(),
            trial=lambda: self._varied(case, guilty),
            tried="rewards that differ within the group",
        )

    def _constant(self, case: Case) -> list[str]:
        assert case.replay is not None
        found = []
        for batch in case.replay.batches:
            for name, t in tensors_in(batch):
                if (
                    t.is_floating_point()
                    and t.numel() > 1
                    and t.dim()
                    and bool((t == t.reshape(t.shape[0], -1)[:, :1].reshape(-1, *[1] * (t.dim() - 1))).all())
                ):
                    found.append(name)
        return found

    def _varied(self, case: Case, guilty: Op) -> Trial:
        """Rewards that differ: in the batch, or where the deviation is taken of them."""
        assert case.replay is not None
        generator = torch.Generator().manual_seed(0)

        names, count = self._constant(case), math.prod(guilty.inputs[0].shape)
        named = [pair for batch in case.replay.batches for pair in tensors_in(batch)]
        rewards = {id(t) for name, t in named if name in names and t.numel() == count}

        def vary(x: Tensor) -> Tensor:
            if id(x) not in rewards:
                return x
            return x + torch.rand(x.shape, generator=generator).to(x)

        def vary_others(x: Tensor) -> Tensor:
            if id(x) in rewards or not x.is_floating_point():
                return x
            return x + torch.rand(x.shape, generator=generator).to(x)

        outcome = case.replay.run(batches=case.batches_with(vary))
        if not outcome.total > 0:
            outcome = case.replay.run(_Varied())
        trial = Trial(outcome.error is None and outcome.total > 0, f"gradient norm {outcome.total:.4g} instead of 0")
        # The control varies everything else: equal rewards still give next to no gradient, but for a penalty on old log-probs.
        control = case.replay.run(batches=case.batches_with(vary_others))
        alive = control.error is None and control.total > 0.3 * outcome.total
        return rejected(trial, f"with the same rewards and other inputs it is {control.total:.4g}" * alive)


class _Varied(Intervention):
    """x - mean(x) of equal numbers gives numbers that differ."""

    names = frozenset({"sub", "__sub__", "subtract"})

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if (
            isinstance(out, Tensor)
            and out.is_floating_point()
            and out.numel() > 1
            and not out.requires_grad
            and bool((out == 0).all())
        ):
            self.acted += 1
            return out + torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).reshape(out.shape)
        return out


def _ops(case: Case, names: tuple[str, ...]) -> list[Op]:
    return [op for op in (case.trace.ops if case.trace is not None else ()) if op.name in names and not op.backward]


def _all_zero(op: Op) -> bool:
    out = op.outputs[0].range
    spread = op.inputs[0].value
    return out.low == out.high == 0 and spread is not None and spread.numel() > 1 and not op.inputs[0].requires_grad


def _centred(op: Op) -> bool:
    """x - mean(x) = 0 throughout, of numbers that do not depend on the weights."""
    out = op.outputs[0]
    mean = any(i.producer is not None and i.producer.name in ("mean", "sum", "div") for i in op.inputs)
    return (
        mean and out.range.low == out.range.high == 0 and math.prod(out.shape) > 1 and not any(i.requires_grad for i in op.inputs)
    )


class TinyStdAmplification(Cause):
    """Dividing by what rounding left of a standard deviation."""

    slug = "tiny-std-amplification"
    specific = 2
    fix = (
        "Put a floor under the standard deviation (1e-2 of the usual one), or treat groups whose rewards are equal up to "
        "rounding as having no advantage."
    )

    def match(self, case: Case) -> Match | None:
        if not (case.kind in ("spike", "divergence") or case.signal == "heavy-clipping") or case.replay is None:
            return None
        for op in _ops(case, ("div", "div_")):
            if len(op.inputs) < 2 or op.inputs[-1].value is None:
                continue
            divisor = op.inputs[-1].value.float().abs()
            maker = _maker(op)
            if maker is None or maker.name not in ("std", "var", "sqrt", "std_mean", "var_mean") or divisor.numel() < 1:
                continue
            least = float(divisor.min())
            source = maker.inputs[0].value
            size = float(source.abs().max()) if source is not None and maker.name.startswith(("std", "var")) else math.nan
            usual = float(divisor.median()) if divisor.numel() > 2 else math.inf
            tiny = 0 < least < 1e-2 and (least < 1e-2 * usual or (size > 0 and least < 1e-3 * size))
            if not tiny:
                continue
            samples, length = batch_shape(case.replay.batches[0])
            rows = where_in_batch(divisor <= 2 * least, samples, length)[0] if samples > 1 and divisor.dim() else ()
            said = (
                f"the divisor is {least:.3g}, not 0: what cancellation left of the deviation of numbers up to {size:.4g}; the "
                f"quotient reaches {op.outputs[0].range.size:.4g}"
            )
            return Match(
                confidence=0.9,
                evidence=(said,),
                phase="forward",
                where=op.path,
                op="div",
                source=op.source,
                samples=rows if 0 < len(rows) < samples else (),
                trial=partial(self._floored, case, least),
                tried="a floor under the deviation",
            )
        return None

    def _floored(self, case: Case, least: float) -> Trial:
        assert case.replay is not None
        before = case.replay.run()
        floored = SafeDivision(floor=max(10 * least, 1e-2))
        after = case.replay.run(floored)
        held = after.finite and (after.total < before.total / 5 or abs(after.loss) < abs(before.loss) / 5)
        return Trial(held, f"{after} instead of {before}", living(floored))


def _maker(op: Op) -> Op | None:
    """What computed the divisor, through an epsilon or a floor."""
    producer = op.inputs[-1].producer
    for _ in range(3):
        if producer is None or producer.name not in (
            "add",
            "clamp",
            "clamp_min",
            "add_",
            "expand",
            "clone",
            "_to_copy",
            "repeat_interleave",
            "index_select",
        ):
            return producer
        producer = next((i.producer for i in producer.inputs if i.producer is not None), None)
    return producer


class TemperatureOverflow(Cause):
    """Logits over a tiny temperature overflow."""

    slug = "temperature-overflow"
    fix = (
        "Divide by the temperature in fp32 after subtracting the maximum, and sample greedily below a temperature of about 0.01."
    )

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.birth is None or not (feeds_sampling(case.birth) or case.error_is_about_sampling):
            return None
        birth, op = case.birth, case.birth.at
        if op.name not in ("div", "div_", "mul", "mul_") or not op.inputs or not op.outputs[0].range.inf:
            return None
        logits = op.inputs[0]
        divisor = next((float(s) for s in op.scalars if isinstance(s, (int, float))), None)
        if divisor is None and len(op.inputs) > 1:
            divisor = op.inputs[1].range.low
        if logits.range.bad or divisor is None or divisor == 0:
            return None
        kind = str(op.outputs[0].dtype).removeprefix("torch.")
        said = f"logits up to {logits.range.size:.4g} are finite before the temperature of {divisor:g} and Inf after it in {kind}"
        return at_birth(
            birth,
            0.96,
            said,
            lambda: self._cooled(case),
            "the division in fp32 after subtracting the maximum",
        )

    def _cooled(self, case: Case) -> Trial:
        """The control divides by a tenth at the least: logits that overflow there too are at fault, not the temperature."""
        assert case.replay is not None
        trial = case.cured_by_either((CoolLogits(),), (Fp32(),))
        warm = case.replay.run(_Warm())
        return rejected(trial, "" if warm.finite else f"at a temperature of 0.1 or more it is not finite either: {warm}")


class _Warm(Intervention):
    """No division by less than a tenth, and no product with more than ten."""

    names = frozenset({"div", "true_divide", "__truediv__", "mul", "__mul__"})

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x, t = args[0], args[1] if len(args) > 1 else kwargs.get("other")
        out = func(*args, **kwargs)
        born = isinstance(out, Tensor) and out.is_floating_point() and bool(torch.isinf(out.detach()).any())
        if not born or not isinstance(x, Tensor) or not bool(torch.isfinite(x.detach()).all()):
            return out
        self.acted += 1
        divides = "div" in name
        if isinstance(t, Tensor):
            return func(x, t.clamp(min=0.1) if divides else t.clamp(max=10))
        return func(x, max(t, 0.1) if divides else min(t, 10.0))


class AllTokensBanned(Cause):
    """Every logit is -inf: nothing is left to sample."""

    slug = "all-tokens-banned"
    fix = "Make sure that the processors leave at least one token: fall back to EOS when every logit is -inf."

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.birth is None or not (feeds_sampling(case.birth) or case.error_is_about_sampling):
            return None
        birth, op = case.birth, case.birth.at
        value = op.inputs[0].value if op.inputs else None
        if value is None or value.dim() == 0 or op.name not in (*SOFTMAX, "sub", "exp"):
            return None
        rows = int((value == -torch.inf).all(-1).sum())
        if not rows:
            return None
        said = (
            f"{rows} of {value.numel() // value.shape[-1]} rows of logits are -inf throughout{birth.place()}: no token is "
            "left to sample"
        )
        return at_birth(
            birth, 0.97, said, lambda: case.cured_by(SafeSoftmax()), "a token left in these rows", op=op.name.strip("_")
        )
