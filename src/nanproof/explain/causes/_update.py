"""Causes that show after the optimizer's step: weights and gradients were finite, and the step made weights or moments NaN."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanproof._wording import listed
from nanproof.core.support._members import BadSetting, groups_of, name_of
from nanproof.explain._case import Case, Prescription, Trial
from nanproof.explain._cause import Cause, Match
from nanproof.explain.locate._trace import is_users, short
from nanproof.explain.replay._copies import HALVES, Copied, all_finite, step_on_copies
from nanproof.explain.replay._interventions import SafeDivision

_ENOUGH = {torch.float16: 1e-4, torch.bfloat16: 1e-6}
"""The eps for weights or state of these dtypes; 1e-8 for others."""
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf", "sum", "v")
"""Names under which optimizers keep a second moment."""
_USUAL = {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.999), "momentum": 0.0, "eps": 1e-8}
_ON_COPIES = "copies of weights, gradients and state"


def gradients_of(case: Case) -> dict[Tensor, Tensor] | None:
    """The gradients that the step was taken with; None where they are gone."""
    if case.replay is not None:
        return {case.replay.parameters[name]: g for name, g in case.replay.gradients(case.max_norm).items()}
    if case.optimizer is None or not case.details.get("gradients_are_there"):
        return None
    held = (p for group in groups_of(case.optimizer) for p in group["params"])
    return {p: p.grad for p in held if p.grad is not None} or None


class Fp16OptimizerUnderflow(Cause):
    """Adam's eps is 0 in fp16: finite gradients, NaN weights."""

    slug = "fp16-optimizer-underflow"
    specific = 2
    fix = (
        "Keep trainable parameters in fp32 (autocast for the forward), or use the fused optimizer, or eps of at least 1e-4: "
        "1e-8 is 0 in fp16."
    )

    def match(self, case: Case) -> Match | None:
        if not case.weights_broke or case.optimizer is None:
            return None
        groups = [g for g in groups_of(case.optimizer) if any(p.dtype in HALVES for p in g["params"])]
        half = [p for g in groups for p in g["params"] if p.dtype in HALVES]
        if not half:
            return None
        eps = min((g["eps"] for g in groups if isinstance(g.get("eps"), float)), default=None)
        kind = str(half[0].dtype).removeprefix("torch.")
        said = f"gradients are finite and the weights are {kind}; the step itself made them non-finite"
        if eps is not None:
            rounded = float(torch.tensor(eps, dtype=half[0].dtype))
            said += (
                f". eps={eps:g} is {rounded:g} in {kind}, so an element whose second moment underflows is divided by {rounded:g}"
            )
        name = name_of(case.optimizer, half[0])
        return Match(
            confidence=0.95,
            evidence=(said,),
            phase="optimizer",
            where=f"{name}.step",
            op=name,
            trial=(lambda: self._in_fp32(case)) if case.replay is not None else None,
            tried="weights and moments in fp32",
        )

    def _in_fp32(self, case: Case) -> Trial:
        assert case.optimizer is not None
        gradients = gradients_of(case) or {}
        as_is = step_on_copies(case.optimizer, gradients)
        wide = step_on_copies(case.optimizer, gradients, dtype=torch.float32)
        slow = step_on_copies(
            case.optimizer, gradients, settings={"lr": 1e-12}
        )  # 0/0 stays NaN at any rate, too large a step not
        broke = as_is is not None and not all_finite(as_is) and slow is not None and not all_finite(slow)
        remedies = [Prescription("fp32-weights"), Prescription("fp32-weights", {"autocast": False})]
        groups = groups_of(case.optimizer)
        half = [i for i, g in enumerate(groups) if any(p.dtype in HALVES for p in g["params"])]
        by_group = {id(groups[i]): {"eps": 1e-4} for i in half}
        if case.healing and all_finite(step_on_copies(case.optimizer, gradients, by_group=by_group)):
            only = {"groups": half} if len(half) < len(groups) else {}
            remedies.append(Prescription("optimizer-settings", {"eps": 1e-4, **only}))
        return Trial(broke and all_finite(wide), "every weight finite after the step", tuple(remedies))


