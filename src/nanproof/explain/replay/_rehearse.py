"""A few whole steps that are undone again: what would happen with another setting?"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.core.support._context import RandomState
from nanproof.core.support._members import groups_of, optimizers_in, states_of
from nanproof.core.support._tree import map_tensors
from nanproof.explain.replay._recorder import Moment
from nanproof.explain.replay._replay import CannotReplay, Replay
from nanproof.explain.replay._surroundings import weights_as

LARGEST_REHEARSAL = 1 << 29
"""Elements of the weights above which whole steps are not rehearsed: it takes a copy of weights and optimizer state."""

REFUSED_STEP = 1.0
"""Seconds in which the diagnosis of a refused step may rehearse training steps: the run waits for it. What is learned too slowly
is another matter: nothing but a rehearsal can tell."""
_HOPELESS = 3.0
"""Times the seconds that are left, from which on a rehearsal is not begun: one run takes the longer the first time."""
_MEASURED = 2
"""Steps after which it is known how long the others will take."""


class TakesTooLong(CannotReplay):
    """A rehearsal would take more time than there is."""

    def __init__(self, steps: int, seconds: float) -> None:
        super().__init__(steps, seconds)
        self.steps, self.seconds = steps, seconds

    def __str__(self) -> str:
        return f"{self.steps} training steps would take {self.seconds:.0f} s or more, and the run waits for this"


@dataclass(slots=True)
class Allowance:
    """The time that is left to rehearse steps in."""

    seconds: float = math.inf

    @contextmanager
    def timed(self, steps: int, fastest: float) -> Iterator[Callable[[], None]]:
        """Take the time of a rehearsal from what is left. Raises `TakesTooLong` if that is hopeless; so does what it yields, to
        be called after each step, once that is seen.

        Args:
            fastest: seconds that one run of the step takes at the least; infinite where nobody knows.
        """
        left, begun = self.seconds, time.perf_counter()
        if math.isfinite(fastest) and steps * fastest > _HOPELESS * left:
            raise TakesTooLong(steps, steps * fastest)
        done, last, shortest = 0, begun, math.inf

        def step_is_done() -> None:
            nonlocal done, last, shortest
            now = time.perf_counter()
            done, last, shortest = done + 1, now, min(shortest, now - last)
            if done >= _MEASURED and now - begun + (steps - done) * shortest > left:
                raise TakesTooLong(steps, steps * shortest)

        try:
            yield step_is_done
        finally:
            self.seconds = max(0.0, left - (time.perf_counter() - begun))


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


@contextmanager
def undone(model: nn.Module, optimizer: Any) -> Iterator[None]:
    """Undo whatever happens inside to weights, buffers, gradients, random numbers and every optimizer that a step reaches. Step
    hooks are not called."""
    members = [p for group in groups_of(optimizer) for p in group["params"]]
    tensors = list({id(t): t for t in (*model.parameters(), *model.buffers(), *members)}.values())
    saved = [t.detach().clone() for t in tensors]
    gradients = [(p, p.grad) for p in (*model.parameters(), *members)]
    random = RandomState.now({t.device for t in tensors if t.device.type == "cuda"})
    inside = [_Saved(each) for each in optimizers_in(optimizer)]
    try:
        yield
    finally:
        for each in inside:
            each.put_back()
        with torch.no_grad():
            for t, value in zip(tensors, saved, strict=True):
                t.copy_(value)
        for p, gradient in gradients:
            p.grad = gradient
        random.restore()  # an optimizer that rounds stochastically draws numbers, and so do fresh weights


class _Saved:
    """State, settings and plain attributes of one optimizer, which has no hooks until they are put back."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._states = {p: {k: _own(v) for k, v in state.items()} for p, state in optimizer.state.items() if _by_key(state)}
        self._other = {key: _own(state) for key, state in optimizer.state.items() if not _by_key(state)}
        self._settings = [{k: (v, _own(v)) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._hooks = {name: getattr(optimizer, name) for name in _HOOKS if hasattr(optimizer, name)}
        plain = (int, float, str, bool, type(None))
        self._plain = {k: v for k, v in vars(optimizer).items() if isinstance(v, plain)}
        for name, registered in self._hooks.items():
            setattr(optimizer, name, type(registered)())

    def put_back(self) -> None:
        optimizer = self._optimizer
        vars(optimizer).update(self._plain)
        for name, registered in self._hooks.items():
            setattr(optimizer, name, registered)
        for p in list(optimizer.state):
            if p not in self._states and p not in self._other:
                del optimizer.state[p]
        for p, state in self._states.items():
            _put_state(optimizer.state[p], state)
        for key, value in self._other.items():
            optimizer.state[key] = value
        for group, kept in zip(optimizer.param_groups, self._settings, strict=True):
            for key, (live, value) in kept.items():
                group[key] = live
                if isinstance(live, Tensor):
                    live.copy_(value)


def _by_key(state: Any) -> bool:
    return isinstance(state, dict)


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def _put_state(live: dict[str, Any], saved: dict[str, Any]) -> None:
    for key in list(live):
        if key not in saved:
            del live[key]
    for key, value in saved.items():
        if isinstance(value, Tensor) and isinstance(live.get(key), Tensor) and live[key].shape == value.shape:
            with torch.no_grad():
                live[key].copy_(value)
        else:
            live[key] = value


def rehearse(
    replay: Replay,
    optimizer: Any,
    moments: Sequence[Moment],
    *,
    factor: float = 1.0,
    rates: Sequence[float] | None = None,
    fresh: bool = False,
    from_start: bool = False,
    change: Callable[[Tensor], Tensor] | None = None,
    under: Callable[[], AbstractContextManager[Any]] = nullcontext,
    loss_factor: float = 1.0,
    max_norm: float | None = None,
    rounds: int = 1,
    allowance: Allowance | None = None,
) -> list[float] | None:
    """The losses of a few steps over recent batches, and of one more forward; everything is undone afterwards.

    None where it would take too much memory, or the optimizer cannot take a step here (one that needs a closure).

    Args:
        factor: what the learning rate is multiplied by.
        rates: other learning rates, one for each group of the optimizer.
        fresh: start without the optimizer's state.
        from_start: start from weights that are initialised anew, and without the optimizer's state.
        change: applied to each tensor of the batches.
        under: makes a context for each run of a step.
        loss_factor: what gradients are multiplied by.
        allowance: the time that this and other rehearsals may take. Raises `TakesTooLong` as soon as it is seen to be too short.
    """
    if sum(p.numel() for p in replay.parameters.values()) > LARGEST_REHEARSAL or not moments:
        return None
    named: dict[str, Tensor] = dict(replay.parameters)
    losses = []
    allowance = allowance or Allowance()
    with allowance.timed(rounds * len(moments), replay.fastest) as step_is_done, undone(replay.model, optimizer):
        if from_start:
            initialise(replay.model)
        for each in optimizers_in(optimizer) if fresh or from_start else ():
            each.state.clear()
        for group in groups_of(optimizer) if rates is None else ():
            if "lr" in group:
                group["lr"] = group["lr"] * factor
        for group, rate in zip(optimizer.param_groups, rates or (), strict=False):
            group["lr"] = rate
        for _ in range(rounds):
            for moment in moments:
                found: dict[str, Tensor] = {}

                def take(found: dict[str, Tensor] = found) -> None:
                    found.update({name: p.grad for name, p in named.items() if p.grad is not None})

                batches = moment.batches if change is None else [map_tensors(batch, change) for batch in moment.batches]
                outcome = replay.run(under(), batches=batches, random=moment.random, after=take)
                losses.append(outcome.loss)
                if not outcome.finite:
                    return losses
                total = outcome.total * loss_factor
                share = loss_factor * (max_norm / (total + 1e-6) if max_norm is not None and total > max_norm else 1.0)
                for gradient in found.values() if share != 1 else ():
                    gradient.mul_(share)
                if not _step(optimizer, named, found):
                    return None
                step_is_done()
        batches = moments[-1].batches if change is None else [map_tensors(batch, change) for batch in moments[-1].batches]
        losses.append(replay.run(under(), batches=batches, random=moments[-1].random, backward=False).loss)
    return losses


def initialise(model: nn.Module) -> None:
    """Initialise weights anew, as torch's modules do it. Frozen weights, and those of other modules, stay as they are."""
    frozen = [(p, p.detach().clone()) for p in model.parameters() if not p.requires_grad]
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed every device too
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset) and type(module).__module__.startswith("torch.nn."):
                reset()
        for p, value in frozen:
            p.copy_(value)


def _step(optimizer: Any, named: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> bool:
    """One step with these gradients. False where the optimizer refuses to take it."""
    kept = {p: p.grad for p in named.values()}
    try:
        for name, p in named.items():
            p.grad = gradients.get(name)
        optimizer.step()
    except Exception:
        return False
    finally:
        for p, gradient in kept.items():
            p.grad = gradient
    return True


def slope_ratio(replay: Replay) -> float | None:
    """The slope of the loss along the gradient, measured, over the one that the gradient's norm promises. None where it cannot be
    told: the two measurements differ, or the loss does not fall."""
    gradients = {name: g.to_dense() for name, g in replay.gradients().items()}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    size = math.sqrt(sum(float(replay.parameters[n].detach().double().square().sum()) for n in gradients))
    if not (0 < norm < math.inf) or size == 0:
        return None
    found = []
    for share in (1e-3, 3e-4):
        h = share * size
        ends = []
        for sign in (1, -1):
            moved = {replay.parameters[n]: replay.parameters[n].detach() + sign * h / norm * g for n, g in gradients.items()}
            with weights_as(moved):
                ends.append(replay.run(backward=False).loss)
        found.append((ends[0] - ends[1]) / (2 * h) / norm)
    if not all(math.isfinite(f) and f > 0 for f in found) or not 0.7 < found[0] / found[1] < 1.4:
        return None
    return found[1]


def steps_seen(optimizer: Any) -> int | None:
    """How many steps the optimizer's state has seen, where it counts them."""
    counts = [float(s["step"]) for _, s in states_of(optimizer) if isinstance(s, dict) and "step" in s]
    return int(max(counts)) if counts else None


def adam_update(optimizer: Any) -> float | None:
    """Root mean square of Adam's last update over the learning rate; at most about 1 in a healthy run."""
    total, count = 0.0, 0
    for each in optimizers_in(optimizer):
        for group in each.param_groups:
            betas = group.get("betas")
            if betas is None or len(betas) != 2:
                continue
            for p in group["params"]:
                state = each.state.get(p, {})
                m, v, step = state.get("exp_avg"), state.get("exp_avg_sq"), state.get("step")
                if m is None or v is None or step is None:
                    continue
                n = float(step)
                if n < 1 or count > 1 << 24:
                    continue
                first, second = m.float() / (1 - betas[0] ** n), v.float() / (1 - betas[1] ** n)
                update = first / (second.sqrt() + group.get("eps", 1e-8))
                total += float(update.square().sum())
                count += update.numel()
    return math.sqrt(total / count) if count else None
