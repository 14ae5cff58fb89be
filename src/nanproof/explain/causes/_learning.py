"""Silent causes: nothing is NaN and nothing is learned. A trial here shows that the named signal changes with the fix."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nanproof._wording import listed
from nanproof.core.support._members import groups_of, name_of, optimizers_in
from nanproof.core.support._tree import map_tensors, tensors_in
from nanproof.explain._case import Case, Prescription, Trial, living
from nanproof.explain._cause import Cause, Match
from nanproof.explain._silent import FAINT, TINY
from nanproof.explain.locate._calls import tensors_of
from nanproof.explain.replay._copies import HALVES, changed_share, step_on_copies
from nanproof.explain.replay._interventions import Leaky
from nanproof.explain.replay._rehearse import slope_ratio
from nanproof.explain.replay._surroundings import Attached, GradEnabled, NonReentrant, weights_as


class OptimizerForeignParameters(Cause):
    """The optimizer holds tensors that the model no longer has."""

    slug = "optimizer-foreign-parameters"
    fix = "Build the optimizer after the last change to the model (resizing, moving, wrapping, replacing a module)."

    def match(self, case: Case) -> Match | None:
        if case.signal != "foreign-parameters":
            return None
        return Match(
            confidence=1.0,
            evidence=(case.details["message"],),
            phase="optimizer",
            where=case.details["left_out"][0],
            trial=lambda: self._rebuilt(case),
            tried="an optimizer over the model's own parameters",
        )

    def _rebuilt(self, case: Case) -> Trial:
        """One step of each on copies: does any weight of the model change?"""
        if case.optimizer is None or case.replay is None:
            return Trial(False, "no step to try it on")
        gradients = case.replay.gradients()
        held = {id(p) for g in groups_of(case.optimizer) for p in g["params"]}
        left = {name: g for name, g in gradients.items() if id(case.replay.parameters[name]) not in held}
        if not left:
            return Trial(False, "the parameters that are left out have no gradient")
        name, gradient = max(left.items(), key=lambda item: float(item[1].float().norm()))
        p = case.replay.parameters[name].detach().clone().requires_grad_()
        p.grad = gradient
        before = p.detach().clone()
        if not self._stepped(case, p):
            return Trial(False, "a second optimizer cannot be made")
        changed = int((p.detach() != before).sum())
        said = f"{changed} of {p.numel()} elements of {name} change in a step; now none can"
        return Trial(changed > 0, said, (Prescription("own-parameters", {"names": list(case.details["left_out"])}),))

    def _stepped(self, case: Case, p: Tensor) -> bool:
        """A step of an optimizer like one of the run's over this parameter alone; False where none can be made."""
        for each in optimizers_in(case.optimizer):
            settings = {k: v for k, v in each.param_groups[0].items() if k != "params"}
            try:
                type(each)([{**settings, "params": [p]}]).step()
            except Exception:
                continue
            return True
        return False


