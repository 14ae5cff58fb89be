"""Causes that lie in the data: what is in the batch, or what is missing from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanproof._wording import few
from nanproof.core.support._tree import tensors_in
from nanproof.explain._case import Case, Trial, bad_in_batch, finite
from nanproof.explain._cause import Cause, Match, at_birth
from nanproof.explain._controls import rejected
from nanproof.explain.causes._objective import compared, rounds
from nanproof.explain.locate._calls import CallStack, tensors_of
from nanproof.explain.locate._locate import extreme, far_off, guilty_sample
from nanproof.explain.locate._trace import Operand
from nanproof.explain.locate._writes import write_into_batch
from nanproof.explain.replay._interventions import Intervention, NoEmptyMean, SafeDivision, ZeroInfinity

FAR = 1e6
"""A sample that is so many times larger than the others of its batch is no sample of the same kind."""


class NonfiniteBatch(Cause):
    """NaN or Inf in features, targets or log-probs that came with the batch."""

    slug = "nonfinite-batch"
    fix = "Drop or repair the sample where the data is read; check features, targets and stored log-probs for NaN and Inf there."

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or not (case.bad_batch or case.bad_inputs) or (case.spoilt and case.write):
            return None
        # -inf alone may be a mask that is there on purpose.
        bad = sorted(case.bad_batch or case.bad_inputs, key=lambda b: b.only_negative)
        first = bad[0]
        when = "before the forward" if case.bad_batch else "when the step was refused"
        said = f"{first.name} holds {first.value} at {list(first.first)} {when} ({first.count} such elements)"
        samples = tuple(sorted({s for b in bad if not b.only_negative or first.only_negative for s in b.samples}))
        confidence = 0.45 if first.only_negative else 0.98
        if not case.bad_batch:
            # Looked at after the step, which may have written it, and without a replay that would tell whether it matters.
            said = f"the model was called with non-finite numbers: {said}"
            confidence = 0.3 if first.only_negative else 0.7
        return Match(
            confidence=confidence,
            evidence=(said,),
            phase="batch",
            where=first.name,
            samples=samples,
            trial=(lambda: case.cured_by(batches=case.batches_with(finite))) if case.replay and case.bad_batch else None,
            tried="the non-finite elements of the batch replaced by 0",
        )


class ChangedInPlace(Cause):
    """The step writes into its own batch, and that is where the number stops being finite."""

    slug = "changed-in-place"
    fix = (
        "Compute on a copy instead of writing into the batch (x = x - mean, not x.sub_(mean)), and make the operation safe for "
        "this sample."
    )

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.replay is None or not case.written or case.write is None:
            return None
        write, spoilt = case.write, case.spoilt
        if not write.breaks and not (spoilt and case.bad_batch):
            return None
        what = f"{write.op} at {write.source or 'a line that is not known'} writes into {write.name}"
        said = f"{what}, which is finite before that and not afterwards"
        if not write.breaks:
            said = f"{what}: what the batch held before this step is gone, and what it holds now is non-finite"
        return Match(
            confidence=0.985 if write.breaks else 0.75,
            evidence=(said,),
            phase="forward",
            where=write.name,
            op=write.op,
            source=write.source or None,
            samples=write.samples or None,
            trial=(lambda: self._before_and_after(case)) if write.breaks else None,
            tried="a copy of the batch, looked at before and after each write",
        )

    def _before_and_after(self, case: Case) -> Trial:
        """Fails where the batch is non-finite before the step, or stays finite in it."""
        assert case.replay is not None
        before = any(bad_in_batch(batch, tensors_in(batch)) for batch in case.replay.batches)
        again = write_into_batch(case.replay)
        held = not before and again is not None and again.breaks
        return Trial(held, "finite before, non-finite after the write" if held else "the write does not make it non-finite")


MOVED = 1e-2


def _moved_a_little(x: Tensor) -> Tensor:
    """Add noise of a hundredth of the size of the numbers."""
    if not _plain_numbers(x):
        return x
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    return x.detach() + MOVED * x.detach().abs().mean() * noise


def _of_usual_size(x: Tensor) -> Tensor:
    """Samples that are far too large, at the size of the others."""
    found = far_off(x, FAR)
    if found is None:
        return x
    sizes, usual, far = found
    smaller = torch.where(far, usual / sizes, torch.ones_like(sizes))
    return x * smaller.reshape(-1, *[1] * (x.dim() - 1))


class NoSupervisedTargets(Cause):
    """Every label is ignored, or a selection is empty: a mean over nothing."""

    slug = "no-supervised-targets"
    fix = (
        "Drop batches without a supervised target (or raise max_length so that the answer is not cut off), and divide the "
        "sum by max(1, count)."
    )

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.birth is None:
            return None
        op = case.birth.op
        empty = any(0 in i.shape for i in op.inputs)
        ignored = [
            name
            for batch in (case.replay.batches if case.replay else ())
            for name, t in tensors_in(batch)
            if t.dtype in (torch.int64, torch.int32) and t.numel() and bool((t == -100).all())
        ]
        trial = self._averaged
        if "nll_loss" in op.name and not empty:
            targets = op.inputs[1].value if len(op.inputs) > 1 else None
            skipped = next((s for s in reversed(op.scalars) if isinstance(s, int)), -100)
            if targets is None or not bool((targets == skipped).all()):
                return None
            said = f"all {targets.numel()} targets of the cross entropy are {skipped}, the ignored index: a mean over nothing"
        elif empty and op.nan_out:
            said = f"{op.name} is the mean of an empty selection (shape {_empty_shape(op.inputs)})"
        elif ignored and op.name in ("div", "div_", "mean"):
            trial = self._supervised
            said = f"every element of {ignored[0]} is -100, the ignored index: nothing is supervised, and the mean is 0/0"
        else:
            return None
        return at_birth(
            case.birth,
            0.96,
            said,
            lambda: trial(case),
            "the sum divided by max(1, count)",
        )

    def _averaged(self, case: Case) -> Trial:
        return case.cured_by_either((NoEmptyMean(),), (SafeDivision(),))

    def _supervised(self, case: Case) -> Trial:
        """The control supervises every label, and a count of 0 in the batch is 1: the step must be finite then, or the divisor of
        0 comes from somewhere else."""
        assert case.replay is not None
        labelled = case.replay.run(batches=case.batches_with(_labelled))
        reason = "" if labelled.finite else f"with every label supervised it is not finite either: {labelled}"
        return rejected(self._averaged(case), reason)


def _labelled(t: Tensor) -> Tensor:
    if t.dtype not in (torch.int64, torch.int32):
        return t
    return torch.where(t == -100, 0, t) if t.dim() else t.clamp(min=1)


def _empty_shape(inputs: list[Operand]) -> str:
    return str(next(list(i.shape) for i in inputs if 0 in i.shape))


class CtcInfeasible(Cause):
    """CTC's loss is Inf: the input is shorter than the target needs."""

    slug = "ctc-infeasible"
    fix = (
        "Filter samples whose input is shorter than their target needs (its length plus one for each repeated symbol), or "
        "set zero_infinity=True."
    )

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.birth is None or "ctc_loss" not in case.birth.op.name:
            return None
        birth, op = case.birth, case.birth.op
        where = birth.place() or ""
        return at_birth(
            birth,
            0.97,
            f"ctc_loss is infinite{where}: the input is shorter than the target needs ({_lengths(op.scalars, op.inputs)})",
            lambda: self._infeasible(case),
            "zero_infinity=True",
        )

    def _infeasible(self, case: Case) -> Trial:
        """The control gives every symbol the same probability: too short an input stays infinite, and nothing else does."""
        assert case.replay is not None
        trial = case.cured_by(ZeroInfinity())
        uniform = case.replay.run(_Uniform(), backward=False)
        reason = f"with uniform probabilities the loss is {uniform.loss:.4g}: the input is long enough"
        return rejected(trial, reason if math.isfinite(uniform.loss) else "")


