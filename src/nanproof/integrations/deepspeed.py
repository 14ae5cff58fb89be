"""DeepSpeed: an engine's steps are judged before they are taken, whatever its ZeRO stage and precision.

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    guard = nanproof.protect(engine)

DeepSpeed looks for overflows in some set-ups and not in others (bf16 with `check_grad_overflow: false`, fp32 without ZeRO), never
at the loss, names nothing, and skips for ever. The guard looks every time. It takes the norm of each parameter's gradient from
the parts that the ranks hold, with the loss in one small all_reduce, and reads the verdict on the host: DeepSpeed owns the
optimizer, so there is no other way to keep it from stepping. Under ZeRO they stand in for DeepSpeed's own pass and all_reduce.

A refused step leaves weights, fp32 masters, moments, step counts and schedule as they were. fp16's dynamic loss scaling stays
DeepSpeed's: an overflow that calibrates it is no incident. A step cannot be run again, so nothing is salvaged or healed; the
cause is looked for on a copy of the module, on the rank whose loss or gradient was bad.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanproof.core.caps import SkipCaps
from nanproof.core.counters import counted
from nanproof.core.environment import about
from nanproof.core.evidence import Gradients, Witness, from_finding, make_incident
from nanproof.core.inquest import told
from nanproof.core.parameters import nonfinite
from nanproof.core.ranks import Ranks
from nanproof.core.stats import RunningStats, SpikeWatch
from nanproof.core.telemetry import Journal
from nanproof.core.terms import Terms, mean_of, read, terms_of, with_terms
from nanproof.core.verdict import Reading, judge
from nanproof.errors import TrainingHalted, UnsupportedError, UsageError
from nanproof.explain.diagnose import diagnose
from nanproof.integrations.loop import LoopGuard
from nanproof.integrations.recorded import RootRecorder, call_again
from nanproof.integrations.versions import check_version
from nanproof.integrations.zero import Pieces, Zero3Holder, holder_of
from nanproof.observe.lookout import Lookout, Unobserved
from nanproof.observe.settings import Observe
from nanproof.policy import Policy
from nanproof.records import Diagnosis, Incident, StepRecord

log = logging.getLogger("nanproof")


def protect_engine(
    engine: Any,
    *,
    policy: Policy | None = None,
    run_dir: str | Path | None = None,
    checkpoints: Any = None,
    observe: Any = None,
) -> EngineGuard:
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
        raise UsageError("protect(engine): its step is replaced already; protect an engine once")
    return EngineGuard(engine, policy, None if run_dir == "auto" else run_dir, observe)


class EngineGuard(LoopGuard):
    """A guard whose optimizer is DeepSpeed's. Same records, same policy, same incidents; nothing to start or to call."""

    def __init__(self, engine: Any, policy: Policy | None, run_dir: str | Path | None, observe: Any = None) -> None:
        super().__init__(policy=policy, run_dir=run_dir, observe=observe)
        self.engine = engine
        self.model, self.optimizer = engine.module, engine.optimizer
        self._holder = holder_of(engine)
        named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
        self._names = tuple(name for name, _ in named)
        self._place = {id(p): i for i, (_, p) in enumerate(named)}
        self._indices: dict[tuple[int, ...], Tensor] = {}
        self._device = torch.device(engine.device)
        ranks = _EngineRanks(engine, self._device)
        self._ranks, self._group, self._size = ranks, ranks.group, ranks.size
        self._clip = engine.gradient_clipping() or None
        self._stats = RunningStats(self._device, torch.float32, self.policy.warmup_steps, self.policy.spike_sensitivity)
        self._watch, self._caps = SpikeWatch(), SkipCaps(self.policy)
        self._journal = Journal(run_dir if self._ranks.rank == 0 else None, self._about)
        self._losses: list[Tensor] = []
        self._terms: list[Terms | None] = []
        self._probes: list[Tensor] = []
        self._batches: list[Any] = []
        """The recorded calls of this step; None for one whose loss was made outside of the model."""
        self._diagnosed: set[str] = set()
        self._halted: TrainingHalted | None = None
        self._lookout = _lookout(self, self.observe)
        self._recorder = RootRecorder(engine.module, self._note_call)
        self._probe = _probe(named, self._probes)
        self._replace(engine, "backward", self._backward)
        self._replace(engine, "step", self._engine_step)
        self._replace(engine.optimizer, "step", self._optimizer_step)
        # Clipping by a NaN would make every gradient NaN before it is looked at.
        self._replace(engine, "clip_fp32_gradients", lambda original: None)
        if self.policy.salvage or self.policy.heal or self.policy.snapshot_every:
            log.warning("nanproof: DeepSpeed's steps cannot be run again: Policy(salvage, heal, snapshot_every) do nothing")
        self._closed, self.started = False, True

    # -- what users call -------------------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The verdict is read on the host each step."""
        return "host: DeepSpeed owns the optimizer"

    def _about(self) -> dict[str, Any]:
        scaled = bool(self.engine.fp16_enabled())
        return about(
            self.model, self.optimizer, self.policy, path=self.path, max_norm=self._clip, ranks=self._size, scaled=scaled
        )

    @property
    def open(self) -> bool:
        return bool(self._losses)

    def sync(self) -> None:
        """Nothing is ever under way here."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": 1,
            "step": self._next,
            "stats": self._stats.state_dict(),
            "watch": self._watch.state_dict(),
            "caps": self._caps.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("version") != 1:
            raise UsageError(
                f"guard.load_state_dict(): version {state.get('version')!r} is unknown; this nanproof reads version 1"
            )
        self._next = state["step"]
        self._stats.load_state_dict(state["stats"])
        self._watch.load_state_dict(state["watch"])
        self._caps.load_state_dict(state["caps"])

    def start(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError("this guard belongs to a DeepSpeed engine: call engine.backward(loss) and engine.step(), nothing else")

    backward = step = train_step = wrap = resume = micro_batch = note_loss = take = start

    def _close(self, alone: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._lookout.close()
        self._recorder.close()
        if self._probe is not None:
            self._probe.remove()
        broken = nonfinite(self._holder.state())
        if broken and not any(i.kind == "nonfinite-weight" for i in self.incidents):
            message = f"found at close: {', '.join(broken[:3])}"
            self._report(Incident(step=max(self._next - 1, 0), kind="nonfinite-weight", action="recorded", message=message))
        self._journal.close()

    # -- what the engine calls -------------------------------------------------------------------------------------------------

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return

        def call(_: Any, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if self._closed else function(original, *args, **kwargs)

        if hasattr(original, "_wrapped_by_lr_sched"):
            call._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch's schedules look for their own mark
        setattr(owner, name, MethodType(call, owner))

    def _note_call(self, batch: Any) -> None:
        """Kept until its backward says whether the loss is the model's own."""
        self._batches.append(batch)

    def _backward(self, original: Any, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self._recorder.recognise(loss):
            self._batches = [*self._batches[: len(self._losses)], None]
        self._losses.append(loss.detach().reshape(()))
        self._terms.append(terms_of(loss))
        return original(loss, *args, **kwargs)

    def _engine_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        halted, self._halted = self._halted, None
        if halted is not None:
            raise halted  # here, not in the optimizer: the engine has finished its own business with the step
        return result

    def _optimizer_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._losses:
            raise UsageError("engine.step(): the guard was told of no loss since the last step; call engine.backward(loss)")
        losses, self._losses = self._losses, []
        terms, self._terms = self._terms, []
        # Under a loss scale an overflow says nothing of a rank.
        probes = list(self._probes) if self._holder.scale == 1.0 else []
        self._probes.clear()
        batches, self._batches = self._batches, []
        pieces, scale = self._holder.pieces(), self._holder.scale
        own = torch.stack([x.float() for x in losses]).mean().to(self._device)
        reading = self._judge(pieces, own, scale, mean_of(terms))
        number, self._next = self._next, self._next + 1
        record = reading.record(
            number, self._names, list(range(len(self._names))), tuple(float(x) for x in self.engine.get_lr()), False
        )
        self._lookout.before_step(number)
        self._lookout.after_step(number, None)
        record = self._lookout.observed(record)
        self._history.append(record)
        self._journal.step(record)
        self.refused_so_far += reading.refused
        self.accepted_so_far += not reading.refused

        def step() -> Any:
            return original(*args, **kwargs)

        if not reading.refused:
            if isinstance(self.optimizer, torch.optim.Optimizer) and self._clip is not None:
                _clip_now(pieces, reading.clip)
            self._holder.take(step, torch.tensor(reading.total * scale, device=self._device))
            self._accepted(record)
        elif self._holder.dynamic and scale > 1 and math.isfinite(reading.loss) and not math.isfinite(reading.total):
            self._overflowed(step, record)
        else:
            self._refused(number, reading, pieces, losses, probes, batches, own, terms)
            self._holder.refuse(step)
        return None

    # -- verdicts --------------------------------------------------------------------------------------------------------------

    def _judge(self, pieces: Pieces, own_loss: Tensor, scale: float, terms: Terms | None) -> Reading:
        """One all_reduce of a number a parameter, one read."""
        squares = torch.zeros(len(self._names), dtype=torch.float64, device=self._device)
        for gradients, places in self._by_kind(pieces):
            norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).to(self._device, torch.float64)
            key = tuple(places)
            if key not in self._indices:
                self._indices[key] = torch.tensor(places, device=self._device)
            squares.index_add_(0, self._indices[key], norms * norms)
        if self._ranks.together:
            loss = own_loss.double().reshape(1)
            said = torch.cat((squares, loss)) if self._holder.cut_up else loss
            dist.all_reduce(said, group=self._group)
            squares = said[:-1] if self._holder.cut_up else squares
            own_loss = said[-1] / self._size
        scaled = scale != 1.0
        verdict = judge(
            own_loss.float(),
            squares.sqrt().float(),
            also_finite=None,
            bad_buffer=None,
            loss_decides=True,  # it is the mean over the ranks, and so alike on all of them
            scale=torch.tensor(scale, device=self._device) if scaled else None,
            max_norm=self._clip,
            stats=self._stats,
            skip_spikes=self.policy.on_spike == "skip",
            held=None,
        )
        assert verdict.learned is not None
        self._stats.take(verdict.learned.point, verdict.learned.loss, verdict.learned.spike, verdict.skip == 0)
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

    def _accepted(self, record: StepRecord) -> None:
        self._caps.accepted()
        for forecast in self._lookout.foresee(record):
            self._foretell(forecast)
        self._report(from_finding(self._watch.see(record, False), self._history))

    def _overflowed(self, step: Any, record: StepRecord) -> None:
        """DeepSpeed finds the overflow itself, lowers its loss scale and skips. It raises when there is no lower one."""
        try:
            step()
        except Exception as error:
            message = f"the loss scale is {record.scale:g} and cannot be lowered further: {error}"
            self._report(Incident(step=record.step, kind="loss-scale-collapse", action="halted", message=message))
            raise

    def _refused(
        self,
        number: int,
        reading: Reading,
        pieces: Pieces,
        losses: list[Tensor],
        probes: list[Tensor],
        batches: list[Any],
        own_loss: Tensor,
        terms: list[Terms | None],
    ) -> None:
        """Ask the ranks what it was, report it, and count it. If that is one too many, it is raised after the engine's step."""
        broken = nonfinite(self._holder.state())
        mine = replace(reading, loss=float(own_loss))
        witness = Witness.hear(self._ranks, mine, losses, probes, bool(broken))
        norms = list(zip(self._names, reading.norms, strict=True))
        gradients = None
        if witness.only_gradients and not math.isfinite(reading.total):
            bad = self._ranks.gather([bool(nonfinite((self._names[self._place[id(p)]], g) for p, g in pieces))])
            gradients = Gradients(norms, not any(said[0] for said in bad.values()))
        incident = make_incident(number, mine, norms, witness, gradients, broken)
        micro = incident.micro_batch
        guilty_terms = terms[micro] if micro is not None and micro < len(terms) else mean_of(terms)
        incident = told(replace(incident, loss=reading.loss), read(guilty_terms), "", self._ranks)
        incident = self._explained(incident, batches, witness)
        cap = self._caps.refused()
        if cap:
            incident = replace(incident, action="halted")
            self._halted = TrainingHalted(f"{cap}. Last: {incident}", incident)
        self._report(incident)

    # -- causes ----------------------------------------------------------------------------------------------------------------

    def _explained(self, incident: Incident, batches: list[Any], witness: Witness) -> Incident:
        """Run the bad micro-batch once more on a copy of the module: on the guilty rank alone, while the others wait for what it
        says. With ZeRO 3 no rank has a module to copy."""
        wanted = self.policy.diagnose == "always" or (self.policy.diagnose == "first" and incident.kind not in self._diagnosed)
        known = witness.guilty > 0 and not witness.weights_bad and not isinstance(self._holder, Zero3Holder)
        if not wanted or not known:
            return incident
        self._diagnosed.add(incident.kind)
        guilty = self._ranks.rank if witness.rank is None else witness.rank
        text = ""
        if guilty == self._ranks.rank:
            found = self._diagnose(batches[witness.micro_batch or 0] if len(batches) > (witness.micro_batch or 0) else None)
            text = "" if found is None or found.cause in ("none", "unknown") else json.dumps(found.to_json())
        if self._ranks.together:
            text = self._ranks.share_text(text, guilty)
        return replace(incident, diagnosis=Diagnosis.from_json(json.loads(text))) if text else incident

    def _diagnose(self, batch: Any) -> Diagnosis | None:
        if batch is None:
            return None
        try:
            # A copy has none of the hooks with which DeepSpeed would take its gradients for those of a step.
            module = copy.deepcopy(self.model)
            with torch.no_grad():
                call_again(module, batch)  # it raises where the engine does something around its module that is not known here
            return diagnose(module, call_again, batch, seconds=self.policy.diagnose_seconds)
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
        self._group, self.together = self.group, self.size > 1


def _lookout(guard: EngineGuard, settings: Observe | None) -> Unobserved:
    """Looks at the engine's module. A stand-in for the stepper, which DeepSpeed has none of: model, optimizer and device."""
    if settings is None:
        return Unobserved()
    stepper: Any = SimpleNamespace(model=guard.model, optimizer=guard.optimizer, parameters=SimpleNamespace(device=guard._device))
    return Lookout(stepper, replace(settings, weights=False))


def _probe(named: list[tuple[str, Tensor]], notes: list[Tensor]) -> Any:
    """A scalar a backward from one early, small parameter, before the ranks' gradients are mixed: it names the rank and the
    micro-batch."""
    chosen = next((p for _, p in named if getattr(p, "ds_numel", p.numel()) <= 1 << 16), named[0][1] if named else None)
    if chosen is None:
        return None

    def look(gradient: Tensor) -> None:
        notes.append(torch.linalg.vector_norm(gradient.detach().float()))

    return chosen.register_hook(look)


def _clip_now(pieces: Pieces, divisor: float) -> None:
    """What clip_grad_norm_ would have done, for an engine that clips plain gradients."""
    if divisor > 1:
        torch._foreach_div_([g for _, g in pieces], divisor)