class NoGradientPath(Cause):
    """Trainable parameters get no gradient although the loss depends on them."""

    slug = "no-gradient-path"
    fix = (
        "The path from the loss to these parameters is cut: look for detach, .data, no_grad, argmax or numpy; with gradient "
        "checkpointing use use_reentrant=False or enable_input_require_grads()."
    )

    def match(self, case: Case) -> Match | None:
        raised = case.error is not None and "does not require grad" in str(case.error)
        if case.replay is None or not (case.signal in ("missing-gradients", "zero-gradients") or raised):
            return None
        control = case.replay.run() if not raised else case.control
        assert control is not None
        if case.signal == "missing-gradients":
            names = [n for n in case.details["missing"] if n in control.missing]
        else:
            names = [n for n, p in case.replay.parameters.items() if p.requires_grad and control.norms.get(n, 0.0) == 0.0]
        if not names:
            return None
        moved = self._depends(case, names, control.loss if not raised else None)
        if moved is None:
            return None
        if case.signal == "missing-gradients" and self._on_purpose(case, names):
            return None
        what = "no gradient" if case.signal != "zero-gradients" else "a gradient of exactly 0"
        said = (
            f"{listed(names, 2)} get {what}, yet the loss depends on them: changed a little, it goes from "
            f"{moved[0]:.6g} to {moved[1]:.6g}"
        )
        return Match(
            confidence=0.8 if case.signal == "zero-gradients" else 0.93,
            evidence=(said,),
            phase="backward",
            where=names[0],
            samples=(),
            trial=lambda: self._attached(case, names),
            tried="detach, .data, no_grad and reentrant checkpointing left out",
        )

    def _depends(self, case: Case, names: list[str], loss: float | None) -> tuple[float, float] | None:
        """The loss before and after all these parameters are changed a little; None if it does not move."""
        assert case.replay is not None
        generator = torch.Generator().manual_seed(0)
        values: dict[Tensor, Tensor] = {}
        for name in names:
            p = case.replay.parameters[name]
            noise = torch.randn(p.shape, generator=generator).to(p.device, torch.float32)
            size = p.detach().float().abs().mean().clamp(min=1e-2)
            values[p] = (p.detach().float() + 0.01 * size * noise).to(p.dtype)
        first = _loss(case) if loss is None else loss
        second = first
        for factor in (1, 10, 100):
            larger = {p: p.detach() + (v - p.detach()) * factor for p, v in values.items()}
            with weights_as(larger):
                second = _loss(case)
            if math.isfinite(second) and abs(second - first) > 1e-6 * max(abs(first), 1e-3):
                return first, second
        return None

    def _on_purpose(self, case: Case, names: list[str]) -> bool:
        """They run under no_grad even with checkpointing left out, and the optimizer does not hold them, or the forward writes
        them itself: a target network, a frozen encoder."""
        assert case.replay is not None
        held = {id(p) for g in groups_of(case.optimizer) for p in g["params"]} if case.optimizer is not None else set()
        named = case.replay.parameters
        if any(id(named[n]) in held and not case.replay.is_written(named[n]) for n in names):
            return False
        modules = dict(case.replay.model.named_modules())
        owners = {id(m): m for n in names if (m := modules.get(n.rsplit(".", 1)[0] if "." in n else "")) is not None}
        seen: list[bool] = []
        hooks = [m.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled())) for m in owners.values()]
        try:
            case.replay.run(Attached(), backward=False)
        finally:
            for hook in hooks:
                hook.remove()
        return bool(seen) and not any(seen)

    def _attached(self, case: Case, names: list[str]) -> Trial:
        assert case.replay is not None
        outcome = case.replay.run(Attached(), GradEnabled())
        reached = [n for n in names if outcome.norms.get(n, 0.0) > 0]
        said = f"{len(reached)} of {len(names)} get a gradient"
        if not case.healing:
            return Trial(bool(reached), said)
        # A detach may be meant elsewhere, so it stays; the kind of checkpointing changes nothing but this.
        change = NonReentrant()
        whole = case.replay.run(change)
        enough = change.acted and whole.finite and all(whole.norms.get(n, 0.0) > 0 for n in reached)
        return Trial(bool(reached), said, living(change) if enough else ())


def _loss(case: Case) -> float:
    assert case.replay is not None
    return case.replay.run(backward=False).loss


class DeadUnits(Cause):
    """A ReLU that never fires: nothing behind it gets a gradient."""

    slug = "dead-units"
    fix = (
        "Every unit of a ReLU is off, so nothing behind it gets a gradient: re-initialise that layer, lower the learning "
        "rate, or use a leaky activation."
    )

    def match(self, case: Case) -> Match | None:
        if case.signal not in ("zero-gradients", "dead-parameters") or case.trace is None or case.replay is None:
            return None
        names = ("relu", "relu_", "clamp_min", "clamp", "threshold", "hardtanh")
        dead = [
            op
            for op in case.trace.ops
            if op.name in names
            and not op.backward
            and op.inputs
            and op.inputs[0].range.high <= 0
            and op.outputs[0].range.size == 0
        ]
        if not dead:
            return None
        op = dead[0]
        said = (
            f"every input of {op.name.rstrip('_')} in {op.path} is at or below 0 (largest {op.inputs[0].range.high:.4g}): its "
            "output is 0 throughout"
        )
        return Match(
            confidence=0.95,
            evidence=(said,),
            phase="forward",
            where=op.path,
            op=op.name.rstrip("_"),
            source=op.source,
            samples=(),
            trial=lambda: self._leaky(case),
            tried="leaky_relu in its place",
        )

    def _leaky(self, case: Case) -> Trial:
        assert case.replay is not None
        change = Leaky()
        outcome = case.replay.run(change)
        names = case.details.get("names") or list(outcome.norms)
        norm = math.hypot(*(outcome.norms.get(name, 0.0) for name in names))
        return Trial(outcome.finite and norm > 0 and change.acted > 0, f"gradient norm {norm:.4g} instead of 0")


