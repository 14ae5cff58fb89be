"""Preflight: what can be told before step 0 from the model, the optimizer, one batch and a forward and backward or two.

Everything is left as it was: weights, gradients, buffers, optimizer state, random numbers.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nanproof._errors import UsageError
from nanproof._records import ABSENT, Diagnosis, StepRecord
from nanproof.core.judge._optimizers import bare_optimizer
from nanproof.core.judge._parameters import Parameters, clean_name, unwrap
from nanproof.core.support._context import Mode
from nanproof.core.support._signals import shielded
from nanproof.core.support._tree import tensors_in
from nanproof.explain._case import Case
from nanproof.explain._diagnose import explain
from nanproof.explain._graph import Activated, Broadcast, applied_twice, broadcast_in, nodes_of
from nanproof.explain._silent import HUGE, TINY, UNCHANGED, is_shifted, shifted_pairs
from nanproof.explain._start import garbage_buffers
from nanproof.explain.causes._raised import IdsOutOfRange
from nanproof.explain.locate._calls import tensors_of
from nanproof.explain.locate._indices import find_outside_id, place_in_batch
from nanproof.explain.locate._locate import batch_shape
from nanproof.explain.replay._copies import all_finite, changed_share, step_on_copies
from nanproof.explain.replay._recorder import Moment
from nanproof.explain.replay._replay import CannotReplay, Deadline, Outcome, Replay
from nanproof.probes._contract import ProbeResult
from nanproof.probes._probing import Probing
from nanproof.probes._run import probe

HEADROOM = 8.0
"""An fp16 output within this factor of 65504 is reported."""


def preflight(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    scaler: Any = None,
    scheduler: Any = None,
    max_norm: float | None = 1.0,
    seconds: float = 60.0,
    accumulate: int = 1,
) -> list[Diagnosis]:
    """Look for what would go wrong, before the first step. Empty if nothing was found; surest first.

    Args:
        model: the module as it will be trained.
        optimizer: the optimizer over its parameters, or a list of them.
        batch: one batch as the loop will give it.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss.
        scaler: the GradScaler, if there will be one.
        scheduler: the learning-rate scheduler, if there will be one.
        max_norm: what gradients will be clipped to.
        seconds: how long it may take.
        accumulate: how many micro-batches the loop splits a batch into. The loop averages their losses,
            as `guard.train_step([micro, ...])` does, so `loss_fn` must return a mean over its batch.

    Found are: weights, buffers or batch that are non-finite; parameters that the optimizer holds twice, does not hold, or that
    are not the model's; fp16 and bf16 traps; a forward or backward that is not finite, with its cause; parameters without a
    gradient; ids out of range; labels shifted twice, or all ignored; masks that empty a row; fp16 outputs near the end of its
    range; an activation applied twice, a loss that is broadcast, pairs that are identical, buffers that were never written, a
    learning rate at which nothing is learned, inputs that are not normalised.

    Where forward and backward are finite, probes change one thing and compare: predictions that depend on later tokens, packed
    documents that see each other, padding that changes the loss, samples that depend on each other or not on their own input, an
    input that nothing depends on, training that differs from evaluation, accumulation that is not a mean, and state that a
    checkpoint does not hold.
    """
    return examine(
        model,
        optimizer,
        batch,
        loss_fn,
        scaler=scaler,
        scheduler=scheduler,
        max_norm=max_norm,
        seconds=seconds,
        accumulate=accumulate,
    ).found


@dataclass(frozen=True, slots=True)
class Examined:
    """What a preflight came to."""

    found: list[Diagnosis]
    """Surest first."""
    probes: list[ProbeResult]
    """What each probe that applied did and saw."""


@shielded
def examine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    scaler: Any = None,
    scheduler: Any = None,
    max_norm: float | None = 1.0,
    seconds: float = 60.0,
    accumulate: int = 1,
) -> Examined:
    """Do what `preflight` does, and return what the probes saw too."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"preflight(model=...): a torch.nn.Module is needed, not {type(model).__name__}")
    if not callable(loss_fn):
        raise UsageError("preflight(loss_fn=...): a function loss_fn(model, batch) is needed")
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise UsageError(f"preflight(scaler=...): a GradScaler is needed, not {type(scaler).__name__}")
    if accumulate < 1:
        raise UsageError(f"preflight(accumulate=...): a number of micro-batches from 1 is needed, not {accumulate}")
    deadline = Deadline.after(seconds)
    flight = _Flight(model, bare_optimizer(optimizer), batch, loss_fn, scaler, scheduler, max_norm, deadline, accumulate)
    flight.look()
    return Examined(sorted(flight.found, key=lambda d: -d.confidence), flight.probes)