class OptimizerMadeNonfinite(Cause):
    """Finite weights and gradients go into the optimizer's step, and weights or moments come out NaN or Inf."""

    slug = "optimizer-made-nonfinite"
    fix = (
        "Use an eps above 0 (1e-8; 1e-4 for fp16 and 1e-6 for bf16 weights or state), keep the optimizer's state in fp32, and "
        "look for a learning rate, weight decay or beta that is NaN or Inf."
    )

    def match(self, case: Case) -> Match | None:
        if case.optimizer is None or case.signal:
            return None
        if not (case.weights_broke or case.refused_for_settings):
            return self._a_step_later(case)
        if case.bad_settings:
            return self._settings(case)
        if not case.can_look_at_the_step:
            names = listed([b.name for b in case.bad_weights])
            return self._unverified(case, f"the step made {names} non-finite, and no copy was kept to try it on", None)
        if case.bad_state:
            return None  # the state was bad before the step
        gradients = gradients_of(case)
        if gradients is None:
            return self._unverified(case, "the gradients of the step are gone, so it cannot be tried on copies", None)
        origin = _Origin()
        copied = step_on_copies(case.optimizer, gradients, origin)
        if copied is None:
            return self._unverified(case, "the step cannot be tried on copies: the optimizer cannot be copied or run alone", None)
        broken = [each for each in copied if not each.finite]
        if not broken:
            said = "the same step on copies is finite: it depends on something that a copy does not have any more"
            return self._unverified(case, said, None)
        return self._broken(case, gradients, broken, origin)

    def _a_step_later(self, case: Case) -> Match | None:
        """Weights are not checked after every step of every run: what the optimizer broke may show in the next one only."""
        last, bad = case.last_taken, case.bad_weights
        if not bad or last is None or last.weights_checked or case.bad_since_start(b.name for b in bad):
            return None
        assert case.optimizer is not None
        unchecked = f"{listed([b.name for b in bad])} became non-finite, and weights were not checked after step {last.step}"
        broken = {id(b.tensor) for b in bad}
        groups = [g for g in groups_of(case.optimizer) if any(id(p) in broken for p in g["params"])]
        name = name_of(case.optimizer, bad[0].tensor)
        if case.bad_settings:
            return replace(self._settings(case), trial=None, tried="", confidence=0.93)
        no_eps = any(g.get("eps") == 0 for g in groups)
        return Match(
            confidence=0.92 if no_eps else 0.5,
            evidence=(unchecked, f"{name} has eps=0: where its second moment is 0, the update is 0/0")
            if no_eps
            else (unchecked,),
            phase="optimizer",
            where=bad[0].name,
            op=name,
            samples=(),
            fix=f"Set eps=1e-8 for {name}: it is 0." if no_eps else "",
        )

    # -- a setting that is NaN or Inf ------------------------------------------------------------------------------------------

    def _settings(self, case: Case) -> Match:
        assert case.optimizer is not None
        first, *more = case.bad_settings
        evidence = [f"{listed([str(s) for s in case.bad_settings])}: any step with it is non-finite"]
        rate = _last_rate(case, first)
        since = ""
        if first.key == "lr" and rate is not None:
            since = f"{rate[0]:g} at step {rate[1]}"
            evidence.append(f"the learning rate of this group was last finite: {since}")
        scheduler, source = _scheduler(case, first)
        if scheduler:
            evidence.append(f"{scheduler} sets it" + (f", with the function at {source}" if source else ""))
            fix = f"Look at {scheduler}, which sets {first.place} to {first.value:g}: its total steps, its warm-up, what "
            fix += "it divides by"
        else:
            fix = f"Find the code that sets {first.place} to {first.value:g}"
        fix += f"; it was {since}." if since else "."
        by_group: dict[int, dict[str, Any]] = {}
        for bad in (first, *more):
            by_group.setdefault(id(bad.group), {})[bad.key] = _last_finite(case, bad)
        values = ", ".join(dict.fromkeys(f"{key}={_shown(v)}" for found in by_group.values() for key, v in found.items()))
        known = "the last finite value" if since else "as the optimizer was built"
        gradients = gradients_of(case)
        return Match(
            confidence=0.97,
            evidence=tuple(evidence),
            phase="optimizer",
            where=first.place,
            op=type(first.owner).__name__,
            source=source or None,
            samples=(),
            fix=fix,
            trial=(lambda: self._with(case, gradients, by_group)) if gradients is not None else None,
            tried=f"{values}, {known}",
            on=_ON_COPIES,
        )

    def _with(self, case: Case, gradients: dict[Tensor, Tensor], by_group: Mapping[int, Mapping[str, Any]]) -> Trial:
        as_is = step_on_copies(case.optimizer, gradients)
        changed = step_on_copies(case.optimizer, gradients, by_group=by_group)
        if as_is is None or changed is None:
            return Trial(False, "the step cannot be tried on copies")
        places = {id(group): i for i, group in enumerate(groups_of(case.optimizer))}
        values = [[places[group], key, _plain(value)] for group, found in by_group.items() for key, value in found.items()]
        remedies = (Prescription("finite-settings", {"values": values}),)
        return Trial(not all_finite(as_is) and all_finite(changed), _compared(changed, as_is), remedies)

    # -- a step that breaks with finite settings -------------------------------------------------------------------------------

    def _broken(self, case: Case, gradients: dict[Tensor, Tensor], broken: list[Copied], origin: _Origin) -> Match:
        """Say which elements break and why, and try fixes on copies until one holds."""
        assert case.optimizer is not None
        first = broken[0]
        name, optimizer = case.name_of(first.parameter), name_of(case.optimizer, first.parameter)
        others = f", and {len(broken) - 1} more parameters" if len(broken) > 1 else ""
        evidence = [
            f"weights and gradients are finite before the step; on copies, {optimizer}.step makes {_parts(first)} of {name} "
            f"non-finite{others}",
            *_reasons(case, first, gradients),
        ]
        if origin.op:
            divides = ", which divides by 0" if origin.divides else ""
            evidence.append(
                f"the first non-finite number comes out of {origin.op}{f' at {origin.source}' if origin.source else ''}{divides}"
            )
        held = self._search(case, gradients, broken, origin)
        as_is = f"of {len(broken)} parameters"
        if all_finite(step_on_copies(case.optimizer, gradients, settings={"lr": 1e-12})):
            held = replace(held, held=False, result="the step is finite at a tiny rate: it is too large, not undefined")
        return Match(
            confidence=0.9,
            evidence=tuple(evidence),
            phase="optimizer",
            where=name,
            op=optimizer,
            source=origin.source or None,
            samples=(),
            fix=held.fix,
            trial=lambda: Trial(held.held, held.result or f"weights or state {as_is} are still non-finite", held.remedies),
            tried=held.tried,
            on=_ON_COPIES,
        )

    def _search(self, case: Case, gradients: dict[Tensor, Tensor], broken: list[Copied], origin: _Origin) -> _Attempt:
        found = [*_attempts(case, broken, origin)]
        for attempt in found:
            changes = (SafeDivision(),) if attempt.division else ()
            changed = step_on_copies(
                case.optimizer,
                gradients,
                *changes,
                dtype=torch.float32 if attempt.wide else None,
                wide_state=attempt.wide,
                by_group=attempt.by_group,
            )
            if changed is not None and all_finite(changed) and all(c.acted for c in changes):
                attempt.held, attempt.result = True, _compared(changed, broken)
                return attempt
        optimizer = name_of(case.optimizer, broken[0].parameter)
        at = f" at {origin.source}" if origin.source else ""
        name = case.name_of(broken[0].parameter)
        fix = f"Look at {optimizer}.step{at}: it makes {name} non-finite from finite numbers. {self.fix}"
        tried = listed([a.tried for a in found]) if found else "nothing changed"
        return _Attempt(fix, tried)

    def _unverified(self, case: Case, said: str, source: str | None) -> Match:
        """The step cannot be shown to break: report what is known, and claim nothing."""
        assert case.optimizer is not None
        half = [p for g in groups_of(case.optimizer) for p in g["params"] if p.dtype in HALVES]
        name = name_of(case.optimizer)
        return Match(
            confidence=0.3 if half else 0.8,  # of halves the more exact cause knows more
            evidence=("loss and gradients were finite, and the step made weights or moments non-finite", said),
            phase="optimizer",
            where=f"{name}.step",
            op=name,
            source=source,
            samples=(),
            fix=f"Look at {name}.step for a division by 0, and for what it keeps between steps. {self.fix}",
        )


