"""The device side of a step: from gradients to a verdict, through the optimizer, to the vector that
reports it.

Nothing here waits for the device on the device path. What the host makes of the report is the
guard's business.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nanproof._errors import UsageError
from nanproof._policy import Policy
from nanproof.core._counters import Counters, counted
from nanproof.core._evidence import Gradients
from nanproof.core._telemetry import Courier
from nanproof.core.judge._judge import Judge, Norms, Report
from nanproof.core.judge._keepers import BufferKeeper, WeightKeeper
from nanproof.core.judge._kernels import Kernels
from nanproof.core.judge._optimizers import HostPath, choose_path, members_of
from nanproof.core.judge._parameters import Parameters, is_dtensor, nonfinite, state_tensors
from nanproof.core.judge._scaling import LossScale
from nanproof.core.judge._stats import RunningStats
from nanproof.core.judge._terms import Terms, mean_of, terms_of, with_terms
from nanproof.core.judge._verdict import Learned, Reading, Verdict, judge
from nanproof.core.support._context import learning_rates
from nanproof.core.support._ranks import Ranks

guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that have a guard: nobody else should put another one around them."""


class Stepper(Judge):
    """Judges the steps of an optimizer of torch, on the device where that is exact."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float | str | None,
        scaler: Any,
        policy: Policy,
        counters: list[Counters] | None = None,
    ) -> None:
        super().__init__(model, optimizer, max_norm, policy, counters)
        self.parameters = Parameters(model, optimizer)
        if not any(p.requires_grad for p in self.parameters.tensors):
            raise UsageError(
                "Guard: the optimizer has no trainable parameter; set requires_grad on those to train, then build the optimizer"
            )
        device, dtype = self.parameters.device, self.parameters.dtype
        self.ranks = Ranks(model, device)
        self._path = choose_path(model, optimizer, policy.switch_to_fused)
        self.scale = LossScale(scaler, device) if scaler is not None and scaler.is_enabled() else None
        self.stats = RunningStats(device, dtype, policy.warmup_steps, policy.spike_sensitivity)
        self.buffers = BufferKeeper(model)
        self.weights = self._weight_keeper()
        self.courier = Courier(device)
        """How reports get to the host."""
        self._latch = torch.zeros((), device=device)
        """1 after a bad step, until the host has dealt with it."""
        self._act: Callable[[Sequence[Any] | None], None] = lambda _: None
        """Applies the last verdict to these optimizers."""
        self.kernels = Kernels.available(device, dtype) if self.on_device else None
        self._probes: deque[Tensor] = deque(maxlen=1024)
        self._probe_of: Tensor | None = None
        self._left: tuple[Any, int] | None = None
        """The watched gradient as the last step or backward left it, and how often it had been
        written."""
        self._by_step = False
        """It was a step that left it so."""
        guarded.update(members_of(optimizer))
        self._probe = self._watch_one_gradient()
        self._note_left()
        self._unreduced = self.ranks.unreduced(self.parameters)

    @property
    def path(self) -> str:
        return self._path.description

    @property
    def path_note(self) -> str:
        return self._path.note

    @property
    def on_device(self) -> bool:
        return self._path.on_device

    @property
    def lag(self) -> int:
        """None where the host reads the verdict anyway."""
        if not self.on_device:
            return 0
        default = 2 if self.parameters.device.type == "cuda" else 0
        return default if self.policy.lag is None else self.policy.lag

    def backward(self, loss: Tensor, scaled: bool = True) -> None:
        self._notice_cleared_gradients()
        loss = loss.reshape(())
        noted = loss.detach(), terms_of(loss)
        seed = self._seed(loss)
        if self.scale is not None and scaled:
            scale = self.scale.value().to(loss.device, non_blocking=True)
            seed = scale if seed is None else seed * scale
            loss = loss.float()
        loss.backward(gradient=seed)
        self.noted.append(noted)

    def note_loss(self, loss: Tensor) -> Tensor | None:
        self._notice_cleared_gradients()
        super().note_loss(loss)
        return self._seed(loss)

    @property
    def backwards(self) -> int:
        """Backwards that reached the watched gradient since the last step."""
        return len(self._probes)

    def only_backwards(self, count: int) -> None:
        """Later backwards were none of the loop's."""
        while len(self._probes) > count:
            self._probes.pop()

    def _seed(self, loss: Tensor) -> Tensor | None:
        return self.ranks.seed(loss, self.buffers.look()) if self.ranks.several else None

    def forget(self) -> None:
        self.forget_losses()
        self.optimizer.zero_grad()

    def norms(self) -> Norms:
        """Read the norms of the gradients now, for a loop that asks for them before its step."""
        _, gradients = self.parameters.present_gradients()
        return Norms.of(self.parameters.norms(gradients, self.kernels), gradients)

    def unscaled(self, norm: Tensor) -> Tensor:
        """Return a norm without the loss scale."""
        return norm if self.scale is None else norm / self.scale.value()

    def step(self, loss: Tensor | None, again: bool, norms: Norms | None = None, acting: Sequence[Any] | None = None) -> Report:
        """A bad step that can be run again latches, and whether an overflow is the loss scale's
        fault can wait for a replay."""
        parameters = self.parameters
        self._notice_cleared_gradients()
        noted, self.noted = self.noted, []
        losses, terms = [own for own, _ in noted], [found for _, found in noted]
        if loss is not None and not any(terms):
            terms = [terms_of(loss)]
        probes = list(self._probes)
        self._probes.clear()
        present, gradients = parameters.present_gradients()
        if not present and not again and not parameters.foreign:
            raise UsageError(
                "guard.step(): no parameter of the optimizer has a gradient; call backward before it, and zero_grad only after"
            )
        if self.scale is not None and not losses and self.scale.untouched:
            raise UsageError(
                "guard.step(): Guard(scaler=...) was given but the loss was not scaled: call guard.backward(loss), or "
                "scaler.scale(loss).backward()"
            )
        if self.scale is not None and any(parameters.tensors[i].dtype == torch.float16 for i in present):
            # What GradScaler.unscale_ says; going on would train fp16 weights without a master copy.
            raise ValueError("Attempting to unscale FP16 gradients.")
        lr = learning_rates(self.optimizer)
        latching = again and self.lag > 0
        summed = self._sum(losses)
        own = self._scalar(loss) if loss is not None else summed
        assert own is not None
        known = norms if norms is not None and norms.hold_for(gradients) else None
        values = parameters.norms(gradients, self.kernels) if known is None else known.values
        clipped = known is not None and known.clipped
        max_norm = known.max_norm if known is not None and clipped else self.max_norm
        if self._unreduced:
            values = self.ranks.share_norms(values, present, self._unreduced)
        also = summed if loss is not None and len(losses) > 1 else None
        bad_buffer = self.buffers.look()
        if bad_buffer is not None:
            bad_buffer = bad_buffer.to(parameters.device, non_blocking=True)
        latch = self._latch if latching else None
        alone, skip_spikes = not self.ranks.several, self.policy.on_spike == "skip"
        if self.kernels is not None and self.scale is None and self.weights is None:
            verdict = self.kernels.judge(own, values, also, bad_buffer, alone, max_norm, self.stats, skip_spikes, latch)
        else:
            verdict = judge(
                own,
                values,
                also_finite=also,
                bad_buffer=bad_buffer,
                loss_decides=alone,
                scale=None if self.scale is None else self.scale.value(),
                max_norm=max_norm,
                stats=self.stats,
                skip_spikes=skip_spikes,
                held=None if latch is None else latch > 0,
            )
        if clipped:
            verdict = replace(verdict, divisor=None if self.scale is None else self.scale.value().float())
        refused, read = self._apply(verdict, gradients, clipped, mean_of(terms), acting)
        self.buffers.settle(refused)
        if verdict.learned is not None:
            self._learn(verdict.learned, refused, again, latch)
        self._note_left()
        return Report(own, verdict.packed[Verdict.TOTAL], losses, probes, parameters.names, present, lr, read, terms)

    def act(self, member: Any) -> None:
        self._act([member])

    def _apply(
        self,
        verdict: Verdict,
        gradients: list[Tensor],
        clipped: bool,
        terms: Terms | None,
        acting: Sequence[Any] | None,
    ) -> tuple[Tensor, Callable[[], Reading]]:
        """Let the optimizer act. Returns whether the step was refused, on the device, and how to
        read the verdict later. The terms of the loss, and what the loop counts, travel with it."""
        counts = counted(self.counters, self.parameters.device) if self.counters else None
        names = [() if found is None else found.names for found in (terms, counts)]
        keeper, scaled = self.weights, self.scale is not None
        refused = verdict.skip > 0
        path = self._path
        if keeper is not None:
            keeper.save()
        if not isinstance(path, HostPath):
            packed = with_terms(verdict.packed, terms, counts)

            def act(members: Sequence[Any] | None) -> None:
                nonlocal refused
                path.step(verdict if members is acting else replace(verdict, skip=refused.float()), members)
                if keeper is not None:
                    broken = keeper.broken() & ~refused
                    keeper.put_back(broken, last=acting is None)
                    packed[Verdict.WEIGHTS_BAD] += broken
                    refused = refused | broken

            act(acting)
            self._act = act
            # What the other optimizers will do to half-precision weights is not known yet.
            parcel = self.courier.send(packed) if keeper is None or acting is None else packed.tolist
            return refused, lambda: Reading.of(parcel(), scaled, *names)
        reading = Reading.of(with_terms(verdict.packed, terms, counts).tolist(), scaled, *names)

        def act_if_good(members: Sequence[Any] | None, to_divide: Sequence[Tensor] = ()) -> None:
            nonlocal reading, refused
            if reading.refused:
                return
            path.step(replace(reading, clip=1.0) if clipped else reading, to_divide, members)
            if keeper is not None and (broken := keeper.broken()):
                keeper.put_back_now()
                reading = replace(reading, weights_bad=True)
                refused = refused | broken

        act_if_good(acting, gradients)
        self._act = act_if_good
        return refused, lambda: reading

    def _learn(self, learned: Learned, refused: Tensor, again: bool, latch: Tensor | None) -> None:
        self.stats.take(learned.point, learned.loss, learned.spike, ~refused)
        if self.scale is not None:
            # Whether an overflow is the scale's fault shows in a replay; without one it is taken to be.
            overflow = torch.zeros_like(learned.overflow) if again else learned.overflow & refused
            self.scale.update(overflow, frozen=refused & ~overflow)
        if latch is not None:
            latch.copy_(torch.maximum(latch, refused.to(latch.dtype)))

    def release(self) -> None:
        self._latch.zero_()

    def look_at_gradients(self, present: Sequence[int]) -> Gradients:
        names, tensors = self.parameters.names, self.parameters.tensors
        there = [(names[i], g) for i in present if (g := tensors[i].grad) is not None]
        norms = self.parameters.norms([g for _, g in there], None).tolist()
        said = self.ranks.gather([bool(nonfinite(there))])
        return Gradients(
            [(name, norm) for (name, _), norm in zip(there, norms, strict=True)], not any(s[0] for s in said.values())
        )

    def broken_state(self) -> list[str]:
        return nonfinite(state_tensors(self.model, self.parameters, self.optimizer)) + self.buffers.broken()

    def close(self) -> None:
        if self._probe is not None:
            self._probe.remove()
        super().close()
        self._path.close()

    @property
    def outdated(self) -> bool:
        return sum(len(group["params"]) for group in self.optimizer.param_groups) != self.parameters.count

    def follow(self) -> None:
        self._path.close()
        self.parameters = Parameters(self.model, self.optimizer)
        self._path = choose_path(self.model, self.optimizer, self.policy.switch_to_fused)
        self.weights = self._weight_keeper()
        self._unreduced = self.ranks.unreduced(self.parameters)

    def _notice_cleared_gradients(self) -> None:
        """The loop gave up the micro-batches so far (zero_grad after a backward): what was noted of
        them goes too."""
        if self._probes and self._probe_of is not None and self._probe_of.grad is None:
            self.noted = []
            self._probes.clear()

    def _weight_keeper(self) -> WeightKeeper | None:
        weights, choice = self.parameters.tensors, self.policy.half_weights
        return WeightKeeper.of(weights, self.optimizer, self.on_device, choice, self.ranks)

    def forget_losses(self) -> None:
        self.noted = []
        self._probes.clear()

    def forget_probes(self) -> None:
        self._probes.clear()

    def _note_left(self) -> None:
        gradient = None if self._probe_of is None else self._probe_of.grad
        self._left = None if gradient is None else (weakref.ref(gradient), gradient._version)
        self._by_step = True

    def _note_added(self, gradient: Tensor) -> None:
        """A backward reached the watched gradient. Clearing makes a new tensor, or writes zeros:
        one more version than adding to it. It may come after a backward too: that of a generator
        adds to gradients that its discriminator clears later."""
        left, version = self._left if self._left is not None else (None, 0)
        added = left is not None and left() is gradient and gradient._version == version + 1
        self.uncleared = added and (self._by_step or self.uncleared)
        self._left, self._by_step = (weakref.ref(gradient), gradient._version), False

    def _watch_one_gradient(self) -> Any:
        """A scalar a backward from one early, small parameter, before any reduction over ranks: bad
        gradients flow back to it from almost everywhere, so it names the micro-batch and the
        rank."""
        trainable = [p for p in self.parameters.tensors if p.requires_grad and not is_dtensor(p)]
        if not trainable:
            return None
        chosen = next((p for p in trainable if p.numel() <= 1 << 16), trainable[0])
        self._probe_of = chosen

        probes = self._probes  # not self: the hook would keep everything alive as long as the parameter
        stepper = weakref.ref(self)

        def look(p: Tensor) -> None:
            if p.grad is not None and p.grad.layout is torch.strided:
                probes.append(torch.linalg.vector_norm(p.grad.detach()))
                owner = stepper()
                if owner is not None:
                    owner._note_added(p.grad)

        return chosen.register_post_accumulate_grad_hook(look)

    def _sum(self, losses: list[Tensor]) -> Tensor | None:
        total = None
        for loss in losses:
            total = self._scalar(loss) if total is None else total + self._scalar(loss)
        return total

    def _scalar(self, loss: Tensor) -> Tensor:
        return loss.detach().reshape(()).to(self.parameters.device, self.parameters.dtype, non_blocking=True)