class _Flight:
    """One preflight under way."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        scaler: Any,
        scheduler: Any,
        max_norm: float | None,
        deadline: Deadline,
        accumulate: int,
    ) -> None:
        self.model, self.optimizer, self.batch, self.loss_fn = model, optimizer, batch, loss_fn
        self.scaler, self.scheduler, self.max_norm, self.deadline = scaler, scheduler, max_norm, deadline
        self.parameters = Parameters(model, optimizer)
        self.replay = Replay(model, loss_fn, [batch], deadline=deadline, mode=_as_training(model, self.parameters.device))
        self.found: list[Diagnosis] = []
        self.accumulate = accumulate
        self.probes: list[ProbeResult] = []

    def look(self) -> None:
        try:
            self._optimizer()
            self._batch()
            outcome = self._forward_and_backward()
            if outcome is not None and outcome.finite:
                self._learning(outcome)
                self._objective(outcome)
                self._first_update(outcome)
                self._headroom()
                self._probe()
        except CannotReplay as why:
            self.found.append(Diagnosis(cause="unknown", confidence=0.0, evidence=(str(why),), fix="Give it more seconds."))

    def _add(self, cause: str, confidence: float, evidence: str, fix: str, **more: Any) -> None:
        if all(d.cause != cause for d in self.found):
            self.found.append(Diagnosis(cause=cause, confidence=confidence, evidence=(evidence,), fix=fix, **more))

    def _explain(self, kind: str, **facts: Any) -> Diagnosis:
        diagnosis = explain(self._case(kind, **facts))
        if diagnosis.cause != "unknown" and all(d.cause != diagnosis.cause for d in self.found):
            self.found.append(diagnosis)
        return diagnosis

    def _case(self, kind: str, **facts: Any) -> Case:
        return Case(
            kind,
            model=self.model,
            replay=self.replay,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            max_norm=self.max_norm,
            **facts,
        )

    # -- what needs no forward -------------------------------------------------------------------------------------------------

    def _optimizer(self) -> None:
        members = [p for group in self.optimizer.param_groups for p in group["params"]]
        if len({id(p) for p in members}) < len(members):
            twice = len(members) - len({id(p) for p in members})
            said = f"{twice} parameters are in the optimizer's groups more than once: they are updated that many times a step"
            self._add("duplicate-parameters", 0.99, said, "Pass each parameter to the optimizer once.", phase="optimizer")
        foreign, left_out = self.parameters.foreign, self.parameters.left_out
        if foreign and left_out:
            said = f"the optimizer holds {len(foreign)} tensors that the model does not have, and lacks {', '.join(left_out[:3])}"
            self._explain("no-learning", signal="foreign-parameters", details={"message": said, "left_out": left_out})
        elif left_out:
            said = f"{len(left_out)} trainable parameters are not in the optimizer, {left_out[0]} among them"
            fix = "Add them to the optimizer, or freeze them with requires_grad_(False) if they are meant to stay."
            self._add("parameters-not-optimized", 0.6, said, fix, phase="optimizer", where=left_out[0])
        frozen = [n for n, p in zip(self.parameters.names, self.parameters.tensors, strict=True) if not p.requires_grad]
        if frozen and len(frozen) == len(self.parameters.names):
            said = f"all {len(frozen)} parameters of the optimizer are frozen"
            self._add("no-gradient-path", 0.99, said, "Set requires_grad on those to train.", phase="optimizer", where=frozen[0])
        rates = [float(group.get("lr", 1.0)) for group in self.optimizer.param_groups]
        if rates and all(rate == 0 for rate in rates) and self.scheduler is None:
            fix = "Set a learning rate above 0, or pass the scheduler if one will."
            self._add("learning-rate-zero", 0.9, "the learning rate is 0 in every group", fix, phase="optimizer")
        half = [n for n, p in zip(self.parameters.names, self.parameters.tensors, strict=True) if p.dtype == torch.float16]
        scaled = self.scaler is not None and self.scaler.is_enabled()
        if half and scaled:
            error = ValueError("Attempting to unscale FP16 gradients.")
            self._explain("exception", error=error)

    def _batch(self) -> None:
        samples, _ = batch_shape(self.batch)
        for name, t in tensors_in(self.batch):
            if t.dim() != 2 or t.shape[0] != samples or not t.numel() or t.is_complex():
                continue
            ignored = not t.is_floating_point() and t.dtype != torch.bool and (t == -100).all(1)
            if isinstance(ignored, Tensor) and bool(ignored.any()):
                rows = tuple(int(i) for i in torch.nonzero(ignored).flatten())
                everything = len(rows) == samples
                said = f"every label of {name} is -100, the ignored index, for {len(rows)} of {samples} samples"
                fix = "Leave out samples without a supervised target, or raise max_length so that the answer is not cut off."
                self._add("no-supervised-targets", 0.95 if everything else 0.6, said, fix, phase="data", where=name, samples=rows)
            if ("attention" in name or "padding" in name) and bool(((t == 0) | (t == 1)).all()):
                empty = (t == 0).all(1)
                if bool(empty.any()):
                    rows = tuple(int(i) for i in torch.nonzero(empty).flatten())
                    said = f"{name} allows nothing for {len(rows)} of {samples} samples: their attention rows are fully masked"
                    fix = "Drop samples that are all padding, or leave one position visible."
                    self._add("attention-row-fully-masked", 0.6, said, fix, phase="data", where=name, samples=rows)

    # -- one forward and backward ----------------------------------------------------------------------------------------------

    def _forward_and_backward(self) -> Outcome | None:
        outside, outcome = find_outside_id(self.replay, refuse=True)
        if outside is not None:
            place = place_in_batch(outside.lookup, [self.batch])
            self._add(
                IdsOutOfRange.slug,
                0.99,
                f"{outside.lookup.op} in {outside.where} is given {place}, for {outside.lookup.table}",
                IdsOutOfRange.fix,
                phase="data",
                where=outside.where,
                op=outside.lookup.op,
                source=outside.source or None,
                samples=place.samples,
                tokens=place.tokens,
            )
            return None
        case_kind = "nonfinite-loss"
        if outcome.error is not None:
            diagnosis = self._explain("exception", error=outcome.error)
            if diagnosis.cause == "unknown":
                text = f"{type(outcome.error).__name__}: {outcome.error}"[:300]
                self.found.append(replace(diagnosis, evidence=(text, *diagnosis.evidence)))
            return outcome
        if not outcome.finite:
            if math.isfinite(outcome.loss):
                case_kind = "nonfinite-gradient" if not outcome.gradients_finite else "gradient-norm-overflow"
            diagnosis = self._explain(case_kind)
            if diagnosis.cause == "unknown":
                self.found.append(diagnosis)
            return outcome
        case = self._case("nonfinite-weight")
        if case.bad_weights:
            self._explain("nonfinite-weight")
        elif case.bad_buffers:  # a bound that is Inf on purpose does no harm
            self._suspect("nonfinite-weight")
        return outcome

    def _learning(self, outcome: Outcome) -> None:
        mine = {name for name, p in zip(self.parameters.names, self.parameters.tensors, strict=True) if p.requires_grad}
        missing = [name for name in outcome.missing if name in mine]
        if missing:
            self._suspect("no-learning", signal="missing-gradients", details={"missing": missing})
        if outcome.norms and outcome.total == 0:
            self._suspect("no-learning", signal="zero-gradients")
        shifted = shifted_pairs([self.batch])
        pair = is_shifted(shifted[0], shifted[1].tolist()) if shifted is not None else None
        if pair is not None:
            self._suspect("no-learning", signal="shifted-labels", details={"inputs": pair[0], "labels": pair[1]})
        if outcome.total > HUGE * max(1.0, abs(outcome.loss)):
            self._suspect("spike", signal="huge-gradients", record=_record(outcome))

    def _objective(self, outcome: Outcome) -> None:
        """What the loss is made of, from its graph and from the batch."""
        activated: list[Activated] = []
        broadcast: list[Broadcast] = []

        def read(loss: Tensor) -> None:
            nodes = nodes_of(loss)
            activated.extend(found for found, _ in applied_twice(nodes))
            broadcast.extend([found] if (found := broadcast_in(nodes)) is not None else [])

        self.replay.run(before_backward=read, backward=False)
        details: dict[str, Any]
        if activated:
            details = {"inner": activated[0].inner, "outer": activated[0].outer}
            self._suspect("no-learning", signal="activation-twice", details=details, moments=[self._moment()])
        if broadcast:
            first = broadcast[0]
            details = {"prediction": list(first.prediction), "result": list(first.result), "op": first.op}
            self._suspect("no-learning", signal="broadcast", details=details)
        if abs(outcome.loss - math.log(2)) < 0.01 or outcome.total == 0:
            self._suspect("no-learning", signal="loss-at-ln2", record=_record(outcome))
        if garbage_buffers(self.model):
            self._suspect("no-learning", signal="garbage-buffers")

    def _rates(self) -> tuple[float, ...]:
        return tuple(float(group.get("lr", math.nan)) for group in self.optimizer.param_groups)

    def _moment(self) -> Moment:
        return Moment(0, (self.batch,), (), self.replay.random, self.replay.mode)

    def _suspect(self, kind: str, **facts: Any) -> None:
        """A suspicion counts only if the catalogue has a cause for it that holds on the replay."""
        diagnosis = explain(self._case(kind, **facts))
        if diagnosis.cause != "unknown" and diagnosis.verified and all(d.cause != diagnosis.cause for d in self.found):
            self.found.append(diagnosis)

    def _first_update(self, outcome: Outcome) -> None:
        """The optimizer's first step, on copies: does it break, round away, or do next to nothing?"""
        if self._case("nonfinite-weight").bad_settings:
            self._explain("nonfinite-weight", weights_broke=True)
            return
        if self.scheduler is not None or all(float(g.get("lr", 1.0)) == 0 for g in self.optimizer.param_groups):
            return
        gradients = {self.replay.parameters[n]: g for n, g in self.replay.gradients(self.max_norm).items()}
        copied = step_on_copies(self.optimizer, gradients)
        if copied is None or outcome.total == 0:
            return
        if not all_finite(copied):
            self._explain("nonfinite-weight", weights_broke=True)
        elif changed_share(copied) < UNCHANGED:
            details = {"share": changed_share(copied)}
            self._suspect("no-learning", signal="unchanged-weights", details=details, record=_record(outcome))
        else:
            moved = math.sqrt(sum(float((each.after.float() - each.before.float()).square().sum()) for each in copied))
            size = math.sqrt(sum(float(each.before.float().square().sum()) for each in copied))
            if moved < TINY * size:
                self._suspect("no-learning", signal="tiny-updates", record=_record(outcome))
            elif not any("initial_lr" in group for group in self.optimizer.param_groups):  # a schedule may warm it up
                details = {
                    "moved": moved / max(size, 1e-30),
                    "usual": outcome.loss,
                    "trivial": outcome.loss,
                    "before_the_run": True,
                }
                self._suspect(
                    "no-learning",
                    signal="stuck",
                    record=_record(outcome, self._rates()),
                    details=details,
                    moments=[self._moment()],
                )

    def _probe(self) -> None:
        known = {i for d in self.found for i in d.samples}
        self.probes = probe(Probing(self.replay, self.optimizer, self.accumulate, known))
        causes = {d.cause for d in self.found}
        self.found += [p.diagnosis for p in self.probes if p.diagnosis is not None and p.diagnosis.cause not in causes]

    def _headroom(self) -> None:
        largest = _fp16_outputs(self.replay)
        if largest is not None and largest[1] * HEADROOM > 65504:
            said = f"the output of {largest[0]} reaches {largest[1]:.4g} in fp16, which ends at 65504"
            fix = "Run in bf16, or keep that module and the residual stream after it in fp32."
            self._add("fp16-activation-overflow", 0.6, said, fix, phase="forward", where=largest[0])


