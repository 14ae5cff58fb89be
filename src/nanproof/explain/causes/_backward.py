"""Causes that show in the backward only: the loss is finite, the gradient is not, or is far too large."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanproof.core.support._members import state_of
from nanproof.explain._case import Case, Prescription, Trial, living
from nanproof.explain._cause import Cause, Match, at_birth
from nanproof.explain._controls import blown_up, hidden_by, not_an_overflow, rejected, unused
from nanproof.explain.locate._locate import Birth, batch_shape, where_in_batch
from nanproof.explain.locate._trace import Op, Trace
from nanproof.explain.replay._interventions import EXP, LOG, Fp32, InsideTrig, Intervention, SafeDivision, SafeInput, SafeRoot
from nanproof.explain.replay._surroundings import weights_as

ROOTS = frozenset(
    {
        "sqrt",
        "sqrt_",
        "pow",
        "linalg_vector_norm",
        "norm",
        "_cdist_forward",
        "cdist",
        "_euclidean_dist",
        "std",
        "std_mean",
        "rsqrt",
    }
)
TRIG = frozenset({"acos", "asin", "atanh", "acosh"})
DANGEROUS = ROOTS | TRIG | EXP | LOG | {"log1p", "div", "div_", "reciprocal", "xlogy", "atan2", "logit", "exp_", "log_"}
"""Operations with a place where their slope is infinite or undefined."""
PRODUCTS = frozenset(
    [
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "mul",
        "mul_",
        "convolution_backward",
        "convolution",
        "add",
        "add_",
        "sum",
        "matmul",
        "native_layer_norm_backward",
        "linear_backward",
        "_to_copy",
        "div",
        "tanh_backward",
        "embedding_dense_backward",
        "mv",
        "addmv",
        "dot",
        "addcmul",
    ]
)


class SqrtAtZero(Cause):
    """The slope of a root at 0 is Inf; times 0 it is NaN."""

    slug = "sqrt-at-zero"
    fix = "Add an epsilon inside the root: (x + 1e-12).sqrt(); torch.linalg.vector_norm defines a gradient of 0 at 0."

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.birth is None or case.birth.op.name not in ROOTS:
            return None
        birth, op = case.birth, case.birth.op
        low = op.inputs[0].range.low if op.inputs else math.nan
        if not birth.in_backward:
            if op.name in ("sqrt", "sqrt_") and low < 0:
                said = f"input of sqrt was {low:.4g}{birth.place()}: below 0"
                return at_birth(birth, 0.7, said, lambda: case.cured_by(SafeRoot()), "the input of sqrt clamped above 0")
            return None
        if op.name == "pow" and op.inputs[0].value is not None and not bool((op.inputs[0].value == 0).any()):
            return None
        what = {"linalg_vector_norm": "norm", "_cdist_forward": "distance", "_euclidean_dist": "distance"}.get(op.name, op.name)
        said = f"input of {what} was 0{birth.place()}: the loss is finite, but the slope of the root at 0 is Inf"
        return at_birth(birth, 0.9, said, lambda: self._rooted(case), "an epsilon under the root", op=what)

    def _rooted(self, case: Case) -> Trial:
        """The control puts 1 under the root: where the loss stays as it is, the root does not count in it."""
        trial = case.cured_by(SafeRoot())
        return rejected(trial, unused(case, SafeRoot(), SafeRoot(1.0))) if trial.held else trial


class MaskedBranchGradient(Cause):
    """torch.where hides the value of a bad branch; its gradient is 0 * Inf."""

    slug = "masked-branch-gradient"
    fix = (
        "Mask the input too: torch.where(ok, f(torch.where(ok, x, safe)), 0). torch.where hides the value of a bad branch, "
        "not its gradient 0 * Inf."
    )

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.birth is None or case.control is None:
            return None
        birth = case.birth
        if not math.isfinite(case.control.loss) or case.control.error is not None:
            return None
        hider = hidden_by(birth.op) if birth.op.name in DANGEROUS else None
        if hider is None:
            return None
        op = birth.op
        value = op.inputs[-1 if op.name in ("div", "div_") else 0].range if op.inputs else None
        shown = f" (its input reaches from {value.low:.4g} to {value.high:.4g})" if value is not None else ""
        said = (
            f"{op.name}{shown} is bad{birth.place()} where {hider.name} at {hider.source} hides it: the loss is "
            "finite, the gradient 0 * Inf"
        )
        return at_birth(birth, 0.95, said, lambda: self._double_where(case), "its input masked as well")

    def _double_where(self, case: Case) -> Trial:
        """Harmless inputs where the branch is bad: the loss must stay what it was, for those places do not count."""
        assert case.control is not None and case.replay is not None
        safe = (_PositiveInput(), _SmallExponent(), _InsideInput(), SafeDivision(floor=1e-20), _SafePower())
        outcome = case.replay.run(*safe)
        near = math.isclose(outcome.loss, case.control.loss, rel_tol=1e-3, abs_tol=1e-6)
        # The run goes on with the changes that acted alone: the others have nothing to do with it.
        remedies = living(*(s for s in safe if s.acted))
        return Trial(outcome.finite and near and any(s.acted for s in safe), f"the same {outcome}", remedies)


class _PositiveInput(SafeInput):
    lived = "an input of log or a root that is not above 0 is taken as 1"

    def __init__(self) -> None:
        super().__init__(LOG | {"log1p", "sqrt", "rsqrt"}, lambda x: x <= 1e-20, 1.0)


class _SmallExponent(SafeInput):
    lived = "an input of exp above 60 is taken as 0"

    def __init__(self) -> None:
        super().__init__(EXP, lambda x: x > 60, 0.0)


class _InsideInput(SafeInput):
    lived = "an input of acos, asin or atanh outside of its domain is taken as 0"

    def __init__(self) -> None:
        super().__init__({"acos", "asin", "atanh"}, lambda x: x.abs() >= 1, 0.0)


class _SafePower(Intervention):
    lived = "the base of a fractional power that is not above 0 is taken as 1"
    names = frozenset({"pow", "__pow__"})

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x, p = args[0], args[1] if len(args) > 1 else kwargs.get("exponent")
        if isinstance(x, Tensor) and isinstance(p, (int, float)) and p < 1 and x.is_floating_point():
            x = self.where(x.detach() <= 1e-20, 1.0, x)
        return torch.pow(x, p)


class InverseTrigBoundary(Cause):
    """acos, asin, atanh at the boundary of their domain."""

    slug = "inverse-trig-boundary"
    fix = "Clamp the argument to [-1 + 1e-6, 1 - 1e-6], or use atan2 of sine and cosine: the slope at the boundary is Inf."

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.birth is None or case.birth.op.name not in TRIG:
            return None
        birth, op = case.birth, case.birth.op
        edge = op.inputs[0].range
        value = max((edge.low, edge.high), key=abs) if op.name != "acosh" else edge.low
        said = f"input of {op.name} was {value:.7g}{birth.place()}: at the boundary its slope is Inf" + (
            "" if abs(value) <= 1 else ", beyond it NaN"
        )
        return at_birth(birth, 0.94, said, lambda: self._inside(case), f"the input of {op.name} clamped inside its domain")

    def _inside(self, case: Case) -> Trial:
        """The control puts 0 at the boundary: where the loss stays as it is, the angle does not count in it."""
        trial = case.cured_by(InsideTrig())
        return rejected(trial, unused(case, InsideTrig(), _InsideInput())) if trial.held else trial


class NormalizeZeroVector(Cause):
    """x / |x| at a zero vector: a gradient of 1e11, and no NaN."""

    slug = "normalize-zero-vector"
    fix = (
        "Leave zero vectors out of the normalisation (or initialise them): x / max(|x|, 1e-12) has a slope of 1e12 at 0. A "
        "larger eps bounds it."
    )

    def match(self, case: Case) -> Match | None:
        if case.kind not in ("spike", "divergence", "gradient-norm-overflow") or case.replay is None or case.record is None:
            return None
        # The step moved the vector off zero: put it back for the look.
        for values in ({}, self._zeroed(case)):
            found = self._look(case, values)
            if found is not None:
                return found
        return None

    def _zeroed(self, case: Case) -> dict[Tensor, Tensor]:
        """The parameter that owned the gradient, with the rows that did set to zero."""
        assert case.record is not None and case.replay is not None
        norms = case.record.by_parameter
        name = max(norms, key=lambda n: norms[n] if norms[n] == norms[n] else 0.0, default="")
        p = case.replay.parameters.get(name)
        if p is None or not norms[name] > 0.9 * case.record.grad_norm:
            return {}
        state = state_of(case.optimizer, p) if case.optimizer is not None else {}
        trail = state.get("exp_avg_sq", state.get("momentum_buffer", p.grad))
        value = p.detach().clone()
        if p.dim() < 2 or trail is None:
            return {p: torch.zeros_like(value)}
        sizes = trail.detach().float().abs().reshape(len(p), -1).amax(1)
        value[sizes > 0.01 * sizes.max()] = 0
        return {p: value}

    def _look(self, case: Case, values: dict[Tensor, Tensor]) -> Match | None:
        assert case.replay is not None and case.record is not None
        if values:
            trace = Trace(case.replay.model, None)
            with weights_as(values):
                outcome = case.replay.run(trace.recording(), before_backward=trace.backward_begins)
            if not outcome.total > 0.01 * case.record.grad_norm:
                return None
        else:
            assert case.trace is not None
            trace = case.trace
            if not case.replay.run().total > 0.01 * case.record.grad_norm:
                return None  # the step has moved on from there
        for op in trace.ops:
            lengths = op.outputs[0].value if op.outputs and op.name in ("linalg_vector_norm", "norm", "sqrt") else None
            if op.backward or lengths is None or lengths.dim() == 0 or not _divides(op):
                continue
            zero = lengths.abs() <= 1e-8 * lengths.abs().max().clamp(min=1e-6)
            if not bool(zero.any()):
                continue
            samples, length = batch_shape(case.replay.batches[0])
            rows = where_in_batch(zero, samples, length)[0] if samples > 1 else ()
            rows = rows if len(rows) < samples else ()
            place = f" (sample {rows[0]})" if len(rows) == 1 else ""
            said = f"{int(zero.sum())} of {zero.numel()} vectors that are divided by their length are zero vectors{place}"
            return Match(
                confidence=0.92,
                evidence=(said, f"the gradient norm was {case.record.grad_norm:.4g}"),
                phase="backward",
                where=op.path,
                op="norm",
                source=op.source,
                samples=rows,
                trial=lambda: self._without(case, values),
                tried="zero vectors left out of the normalisation",
            )
        return None

    def _without(self, case: Case, values: dict[Tensor, Tensor]) -> Trial:
        assert case.replay is not None
        change = _UnitLength()
        with weights_as(values):
            before = case.replay.run()
            after = case.replay.run(change)
        held = bool(change.acted) and after.finite and after.total * 100 < (before.total if before.finite else math.inf)
        return Trial(held, f"gradient norm {after.total:.4g} instead of {before.total:.4g}", living(change))


class _UnitLength(Intervention):
    lived = "a vector of length 0 is divided by 1 where it is normalised"
    names = frozenset({"norm", "linalg_norm", "linalg_vector_norm", "vector_norm", "sqrt", "cosine_similarity"})

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == "cosine_similarity":
            dim = kwargs.get("dim", args[2] if len(args) > 2 else 1)
            a, b = (x / self._length(x, dim) for x in args[:2])
            return (a * b).sum(dim)
        if name == "sqrt":
            x = args[0]
            return torch.sqrt(self.where(x.detach() <= 1e-20, 1.0, x))
        out = func(*args, **kwargs)
        return self.where(out.detach() <= 1e-8, 1.0, out) if isinstance(out, Tensor) and out.dim() else out

    def _length(self, x: Tensor, dim: int) -> Tensor:
        out = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
        return self.where(out.detach() <= 1e-8, 1.0, out)


def _divides(op: Op) -> bool:
    """Something is divided by the result, perhaps after an epsilon was added or a floor set."""
    for _ in range(4):
        ahead = [c for c in op.consumers if not c.backward]
        if any(c.name in ("div", "div_", "reciprocal") and c.inputs and c.inputs[-1].producer is op for c in ahead):
            return True
        onwards = [
            c
            for c in ahead
            if c.name in ("clamp_min", "clamp", "add", "maximum", "expand", "clamp_min_", "add_", "where", "clone")
        ]
        if not onwards:
            return False
        op = onwards[0]
    return False


class ExplodingGradient(Cause):
    """The gradient grows with every layer or time step until it overflows."""

    slug = "exploding-gradient"
    fix = (
        "The gradient grows with every layer or time step: orthogonal or smaller initialisation, normalisation layers, "
        "truncated backpropagation, or a shorter sequence."
    )

    costly = True
    specific = 0

    def match(self, case: Case) -> Match | None:
        finite = case.signal == "huge-gradients" or case.kind == "spike"
        if (not case.nonfinite and not finite) or case.replay is None or case.control is None or case.error is not None:
            return None
        birth = None if finite else case.birth
        if birth is not None:
            out = next((o for o in birth.at.outputs if o.range.bad), None)
            if birth.at.name not in PRODUCTS or birth.op.name in ROOTS or out is None or out.dtype == torch.float16:
                return None
            if any(i.range.bad for i in birth.at.inputs):
                return None
        elif not finite and case.control.finite:
            return None
        in_forward = birth is not None and not birth.in_backward
        sizes = self._sizes(case, in_forward)
        growth, first, last = _growth(sizes)
        if growth is None:
            return None
        what = "activation" if in_forward else "gradient"
        said = (
            f"the largest {what} grows from {first:.3g} to {last:.3g} over {len(sizes)} products, a factor of {growth:.3g} each"
        )
        tried = "every weight matrix scaled down"
        trial = partial(self._tamed, case, finite)
        if birth is not None:
            return replace(at_birth(birth, 0.9 if not in_forward else 0.75, said, trial, tried), samples=(), tokens=())
        return Match(confidence=0.88, evidence=(said,), phase="backward", trial=trial, tried=tried, where=_largest(case))

    def _sizes(self, case: Case, in_forward: bool) -> list[float]:
        trace = case.forward_trace if in_forward else case.trace
        assert trace is not None
        names = ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward", "mv", "addmv", "mul", "linear")
        ops = [op for op in trace.ops if op.backward != in_forward and op.name in names and op.outputs]
        if any(op.name != "mul" for op in ops):
            ops = [op for op in ops if op.name != "mul"]
        sizes = [op.outputs[0].range.size for op in ops]
        return [s for s in sizes if math.isfinite(s) and s > 0]

    def _tamed(self, case: Case, finite: bool) -> Trial:
        assert case.replay is not None and case.control is not None
        matrices = [p for p in case.replay.parameters.values() if p.dim() >= 2 and p.is_floating_point()]
        norms = {p: float(torch.linalg.matrix_norm(p.detach().float().reshape(len(p), -1), 2)) for p in matrices}
        trial = Trial(False, "no weight matrix to scale")
        for limit in (1.0, 0.1, 0.01):
            with weights_as({p: p.detach() * (limit / n) for p, n in norms.items() if n > limit}):
                if finite:
                    total = case.replay.run().total
                    trial = Trial(
                        total < 1e-3 * case.control.total, f"gradient norm {total:.4g} instead of {case.control.total:.4g}"
                    )
                else:
                    trial = case.cured_by()
            if trial.held:
                tamed = Trial(True, f"{trial.result} (spectral norms of at most {limit:g})")
                return rejected(tamed, self._of_the_batch(case, finite) or blown_up(case))
        return trial

    def _of_the_batch(self, case: Case, finite: bool) -> str:
        """The control brings the batch to an ordinary size: a gradient that grows with every layer still grows."""
        assert case.replay is not None and case.control is not None
        outcome = case.replay.run(batches=case.batches_with(_of_size_1))
        calm = outcome.finite and (not finite or outcome.total < 1e-3 * case.control.total)
        return f"with inputs of size 1 and the same weights it is ordinary: {outcome}" if calm else ""


def _of_size_1(x: Tensor) -> Tensor:
    """Scale down to a mean square of 1 at the most."""
    if not x.is_floating_point() or not x.numel() or x.layout is not torch.strided:
        return x
    return x / x.detach().float().square().mean().sqrt().clamp(min=1).to(x.dtype)


def _growth(sizes: list[float]) -> tuple[float | None, float, float]:
    """The factor a product if the sizes rise steadily by many orders of magnitude."""
    if len(sizes) < 4:
        return None, 0.0, 0.0
    top = max(range(len(sizes)), key=sizes.__getitem__)
    rise = sizes[: top + 1]
    if len(rise) < 4 or rise[-1] < 1e6 * rise[0]:
        return None, 0.0, 0.0
    logs = [math.log(s) for s in rise]
    half = logs[len(logs) // 2]
    steady = logs[0] + 0.1 * (logs[-1] - logs[0]) < half < logs[-1] - 0.1 * (logs[-1] - logs[0])
    return (math.exp((logs[-1] - logs[0]) / (len(logs) - 1)) if steady else None), rise[0], rise[-1]


def _largest(case: Case) -> str | None:
    norms = case.control.norms if case.control is not None else {}
    return max(norms, key=lambda n: norms[n] if norms[n] == norms[n] else math.inf) if norms else None


class Fp16GradientOverflow(Cause):
    """A scaled gradient passes 65504 while the forward is far below."""

    slug = "fp16-gradient-overflow"
    fix = (
        "Use a dynamic loss scale (GradScaler) instead of a fixed factor, or bf16: a gradient passed 65504 while the forward "
        "is far below."
    )

    def match(self, case: Case) -> Match | None:
        birth: Birth | None = case.birth if case.nonfinite else None
        if birth is None or not birth.in_backward:
            return None
        out = next((o for o in birth.at.outputs if o.range.bad), None)
        if out is None or out.dtype != torch.float16 or any(i.range.bad for i in birth.at.inputs):
            return None
        if birth.op.name in ROOTS or birth.op.name in TRIG or birth.op.name in LOG:
            return None
        size = max((i.range.size for i in birth.at.inputs), default=math.nan)
        node = birth.at.node.removesuffix("0") or birth.at.name
        said = (
            f"{node} gives Inf in fp16 from gradients and values up to {size:.4g}; fp16 ends at 65504, and the forward stays "
            "below it"
        )
        return at_birth(
            birth,
            0.93,
            said,
            lambda: self._smaller(case),
            "the loss scaled down by 4096",
        )

    def _smaller(self, case: Case) -> Trial:
        assert case.replay is not None
        trial = case.cured_by(scale=case.replay.scale * 2.0**-12)
        if trial.held and not case.healing:
            return trial
        wide = case.cured_by(Fp32())
        if case.birth is not None and wide.held:
            wide = rejected(wide, not_an_overflow(case, case.birth))
        smaller = (Prescription("smaller-backward", {"factor": 2.0**-12}),) if trial.held else ()
        return replace(trial if trial.held else wide, remedies=(*smaller, *wide.remedies))
