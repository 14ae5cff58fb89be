"""The optimizer's step on copies, and a few whole steps that are undone again: what would happen with another setting?"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanproof.explain.replay._recorder import Moment
from nanproof.explain.replay._replay import Replay
from nanproof.explain.replay._surroundings import weights_as

LARGEST = 1 << 26
"""Elements of the weights that are copied for one look at the optimizer's step, at the most."""
LARGEST_REHEARSAL = 1 << 29
"""Elements of the weights above which whole steps are not rehearsed: it takes a copy of weights and optimizer state."""


def step_on_copies(
    optimizer: Optimizer,
    gradients: Mapping[Tensor, Tensor],
    dtype: torch.dtype | None = None,
    fresh: bool = False,
    **settings: Any,
) -> list[tuple[Tensor, Tensor]] | None:
    """(weight before, weight after) of one step on copies, in another dtype or with other settings.

    None where a second optimizer of the same kind cannot be made.
    """
    groups, copies, size = [], [], 0
    for group in optimizer.param_groups:
        members = []
        for p in group["params"]:
            gradient = gradients.get(p)
            if gradient is None or size > LARGEST:
                continue
            size += p.numel()
            clone = p.detach().clone().to(dtype or p.dtype).requires_grad_()
            clone.grad = gradient.detach().to(clone.dtype)
            members.append(clone)
            copies.append((p, clone))
        if members:
            kept = {k: _own(v) for k, v in group.items() if k != "params"}
            groups.append({**kept, **{k: v for k, v in settings.items() if k in kept}, "params": members})
    if not groups:
        return None
    try:
        other = type(optimizer)(groups)  # type: ignore[call-arg]
        for p, clone in copies if not fresh else ():
            other.state[clone] = {k: _cast(v, p, clone) for k, v in optimizer.state.get(p, {}).items()}
        before = [clone.detach().clone() for _, clone in copies]
        other.step()
    except Exception:
        return None
    return list(zip(before, [clone.detach() for _, clone in copies], strict=True))


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


def _cast(value: Any, p: Tensor, clone: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    same = value.is_floating_point() and value.dtype == p.dtype and value.dim() > 0
    return value.clone().to(clone.dtype) if same else value.clone()


@contextmanager
def undone(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Whatever is done to weights, buffers and the optimizer inside is undone; the optimizer's step hooks are not called."""
    members = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = list({id(t): t for t in (*model.parameters(), *model.buffers(), *members)}.values())
    saved = [t.detach().clone() for t in tensors]
    gradients = [(p, p.grad) for p in members]
    states = {p: {k: _own(v) for k, v in state.items()} for p, state in optimizer.state.items()}
    settings = [{k: (v, _own(v)) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    hooks = {name: getattr(optimizer, name) for name in _HOOKS if hasattr(optimizer, name)}
    own = {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float, str, bool, type(None)))}
    for name, registered in hooks.items():
        setattr(optimizer, name, type(registered)())
    try:
        yield
    finally:
        vars(optimizer).update(own)
        for name, registered in hooks.items():
            setattr(optimizer, name, registered)
        with torch.no_grad():
            for t, value in zip(tensors, saved, strict=True):
                t.copy_(value)
        for p in list(optimizer.state):
            if p not in states:
                del optimizer.state[p]
        for p, state in states.items():
            _put_state(optimizer.state[p], state)
        for group, kept in zip(optimizer.param_groups, settings, strict=True):
            for key, (live, value) in kept.items():
                group[key] = live
                if isinstance(live, Tensor):
                    live.copy_(value)
        for p, gradient in gradients:
            p.grad = gradient


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
    optimizer: Optimizer,
    moments: Sequence[Moment],
    *,
    factor: float = 1.0,
    rate: float | None = None,
    fresh: bool = False,
    max_norm: float | None = None,
    rounds: int = 1,
) -> list[float] | None:
    """The losses of a few steps over recent batches, with the learning rate times `factor`, with another `rate`, or with a fresh
    optimizer state; everything is undone afterwards.

    None where it would take too much memory.
    """
    if sum(p.numel() for p in replay.parameters.values()) > LARGEST_REHEARSAL:
        return None
    named: dict[str, Tensor] = dict(replay.parameters)
    losses = []
    with undone(replay.model, optimizer):
        if fresh:
            optimizer.state.clear()
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor if rate is None else rate
        for _ in range(rounds):
            for moment in moments:
                found: dict[str, Tensor] = {}

                def take(found: dict[str, Tensor] = found) -> None:
                    found.update({name: p.grad for name, p in named.items() if p.grad is not None})

                outcome = replay.run(batches=moment.batches, random=moment.random, after=take)
                losses.append(outcome.loss)
                if not outcome.finite:
                    return losses
                kept = {p: p.grad for p in named.values()}
                for name, p in named.items():
                    p.grad = found.get(name)
                if max_norm is not None:
                    torch.nn.utils.clip_grad_norm_(list(named.values()), max_norm)
                with suppress(Exception):
                    optimizer.step()
                for p, gradient in kept.items():
                    p.grad = gradient
        last = replay.run(batches=moments[-1].batches, random=moments[-1].random, backward=False)
        losses.append(last.loss)
    return losses


def slope_ratio(replay: Replay) -> float | None:
    """The slope of the loss along the gradient, measured, over the one that the gradient's norm promises. None where it cannot be
    told: the two measurements differ, or the loss does not fall."""
    gradients = replay.gradients()
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


def adam_update(optimizer: Any) -> float | None:
    """Root mean square of Adam's last update over the learning rate; at most about 1 in a healthy run."""
    total, count = 0.0, 0
    for group in optimizer.param_groups:
        betas = group.get("betas")
        if betas is None or len(betas) != 2:
            continue
        for p in group["params"]:
            state = optimizer.state.get(p, {})
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


def changed_share(pairs: list[tuple[Tensor, Tensor]] | None) -> float:
    """Share of elements that a step changed."""
    if not pairs:
        return 0.0
    changed = sum(int((a != b).sum()) for a, b in pairs)
    return changed / max(1, sum(a.numel() for a, _ in pairs))