@dataclass(slots=True)
class _Attempt:
    """A change that may keep the step finite."""

    fix: str
    tried: str
    by_group: dict[int, dict[str, Any]] = field(default_factory=dict)
    wide: bool = False
    division: bool = False
    remedies: tuple[Prescription, ...] = ()
    held: bool = False
    result: str = ""


def _attempts(case: Case, broken: list[Copied], origin: _Origin) -> list[_Attempt]:
    """The fixes to try, mildest first."""
    groups = groups_of(case.optimizer)
    ours = {id(each.parameter) for each in broken}
    hit = [g for g in groups if any(id(p) in ours for p in g["params"])]
    narrow = {
        value.dtype
        for each in broken
        for value in (each.parameter, *each.state.values())
        if value.dtype in HALVES and (value.dim() or value is each.parameter)
    }
    enough = max((_ENOUGH[dtype] for dtype in narrow), default=1e-8)
    small = [g for g in hit if isinstance(g.get("eps"), float) and g["eps"] < enough]
    optimizer = name_of(case.optimizer, broken[0].parameter)
    found = []
    if small:
        had = ", ".join(dict.fromkeys(f"{g['eps']:g}" for g in small))
        fix = f"Set eps={enough:g} for {optimizer} (it is {had}): where the second moment is 0, the step divides by eps alone."
        settings: dict[str, Any] = {"eps": enough}
        if len(groups) > len(small):
            settings["groups"] = [i for i, g in enumerate(groups) if any(g is other for other in small)]
        by_group = {id(g): {"eps": enough} for g in small}
        found.append(_Attempt(fix, f"eps={enough:g}", by_group, remedies=(Prescription("optimizer-settings", settings),)))
    if narrow:
        kinds = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in narrow))
        if any(each.parameter.dtype in HALVES for each in broken):
            fix = (
                f"Keep the weights that {optimizer} trains, and its state, in fp32 (autocast for the forward): they are {kinds}."
            )
            remedies = (Prescription("fp32-weights"), Prescription("fp32-weights", {"autocast": False}))
            found.append(_Attempt(fix, "weights and state in fp32", wide=True, remedies=remedies))
        else:
            keys = sorted({k for each in broken for k, v in each.state.items() if v.dtype in HALVES and v.dim()})
            fix = f"Keep {listed(keys)} of {optimizer} in fp32: it is {kinds}, which cannot hold numbers of this size."
            found.append(_Attempt(fix, "the state in fp32", wide=True))
    if origin.divides or not found:
        at = f" at {origin.source}" if origin.source else ""
        fix = f"{optimizer}.step divides by 0{at}: add an eps to the divisor, or clamp it."
        found.append(_Attempt(fix, "a divisor of 0 taken as 1", division=True))
    return found