class LearningRateZero(Cause):
    """The learning rate is 0, or so small that no weight changes, while the gradients are not."""

    slug = "learning-rate-zero"
    specific = 2
    fix = (
        "Check the schedule: its total number of steps, its warm-up, its last value, and that it is stepped once an epoch or "
        "once a step, as it expects. The learning rate is 0 while the gradients are not."
    )

    def match(self, case: Case) -> Match | None:
        norm = case.record.grad_norm if case.record is not None else math.nan
        rate = max(case.record.lr, default=math.nan) if case.record is not None else math.nan
        if case.signal == "zero-learning-rate":
            shown = f"{rate:.2g}" if rate else "0"
            said = f"the learning rate has been {shown} for {case.details['steps']} steps; the gradient norm is {norm:.4g}"
            if rate:
                said += f"; it was {case.details['largest']:.2g}"
        elif case.signal == "unchanged-weights" and rate < 1e-7:
            said = f"a step changes {case.details['share']:.1%} of the weights at a learning rate of {rate:.2g}"
        else:
            return None
        return Match(
            confidence=0.98,
            evidence=(said,),
            phase="optimizer",
            where="learning rate",
            trial=(lambda: self._moving(case)) if case.replay is not None and case.optimizer is not None else None,
            tried="a learning rate of 1e-3",
        )

    def _moving(self, case: Case) -> Trial:
        assert case.optimizer is not None and case.replay is not None
        gradients = {case.replay.parameters[n]: g for n, g in case.replay.gradients().items()}
        now = changed_share(step_on_copies(case.optimizer, gradients))
        then = changed_share(step_on_copies(case.optimizer, gradients, settings={"lr": 1e-3}))
        said = f"{then:.0%} of the elements change in a step instead of {now:.0%}"
        return Trial(now < 0.05 and then > 0.5, said, self._floors(case) if case.healing else ())

    def _floors(self, case: Case) -> tuple[Prescription, ...]:
        """Rates at which the loss does not rise over the last batches: the mean of those the run had, else a tenth of it."""
        assert case.optimizer is not None and case.replay is not None
        had = [r.lr for r in case.history if r.lr and max(r.lr) > 0 and len(r.lr) == len(case.optimizer.param_groups)]
        if not had or not case.moments:
            return ()
        usual = [math.fsum(rates) / len(had) for rates in zip(*had, strict=True)]
        found, ends = [], {}
        for share in (0.0, 1.0, 0.1):
            rates = [share * rate for rate in usual]
            losses = case.rehearse(rates=rates, max_norm=case.max_norm)
            ends[share] = losses[-1] if losses is not None and math.isfinite(losses[-1]) else math.inf
            if share and ends[share] <= ends[0.0] < math.inf:
                floor = rates[0] if len(set(rates)) == 1 else rates
                found.append(Prescription("learning-rate-floor", {"floor": floor}))
        return tuple(found)


class Bf16UpdateRounding(Cause):
    """Updates round away in half-precision weights."""

    slug = "bf16-update-rounding"
    remedy = "Keep fp32 master weights (autocast for the forward) or round stochastically"
    fix = f"{remedy}: in bf16 an update below 1/256 of the weight is lost."

    def match(self, case: Case) -> Match | None:
        if case.signal != "unchanged-weights" or case.optimizer is None:
            return None
        half = [p for g in groups_of(case.optimizer) for p in g["params"] if p.dtype in HALVES]
        if not half:
            return None
        kind, name = str(half[0].dtype).removeprefix("torch."), name_of(case.optimizer, half[0])
        norm = case.record.grad_norm if case.record is not None else math.nan
        said = (
            f"a step changes {case.details['share']:.1%} of the sampled {kind} weights, with a gradient norm of {norm:.4g}: "
            "the updates round away"
        )
        return Match(
            confidence=0.95,
            evidence=(said,),
            phase="optimizer",
            where=f"{name}.step",
            op=name,
            trial=(lambda: self._in_fp32(case)) if case.replay is not None else None,
            tried="fp32 weights",
        )

    def _in_fp32(self, case: Case) -> Trial:
        assert case.optimizer is not None and case.replay is not None
        gradients = {case.replay.parameters[n]: g for n, g in case.replay.gradients(case.max_norm).items()}
        now = changed_share(step_on_copies(case.optimizer, gradients))
        then = changed_share(step_on_copies(case.optimizer, gradients, dtype=torch.float32))
        said = f"a step changes {then:.0%} of the elements instead of {now:.1%}"
        return Trial(then > 5 * now and then > 0.5, said, (Prescription("fp32-weights"),))


