"""Failures without a NaN: nothing moves, nothing flows, nothing is learned. Noticed from records, a small sample of weights, and
the graph of one loss.

What is noticed here is a suspicion; a replay and the catalogue decide whether it is an incident. A healthy run must not show
any: each replay calls the model, and its forwards belong to the loop.

| signal | noticed after |
|---|---|
| foreign-parameters | 1 step |
| missing-gradients | 3 steps |
| zero-gradients | 4 steps if there never was a gradient, else 20 (8 where the loss is exactly 0) |
| zero-learning-rate | 5 steps |
| shifted-labels | 3 steps |
| dead-parameters | 12 steps |
| unchanged-weights, tiny-updates | two samples in a row: step 10, later every 50 steps |
| huge-gradients, nonfinite-buffers | 1 step |
| garbage-buffers | 8 steps |
| early-jump | 15 steps after it, within the first 20 |
| activation-twice, broadcast | 3 steps |
| uncleared-gradients | 10 steps |
| constant-loss | 8 steps |
| loss-at-ln2, heavy-clipping | 10 steps |
| stuck, collapsed | 20 steps if far above the loss of a constant prediction, else 60; once more after 100 |
| lost-state | 1 step, at a spike |
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from typing import Any

import torch
from torch import Tensor

from nanproof._records import ABSENT, StepRecord
from nanproof._wording import listed
from nanproof.core._telemetry import Courier
from nanproof.core.judge._parameters import Parameters, local
from nanproof.core.support._members import optimizers_in
from nanproof.core.support._tree import tensors_in
from nanproof.explain._graph import Activated, Broadcast

FIRST_STEPS = 3
NEVER = 4
AGAIN = 20
SOLVED = 8
DEAD = 12
NO_RATE = 5
UNCHANGED = 0.05
"""Share of sampled elements that change in a step, below which a step changes next to nothing."""
TINY = 3e-5
"""Size of an update relative to the weights below which it is worth asking whether the gradients are right."""
FAINT = 1e-3
"""A gradient norm below this share of the loss may be off by a factor. Updates that are tiny without it are a small rate."""
HUGE = 1e6
"""A gradient norm this many times the loss, or 1, is looked at once."""
NO_RATE_SHARE = 1e-6
"""A learning rate that has fallen to this share of the largest one counts as 0."""
UNCLEARED = 10
"""Steps in a row that add to the gradients of the step before."""
CONSTANT = 8
"""Steps in a row with the same loss."""
LN2 = 10
"""Steps in a row with a loss of ln 2, as of a pair whose members cannot be told apart."""
HEAVY = 20.0
"""Times the limit that gradients are before clipping, in 10 steps in a row, to be looked at once."""
RECENT = 20
"""Steps whose mean loss is compared with that of a constant prediction."""
NEAR = 0.97
"""Share of the loss of a constant prediction, or of the first losses, from which a loss has not fallen."""
SOON, ABOVE = 60, 1.1
"""Before this step a loss must be so many times that of a constant prediction: healthy runs need some steps to get below it."""
AGAIN_STUCK = 100
"""Steps after which a loss that does not fall is looked at a second time."""
ENOUGH = 4.0
"""Targets for each class that say what a constant prediction costs."""
FAR_ABOVE = 10.0
"""Times the loss of a constant prediction, from which a loss is looked at although it falls."""
SAME = 1e-3
"""Predictions of different samples that are closer than this are the same."""


@dataclass(frozen=True, slots=True)
class Signal:
    """Something that a healthy run does not show."""

    name: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)
    since: int | None = None
    """The step at which it began."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one step showed beyond its record."""

    sample: tuple[float, float, float] | None = None
    """What its update did to the sampled weights."""
    shifted: tuple[str, str] | None = None
    """Two tensors of the batch of which one is the other moved by one, where the loss moved it again."""
    outputs: tuple[float, ...] | None = None
    """See `outputs_of`."""
    activated: Activated | None = None
    broadcast: Broadcast | None = None
    uncleared: bool = False
    """Its gradients were added to those of the step before."""