class _Uniform(Intervention):
    """ctc_loss of log-probabilities that are all the same."""

    names = frozenset({"ctc_loss"})

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        self.acted += 1
        return func(torch.full_like(args[0], -math.log(args[0].shape[-1])), *args[1:], **kwargs)


def _lengths(scalars: list[Any], inputs: list[Operand]) -> str:
    lists: list[Any] = [s for s in scalars if isinstance(s, (list, tuple)) and s and isinstance(s[0], int)]
    if len(lists) < 2:
        small = [
            i.value.tolist() for i in inputs if i.value is not None and i.value.dim() == 1 and not i.value.is_floating_point()
        ]
        lists = small[-2:]
    return f"input lengths {lists[0]}, target lengths {lists[1]}" if len(lists) >= 2 else "lengths not at hand"


class InputsNotNormalised(Cause):
    """Pixels of 0 to 255, or features of very different scale: at ordinary rates the run diverges, or learns nothing."""

    slug = "inputs-not-normalised"
    specific = 2
    fix = (
        "Bring the inputs to a mean of 0 and a deviation of 1 (images: divide by 255 and subtract the mean; features: "
        "standardise each, or take the logarithm of the large ones). A lower rate hides this and makes the rest learn slowly."
    )

    LARGE = 10.0
    """Size of inputs, as the root of their mean square, from which they count as not normalised."""

    def match(self, case: Case) -> Match | None:
        failed = case.kind == "divergence" or case.signal in ("stuck", "collapsed", "heavy-clipping", "dead-parameters")
        failed = failed or case.signal in ("early-jump", "huge-gradients") or (case.nonfinite and not case.weights_broke)
        if not failed or case.replay is None or not case.moments or case.bad_batch or case.bad_weights:
            return None
        large = self._large(case)
        if not large:
            return None
        name, t, size = large[0]
        columns = _feature_sizes(t)
        spread = f"; its features have deviations from {columns[0]:.3g} to {columns[1]:.3g}" if columns else ""
        return Match(
            confidence=0.8,
            evidence=(f"{name} goes into the model with numbers of {size:.4g} on average{spread}",),
            phase="data",
            where=name,
            samples=(),
            trial=lambda: self._standardised(case, [n for n, _, _ in large]),
            tried="inputs of mean 0 and deviation 1, from fresh weights over the recent batches",
        )

    def _large(self, case: Case) -> list[tuple[str, Tensor, float]]:
        """Floating-point tensors of the batch that are large and go into the model."""
        assert case.replay is not None
        if len(case.replay.batches) != 1:
            return []
        floats = [(n, t) for n, t in tensors_in(case.replay.batches[0]) if t.dim() > 1 and t.numel() > 8 and _plain_numbers(t)]
        sized = [(n, t, _usual_size(t)) for n, t in floats]
        large = [(n, t, size) for n, t, size in sized if size > self.LARGE]
        if not large:
            return []
        given: set[tuple[int, float]] = set()

        def note(_call: Any, args: Any, kwargs: Any, _output: Any) -> None:
            given.update(_mark(x) for x in tensors_of((args, kwargs)) if _plain_numbers(x))

        case.replay.run(CallStack(case.replay.model).following(on_leave=note), backward=False)
        return [(n, t, size) for n, t, size in large if _mark(t) in given]

    def _standardised(self, case: Case, names: list[str]) -> Trial:
        assert case.replay is not None
        fresh = not case.details.get("before_the_run")
        how: dict[str, Any] = {"max_norm": case.max_norm, "rounds": rounds(case, 40), "from_start": fresh}
        whole = {id(t) for m in case.moments for b in m.batches for n, t in tensors_in(b) if n in names}
        as_is = case.rehearse(**how)
        change = partial(_standard, whole)
        return compared(as_is, case.rehearse(change=change, **how), fresh)


