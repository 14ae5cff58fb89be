"""DeepSpeed: an engine's steps are judged before they are taken, whatever its ZeRO stage and
precision.

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    guard = nanproof.protect(engine)

DeepSpeed looks for overflows in some set-ups and not in others (bf16 with `check_grad_overflow:
false`, fp32 without ZeRO), never at the loss, names nothing, and skips for ever. The guard looks
every time. It takes the norm of each parameter's gradient from the parts that the ranks hold, with
the loss in one small all_reduce, and reads the verdict on the host: DeepSpeed owns the optimizer,
so there is no other way to keep it from stepping. Under ZeRO they stand in for DeepSpeed's own pass
and all_reduce.

A refused step leaves weights, fp32 masters, moments, step counts and schedule as they were. fp16's
dynamic loss scaling stays DeepSpeed's: an overflow that calibrates it is not an incident. A step cannot
be run again, so nothing is salvaged or healed; the cause is looked for on a copy of the module, on
the rank whose loss or gradient was bad.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanproof import _wording as wording
from nanproof._errors import AlreadyGuarded, TrainingHalted, UnsupportedError, UsageError
from nanproof._policy import Policy
from nanproof._records import Diagnosis, Incident
from nanproof.core._caps import SkipCaps
from nanproof.core._contracts import Explainer, Refusal
from nanproof.core._counters import Counters, counted
from nanproof.core._engine import Engine
from nanproof.core._evidence import Gradients
from nanproof.core._telemetry import Journal
from nanproof.core._under_way import UNKNOWN, UnderWay
from nanproof.core.judge._judge import Judge, Norms, Report
from nanproof.core.judge._keepers import BufferKeeper
from nanproof.core.judge._parameters import Parameters
from nanproof.core.judge._stats import RunningStats, SpikeWatch
from nanproof.core.judge._terms import Terms, mean_of, with_terms
from nanproof.core.judge._verdict import Reading, judge
from nanproof.core.support._inner import nonfinite
from nanproof.core.support._ranks import Ranks
from nanproof.explain._diagnose import diagnose
from nanproof.explain._examiner import shared
from nanproof.explain._known import BadData, Known, fingerprint
from nanproof.explain.lines._recorded import RootRecorder, call_again
from nanproof.integrations._patches import Patches
from nanproof.integrations._protected import ProtectedRun
from nanproof.integrations._versions import check_version
from nanproof.integrations.deepspeed._zero import Pieces, Zero3Holder, holder_of
from nanproof.observe._lookout import Lookout
from nanproof.observe._settings import Observe
from nanproof.recover._checkpoints import Checkpoints

log = logging.getLogger("nanproof")


def protect_engine(
    engine: Any,
    *,
    policy: Policy | None = None,
    run_dir: str | Path | None = None,
    checkpoints: Checkpoints | None = None,
    observe: Observe | bool | None = None,
) -> ProtectedRun:
    """Guard the steps of a DeepSpeed engine. Call it after `deepspeed.initialize`, on every rank.

    Args:
        engine: what `deepspeed.initialize` returned first.
        run_dir: folder for the records; "auto" is none, because an engine has no folder of its own.
        observe: True or `Observe(...)`. What a step does to the weights is not seen: DeepSpeed holds them in parts.
    """
    check_version("deepspeed")
    if checkpoints is not None:
        raise UnsupportedError("protect(engine, checkpoints=...): a cut-up state is DeepSpeed's to save: engine.save_checkpoint")
    if type(engine).__name__ == "PipelineEngine" or hasattr(engine, "train_schedule"):
        raise UnsupportedError("protect(engine): a PipelineEngine steps inside train_batch, out of reach of a guard")
    if engine.optimizer is None or not hasattr(engine.optimizer, "param_groups"):
        raise UsageError(
            "protect(engine): the engine has no optimizer; pass one to deepspeed.initialize or name it in its config"
        )
    if "step" in engine.__dict__:
        raise AlreadyGuarded("protect(engine): its step is replaced already; protect an engine once")
    run = ProtectedRun(policy=policy, run_dir=None if run_dir == "auto" else run_dir, observe=observe)
    if run.policy.salvage or run.policy.heal or run.policy.snapshot_every:
        log.warning("nanproof: DeepSpeed's steps cannot be run again: Policy(salvage, heal, snapshot_every) do nothing")
    _EngineLoop(engine, run)
    return run


class _EngineLoop:
    """Stands between a DeepSpeed engine and its optimizer, until the run is closed."""

    def __init__(self, engine: Any, run: ProtectedRun) -> None:
        self._run = run
        self._judge = zero = ZeroJudge(engine, run.policy, run.counters)
        self._halted: TrainingHalted | None = None
        settings = run.observe
        lookout = Lookout.of(zero, None if settings is None else replace(settings, weights=False))
        run.adopt(
            Engine(
                zero,
                UnderWay(zero, None),
                policy=run.policy,
                journal=Journal(run.run_dir if zero.ranks.rank == 0 else None, zero.about),
                account=run.account,
                watch=SpikeWatch(),
                caps=SkipCaps(run.policy),
                loop=run.loop,
                explainer=_OnACopy(zero, run.policy),
                lookout=lookout,
            )
        )
        self._recorder = RootRecorder(engine.module, lambda batch: run.engine.begin(UNKNOWN))
        patches = Patches()
        patches.later(self._recorder.close)
        patches.method(engine, "backward", self._backward)
        patches.method(engine, "step", self._engine_step)
        patches.method(engine.optimizer, "step", self._optimizer_step)
        if hasattr(engine, "clip_fp32_gradients"):
            # Clipping by a NaN would make every gradient NaN before it is looked at.
            patches.method(engine, "clip_fp32_gradients", lambda original: None)
        run.on_close(patches.undo)

    def _backward(self, original: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        known = self._recorder.recognise(loss)
        if not self._run.open:
            self._run.engine.begin(UNKNOWN)
        self._run.engine.loss(loss, self._recorder.calls if known else ())
        return original(loss, *args, **kwargs)

    def _engine_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        halted, self._halted = self._halted, None
        if halted is not None:
            raise halted  # here, not in the optimizer: the engine has finished its own business with the step
        return result

    def _optimizer_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        zero, run = self._judge, self._run
        zero.take = lambda: original(*args, **kwargs)
        try:
            run.engine.step()
            run.engine.end()
        except TrainingHalted as halted:
            self._halted = halted
        except Exception as error:
            if zero.lowering is not None:  # DeepSpeed raises when there is no lower loss scale
                step, seen = run.next_step - 1, wording.lowest_scale(zero.lowering, error)
                run.engine.tell.incident(Incident(step=step, kind="loss-scale-collapse", action="halted", message=seen))
            raise


class ZeroJudge(Judge):
    """Judges the steps of an engine, whose gradients lie in parts on the ranks. Every verdict is
    read on the host."""

    def __init__(self, engine: Any, policy: Policy, counters: list[Counters]) -> None:
        super().__init__(engine.module, engine.optimizer, engine.gradient_clipping() or None, policy, counters)
        self.take: Callable[[], Any] = lambda: None
        """The optimizer's own step, of the step under way."""
        self.lowering: float | None = None
        """The loss scale that DeepSpeed is about to lower."""
        self.holder = holder_of(engine)
        self._engine, self._device = engine, torch.device(engine.device)
        self.parameters = _EngineParameters(engine.module, self._device)
        self.ranks = self._ranks = _EngineRanks(engine, self._device)
        self.stats = RunningStats(self._device, torch.float32, policy.warmup_steps, policy.spike_sensitivity)
        self.buffers = BufferKeeper(engine.module)
        self._place = {id(p): i for i, p in enumerate(self.parameters.tensors)}
        self._indices: dict[tuple[int, ...], Tensor] = {}
        self._probes: list[Tensor] = []
        self._probe = _probe(self.parameters.tensors, self._probes)
        self._bad_gradients = False
        """Of the last refused step: whether an element of a gradient that this rank holds is
        non-finite."""

    @property
    def path(self) -> str:
        return f"host: {self.path_note}"

    @property
    def path_note(self) -> str:
        return "DeepSpeed owns the optimizer"

    @property
    def scaled(self) -> bool:
        return bool(self._engine.fp16_enabled())

    def calibrates_at(self, reading: Reading) -> bool:
        """An overflow is DeepSpeed's to deal with, as long as it has a scale to lower."""
        return self.holder.dynamic and (reading.scale or 1.0) > 1 and math.isfinite(reading.loss)

    def own_reading(self, reading: Reading, report: Report) -> Reading:
        return replace(reading, loss=float(report.loss))

    def step(
        self,
        loss: Tensor | None,
        again: bool,
        norms: Norms | None = None,
        acting: Sequence[Any] | None = None,
        closure: Any = None,
    ) -> Report:
        noted, self.noted = self.noted, []
        losses, terms = [own for own, _ in noted], [found for _, found in noted]
        holder, scale = self.holder, self.holder.scale
        # Under a loss scale an overflow says nothing of a rank.
        probes = list(self._probes) if scale == 1.0 else []
        self._probes.clear()
        pieces = holder.pieces()
        own = torch.stack([x.float() for x in losses]).mean().to(self._device)
        reading = self._reading(pieces, own, scale, mean_of(terms))
        lr = tuple(float(x) for x in self._engine.get_lr())
        self.buffers.look()
        if not reading.refused:
            if isinstance(self.optimizer, torch.optim.Optimizer) and self.max_norm is not None:
                _clip_now(pieces, reading.clip)
            holder.take(self.take, torch.tensor(reading.total * scale, device=self._device))
        elif not math.isfinite(reading.total) and self.calibrates_at(reading):
            self.lowering = reading.scale
            self.take()
            self.lowering = None
        else:
            self._bad_gradients = bool(nonfinite((self._name(p), g) for p, g in pieces))
            holder.refuse(self.take)
        self.buffers.settle(torch.tensor(reading.refused, device=self._device))
        total = torch.tensor(reading.total, device=self._device)
        present = list(range(len(self.parameters.names)))
        return Report(own, total, losses, probes, self.parameters.names, present, lr, lambda: reading, terms)

    def look_at_gradients(self, present: Sequence[int]) -> Gradients:
        """Those of a refused step were looked at before DeepSpeed cleared them; their norms are in
        the reading."""
        bad = self.ranks.gather([self._bad_gradients])
        return Gradients(None, not any(said[0] for said in bad.values()))

    def broken_state(self) -> list[str]:
        return nonfinite(self.holder.state())

    def forget_losses(self) -> None:
        super().forget_losses()
        self._probes.clear()

    def close(self) -> None:
        super().close()
        if self._probe is not None:
            self._probe.remove()

    def _name(self, p: Tensor) -> str:
        return self.parameters.names[self._place[id(p)]]

    def _reading(self, pieces: Pieces, own_loss: Tensor, scale: float, terms: Terms | None) -> Reading:
        """One all_reduce of a number a parameter, one read."""
        squares = torch.zeros(len(self.parameters.names), dtype=torch.float64, device=self._device)
        for gradients, places in self._by_kind(pieces):
            norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).to(self._device, torch.float64)
            key = tuple(places)
            if key not in self._indices:
                self._indices[key] = torch.tensor(places, device=self._device)
            squares.index_add_(0, self._indices[key], norms * norms)
        if self.ranks.together:
            loss = own_loss.double().reshape(1)
            said = torch.cat((squares, loss)) if self.holder.cut_up else loss
            dist.all_reduce(said, group=self._ranks.group)
            squares = said[:-1] if self.holder.cut_up else squares
            own_loss = said[-1] / self._ranks.size
        scaled = scale != 1.0
        verdict = judge(
            own_loss.float(),
            squares.sqrt().float(),
            also_finite=None,
            bad_buffer=None,
            loss_decides=True,  # it is the mean over the ranks, and so alike on all of them
            scale=torch.tensor(scale, device=self._device) if scaled else None,
            max_norm=self.max_norm if not isinstance(self.max_norm, Mapping) else None,
            stats=self.stats,
            skip_spikes=self.policy.on_spike == "skip",
            held=None,
        )
        assert verdict.learned is not None
        self.stats.take(verdict.learned.point, verdict.learned.loss, verdict.learned.spike, verdict.skip == 0)
        counts = counted(self.counters, self._device)
        names = [() if found is None else found.names for found in (terms, counts)]
        return Reading.of(with_terms(verdict.packed, terms, counts).tolist(), scaled, *names)

    def _by_kind(self, pieces: Pieces) -> list[tuple[list[Tensor], list[int]]]:
        kinds: dict[Any, tuple[list[Tensor], list[int]]] = {}
        for p, g in pieces:
            gradients, places = kinds.setdefault((g.dtype, g.device), ([], []))
            gradients.append(g)
            places.append(self._place[id(p)])
        return list(kinds.values())