class GradientScaleMismatch(Cause):
    """Gradients or updates are off by a power of two: unscaled twice, or never."""

    slug = "gradient-scale-mismatch"
    fix = (
        "Unscale gradients once: remove the second division (a hook, a wrapper, scaler.unscale_ before one that unscales "
        "itself), or add the missing one."
    )

    def match(self, case: Case) -> Match | None:
        if case.signal == "small-updates":
            kept = case.details["kept"]
            return Match(
                confidence=0.95,
                evidence=(
                    f"a step of SGD changes the weights by {kept:.3g} times learning rate * gradient, about {_power(kept)}",
                ),
                phase="optimizer",
                where="optimizer.step",
                samples=(),
                trial=(lambda: self._plain_step(case, kept)) if case.replay is not None else None,
                tried="a plain step of learning rate times gradient",
            )
        signals = ("tiny-updates", "heavy-clipping", "stuck")
        if case.replay is None or not (case.signal in signals or case.kind in ("divergence", "nonfinite-loss")):
            return None
        if case.signal == "stuck" and not (case.details["moved"] < TINY and _faint(case)):
            return None
        if (
            case.kind in ("divergence", "nonfinite-loss")
            and not case.signal
            and case.record is not None
            and case.record.step > 20
        ):
            return None
        if case.kind == "nonfinite-loss":
            return None
        ratio = slope_ratio(case.replay)
        if ratio is None or 1 / 50 < ratio < 50:
            return None
        power = math.log2(ratio)
        exact = abs(power - round(power)) < 0.15
        shown = f"2^{round(power)}" if exact else f"{ratio:.3g}"
        said = (
            f"along the gradient the loss falls {shown} times as fast as the gradient says: the gradients are "
            f"{'too small' if ratio > 1 else 'too large'} by that factor"
        )
        return Match(
            confidence=0.95 if exact else 0.6,
            evidence=(said,),
            phase="backward",
            where="gradients",
            samples=(),
            trial=lambda: self._rescaled(case, ratio),
            tried=f"gradients times {shown}",
        )

    def _rescaled(self, case: Case, ratio: float) -> Trial:
        """A plain step along the gradient as it is, and with the factor undone: which one lowers the loss?"""
        assert case.replay is not None and case.optimizer is not None
        gradients = case.replay.gradients()
        rate = max((float(g.get("lr", 0.0)) for g in groups_of(case.optimizer)), default=0.0)
        start, as_is = _loss(case), self._stepped(case, gradients, rate)
        for share in (1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5):
            after = self._stepped(case, gradients, rate * ratio * share)
            if start - after > 10 * abs(start - as_is) and start - after > 1e-5 * abs(start):
                said = f"a step takes the loss from {start:.6g} to {after:.6g} instead of {as_is:.6g}"
                return Trial(True, said, _factor(ratio, share))
        return Trial(False, f"a step takes the loss from {start:.6g} to {after:.6g}, as it is to {as_is:.6g}")

    def _plain_step(self, case: Case, kept: float) -> Trial:
        assert case.replay is not None and case.optimizer is not None
        gradients = case.replay.gradients(case.max_norm)
        rate = max((float(g.get("lr", 0.0)) for g in groups_of(case.optimizer)), default=0.0)
        start, plain = _loss(case), self._stepped(case, gradients, rate)
        as_is = self._stepped(case, gradients, rate * kept)
        held = start - plain > 5 * abs(start - as_is)
        return Trial(held, f"it takes the loss from {start:.6g} to {plain:.6g} instead of {as_is:.6g}", _factor(1 / kept, 1.0))

    def _stepped(self, case: Case, gradients: dict[str, Tensor], rate: float) -> float:
        assert case.replay is not None
        named = case.replay.parameters
        with weights_as({named[n]: named[n].detach() - rate * g for n, g in gradients.items()}):
            return _loss(case)