def _standard(which: set[int], t: Tensor) -> Tensor:
    """Mean 0 and deviation 1: of each feature of a table, of a picture or a signal as a whole."""
    if id(t) not in which:
        return t
    x = t.detach().float()
    axes = tuple(range(x.dim() - 1)) if x.dim() == 2 else tuple(range(x.dim()))
    deviation, mean = torch.std_mean(x, axes, correction=0, keepdim=True)
    return ((x - mean) / deviation.clamp(min=1e-6)).to(t.dtype if t.is_floating_point() else torch.float32)


def _feature_sizes(t: Tensor) -> tuple[float, float] | None:
    """The least and largest deviation of the columns of a table."""
    if t.dim() != 2 or len(t) < 2:
        return None
    deviations = t.detach().float().std(0)
    return float(deviations.min()), float(deviations.max())


def _usual_size(t: Tensor) -> float:
    """The root mean square of a sample, in the middle of all samples: one that is far off does not count."""
    return float(t.detach().float().reshape(len(t), -1).square().mean(1).sqrt().median())


def _plain_numbers(t: Tensor) -> bool:
    return t.is_floating_point() and t.layout is torch.strided and t.numel() > 0


def _mark(t: Tensor) -> tuple[int, float]:
    """What a tensor has in common with a copy of it."""
    return t.numel(), float(t.detach().float().abs().max())