class _EngineParameters(Parameters):
    """The trainable parameters of an engine's module: what DeepSpeed's optimizer holds are parts of
    them."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        trainable = [p for p in module.parameters() if p.requires_grad]
        super().__init__(module, torch.optim.SGD(trainable, lr=0.0))
        self.device = device


class _OnACopy(Explainer):
    """Runs the bad micro-batch once more on a copy of the module: on the guilty rank alone, while
    the others wait for what it says. With ZeRO 3 no rank has a module to copy."""

    def __init__(self, zero: ZeroJudge, policy: Policy) -> None:
        self._judge, self._policy = zero, policy
        self._known = Known(policy)

    def refused(self, incident: Incident, refusal: Refusal) -> Incident:
        ranks = self._judge.ranks
        tellable = incident.kind != "nonfinite-weight" and (not ranks.together or incident.rank is not None)
        if self._policy.diagnose == "never" or not tellable or isinstance(self._judge.holder, Zero3Holder):
            return incident
        guilty = ranks.rank if incident.rank is None else incident.rank
        if guilty == ranks.rank:
            try:
                incident = self._examined(incident, refusal)
            except Exception:  # the other ranks wait below
                log.debug("nanproof: a refused step could not be examined", exc_info=True)
        return shared(ranks, incident, guilty) if ranks.together else incident

    def _examined(self, incident: Incident, refusal: Refusal) -> Incident:
        calls = refusal.attempt.calls
        which = incident.micro_batch or 0
        call = calls[which][0] if which < len(calls) and calls[which] else None
        if call is None:
            return incident
        data = BadData.of([(call["args"], call["kwargs"])])
        incident = replace(incident, bad_samples=data.samples)
        return self._known.diagnose(
            incident,
            fingerprint(incident, data.names),
            lambda: (self._diagnosis(call), ""),
            every=self._policy.diagnose == "always",
        )

    def _diagnosis(self, call: Any) -> Diagnosis | None:
        try:
            # A copy has none of the hooks with which DeepSpeed would take its gradients for those of a step.
            module = copy.deepcopy(self._judge.model)
            with torch.no_grad():
                call_again(module, call)  # it raises where the engine does something around its module that is not known here
            found = diagnose(module, call_again, call, seconds=self._policy.diagnose_seconds)
            return found if found.named else None
        except Exception as error:
            log.warning("nanproof: the step could not be run again on a copy of the module: %r", error)
            return None


class _EngineRanks(Ranks):
    """The ranks that an engine reduces gradients over."""

    def __init__(self, engine: Any, device: torch.device) -> None:
        super().__init__(nn.Identity(), device)
        self.group = getattr(engine, "seq_data_parallel_group", None) or getattr(engine, "data_parallel_group", None)
        self.size = dist.get_world_size(self.group) if dist.is_initialized() else 1
        if self.size != self.world:
            raise UnsupportedError(
                "protect(engine): only part of the ranks share a gradient here (model, pipeline or expert parallel); plain data "
                "parallel ZeRO is supported"
            )
        self.train_over(self.group, self.size)


def _probe(parameters: list[Tensor], notes: list[Tensor]) -> Any:
    """A scalar a backward from one early, small parameter, before the ranks' gradients are mixed:
    it names the rank and the micro-batch."""
    chosen = next((p for p in parameters if getattr(p, "ds_numel", p.numel()) <= 1 << 16), parameters[0] if parameters else None)
    if chosen is None:
        return None

    def look(gradient: Tensor) -> None:
        notes.append(torch.linalg.vector_norm(gradient.detach().float()))

    return chosen.register_hook(look)


def _clip_now(pieces: Pieces, divisor: float) -> None:
    """What clip_grad_norm_ would have done, for an engine that clips plain gradients."""
    if divisor > 1:
        torch._foreach_div_([g for _, g in pieces], divisor)
