"""Causes that lie in the model's own numbers before the step: weights and buffers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nanproof._wording import listed
from nanproof.core.support._tree import tensors_in
from nanproof.explain._case import BadWeight, Case, Prescription, Trial
from nanproof.explain._cause import Cause, Match
from nanproof.explain._start import Garbage, garbage_buffers
from nanproof.explain.causes._objective import better, rounds
from nanproof.explain.locate._locate import batch_shape, extreme, where_in_batch
from nanproof.explain.replay._surroundings import weights_as


def _listed(bad: list[BadWeight]) -> str:
    return listed([f"{b.name} ({b.count} elements)" for b in bad])


def _repaired(case: Case, bad: list[BadWeight]) -> Trial:
    """The control is the start of the run: weights that were finite then became non-finite later."""
    at_start = case.details.get("largest_at_start")
    if at_start is not None and all(math.isfinite(at_start.get(b.name, math.nan)) for b in bad):
        return Trial(False, f"{bad[0].name} was finite when the run began: something made it non-finite since")
    with weights_as({b.tensor: torch.nan_to_num(b.tensor.detach(), 0.0, 0.0, 0.0) for b in bad}):
        return case.cured_by()


class NonfiniteWeightsAtStart(Cause):
    """A checkpoint that is NaN already, or a parameter that was never initialised."""

    slug = "nonfinite-weights-at-start"
    fix = (
        "Load the last checkpoint in which every tensor is finite, and initialise parameters that no checkpoint fills "
        "(torch.empty is not an initialisation)."
    )

    GARBAGE = 1e8
    """A weight larger than this, and as many times larger than those of other parameters, is memory that nobody wrote."""

    def match(self, case: Case) -> Match | None:
        bad = case.bad_weights
        if not bad and (garbage := self._garbage(case)):
            return garbage
        if case.signal or not (_of_weights(case) and case.bad_since_start(b.name for b in bad)):
            return self._state(case)
        frozen = "" if bad[0].tensor.requires_grad else ", which is frozen"
        said = f"non-finite before the step: {_listed(bad)}{frozen}"
        if case.last_taken is not None:
            said += f"; it was so when the run began, and no step up to step {case.last_taken.step} used it"
        return Match(
            confidence=0.96,
            evidence=(said,),
            phase="weights",
            where=bad[0].name,
            samples=(),
            trial=lambda: _repaired(case, bad),
            tried="the non-finite weights set to 0",
        )

    def _garbage(self, case: Case) -> Match | None:
        """Weights that are finite, and far larger than any initialisation would make them."""
        extreme = case.nonfinite or case.kind == "divergence" or case.signal in ("huge-gradients", "heavy-clipping", "stuck")
        if not extreme or case.replay is None or case.weights_broke:
            return None
        at_start = case.details.get("largest_at_start")
        if at_start is None and not case.last_taken:
            at_start = {n: float(p.detach().abs().max()) for n, p in case.replay.parameters.items() if p.numel()}
        sizes = {n: size for n, size in (at_start or {}).items() if math.isfinite(size)}
        usual = sorted(sizes.values())[len(sizes) // 2] if sizes else 0.0
        names = [n for n, size in sizes.items() if size > self.GARBAGE * max(usual, 1e-3) and n in case.replay.parameters]
        if not names or len(names) > len(sizes) // 2:
            names = [n for n, size in sizes.items() if size > 1e15 and n in case.replay.parameters]
        if not names:
            return None
        frozen = "" if case.replay.parameters[names[0]].requires_grad else ", which is frozen"
        said = f"{listed(names)} held numbers up to {sizes[names[0]]:.3g} when the run began{frozen}; {usual:.3g} is usual here"
        return Match(
            confidence=0.97,
            evidence=(said,),
            phase="weights",
            where=names[0],
            samples=(),
            trial=lambda: self._initialised(case, names),
            tried="these weights drawn anew at an ordinary size",
        )

    def _initialised(self, case: Case, names: list[str]) -> Trial:
        """Only these are changed. Fails where the step is as bad with them at an ordinary size."""
        assert case.replay is not None
        generator = torch.Generator().manual_seed(0)
        named, before = case.replay.parameters, case.replay.run()
        values = {named[n]: 0.02 * torch.randn(named[n].shape, generator=generator).to(named[n]) for n in names}
        with weights_as(values):
            after = case.replay.run()
        held = after.finite and not after.total > 1e-4 * (before.total if before.finite else math.inf)
        return Trial(held, f"{after} instead of {before}")

    def _state(self, case: Case) -> Match | None:
        """Moments that were loaded non-finite."""
        if case.signal or not _of_state(case) or not case.bad_since_start(()):
            return None
        name, key = case.bad_state[0]
        return Match(
            confidence=0.96,
            evidence=(f"the optimizer's state was non-finite before the first step: {_listed_state(case)}",),
            phase="weights",
            where=name,
            samples=(),
            fix=f"Load an optimizer state in which every tensor is finite, or start without one: {key} of {name} is not.",
        )


class NonfiniteWeightsMidRun(Cause):
    """Weights or moments that were finite became NaN or Inf between steps, while the run went on."""

    slug = "nonfinite-weights-mid-run"
    fix = (
        "Find what writes into weights or optimizer state between steps (.data, an average of weights, a callback); if nothing "
        "does, suspect the device's memory. Snapshots or checkpoints let the run go back by itself."
    )

    def match(self, case: Case) -> Match | None:
        if case.signal:
            return None
        if _of_weights(case):
            names, said = [b.name for b in case.bad_weights], _listed(case.bad_weights)
        elif _of_state(case):
            names, said = [name for name, _ in case.bad_state], f"optimizer state {_listed_state(case)}"
        else:
            return None
        if case.bad_since_start(names if _of_weights(case) else ()):
            return None
        seen = f"first seen at step {case.record.step}" if case.record is not None else "seen at the end of the run"
        evidence = [f"non-finite before the step: {said}, {seen}"]
        last = case.last_taken
        if last is not None:
            evidence.append(f"step {last.step} was taken with a finite loss and finite gradients")
            if last.weights_checked:
                evidence.append(
                    f"the weights were checked after step {last.step} and were finite, so the optimizer did not do it"
                )
            else:
                evidence.append(f"the weights were not checked after step {last.step}, so that step may have broken them")
        evidence += case.details.get("mid_run", ())
        return Match(
            confidence=0.9,
            evidence=tuple(evidence),
            phase="weights",
            where=names[0],
            samples=(),
            fix=(
                f"Find what writes into {names[0]} or its optimizer state between steps (.data, an average of weights, a "
                "callback); if nothing does, suspect the device's memory. Snapshots or checkpoints let the run go back by itself."
            ),
        )


def _of_weights(case: Case) -> bool:
    """Weights were non-finite before the step."""
    return bool(case.bad_weights) and not case.weights_broke


def _of_state(case: Case) -> bool:
    """Weights were finite before the step, and moments were not."""
    return case.kind == "nonfinite-weight" and case.can_look_at_the_step and not case.bad_weights and bool(case.bad_state)


def _listed_state(case: Case) -> str:
    return listed([f"{key} of {name}" for name, key in case.bad_state])


class UninitializedRows(Cause):
    """New rows of an embedding are garbage; only batches with their ids fail."""

    slug = "uninitialized-rows"
    specific = 2
    fix = (
        "Initialise the new rows, for instance with the mean of the old ones (transformers: resize_token_embeddings(..., "
        "mean_resizing=True))."
    )

    def match(self, case: Case) -> Match | None:
        if case.weights_broke or not case.nonfinite or case.replay is None or case.signal:
            return None
        tables = {len(m.weight) for m in case.replay.modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
        bad = case.bad_weights
        if bad and not case.could_be_uninitialised(b.name for b in bad):
            return None
        rows_only = bool(bad) and all(_some_rows(b, tables) for b in bad)
        if rows_only:
            first = bad[0]
            rows = list(first.rows)
            said = (
                f"{len(rows)} of {len(first.tensor)} rows of {first.name} are non-finite ({_span(rows)}); the other rows are fine"
            )
            confidence = 0.97
        else:
            found = self._garbage(case) if not bad else None
            if found is None:
                return None
            name, table, rows = found
            first = BadWeight(name, table, 0, tuple(rows), True, nn.Identity())
            said = f"{len(rows)} of {len(table)} rows of {name} are over 10,000 times as large as the others ({_span(rows)})"
            confidence = 0.9
        samples, tokens, used = self._used(case, rows)
        if used:
            said += f"; this batch holds {used}"
        return Match(
            confidence=confidence if used or first.whole_rows else 0.8,
            evidence=(said,),
            phase="weights",
            where=f"{first.name}[{rows[0]}]",
            op="embedding",
            samples=samples,
            tokens=tokens,
            trial=lambda: self._filled(case, bad or [first]),
            tried="these rows set to the mean of the others",
        )

    def _garbage(self, case: Case) -> tuple[str, Tensor, list[int]] | None:
        """Finite rows of nonsense: what torch.empty happened to hold."""
        assert case.replay is not None
        tables = {id(module.weight) for module in case.replay.model.modules() if isinstance(module, nn.Embedding)}
        for name, p in case.replay.parameters.items():
            if id(p) not in tables or len(p) < 8:
                continue
            sizes = p.detach().float().abs().amax(1)
            rows = torch.nonzero(sizes > 1e4 * sizes.median().clamp(min=1e-6)).flatten().tolist()
            if 0 < len(rows) < len(p) // 2:
                return name, p, rows
        return None

    def _used(self, case: Case, rows: list[int]) -> tuple[tuple[int, ...], tuple[int, ...], str]:
        assert case.replay is not None
        for batch in case.replay.batches:
            samples, length = batch_shape(batch)
            for name, t in tensors_in(batch):
                if t.dtype in (torch.int64, torch.int32) and t.dim() >= 2 and t.shape[0] == samples:
                    hit = torch.isin(t, torch.tensor(rows, device=t.device))
                    if bool(hit.any()):
                        where = where_in_batch(hit, samples, length)
                        spot = tuple(int(i) for i in torch.nonzero(hit)[0])
                        found = where if len(where[0]) < samples else ((), ())
                        return found[0], found[1], f"id {int(t[spot])} in {name} at {list(spot)}"
        return (), (), ""

    def _filled(self, case: Case, bad: list[BadWeight]) -> Trial:
        values = {}
        for b in bad:
            table = b.tensor.detach().clone()
            good = torch.ones(len(table), dtype=torch.bool, device=table.device)
            good[list(b.rows)] = False
            table[~good] = table[good].mean(0)
            values[b.tensor] = table
        with weights_as(values):
            trial = case.cured_by()
        rows = {b.name: list(b.rows) for b in bad}
        return replace(trial, remedies=(Prescription("filled-rows", {"rows": rows}),))


def _some_rows(b: BadWeight, tables: set[int]) -> bool:
    table = isinstance(b.module, (nn.Embedding, nn.EmbeddingBag))
    head = b.tensor.dim() == 2 and len(b.tensor) in tables
    few = b.tensor.dim() >= 2 and 0 < len(b.rows) <= len(b.tensor) // 2
    return few and (table or (head and b.whole_rows))


def _span(rows: list[int]) -> str:
    if len(rows) > 1 and rows == list(range(rows[0], rows[-1] + 1)):
        return f"rows {rows[0]} to {rows[-1]}"
    return "row " + ", ".join(map(str, rows[:4])) + (" and more" if len(rows) > 4 else "")


class UninitializedBuffer(Cause):
    """A buffer that is finite and was never written: rotary frequencies, say, after loading through the meta device."""

    slug = "uninitialized-buffer"
    specific = 2
    fix = (
        "Compute the buffer again after the model was made on the meta device or with to_empty (non-persistent buffers are in no "
        "checkpoint), or register it as persistent."
    )

    def match(self, case: Case) -> Match | None:
        if case.model is None or not (case.nonfinite or case.kind == "divergence" or case.signal in ("garbage-buffers", "stuck")):
            return None
        found = garbage_buffers(case.model)
        if not found:
            return None
        first = found[0]
        return Match(
            confidence=0.95 if first.fresh is not None else 0.88,
            evidence=(f"{first.name} holds {first.seen}", *((first.compared(),) if first.fresh is not None else ())),
            phase="buffer",
            where=first.name,
            samples=(),
            trial=(lambda: self._written(case, found)) if case.replay is not None else None,
            tried="the buffer as a new module of this class has it" if first.fresh is not None else "an ordinary value in it",
        )

    def _written(self, case: Case, found: list[Garbage]) -> Trial:
        """Fails where the buffer has no part in the loss, where the step is as bad without the garbage, and, where nothing is
        known about what belongs there, where the run learns as well with it."""
        assert case.replay is not None
        values = {g.buffer: g.fresh if g.fresh is not None else g.ordinary for g in found}
        before = case.replay.run()
        with weights_as(values):
            after = case.replay.run()
        moved = abs(after.loss - before.loss) / max(abs(before.loss), 1e-12) + abs(after.total / max(before.total, 1e-30) - 1)
        apart = not before.finite or moved > 1e-5
        trial = Trial(after.finite and apart, f"{after} instead of {before}")
        if not trial.held or not before.finite or all(g.fresh is not None for g in found):
            return trial
        how: dict[str, Any] = {"max_norm": case.max_norm, "rounds": rounds(case, 80)}
        as_is = case.rehearse(**how)
        written = case.rehearse(under=lambda: weights_as(values), **how)
        return better(as_is, written)


class PoisonedBuffer(Cause):
    """Running statistics took in a bad batch: training looks fine, evaluation is NaN."""

    slug = "poisoned-buffer"
    fix = (
        "Restore the buffers when a step is skipped (the guard does), reset the running statistics, and keep extreme batches out."
    )

    def match(self, case: Case) -> Match | None:
        if case.bad_buffer:
            said = f"the forward made the buffer {case.bad_buffer} non-finite; its last finite values were put back"
            if case.control is not None and case.control.finite:
                said += f". Loss and gradients look fine ({case.control}), evaluation would be NaN"
            return Match(
                confidence=0.93,
                evidence=(said,),
                phase="buffer",
                where=case.bad_buffer,
                samples=found.samples if (found := extreme(case.replay.batches, 1e3) if case.replay else None) else (),
                trial=(lambda: self._smaller(case)) if case.replay is not None else None,
                tried="the batch scaled down to an ordinary size",
            )
        if not case.bad_buffers or case.bad_weights:
            return None
        bad = case.bad_buffers
        return Match(
            confidence=0.9,
            evidence=(f"non-finite buffers: {_listed(bad)}",),
            phase="buffer",
            where=bad[0].name,
            trial=lambda: self._reset(case, bad),
            tried="the non-finite buffer values reset",
        )

    def _smaller(self, case: Case) -> Trial:
        """With the batch at an ordinary size, the forward leaves every buffer finite."""
        assert case.replay is not None

        def shrink(x: Tensor) -> Tensor:
            return x / x.abs().max().clamp(min=1) if x.is_floating_point() and bool(torch.isfinite(x).all()) else x

        bad: list[str] = []
        buffers = list(case.replay.model.named_buffers())

        def look() -> None:
            floating = [(name, b) for name, b in buffers if b.is_floating_point()]
            bad.extend(name for name, b in floating if bool((torch.isnan(b) | (b == torch.inf)).any()))

        control = case.replay.run(after=look)
        before = list(bad)
        bad.clear()
        outcome = case.replay.run(batches=case.batches_with(shrink), after=look)
        return Trial(
            bool(before) and not bad and outcome.finite, f"every buffer finite, where {', '.join(before[:2]) or control} was not"
        )

    def _reset(self, case: Case, bad: list[BadWeight]) -> Trial:
        assert case.replay is not None
        values = {}
        for b in bad:
            filler = 1.0 if "var" in b.name else 0.0
            values[b.tensor] = torch.nan_to_num(b.tensor.detach(), filler, filler, filler)
        with case.replay.evaluating():
            control = case.replay.run(backward=False)
            with weights_as(values):
                outcome = case.replay.run(backward=False)
        return Trial(
            not control.finite and outcome.finite,
            f"in evaluation the loss is {outcome.loss:.4g} instead of {control.loss:.4g}",
            (Prescription("reset-buffers", {"names": [b.name for b in bad]}),),
        )