def _as_training(model: nn.Module, device: torch.device) -> Mode:
    """The mode a training loop will have: as the modules are, but training if the whole model was left in evaluation."""
    modules = list(model.modules())
    mode = Mode.now(modules, device)
    return mode if any(mode.training) else replace(mode, training=[True] * len(modules))


def _record(outcome: Outcome, rates: tuple[float, ...] = ()) -> StepRecord:
    names = tuple(outcome.norms)
    norms = array("d", [outcome.norms[n] for n in names] or [ABSENT])
    return StepRecord(
        step=0,
        loss=outcome.loss,
        grad_norm=outcome.total,
        action="stepped",
        clip=1.0,
        lr=rates,
        scale=None,
        spike=False,
        typical=(0.0, 0.0),
        spread=(0.0, 0.0),
        loss_size=abs(outcome.loss),
        weights_checked=False,
        names=names,
        norms=norms,
    )


def _fp16_outputs(replay: Replay) -> tuple[str, float] | None:
    """The module with the largest fp16 output, and how large it is."""
    paths = {id(m): clean_name(name) or type(m).__name__ for name, m in unwrap(replay.model).named_modules()}
    found: dict[str, Tensor] = {}

    def look(module: nn.Module, _inputs: Any, output: Any) -> None:
        for t in tensors_of(output):
            if t.dtype == torch.float16 and t.numel():
                size = t.detach().abs().max().float()
                path = paths.get(id(module), type(module).__name__)
                found[path] = torch.maximum(found[path], size) if path in found else size

    handle = torch.nn.modules.module.register_module_forward_hook(look)
    try:
        replay.run(backward=False)
    finally:
        handle.remove()
    if not found:
        return None
    path = max(found, key=lambda p: float(found[p]))
    return path, float(found[path])
