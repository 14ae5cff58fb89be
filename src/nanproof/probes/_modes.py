"""Compare training with evaluation: without dropout both must give the same, and evaluation must not be random."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from nanproof._wording import listed
from nanproof.core.support._context import Mode, RandomState
from nanproof.probes._contract import ProbeResult, finding
from nanproof.probes._probing import Probing, depends, moved
from nanproof.probes._recorder import ModuleCall, Recorder


def train_and_eval(probing: Probing) -> Iterator[ProbeResult]:
    """Are both modes the same without dropout, and is evaluation steady?"""
    modules = probing.replay.modules
    evaluation = replace(probing.steady, training=[False] * len(modules))
    with _no_recurrent_dropout(modules):
        calm = probing.run(recorder=Recorder(probing.model, no_dropout=True), mode=evaluation)
    once = probing.run(mode=evaluation)
    yield from _random_in_eval(probing, evaluation, once, calm)
    if calm.draws:
        return
    with _no_recurrent_dropout(modules):
        trained = probing.run(recorder=Recorder(probing.model, no_dropout=True))
    if trained.draws or not _same_tokens(trained, calm):
        return  # noise on purpose (layer drop, jitter, sampling), or a decoder that is fed its targets in training
    results = list(zip(trained.results(), calm.results(), strict=False))
    if len(trained.results()) != len(calm.results()) or any(a.values.shape != b.values.shape for a, b in results) or not results:
        return
    did = "ran the batch in training and in evaluation, with dropout off and batch statistics fixed"
    for a, b in results:
        change = moved(a.values, b.values)
        if not depends(change, float(a.values.abs().max()), a.values, None):
            continue
        if _probabilities(a.values, b.values):
            return
        where = _first_module(probing, evaluation)
        saw = f"the results differ by {change:.2g}"
        fix = "Look for code that asks self.training and changes more than randomness; validation measures another model."
        yield finding("train-eval-differ", did, saw, fix, confidence=0.9, phase="forward", where=where)
        return
    yield ProbeResult("train-eval-differ", did, "the results are the same")


def _same_tokens(a: Recorder, b: Recorder) -> bool:
    same = (x.ids.shape == y.ids.shape and torch.equal(x.ids, y.ids) for x, y in zip(a.lookups, b.lookups, strict=False))
    return len(a.lookups) == len(b.lookups) and all(same)


def _probabilities(trained: torch.Tensor, evaluated: torch.Tensor) -> bool:
    """Whether evaluation returns the probabilities of the logits that training returns: a habit, not a mistake."""
    t = trained.float()
    known = [t.sigmoid(), *(f(t, d) for d in {1 % t.dim(), t.dim() - 1} for f in (torch.softmax, torch.log_softmax))]
    return any(torch.allclose(k, evaluated.float(), rtol=1e-3, atol=1e-5) for k in known)


def _random_in_eval(probing: Probing, mode: Mode, once: Recorder, calm: Recorder) -> Iterator[ProbeResult]:
    if not once.dropouts:
        return
    other = _other_random(probing)
    again = probing.run(mode=mode, random=other)
    pairs = list(zip(once.results(), again.results(), strict=False))
    steady = [r.values for r in calm.results()]
    with _no_recurrent_dropout(probing.replay.modules):
        quiet = probing.run(recorder=Recorder(probing.model, no_dropout=True), mode=mode, random=other)
    differ = any(moved(a.values, b.values) > 0 for a, b in pairs)
    calmed = all(torch.equal(a, b.values) for a, b in zip(steady, quiet.results(), strict=True))
    if differ and calmed:
        where = list(dict.fromkeys(once.dropouts))
        did = "ran the batch twice in evaluation with different random numbers"
        saw = f"the results differ; dropout is active in {listed(where)}, and without it they are the same"
        fix = "Pass training=self.training to F.dropout, or use nn.Dropout in a registered module."
        yield finding("random-in-eval", did, saw, fix, phase="forward", where=where[0], op="dropout")


def _other_random(probing: Probing) -> RandomState:
    """Other random numbers than those of the step."""
    now = RandomState.now(probing.replay.devices)
    probing.replay.random.restore()
    torch.rand(7)
    for device in probing.replay.devices:
        torch.rand(7, device=device)
    other = RandomState.now(probing.replay.devices)
    now.restore()
    return other


@contextmanager
def _no_recurrent_dropout(modules: list[nn.Module]) -> Iterator[None]:
    """Recurrent layers drop inside one operation."""
    layers = [m for m in modules if isinstance(m, nn.RNNBase)]
    before = [m.dropout for m in layers]
    for layer in layers:
        layer.dropout = 0.0
    try:
        yield
    finally:
        for layer, dropout in zip(layers, before, strict=True):
            layer.dropout = dropout


def _first_module(probing: Probing, evaluation: Mode) -> str | None:
    """The first module whose output differs between the modes."""
    seen: list[tuple[str, list[torch.Tensor]]] = []

    def keep(call: ModuleCall) -> None:
        seen.append((call.path, [t.detach().clone() for t in call.outputs]))

    with _no_recurrent_dropout(probing.replay.modules):
        probing.run(recorder=Recorder(probing.model, no_dropout=True, on_module=keep))
        before = seen.copy()
        seen.clear()
        probing.run(recorder=Recorder(probing.model, no_dropout=True, on_module=keep), mode=evaluation)
    for (path, was), (other, now) in zip(before, seen, strict=False):
        if path != other or [t.shape for t in was] != [t.shape for t in now]:
            return path
        if any(depends(moved(a, b), float(a.abs().max()), a, None) for a, b in zip(was, now, strict=True) if a.numel()):
            return path
    return None
