"""Causes that lie in the optimizer, the loss scale or the learning rate, and show as bad weights, spikes or divergence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanproof._wording import listed
from nanproof.core.support._members import groups_of, name_of, optimizers_in
from nanproof.explain._case import Case, Prescription, Trial
from nanproof.explain._cause import Cause, Match
from nanproof.explain._controls import blown_up, rejected, weights_at_their_first_size
from nanproof.explain._growth import Growth, growth
from nanproof.explain.causes._objective import LARGE_UPDATE, compared, rounds
from nanproof.explain.causes._update import gradients_of
from nanproof.explain.replay._copies import Copied, all_finite, step_on_copies
from nanproof.explain.replay._rehearse import adam_update, initialise, slope_ratio, steps_seen, undone
from nanproof.explain.replay._surroundings import weights_as

CANNOT_REHEARSE = "whole steps cannot be rehearsed here: the model is too large, or the optimizer needs a closure"


def _adam(optimizer: Any) -> str:
    """The class of the optimizer that keeps a second moment."""
    names = [type(each).__name__ for each in optimizers_in(optimizer) if any("betas" in g for g in each.param_groups)]
    return names[-1] if names else name_of(optimizer)


def _kept(optimizer: Any) -> Iterator[tuple[dict[str, Any], Tensor, dict[str, Any]]]:
    """Every parameter with its group and what its optimizer keeps of it."""
    for each in optimizers_in(optimizer):
        for group in each.param_groups:
            yield from ((group, p, each.state.get(p, {})) for p in group["params"])


class Fp16WeightsWithGradScaler(Cause):
    """Attempting to unscale FP16 gradients, as GradScaler says."""

    slug = "fp16-weights-with-grad-scaler"
    fix = (
        "Load or cast the trainable parameters to fp32 and let autocast run the forward in fp16; GradScaler refuses fp16 "
        "gradients."
    )

    def match(self, case: Case) -> Match | None:
        if case.error is None or "unscale FP16 gradients" not in str(case.error):
            return None
        groups = groups_of(case.optimizer) if case.optimizer is not None else []
        half = [p for g in groups for p in g["params"] if p.dtype == torch.float16 and p.requires_grad]
        return Match(
            confidence=0.98,
            evidence=(f"{len(half)} trainable parameters are fp16 under a GradScaler, which cannot unscale their gradients",),
            phase="optimizer",
            where="GradScaler.unscale_",
            trial=(lambda: self._in_fp32(case, half)) if case.replay is not None and half else None,
            tried="the trainable parameters in fp32",
        )

    def _in_fp32(self, case: Case, half: list[Tensor]) -> Trial:
        """GradScaler itself on copies of those that get a gradient: it raises on fp16, not on fp32."""
        assert case.replay is not None
        reached = {id(case.replay.parameters[name]) for name in case.replay.gradients()}
        half = [p for p in half if id(p) in reached]
        if not half:
            return Trial(False, "none of the fp16 parameters gets a gradient, so GradScaler has nothing to refuse")
        results = []
        for dtype in (torch.float16, torch.float32):
            p = half[0].detach().to(dtype).requires_grad_()
            p.grad = torch.ones_like(p)
            scaler = torch.amp.GradScaler(p.device.type)
            scaler.scale(torch.ones((), device=p.device))
            try:
                scaler.unscale_(torch.optim.SGD([p], 0.1))
                results.append(True)
            except (ValueError, AssertionError, RuntimeError):
                results.append(False)
        return Trial(results == [False, True], "GradScaler unscales the gradients", (Prescription("fp32-weights"),))


class GradientsNotCleared(Cause):
    """Every backward adds to the gradients of the steps before: the updates grow, and one Inf stays in .grad for ever."""

    slug = "gradients-not-cleared"
    specific = 2
    fix = "Call optimizer.zero_grad() before every backward, also after a skipped step: one Inf in .grad stays there for ever."

    def match(self, case: Case) -> Match | None:
        bad = case.nonfinite or case.kind == "divergence"
        if (
            not case.uncleared
            or not case.details.get("every_step", True)
            or not (bad or case.signal in ("uncleared-gradients", "stuck", "collapsed"))
        ):
            return None
        return Match(
            confidence=0.9 if case.nonfinite else 0.98,  # an Inf has a cause of its own
            evidence=("the gradients of the step before were still in .grad when this step's backward added to them",),
            phase="backward",
            where="optimizer.zero_grad",
            samples=(),
            trial=(lambda: self._cleared(case)) if case.replay is not None and self._sums(case) else None,
            tried="this step's own gradients",
        )

    def _sums(self, case: Case) -> dict[Tensor, Tensor]:
        held = (p for group in groups_of(case.optimizer) for p in group["params"]) if case.optimizer is not None else ()
        return {p: p.grad for p in held if p.grad is not None and p.grad.layout is torch.strided}

    def _cleared(self, case: Case) -> Trial:
        """What the optimizer was given, next to the gradients of the step alone. The two are the same where .grad was cleared."""
        assert case.replay is not None
        sums = {p: g.detach().clone() for p, g in self._sums(case).items()}
        own = {case.replay.parameters[n]: g for n, g in case.replay.gradients().items()}
        both = [(sums[p].float(), own[p].float()) for p in sums if p in own and own[p].layout is torch.strided]
        size = math.sqrt(sum(float(g.square().sum()) for _, g in both))
        apart = math.sqrt(sum(float((s / case.replay.scale - g).square().sum()) for s, g in both))
        held = math.isfinite(size) and size > 0 and not apart < 0.5 * size
        given = math.sqrt(sum(float(s.square().sum()) for s, _ in both))
        return Trial(held, f"gradient norm {size:.4g}; the optimizer was given the sum, {given:.4g}")


class ClippingStarves(Cause):
    """One parameter's huge gradient makes clipping by the global norm scale all the others to nothing."""

    slug = "clipping-starves"
    specific = 2
    fix = (
        "Clip this parameter's gradient by itself (a group of its own, clip by value, or a smaller weight of its loss term): "
        "with one global norm it takes the whole of the limit, and the other parameters stop learning."
    )

    OWNS = 0.98
    """Share of the norm that one parameter has."""
    STARVED = 10.0
    """How many times smaller the clipping makes the updates of the others."""

    def match(self, case: Case) -> Match | None:
        if case.signal != "heavy-clipping" or case.record is None or case.replay is None or case.max_norm is None:
            return None
        norms = case.record.by_parameter
        owners = self._owners(norms)
        others = math.hypot(*(norm for n, norm in norms.items() if n not in owners))
        if not owners or others == 0:
            return None
        owned = math.hypot(*(norms[n] for n in owners))
        said = (
            f"{listed(owners)} have a gradient norm of {owned:.4g}, all others together {others:.4g}: clipped to "
            f"{case.max_norm:g}, the others are divided by {case.record.clip:.4g}"
        )
        return Match(
            confidence=0.93,
            evidence=(said,),
            phase="optimizer",
            where=owners[0],
            samples=(),
            trial=lambda: self._alone(case, owners),
            tried=f"{listed(owners)} clipped by themselves",
        )

    def _owners(self, norms: dict[str, float]) -> list[str]:
        """The parameters that have nearly all of the norm, down to the widest gap; none where that is more than half of them."""
        ranked = sorted((n for n in norms if norms[n] > 0), key=lambda n: -norms[n])
        total = math.hypot(*norms.values())
        most = [i for i in range(1, len(norms) // 2 + 1) if i < len(ranked)]
        able = [i for i in most if math.hypot(*(norms[n] for n in ranked[:i])) >= self.OWNS * total]
        if not able:
            return []
        return ranked[: max(able, key=lambda i: norms[ranked[i - 1]] / norms[ranked[i]])]

    def _alone(self, case: Case, owners: list[str]) -> Trial:
        """A step on copies, clipped as it is and with these parameters clipped by themselves. Fails where the optimizer evens the
        difference out, as Adam does."""
        assert case.replay is not None and case.max_norm is not None and case.record is not None
        named, found = case.replay.parameters, case.replay.gradients()
        sizes = {n: float(g.float().norm()) for n, g in found.items()}
        total = math.hypot(*sizes.values())
        own = math.hypot(*(size for n, size in sizes.items() if n in owners))
        others = math.hypot(*(size for n, size in sizes.items() if n not in owners))
        if not (own > 0 and others > 0):
            return Trial(False, "no gradient")
        as_is = {named[n]: g * min(1.0, case.max_norm / total) for n, g in found.items()}
        alone = {named[n]: g * min(1.0, case.max_norm / (own if n in owners else others)) for n, g in found.items()}
        but = {id(named[n]) for n in owners if n in named}
        moved = [self._moved(step_on_copies(case.optimizer, gradients), but) for gradients in (as_is, alone)]
        said = f"a step moves the other weights by {moved[1]:.3g} of their size instead of {moved[0]:.3g}"
        return Trial(moved[1] > self.STARVED * moved[0] and moved[1] > 0, said)

    def _moved(self, copied: list[Copied] | None, but: set[int]) -> float:
        others = [each for each in copied or () if id(each.parameter) not in but]
        moved = math.sqrt(sum(float((c.after.float() - c.before.float()).square().sum()) for c in others))
        return moved / max(math.sqrt(sum(float(c.before.float().square().sum()) for c in others)), 1e-30)


class GradientNormOverflow(Cause):
    """Every gradient is finite, their norm is not, and clipping would set all to 0."""

    slug = "gradient-norm-overflow"
    specific = 0
    fix = (
        "Scale the loss down (a sum where a mean was meant, a huge weight of a term): every gradient is finite, the sum of "
        "their squares is not."
    )

    ORDINARY = 1e3
    """A loss below this is not in a unit of its own."""

    def match(self, case: Case) -> Match | None:
        if case.kind != "gradient-norm-overflow" or (case.control is not None and not case.control.gradients_finite):
            return None  # run again, a gradient itself is bad
        largest = max((n for n in (case.record.norms if case.record else ()) if math.isfinite(n)), default=math.nan)
        if case.control is not None and case.control.norms:
            largest = max((n for n in case.control.norms.values() if math.isfinite(n)), default=largest)
        said = f"every gradient is finite, the largest norm of one tensor is {largest:.4g}, and the sum of squares passes 3.4e38"
        return Match(
            confidence=0.8,
            evidence=(said,),
            phase="backward",
            where="gradient norm",
            op="norm",
            samples=(),
            trial=(lambda: self._smaller(case)) if case.replay is not None else None,
            tried="the loss scaled down by 2^-64",
        )

    def _smaller(self, case: Case) -> Trial:
        assert case.replay is not None
        factor = 2.0**-64
        found: list[float] = []

        def look() -> None:
            assert case.replay is not None
            grads = [p.grad.to_dense().float() for p in case.replay.parameters.values() if p.grad is not None]
            found.append(float(torch.stack([g.norm() for g in grads]).norm()))

        outcome = case.replay.run(scale=factor, after=look)
        held = outcome.gradients_finite and bool(found) and math.isfinite(found[0]) and found[0] > 0
        said = f"gradient norm {found[0] if found else math.nan:.4g}"
        trial = Trial(held, said, self._unit(case, found[0] / factor) if held and case.healing else ())
        # The control: a loss of an ordinary size is not in the wrong unit; its gradient grew on the way back.
        small = abs(outcome.loss) < self.ORDINARY
        reason = f"the loss is {outcome.loss:.4g}: its scale is not what makes the gradient large" * small
        return rejected(trial, reason or blown_up(case)) if held else trial

    def _unit(self, case: Case, norm: float) -> tuple[Prescription, ...]:
        """Where the loss is in a unit of its own: gradients times the power of two that takes their norm to 1, or to what is
        clipped to. Not where the run exploded on its way here, nor where the gradient does not say what the loss will do."""
        assert case.replay is not None
        before = [r.grad_norm for r in case.history if r.action != "skipped" and math.isfinite(r.grad_norm)]
        if any(g < 1e-6 * norm for g in before) or not 0.1 < (slope_ratio(case.replay) or 0.0) < 10:
            return ()
        return (Prescription("gradient-factor", {"factor": 2.0 ** -round(math.log2(norm / (case.max_norm or 1.0)))}),)


class LearningRateTooHigh(Cause):
    """The updates are so large that the weights blow up, or loss and norms rise over many steps."""

    slug = "learning-rate-too-high"
    specific = 0
    fix = "Lower the learning rate (a tenth is a good first try) and warm it up over the first steps."

    def match(self, case: Case) -> Match | None:
        if case.signal in ("stuck", "collapsed"):
            return self._stuck(case)
        if case.signal or not (case.nonfinite or case.kind == "divergence"):
            return None
        if any(not bad.only_negative for bad in (*case.bad_batch, *case.bad_inputs)):
            return None
        found = growth(case)
        blown_up = None if found is None else self._blown_up(case, found)
        if blown_up is not None or case.kind != "divergence" or case.record is None:
            return blown_up
        return self._rising(case)

    def _blown_up(self, case: Case, found: Growth) -> Match | None:
        """The records account for weights that have outgrown the run."""
        rate, start = f"{found.rate:g}", f"{found.start:.3g}"
        evidence = [
            f"the learning rate of step {found.step} is {rate}, so its update is about {found.update:.3g}; the largest weight of "
            f"{found.name} was {start} when the run began",
        ]
        made = "would be" if case.weights_broke and case.can_look_at_the_step else "is"
        evidence.append(f"the largest weight of {found.name} {made} {found.now:.3g} now, as the updates since then account for")
        if found.before is not None:
            evidence.append(f"the learning rate was {found.before[0]:g} up to step {found.before[1]}, and {rate} after it")
            fix = (
                f"Find what raises the learning rate from {found.before[0]:g} to {rate} at step {found.step} (the schedule, its "
                "number of steps, code that writes into param_groups)."
            )
        else:
            fix = f"Lower the learning rate: it is {rate}. Start at {found.sane_rate:g} or below, and warm it up."
        trial: Callable[[], Trial] | None = None
        tried, on = "the weights at the size they began with", "the replay"
        if case.weights_broke:
            tried, on = f"a learning rate of {found.sane_rate:g}", "copies of weights, gradients and state"
            gradients = gradients_of(case) if case.can_look_at_the_step else None
            if gradients is not None:
                trial = lambda: self._smaller_step(case, gradients, found)  # noqa: E731
        elif case.kind == "divergence" and case.replay is not None and case.moments:
            tried = f"a lower learning rate over the last batches, or else {tried}"
            trial = lambda: held if (held := self._slower(case)).held else self._shrunk(case)  # noqa: E731
        elif case.replay is not None and not case.bad_weights:
            trial = lambda: self._shrunk(case)  # noqa: E731
        certain = found.times >= 1e3
        if trial is None and case.kind != "divergence" and not certain:
            return None  # such weights need not overflow anything
        return Match(
            confidence=0.97 if certain else 0.8,
            evidence=tuple(evidence),
            phase="optimizer",
            where="learning rate",
            samples=(),
            fix=fix,
            trial=trial,
            tried=tried,
            on=on,
        )

    def _smaller_step(self, case: Case, gradients: dict[Tensor, Tensor], found: Growth) -> Trial:
        as_is = step_on_copies(case.optimizer, gradients)
        slower = step_on_copies(case.optimizer, gradients, settings={"lr": found.sane_rate})
        if as_is is None or slower is None:
            return Trial(False, "the step cannot be tried on copies")
        remedies = (Prescription("learning-rate", {"factor": found.sane_rate / found.rate}),)
        return Trial(not all_finite(as_is) and all_finite(slower), "every weight is finite after the step", remedies)

    def _shrunk(self, case: Case) -> Trial:
        """The same step, with every weight that has grown scaled down to the size it had at the start."""
        assert case.replay is not None
        values = weights_at_their_first_size(case)
        control = case.replay.run() if case.kind == "divergence" else case.control
        with weights_as(values):
            if case.kind != "divergence":
                return case.cured_by()
            outcome = case.replay.run()
        assert control is not None
        held = outcome.finite and not outcome.loss > 0.1 * control.loss
        return Trial(held, f"the loss is {outcome.loss:.4g} instead of {control.loss:.4g}")

    def _stuck(self, case: Case) -> Match | None:
        """Nothing is learned, and the updates are large: from fresh weights a lower rate learns the recent batches."""
        moved = case.details["moved"]
        if case.replay is None or not case.moments or case.record is None or moved < LARGE_UPDATE:
            return None
        rate = max(case.record.lr, default=math.nan)
        same = "; every sample gets the same output" if case.signal == "collapsed" else ""
        said = (
            f"the loss is {case.details['usual']:.4g}, where a constant prediction gives {case.details['trivial']:.4g}{same}; "
            f"the learning rate is {rate:g}, and one step moved the weights by {moved:.2g} of their size"
        )
        return Match(
            confidence=0.85,
            evidence=(said,),
            phase="optimizer",
            where="learning rate",
            samples=(),
            trial=lambda: self._learns(case),
            tried="a lower learning rate, from fresh weights over the recent batches",
        )

    def _learns(self, case: Case) -> Trial:
        assert case.replay is not None
        fresh = not case.details.get("before_the_run")
        how: dict[str, Any] = {"max_norm": case.max_norm, "rounds": rounds(case, 40), "from_start": fresh}
        as_is = case.rehearse(**how)
        trial = Trial(False, CANNOT_REHEARSE)
        for factor in (0.1, 0.01):
            slower = case.rehearse(factor=factor, **how)
            trial = compared(as_is, slower, fresh)
            if trial.held:
                return replace(trial, remedies=(Prescription("learning-rate", {"factor": factor}),))
        return trial

    def _rising(self, case: Case) -> Match:
        assert case.record is not None
        recent = [r for r in case.history if r.step >= case.record.step - 3 and math.isfinite(r.loss)][:12]
        shown = ", ".join(f"{r.loss:.3g}" for r in recent[:8])
        rate = max((float(x) for x in case.record.lr), default=math.nan)
        return Match(
            confidence=0.75,
            evidence=(f"the loss grows over many steps ({shown}), not at one batch; the learning rate is {rate:g}",),
            phase="optimizer",
            where="learning rate",
            trial=(lambda: self._slower(case)) if case.replay is not None and case.moments else None,
            tried="a learning rate of a tenth over the last batches",
        )

    def _slower(self, case: Case) -> Trial:
        assert case.replay is not None and case.optimizer is not None
        results: dict[float, float] = {}
        for factor in (1.0, 0.1, 0.01):
            losses = case.rehearse(factor=factor, max_norm=case.max_norm, rounds=2)
            if losses is None:
                return Trial(False, CANNOT_REHEARSE)
            results[factor] = losses[-1] if math.isfinite(losses[-1]) else math.inf
        best = min(results[0.1], results[0.01])
        helped = [factor for factor in (0.1, 0.01) if results[factor] < 0.8 * results[1.0]]
        remedies = tuple(Prescription("learning-rate", {"factor": factor}) for factor in helped)
        return Trial(best < 0.8 * results[1.0], f"the loss ends at {best:.4g} instead of {results[1.0]:.4g}", remedies)


class StaleSecondMoment(Cause):
    """Adam's second moment lags behind gradients that grew: updates of several times the learning rate."""

    slug = "stale-second-moment"
    specific = 2
    fix = "Use a smaller beta2 (0.95) or update clipping: Adam's second moment still remembers the small gradients of before."

    HIGH = 1.2

    def match(self, case: Case) -> Match | None:
        if case.kind not in ("spike", "divergence") or case.optimizer is None or case.record is None:
            return None
        size = case.details.get("update")
        betas = max((g["betas"][1] for g in groups_of(case.optimizer) if g.get("betas")), default=0.0)
        if size is None or size < self.HIGH or betas < 0.97:
            return None
        said = (
            f"the update is {size:.3g} times the learning rate (root mean square; a healthy run stays at or below 1): with "
            f"beta2={betas:g} the second moment lags behind gradients that grew"
        )
        return Match(
            # One large gradient gives a large update with any beta2: where the next steps were normal, it was the batch.
            confidence=0.92 if case.kind == "divergence" else 0.5,
            evidence=(said,),
            phase="optimizer",
            where=f"{_adam(case.optimizer)}.step",
            op=_adam(case.optimizer),
            samples=(),
            trial=(lambda: self._quicker(case)) if case.replay is not None else None,
            tried="beta2=0.95 over the last batches",
        )

    def _quicker(self, case: Case) -> Trial:
        """A second moment that has seen the last batches with beta2=0.95: is the update back at the learning rate?"""
        assert case.optimizer is not None and case.replay is not None
        squares: dict[Tensor, Tensor] = {}
        seen = 0
        for moment in list(case.moments)[-4:]:
            found: dict[Tensor, Tensor] = {}

            def take(found: dict[Tensor, Tensor] = found) -> None:
                assert case.replay is not None
                found.update({p: p.grad.to_dense().clone() for p in case.replay.parameters.values() if p.grad is not None})

            if not case.replay.run(batches=moment.batches, random=moment.random, after=take).finite:
                continue
            seen += 1
            for p, g in found.items():
                g = g.detach().float().square() * 0.05
                squares[p] = squares[p] * 0.95 + g if p in squares else g
        total, count = 0.0, 0
        for group, p, state in _kept(case.optimizer):
            if p not in squares or "exp_avg" not in state or "exp_avg_sq" not in state:
                continue
            n = float(state["step"])
            first = state["exp_avg"].float() / (1 - group["betas"][0] ** n)
            second = state["exp_avg_sq"].float() / (1 - group["betas"][1] ** n)
            quick = torch.maximum(second, squares[p] / (1 - 0.95**seen))
            total += float((first / (quick.sqrt() + group.get("eps", 1e-8))).square().sum())
            count += first.numel()
        now, after = adam_update(case.optimizer) or math.inf, math.sqrt(total / count) if count else math.inf
        said = f"the update is {after:.3g} times the learning rate instead of {now:.3g}"
        return Trial(after < 0.9 * now, said, (Prescription("optimizer-settings", {"beta2": 0.95}),))


class OptimizerStateReset(Cause):
    """Trained weights, new optimizer state: the first updates are the learning rate times a sign."""

    slug = "optimizer-state-reset"
    specific = 2
    fix = (
        "Restore the optimizer's state with the weights when resuming (optimizer.load_state_dict), or warm the learning rate "
        "up again."
    )

    def match(self, case: Case) -> Match | None:
        if case.kind not in ("spike", "divergence") or case.optimizer is None or case.record is None:
            return None
        done = steps_seen(case.optimizer)
        if done is None or done > 100:
            return None
        position = getattr(case.scheduler, "last_epoch", None)
        if isinstance(position, int) and position > done + 20:
            said = f"the schedule is at step {position}, the optimizer's state has seen {done} steps"
            return self._said(case, said, 0.95)
        if case.record.step > done + 20:
            said = f"this is step {case.record.step}, the optimizer's state has seen {done} steps"
            return self._said(case, said, 0.95)
        if case.signal != "early-jump":
            return None
        first = case.details["first"].loss
        untrained = self._untrained_loss(case)
        peak = max((r.loss for r in case.history if math.isfinite(r.loss)), default=math.nan)
        # A first loss that is no more than rounding says nothing: any step is up from there.
        if untrained is None or not 1e-7 * untrained < first < 0.3 * untrained or not peak > 0.02 * untrained:
            return None
        said = (
            f"the weights were trained already (loss {first:.4g} at the first step, {untrained:.4g} with new weights), the "
            f"optimizer's state has seen {done} steps, and the loss jumped to {peak:.4g}"
        )
        return self._said(case, said, 0.85)

    def _said(self, case: Case, said: str, confidence: float) -> Match:
        return Match(
            confidence=confidence,
            evidence=(said,),
            phase="optimizer",
            where="optimizer state",
            samples=(),
            trial=(lambda: self._kept(case))
            if case.moments and case.replay is not None and case.signal == "early-jump"
            else None,
            tried="the optimizer's state kept instead of a fresh one, over the last batches",
        )

    def _kept(self, case: Case) -> Trial:
        """From here: the next steps with the state there is now, and with none."""
        assert case.replay is not None and case.optimizer is not None
        fresh = case.rehearse(max_norm=case.max_norm, fresh=True)
        kept = case.rehearse(max_norm=case.max_norm)
        if fresh is None or kept is None:
            return Trial(False, CANNOT_REHEARSE)
        return Trial(max(fresh) > 1.5 * max(kept), f"the loss reaches {max(kept):.4g} instead of {max(fresh):.4g}")

    def _untrained_loss(self, case: Case) -> float | None:
        """The loss with weights that are initialised anew. Those of now, shuffled, would not do: the jump made them large."""
        if case.replay is None:
            return None
        with undone(case.replay.model, case.optimizer):
            initialise(case.replay.model)
            loss = case.replay.run(backward=False).loss
        return loss if math.isfinite(loss) else None
