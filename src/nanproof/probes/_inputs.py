"""Probe each input tensor as a whole: does anything depend on it?

Batches carry tensors that no model reads (indices, metadata, labels of other tasks), and many models
accept arguments that they do not use. So an input that changes nothing is reported only with a sign
that it was meant to: a module reads it and its output goes nowhere, or two towers read one input while
its twin stays unread.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.core.judge._parameters import unwrap
from nanproof.core.support._context import RandomState
from nanproof.core.support._tree import map_tensors, tensors_in
from nanproof.explain.locate._calls import tensors_of
from nanproof.explain.locate._locate import batch_shape
from nanproof.probes._contract import ProbeResult, finding
from nanproof.probes._probing import DoesNotApply, Probing, shaken
from nanproof.probes._recorder import ModuleCall, Recorder
from nanproof.probes._tokens import key_of

_NOT_INPUTS = tuple("mask weight label target len idx index pos type segment cache state hidden mem".split())
MOST = 8
"""Tensors that are tried, the largest first."""
TRIES = 3
"""Other contents, and other random numbers, under which nothing may move."""


def tensors_ignored(probing: Probing) -> Iterator[ProbeResult]:
    """Does the step depend on each of its inputs?"""
    samples, _ = batch_shape(probing.batch)
    if not probing.weights or probing.replay.writes or _switched_off(probing.batch):
        return
    for name, t in _candidates(probing, samples):
        try:
            if not _same(probing.base, probing.run(batch=_with(probing.batch, t, _other(t, 0)))) or not _is_ignored(probing, t):
                continue
            yield from _report(probing, name, t, samples)
        except DoesNotApply:
            continue  # a loss that does not accept other numbers there, so it reads them


def _candidates(probing: Probing, samples: int) -> list[tuple[str, Tensor]]:
    compared = [x.targets for x in probing.base.compared if x.targets is not None]
    found: list[tuple[str, Tensor]] = []
    for name, t in tensors_in(probing.batch):
        if t.dim() < 1 or t.shape[0] != samples or t.layout is not torch.strided or t.is_complex() or t.dtype == torch.bool:
            continue
        if any(word in key_of(name) for word in _NOT_INPUTS) or any(_equal(t, x) for x in compared) or bool((t == t[:1]).all()):
            continue
        if t.is_floating_point():
            read = t[0].numel() >= 4
        else:
            read = any(_equal(t, x.ids) for x in probing.base.lookups) or (t.dim() == 2 and len(torch.unique(t)) >= 8)
        if read:
            found.append((name, t))
    return sorted(found, key=lambda item: -item[1].numel())[:MOST]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.device == b.device and torch.equal(a, b)


def _switched_off(batch: Any) -> bool:
    """Whether something in the batch may turn an input off: a flag that is zero everywhere, or an end of an episode."""
    if isinstance(batch, Mapping) and any(value is False for value in batch.values()):
        return True
    for name, t in tensors_in(batch):
        key = key_of(name)
        if not t.numel() or "type" in key or "segment" in key:
            continue
        if bool((t == 0).all()) or (bool((t == 1).all()) and "mask" not in key):
            return True
    return False


def _with(batch: Any, t: Tensor, new: Tensor) -> Any:
    return map_tensors(batch, lambda each: new if each is t else each)


def _other(t: Tensor, seed: int) -> Tensor:
    """Other contents: noise of the same size or larger, or other ids of the same tensor."""
    generator = torch.Generator().manual_seed(seed)
    if t.is_floating_point():
        noise = torch.randn(t.shape, generator=generator).to(t.device, t.dtype)
        return t.detach().roll(1, 0) + noise * (1 + seed) * t.detach().float().std().clamp(min=1e-3).to(t.dtype)
    pool = torch.unique(t)
    pool = pool[pool >= 0]
    if len(pool) < 2:
        raise DoesNotApply("one id only")
    picks = torch.randint(0, len(pool), t.shape, generator=generator).to(t.device)
    other = torch.where(pool[picks] == t, pool[(picks + 1) % len(pool)], pool[picks])
    return torch.where(t < 0, t, other)


def _same(a: Recorder, b: Recorder) -> bool:
    """Whether loss, predictions and outputs are the same to the last bit."""
    one, two = a.results(), b.results()
    return a.loss == b.loss and len(one) == len(two) and all(_equal(x.values, y.values) for x, y in zip(one, two, strict=True))


def _is_ignored(probing: Probing, t: Tensor) -> bool:
    """Whether nothing depends on a tensor: not with noise in the weights and in gates that begin at zero, not under other
    random numbers, not in the gradient, and not in buffers that a later step reads."""
    buffers = [b for b in unwrap(probing.model).buffers() if b.is_floating_point() and b.numel()]
    noisy = [*probing.weights, *(b for b in buffers if not b.is_inference() and bool((b == 0).all()))]
    states = [None, *(_random_numbers(probing, i) for i in range(1, TRIES))]
    kept: list[list[Tensor]] = []

    def keep(recorder: Recorder, _loss: Tensor) -> None:
        kept.append([b.detach().clone() for b in unwrap(probing.model).buffers()])

    for seed, state in enumerate(states):
        kept.clear()
        before = probing.run(shaken(noisy), random=state, look=keep)
        after = probing.run(shaken(noisy), random=state, look=keep, batch=_with(probing.batch, t, _other(t, seed)))
        if not _same(before, after) or not all(_equal(a, b) for a, b in zip(*kept, strict=True)):
            return False
    return not _has_gradient(probing, t, noisy)


def _random_numbers(probing: Probing, seed: int) -> RandomState:
    """Other random numbers than those of the step."""
    now = RandomState.now(probing.replay.devices)
    try:
        torch.manual_seed(seed)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed)
        return RandomState.now(probing.replay.devices)
    finally:
        now.restore()


def _has_gradient(probing: Probing, t: Tensor, noisy: list[Tensor]) -> bool:
    """Whether the loss has a gradient from a tensor. It has one from a rounded or quantised input, whose value may stay."""
    leaf = t.detach().clone().requires_grad_() if t.is_floating_point() else t
    found: list[bool] = []

    def look(recorder: Recorder, loss: Tensor) -> None:
        read = [leaf] if t.is_floating_point() else [x.output for x in recorder.lookups if _equal(x.ids, t)]
        read = [x for x in read if x.requires_grad]
        gradients = torch.autograd.grad(loss, read, retain_graph=True, allow_unused=True) if read else ()
        found.extend(bool((g != 0).any()) for g in gradients if g is not None)

    probing.run(shaken(noisy), batch=_with(probing.batch, t, leaf), look=look)
    return any(found)


def _report(probing: Probing, name: str, t: Tensor, samples: int) -> Iterator[ProbeResult]:
    did = f"changed {name} in every sample"
    stayed = "the loss and every output stayed the same to the last bit"
    where = _last_reader(probing, t)
    if where is not None:
        saw = f"the output of {where} moved, but {stayed}"
        fix = f"Use what {where} returns: look for a wrong variable, a gate at 0, or a branch that is never taken."
        yield finding("input-ignored", did, saw, fix, phase="forward", where=where)
    elif (twins := _towers(probing, t)) is not None:
        other, one, two = twins
        saw = f"{stayed}; {one} and {two} both read {other}"
        fix = f"Give {name} to one of them. If it is not needed, remove it from the model's arguments."
        yield finding("input-ignored", did, saw, fix, confidence=0.85, phase="forward", where=two)


def _last_reader(probing: Probing, t: Tensor) -> str | None:
    """The last module with weights whose output depends on a tensor."""
    weighed = {name for name, m in unwrap(probing.model).named_modules() if any(True for _ in m.parameters())}
    seen: list[tuple[str, list[tuple[float, float]]]] = []

    def keep(call: ModuleCall) -> None:
        sums = [(float(x.detach().double().sum()), float(x.detach().double().abs().sum())) for x in call.outputs]
        seen.append((call.path, sums))

    probing.run(recorder=Recorder(probing.model, on_module=keep))
    before = seen.copy()
    seen.clear()
    probing.run(recorder=Recorder(probing.model, on_module=keep), batch=_with(probing.batch, t, _other(t, 0)))
    moved = [a[0] for a, b in zip(before, seen, strict=False) if a[0] == b[0] and a != b and a[0] in weighed]
    return moved[-1] if moved else None


def _towers(probing: Probing, t: Tensor) -> tuple[str, str, str] | None:
    """Two towers of the same build that read one input, where the model was given its twin `t` as well: (name of the input,
    first tower, second tower). Target networks, which have no gradient, read the same input on purpose."""
    model = unwrap(probing.model)
    twins = [(name, x) for name, x in tensors_in(probing.batch) if x is not t and x.shape == t.shape and x.dtype == t.dtype]
    if not t.is_floating_point():
        twins = [(name, x) for name, x in twins if len(torch.unique(x)) >= 8 and int(t.max()) <= 2 * int(x.max())]
    given: list[Tensor] = []
    readers: dict[int, list[tuple[str, nn.Module]]] = {}

    def note(path: str, module: nn.Module) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs = [x for x in (*tensors_of(args), *tensors_of(kwargs)) if any(x is y for _, y in twins) or x is t]
            if module is model:
                given.extend(inputs)
            elif torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
                for x in inputs:
                    readers.setdefault(id(x), []).append((path, module))

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    towers = [(path, m) for path, m in model.named_modules() if m is model or any(True for _ in m.children())]
    handles = [note(path, m) for path, m in towers]
    try:
        again = probing.run()
    finally:
        for handle in handles:
            handle.remove()
    if not any(x is t for x in given) or id(t) in readers or len([1 for _, x in twins if id(x) in readers]) != 1:
        return None
    for name, x in twins:
        found = readers.get(id(x), [])
        for i, (one, a) in enumerate(found):
            for two, b in found[i + 1 :]:
                apart = not (two + ".").startswith(one + ".") or (a is b and not again.dropouts and not again.draws)
                if apart and _build(a) == _build(b):
                    return name, one, two
    return None


def _build(module: nn.Module) -> tuple[Any, ...]:
    return type(module), [p.shape for p in module.parameters()]