def _faint(case: Case) -> bool:
    return case.record is not None and case.record.grad_norm < FAINT * abs(case.record.loss)


def _factor(ratio: float, share: float) -> tuple[Prescription, ...]:
    """Gradients times the power of two that they are off by, or the part of it that lowered the loss: the loss may be scaled on
    purpose. A factor that is no power of two may be meant."""
    power = math.log2(ratio)
    if abs(power - round(power)) >= 0.15:
        return ()
    return (Prescription("gradient-factor", {"factor": 2.0 ** round(power + math.log2(share))}),)


def _power(x: float) -> str:
    return f"2^{round(math.log2(x))}" if x > 0 else "0"


def shift_of(replay: Any, inputs: str, labels: str) -> int | None:
    """How far the loss function itself moves labels against logits: 0 or 1. From where gradients reach the logits.

    A position of the logits gets a gradient exactly if the label it is compared with counts, so the pattern of gradients is that
    of the labels, or that of the labels moved by one. None if that does not show.
    """
    batch = replay.batches[0]
    found = dict(tensors_in(batch))
    y = found[labels]
    samples, length = y.shape
    reached: list[Tensor] = []

    def hook(module: Any, args: Any, output: Any) -> None:
        for t in tensors_of(output):
            if t.dim() == 3 and t.shape[:2] == (samples, length) and t.requires_grad and t.is_floating_point():
                t.register_hook(lambda g: reached.append(g.detach().abs().amax(2) > 0))

    # The last label that counts, alone: its gradient is at its own position, or, moved, at the one before.
    counted = torch.nonzero((y != -100).any(0)).flatten()
    if not len(counted) or int(counted[-1]) == 0:
        return None
    last = int(counted[-1])
    only_last = torch.full_like(y, -100)
    only_last[:, last] = y[:, last]
    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        changed = [map_tensors(batch, lambda t: only_last if t is y else t)]
        outcome = replay.run(batches=changed)
    finally:
        handle.remove()
    if not reached or outcome.error is not None:
        return None
    # With several heads (the next token, the one after it) one that does not move the labels is enough: they are as meant.
    nearest = [places.any(0) for places in reached]
    if any(bool(places[last]) for places in nearest):
        return 0
    return 1 if bool(nearest[0][last - 1]) else None


class LabelsShiftedTwice(Cause):
    """The data moves the labels by one, and so does the loss."""

    slug = "labels-shifted-twice"
    fix = "Pass the labels unshifted (labels = input_ids): the model's loss moves them by one itself."

    def match(self, case: Case) -> Match | None:
        if case.signal != "shifted-labels" or case.replay is None:
            return None
        inputs, labels = case.details["inputs"], case.details["labels"]
        shift = shift_of(case.replay, inputs, labels)
        if shift != 1:
            return None
        said = (
            f"{labels} is {inputs} moved by one already, and the loss moves it by one again: position t is trained on token t + 2"
        )
        return Match(
            confidence=0.97,
            evidence=(said,),
            phase="data",
            where=labels,
            samples=(),
            trial=lambda: self._unshifted(case, inputs, labels),
            tried=f"{labels} moved back by one",
        )

    def _unshifted(self, case: Case, inputs: str, labels: str) -> Trial:
        """With unshifted labels each position is trained on the next token; the losses of both are said."""
        assert case.replay is not None
        batch = case.replay.batches[0]
        tensors = dict(tensors_in(batch))
        x, y = tensors[inputs], tensors[labels]
        back = torch.cat((torch.full_like(y[:, :1], -100), y[:, :-1]), 1)
        agrees = bool(((back == x) | (back == -100)).all())
        outcome = case.replay.run(batches=[map_tensors(batch, lambda t: back if t is y else t)])
        control = case.replay.run()
        return Trial(
            agrees and outcome.finite,
            f"position t is trained on token t + 1; the loss is {outcome.loss:.4g} instead of {control.loss:.4g}",
        )