class OutlierBatch(Cause):
    """A spike from one batch, or an overflow where a sample is extreme; the next ones are normal again."""

    slug = "outlier-batch"
    fix = 'Look at this batch (its source, scaling, labels); clip or skip it: Policy(on_spike="skip") refuses such steps.'

    def match(self, case: Case) -> Match | None:
        if case.nonfinite and case.replay is not None and not (case.signal or case.bad_batch or case.bad_weights):
            return self._overflowed(case, case.replay.batches)
        if case.kind != "spike" or case.record is None or case.signal:
            return None
        said = (
            f"loss {case.record.loss:.4g} at step {case.record.step} where {case.record.loss_size:.4g} was usual; the steps "
            "after it were normal"
        )
        return Match(
            confidence=0.6,
            evidence=(said,),
            phase="data",
            where=f"the batch of step {case.record.step}",
            samples=self._samples(case),
            trial=(lambda: self._compare(case)) if case.replay is not None else None,
            tried="other batches of the run in its place",
        )

    def _overflowed(self, case: Case, batches: Sequence[Any]) -> Match | None:
        """Every number of the batch is finite, but some are so large that what is computed from them is not."""
        found = extreme(batches, FAR)
        if found is None:
            return None
        numbers = f"sample{'s' if len(found.samples) > 1 else ''} {few(found.samples)}"
        return Match(
            confidence=0.94,
            evidence=(
                f"{found.name} holds numbers up to {found.largest:.4g} in {numbers}, where {found.usual:.4g} is usual: they are "
                "finite, what is computed from them is not",
            ),
            phase="data",
            where=found.name,
            op=case.birth.op.name if case.birth is not None else None,
            source=case.birth.op.source if case.birth is not None else None,
            samples=found.samples,
            trial=lambda: case.cured_by(batches=case.batches_with(_of_usual_size)),
            tried="these samples scaled down to the usual size",
            fix="Drop or repair these samples where the data is read: they were damaged, or are in another unit.",
        )

    def _compare(self, case: Case) -> Trial:
        """With the weights of now, this batch is still far off and the others are not."""
        assert case.replay is not None and case.record is not None
        own = case.replay.run(backward=True)
        others = [case.replay.run(batches=m.batches) for m in case.moments if m.step != case.record.step][-3:]
        if not others:
            return Trial(False, "no other batch at hand")
        usual = max(o.total for o in others)
        loss = max(abs(o.loss) for o in others)
        off = own.total > 5 * usual or abs(own.loss) > 3 * loss
        said = f"gradient norm {usual:.4g} instead of {own.total:.4g}, loss {loss:.4g} instead of {own.loss:.4g}"
        # The control moves every number a little. An outlier stays one; the rounding that a step amplifies does not.
        moved = case.replay.run(batches=case.batches_with(_moved_a_little))
        calm = moved.finite and moved.total < 0.2 * own.total and abs(moved.loss) < max(0.2 * abs(own.loss), 3 * loss)
        return rejected(Trial(off, said), f"moved by {MOVED:.0e} of its size, the batch is ordinary: {moved}" if calm else "")

    def _samples(self, case: Case) -> tuple[int, ...]:
        """The sample that makes the difference, if it is one: halfway between this batch and an ordinary one is the line."""
        others = [m.batches[0] for m in case.moments if case.record and m.step != case.record.step and len(m.batches) == 1]
        if case.replay is None or not others:
            return ()
        own, usual = case.replay.run(), case.replay.run(batches=[others[-1]])
        if not own.total > 5 * usual.total > 0:
            return ()
        line = math.sqrt(own.total * usual.total)
        return guilty_sample(case.replay, others[::-1], bad=lambda outcome: not outcome.total < line)