class SilentWatch:
    """Sees every accepted step, and says each thing once."""

    def __init__(self, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = parameters
        self._plain = type(optimizer) is torch.optim.SGD
        self._said: set[str] = set()
        self._steps = 0
        self._absent: set[int] | None = None
        self._zero = 0
        self._learned = False
        self._no_rate = 0
        self._dead: dict[int, int] = {}
        """Parameters whose gradient is exactly 0, and for how many steps in a row."""
        self._first: StepRecord | None = None
        self._jumped: StepRecord | None = None
        self._samples: deque[tuple[float, float, float, float]] = deque(maxlen=2)
        """(share of elements that changed, relative size of the update, the same over lr * gradient, learning rate) of the last
        sampled steps."""
        self.moves_every_step = True
        """Whether the sampled steps changed the weights; an optimizer that steps every k-th time accumulates in between."""
        self._due: deque[Signal] = deque()
        """Signals that were noticed and not yet returned."""
        self._largest_rate = 0.0
        self._uncleared = self._clipped = self._collapsed = 0
        self._stuck_again = False
        self._early: list[float] = []
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        """(loss, learning rate) of the last steps."""

    def renewed(self, parameters: Parameters, optimizer: torch.optim.Optimizer, dealt_with: str) -> SilentWatch:
        """A watch that counts from here, and does not say again what was said, but for what was dealt with."""
        new = SilentWatch(parameters, optimizer)
        new._said = (self._said | {"early-jump"}) - {dealt_with}  # a jump is one of a run's first steps
        new._learned, new._due = self._learned, self._due
        return new

    def see(self, record: StepRecord, look: Look) -> Signal | None:
        """Take the next accepted step, and return the next signal that is due."""
        self._steps += 1
        rate = max(record.lr, default=0.0)
        self._largest_rate = max(self._largest_rate, rate)
        self._recent.append((record.loss, rate))
        if len(self._early) < 5:
            self._early.append(record.loss)
        if look.sample is not None:
            self._samples.append((*look.sample, rate))
            self.moves_every_step = self.moves_every_step and look.sample[0] > 0
        early = (self._foreign, self._missing) if self._steps <= FIRST_STEPS else ()
        of_record = (*early, self._zeros, self._dead_ones, self._rate, self._unchanged, self._huge)
        signals = [watch(record) for watch in (*of_record, self._jump, self._constant, self._heavy)]
        signals += [self._cleared(record, look), *self._of_loss(record, look)]
        for signal in signals:
            if signal is not None:
                self.notice(signal)
        return self._due.popleft() if self._due else None

    def notice(self, signal: Signal | None) -> None:
        """Queue a signal, once. Several may come at one step, and some of them only at that step."""
        if signal is not None and signal.name not in self._said:
            self._said.add(signal.name)
            self._due.append(signal)

    def _of_loss(self, record: StepRecord, look: Look) -> list[Signal | None]:
        """What the graph of the loss shows."""
        found: list[Signal | None] = []
        if look.activated is not None:
            inner, outer = look.activated.inner, look.activated.outer
            details = {"inner": inner, "outer": outer}
            found.append(Signal("activation-twice", f"the output of {inner} goes into {outer} as logits", details, 0))
        if look.broadcast is not None:
            few, many = list(look.broadcast.prediction), list(look.broadcast.result)
            message = f"predictions of shape {few} are compared with targets in {many} pairs"
            found.append(Signal("broadcast", message, {"prediction": few, "result": many, "op": look.broadcast.op}, 0))
        if look.shifted is not None:
            inputs, labels = look.shifted
            message = f"{labels} is {inputs} moved by one, and the loss moves it again"
            found.append(Signal("shifted-labels", message, {"inputs": inputs, "labels": labels}))
        if look.outputs is not None:
            found += [self._level(record, *look.outputs)]
        return found

    def _cleared(self, record: StepRecord, look: Look) -> Signal | None:
        self._uncleared = self._uncleared + 1 if look.uncleared else 0
        if self._uncleared < UNCLEARED or len(self._samples) < 2 or not self.moves_every_step:
            return None
        message = f"the gradients of {UNCLEARED} steps in a row were added to those of the step before"
        return Signal("uncleared-gradients", message, {}, record.step - UNCLEARED + 1)

    def _constant(self, record: StepRecord) -> Signal | None:
        before = self._recent[-2][0] if len(self._recent) > 1 else math.inf
        near_ln2 = abs(record.loss - math.log(2)) < 0.01
        if not near_ln2 and abs(record.loss - before) > 1e-6 * abs(record.loss):
            return None
        losses = [loss for loss, _ in self._recent]
        last = losses[-CONSTANT:]
        if len(last) == CONSTANT and record.loss != 0 and max(last) - min(last) <= 1e-6 * abs(record.loss):
            message = f"the loss has been {record.loss:.6g} for {CONSTANT} steps"
            return Signal("constant-loss", message, {}, record.step - CONSTANT + 1)
        near = losses[-LN2:]
        if len(near) == LN2 and all(abs(loss - math.log(2)) < 0.01 for loss in near):
            return Signal("loss-at-ln2", f"the loss has been ln 2 for {LN2} steps", {}, record.step - LN2 + 1)
        return None

    def _heavy(self, record: StepRecord) -> Signal | None:
        self._clipped = self._clipped + 1 if record.clip >= HEAVY else 0
        if self._clipped < 10:
            return None
        message = f"the gradients have been over {HEAVY:g} times the limit for 10 steps; they are clipped to 1/{record.clip:.3g}"
        return Signal("heavy-clipping", message, {}, record.step - 9)

    def _level(self, record: StepRecord, spread: float, loss: float, trivial: float, samples: float) -> Signal | None:
        """Compare the loss with that of a constant prediction. If too few targets tell what that is, the loss must not have
        fallen either."""
        losses, rates = [x for x, _ in self._recent], [r for _, r in self._recent]
        if len(losses) < RECENT or rates[-1] > 1.02 * rates[0] or not trivial > 0:
            return None  # too early, or still warming up
        usual, first = math.fsum(losses) / len(losses), min(self._early)
        self._collapsed = self._collapsed + 1 if spread < SAME and loss > 0.5 * trivial else 0
        moved = self._samples[-1][1] if self._samples else 0.0
        details = {"trivial": trivial, "usual": usual, "moved": moved}
        if self._collapsed >= 2:
            message = f"the model gives every sample the same output; the loss is {usual:.4g}"
            return Signal("collapsed", message, details, record.step)
        loss *= usual / record.loss if record.loss > 0 else 1.0  # of the last steps, in the unit of this one
        fallen = usual < NEAR * first and samples < ENOUGH
        level = NEAR if self._steps >= SOON else ABOVE
        if (fallen or loss < level * trivial) and not loss > FAR_ABOVE * trivial:
            return None
        if self._steps >= AGAIN_STUCK and not self._stuck_again:  # the first look came before much could be learned
            self._said.discard("stuck")
            self._stuck_again = True
        message = f"the loss is {usual:.4g} after {self._steps} steps; a constant prediction gives {trivial:.4g}"
        return Signal("stuck", message, details, record.step)

    def _foreign(self, record: StepRecord) -> Signal | None:
        foreign, left_out = self._parameters.foreign, self._parameters.left_out
        if not (foreign and left_out) or self._steps > 1:
            return None
        message = f"the optimizer holds {len(foreign)} tensors that the model does not have, and lacks {listed(left_out)}"
        return Signal("foreign-parameters", message, {"message": message, "left_out": left_out}, record.step)

    def _missing(self, record: StepRecord) -> Signal | None:
        if self._steps > FIRST_STEPS:
            return None
        tensors, names = self._parameters.tensors, self._parameters.names
        foreign = set(self._parameters.foreign)
        if len(names) != len(record.norms):
            return None
        now = {i for i, n in enumerate(record.norms) if n == ABSENT and tensors[i].requires_grad and names[i] not in foreign}
        self._absent = now if self._absent is None else self._absent & now
        if self._steps < FIRST_STEPS or not self._absent:
            return None
        missing = [names[i] for i in sorted(self._absent)]
        message = f"{len(missing)} trainable parameters have had no gradient so far, {missing[0]} among them"
        return Signal("missing-gradients", message, {"missing": missing}, 0)

    def _zeros(self, record: StepRecord) -> Signal | None:
        if record.grad_norm != 0:
            self._zero, self._learned = 0, True
            return None
        if all(n == ABSENT for n in record.norms):
            return None
        self._zero += 1
        due = NEVER if not self._learned else SOLVED if record.loss == 0 else AGAIN
        if self._zero < due:
            return None
        solved = self._learned and record.loss == 0
        message = f"every gradient has been exactly 0 for {self._zero} steps"
        return Signal("zero-gradients", message, {"solved": solved}, record.step - self._zero + 1)

    def _dead_ones(self, record: StepRecord) -> Signal | None:
        if record.grad_norm == 0:
            return None
        at_zero = compress(range(len(record.norms)), map(not_, record.norms))
        self._dead = {i: self._dead.get(i, 0) + 1 for i in at_zero}
        dead = [self._parameters.names[i] for i, steps in self._dead.items() if steps >= DEAD and i < len(self._parameters.names)]
        if not dead:
            return None
        return Signal(
            "dead-parameters",
            f"the gradient of {dead[0]} has been exactly 0 for {DEAD} steps",
            {"names": dead},
            record.step - DEAD + 1,
        )

    def _jump(self, record: StepRecord) -> Signal | None:
        """A loss that was small at first, shot up within a few steps and did not stay there."""
        if self._first is None:
            self._first = record
        if self._jumped is None:
            far = abs(record.loss) > 20 * abs(self._first.loss) > 0 and record.grad_norm > 10 * self._first.grad_norm > 0
            self._jumped = record if far and self._steps <= 20 else None
            return None
        if record.step != self._jumped.step + 15:
            return None
        message = f"the loss jumped from {self._first.loss:.4g} to {self._jumped.loss:.4g} within the first steps"
        return Signal("early-jump", message, {"record": self._jumped, "first": self._first}, self._jumped.step)

    def lost_state(self, record: StepRecord, done: int) -> Signal | None:
        """At a spike: the optimizer's state has seen far fewer steps than this watch."""
        if done + RECENT > self._steps:
            return None
        message = f"loss {record.loss:.4g} {done} steps after the optimizer's state began anew"
        return Signal("lost-state", message, {"done": done}, record.step)

    def _rate(self, record: StepRecord) -> Signal | None:
        least = NO_RATE_SHARE * self._largest_rate
        still = bool(record.lr) and all(x <= least for x in record.lr) and record.grad_norm > 0
        self._no_rate = self._no_rate + 1 if still else 0
        # A schedule may well end at 0 a few steps before the loop does.
        if self._no_rate < max(NO_RATE, (self._steps - self._no_rate) // 5):
            return None
        shown = "0" if not any(record.lr) else f"{max(record.lr):.2g} or less"
        message = f"the learning rate has been {shown} for {self._no_rate} steps"
        details = {"steps": self._no_rate, "largest": self._largest_rate}
        return Signal("zero-learning-rate", message, details, record.step - self._no_rate + 1)

    def _unchanged(self, record: StepRecord) -> Signal | None:
        if len(self._samples) < 2 or not record.grad_norm > 0:
            return None
        (share0, size0, kept0, rate0), (share1, size1, kept1, rate1) = self._samples
        if rate1 > 1.02 * rate0 or rate1 == 0:
            return None  # still warming up
        if max(share0, share1) < UNCHANGED:
            message = f"a step changes {share1:.1%} of the sampled weights"
            return Signal("unchanged-weights", message, {"share": max(share0, share1)}, record.step)
        if 0 < kept0 < 1 / 50 and 0 < kept1 < 1 / 50 and (self._plain or _same_power(kept0, kept1)):
            message = f"a step changes the weights by {kept1:.2g} of learning rate times gradient"
            return Signal("small-updates", message, {"kept": kept1}, record.step)
        if max(size0, size1) < TINY and record.grad_norm < FAINT * abs(record.loss):
            return Signal(
                "tiny-updates", f"a step changes the weights by {size1:.2g} of their size", {"size": size1}, record.step
            )
        return None

    def _huge(self, record: StepRecord) -> Signal | None:
        if not record.grad_norm > HUGE * max(1.0, min(abs(record.loss), 10.0)):
            return None
        return Signal(
            "huge-gradients", f"a gradient norm of {record.grad_norm:.3g} with a loss of {record.loss:.3g}", {}, record.step
        )


def _same_power(a: float, b: float) -> bool:
    """Both are the same power of two, as a loss scale is. An optimizer of one's own may rescale by anything else on purpose."""
    exponents = math.log2(a), math.log2(b)
    return round(exponents[0]) == round(exponents[1]) and all(abs(e - round(e)) < 0.02 for e in exponents)


class WeightSample:
    """A few thousand weights before and after a step, now and then. Waits for no device."""

    TENSORS, ELEMENTS = 6, 1024

    def __init__(self, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        trainable = [p for p in parameters.tensors if p.requires_grad and p.is_floating_point() and local(p).is_contiguous()]
        matrices = [p for p in trainable if p.dim() >= 2] or trainable
        self._chosen = sorted(matrices, key=lambda p: -p.numel())[: self.TENSORS]
        self._courier = Courier(parameters.device)
        self._before: list[Tensor] = []
        self._promised: list[Tensor | None] = []

    @staticmethod
    def due(step: int) -> bool:
        return step in (5, 10) or (step > 0 and step % 50 == 0)

    def before(self) -> None:
        self._before = [self._some(p) for p in self._chosen]
        self._promised = self._promise()

    def _promise(self) -> list[Tensor | None]:
        """Learning rate times gradient, summed over the sample: what plain SGD will do, before scale and clipping."""
        plain = [each for each in optimizers_in(self._optimizer) if isinstance(each, torch.optim.SGD)]
        rates = {id(p): group["lr"] for each in plain for group in each.param_groups for p in group["params"]}
        usable = [id(p) in rates and p.grad is not None and p.grad.layout is torch.strided for p in self._chosen]
        return [
            self._some(p.grad).float().abs().sum() * rates[id(p)] if ok and p.grad is not None else None
            for p, ok in zip(self._chosen, usable, strict=True)
        ]

    def after(self) -> Callable[[], list[float]] | None:
        """To be read later: (share of the elements that changed, size of the change relative to the weights, and relative to
        learning rate times gradient)."""
        if not self._before:
            return None
        pairs = [(a.float(), self._some(p).float()) for a, p in zip(self._before, self._chosen, strict=True)]
        first = pairs[0][0].device
        share = torch.stack([(a != b).float().mean().to(first, non_blocking=True) for a, b in pairs]).mean()
        moved = torch.stack([(b - a).square().sum().to(first, non_blocking=True) for a, b in pairs]).sum()
        size = torch.stack([a.square().sum().to(first, non_blocking=True) for a, _ in pairs]).sum()
        self._before = []
        return self._courier.send(torch.stack((share, (moved / size.clamp(min=1e-30)).sqrt(), self._kept_promise(pairs, first))))

    def _kept_promise(self, pairs: list[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
        """The change over what was promised; -1 where nothing was."""
        done = [((b - a).abs().sum(), p) for (a, b), p in zip(pairs, self._promised, strict=True) if p is not None]
        if not done:
            return torch.full((), -1.0, device=device)
        moved = torch.stack([x.to(device, non_blocking=True) for x, _ in done]).sum()
        return moved / torch.stack([p.to(device, non_blocking=True) for _, p in done]).sum().clamp(min=1e-30)

    def _some(self, p: Tensor) -> Tensor:
        flat = local(p.detach()).reshape(-1)
        return flat[:: max(1, flat.numel() // self.ELEMENTS)].clone()


def shifted_pairs(batches: Sequence[Any]) -> tuple[list[tuple[str, str]], Tensor] | None:
    """Pairs of tensors of a batch of which one could be the other moved by one; for each, on the device, the share of places
    where it is, where neighbours differ, and where the two are simply equal."""
    if len(batches) != 1:
        return None
    tokens = [(name, t) for name, t in tensors_in(batches[0]) if t.dtype == torch.int64 and t.dim() == 2 and t.shape[1] >= 4][:4]
    names, shares = [], []
    for x_name, x in tokens:
        for y_name, y in tokens:
            if x is not y and x.shape == y.shape and x.device == y.device:
                counts, all_counts = y[:, :-1] != -100, y != -100
                moved = ((y[:, :-1] == x[:, 1:]) & counts).sum() / counts.sum().clamp(min=1)
                equal = ((y == x) & all_counts).sum() / all_counts.sum().clamp(min=1)
                names.append((x_name, y_name))
                shares.append(torch.stack((moved, (x[:, 1:] != x[:, :-1]).float().mean(), equal)))
    return (names, torch.stack(shares).flatten()) if names else None


def is_shifted(names: list[tuple[str, str]], shares: list[float]) -> tuple[str, str] | None:
    """The pair of which the second is the first moved by one, from what `shifted_pairs` sent."""
    for i, pair in enumerate(names):
        moved, varied, equal = shares[3 * i : 3 * i + 3]
        if moved > 0.9 and equal < 0.9 and varied > 0.05:
            return pair
    return None


def moves_again(labels: Tensor, targets: Sequence[Tensor]) -> Tensor:
    """Return, on the device, the largest share of places where a target is the label after it, and where it is the label
    itself."""
    samples, length = labels.shape
    again, as_they_are = [labels.new_zeros((), dtype=torch.float32)], [labels.new_zeros((), dtype=torch.float32)]
    for target in targets:
        if target.device != labels.device or target.numel() not in (labels.numel(), samples * (length - 1)):
            continue
        found = target.detach().reshape(samples, -1)
        again.append(_same(found[:, : length - 1], labels[:, 1:]))
        if found.shape == labels.shape:
            as_they_are.append(_same(found, labels))
    return torch.stack((torch.stack(again).max(), torch.stack(as_they_are).max()))


def _same(target: Tensor, labels: Tensor) -> Tensor:
    counts = labels != -100
    return ((target == labels) & counts).sum() / counts.sum().clamp(min=1)