def _parts(copied: Copied) -> str:
    """What of a parameter is non-finite: elements of the weight, keys of the state."""
    bad = int((~torch.isfinite(copied.after)).sum())
    parts = [f"{bad} of {copied.after.numel()} elements"] if bad else []
    return " and ".join(parts + [f"the state {key}" for key in copied.bad])


def _reasons(case: Case, copied: Copied, gradients: Mapping[Tensor, Tensor]) -> list[str]:
    """The eps, the second moment and the dtypes at the elements that break."""
    bad = ~torch.isfinite(copied.after)
    for key in copied.bad if not bool(bad.any()) else ():
        if copied.state[key].shape == bad.shape:
            bad = ~torch.isfinite(copied.state[key])
            break
    found = []
    same = {key: value for key, value in copied.state.items() if value.shape == bad.shape}
    zero = [key for key, value in same.items() if key in _SQUARES and bool(bad.any()) and bool((value[bad] == 0).all())]
    group = next((g for g in groups_of(case.optimizer) if any(p is copied.parameter for p in g["params"]) and "eps" in g), {})
    eps = group.get("eps")
    if isinstance(eps, float) and zero:
        found.append(f"at these elements {listed(zero)} is 0 after the step, and eps={eps:g}")
    elif isinstance(eps, float):
        found.append(f"its group has eps={eps:g}")
    elif zero:
        found.append(f"at these elements {listed(zero)} is 0 after the step")
    gradient = gradients[copied.parameter]
    if not gradient.is_sparse and bool((gradient[bad] == 0).all()):
        found.append("the gradient is 0 at all of them")
    narrow = [f"{k} ({str(v.dtype).removeprefix('torch.')})" for k, v in copied.state.items() if v.dtype in HALVES and v.dim()]
    if narrow:
        found.append(f"the optimizer keeps {listed(narrow)} in half precision")
    return found


def _compared(changed: list[Copied], as_is: list[Copied]) -> str:
    broke = sum(not each.finite for each in as_is)
    return f"all {len(changed)} parameters and their state are finite after the step; without it, not so for {broke}"


def _last_rate(case: Case, bad: BadSetting) -> tuple[float, int] | None:
    """The last finite learning rate of a group, and its step."""
    if bad.index is None:
        return None
    for record in reversed(list(case.history)):
        if bad.index < len(record.lr) and math.isfinite(record.lr[bad.index]):
            return record.lr[bad.index], record.step
    return None


def _last_finite(case: Case, bad: BadSetting) -> Any:
    """What to try in its place: the last rate of the run, else what the optimizer was built with, else what is usual."""
    rate = _last_rate(case, bad) if bad.key == "lr" else None
    if rate is not None:
        return rate[0]
    built = getattr(bad.owner, "defaults", {})
    for value in (bad.group.get("initial_lr") if bad.key == "lr" else None, built.get(bad.key)):
        numbers = value if isinstance(value, (tuple, list)) else (value,)
        if all(isinstance(x, (int, float, Tensor)) and math.isfinite(float(x)) for x in numbers):
            return value
    return _USUAL[bad.key]


def _plain(value: Any) -> Any:
    return [float(x) for x in value] if isinstance(value, (tuple, list)) else float(value)


def _shown(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, (tuple, list)) else f"{float(value):g}"


def _scheduler(case: Case, bad: BadSetting) -> tuple[str, str]:
    """The class of the scheduler that sets the learning rate, and where the user's own function for it is, if it has one."""
    scheduler = case.scheduler
    if scheduler is None or bad.key != "lr":
        return "", ""
    while (inner := getattr(scheduler, "scheduler", None)) is not None and hasattr(inner, "step"):
        scheduler = inner
    functions = getattr(scheduler, "lr_lambdas", None) or ()
    function = functions[bad.index] if bad.index is not None and bad.index < len(functions) else None
    code = getattr(getattr(function, "func", function), "__code__", None)
    source = f"{short(code.co_filename)}:{code.co_firstlineno}" if code is not None and is_users(code.co_filename) else ""
    return type(scheduler).__name__, source


class _Origin(TorchDispatchMode):
    """While open, finds the first operation that makes a non-finite number from finite ones."""

    def __init__(self) -> None:
        super().__init__()
        self.op, self.source, self.divides = "", "", False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.op:
            return func(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if _has_numbers(t)]
        good = bool(given) and all(_finite(t) for t in given)
        name = func.name().partition("::")[2].partition(".")[0].rstrip("_")
        divides = good and name in ("div", "addcdiv", "_foreach_div", "_foreach_addcdiv", "reciprocal") and _holds_0(given)
        made = func(*args, **kwargs)
        if good and not all(_finite(t) for t in (*given, *tree_leaves(made)) if _has_numbers(t)):
            self.op, self.source, self.divides = name.strip("_"), _line(), divides
        return made


def _has_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0 and value.layout is torch.strided


def _finite(t: Tensor) -> bool:
    return bool(torch.isfinite(t).all())


def _holds_0(given: list[Tensor]) -> bool:
    return any(bool((t == 0).any()) for t in given[-max(1, len(given) // 2) :])


def _line() -> str:
    """The line of an optimizer of the user's own that called the operation; empty for one of torch."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != step_on_copies.__code__.co_filename:
        if is_users(frame.f_code.co_filename):
            return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
