"""Probe single samples: does one depend on another, and does each depend on its own input?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nanproof._wording import few
from nanproof.core.support._tree import map_tensors, tensors_in
from nanproof.explain.locate._locate import batch_shape
from nanproof.probes._contract import ProbeResult, finding
from nanproof.probes._inputs import tensors_ignored
from nanproof.probes._probing import Probing, changed_rows, depends, shaken
from nanproof.probes._recorder import RECURRENT, Compared, ModuleCall, Recorder
from nanproof.probes._tokens import next_token

_SEQUENCES = ("multi_head_attention_forward", "scaled_dot_product_attention", *RECURRENT)
"""Operations that mix positions, and so mix samples if these come first where positions should."""
_LAYOUT = ("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "_unsafe_view")
_OVER_BATCH = ("softmax", "log_softmax", "normalize")
TRIES = 6
"""Other contents that are tried before an input counts as ignored."""


def samples_mixed(probing: Probing) -> Iterator[ProbeResult]:
    """Do the results of one sample depend on another one?"""
    samples = _samples(probing)
    if samples is None or _is_graph(probing.batch, samples):
        return
    before = probing.base.results()
    after = probing.run(batch=changed_rows(probing.batch, samples, 0, 1)).results()
    control, mixed = 0.0, False
    for was, now in zip(before, after, strict=False):
        a, b = _by_sample(was, samples), _by_sample(now, samples)
        if a is None or b is None or a.shape != b.shape:
            continue
        change = (a.double() - b.double()).abs()
        control = max(control, float(change[0].max()) if change.numel() else 0.0)
        mixed = mixed or depends(_leftover(change, samples), float(change.max()), a, None)
    if control == 0:
        return
    did = "replaced sample 0 by sample 1"
    if not mixed:
        yield ProbeResult("samples-mixed", did, f"the results of the other samples stayed, its own moved by {control:.2g}")
        return
    guilty = _first_mix(probing, samples)
    if guilty is None:
        return  # samples may meet on purpose: contrastive losses, statistics of the batch, attention between samples
    call, where = guilty
    saw = f"the results of other samples moved too; the first operation that mixes them is {call}"
    if call in _SEQUENCES:
        fix = "Set batch_first=True, or give the module (length, batch, features): it takes the first dimension for positions."
    elif call in _LAYOUT:
        fix = f"Use transpose or permute to swap dimensions: {call} only cuts the same numbers into other rows."
    else:
        fix = f"Give {call} the dimension of the classes (dim=-1), not that of the batch."
    yield finding("samples-mixed", did, saw, fix, phase="forward", where=where, op=call)


def _samples(probing: Probing) -> int | None:
    """How many samples there are, where it is certain that they come first: there is a target for each, the sequence runs along
    the second dimension, or the names are those of a tokenizer."""
    tensors = list(tensors_in(probing.batch))
    deep = {t.shape[0] for _, t in tensors if t.dim() >= 2}
    found: int | None = None
    for result in probing.base.compared:
        t = result.targets
        if t is not None and (t.dim() == 1 or (t.dim() == 2 and t.shape[1] == 1)) and len(t) in deep:
            found = len(t)
    if found is None and (stream := next_token(probing)) is not None:
        found = len(stream.ids)
    if found is None:
        found = _first_of_classes(probing)
    if found is None:
        found = next((len(t) for name, t in tensors if t.dim() == 2 and ("input_ids" in name or "attention_mask" in name)), None)
    if found is None or found < 2:
        return None
    square = any(t.dim() in (2, 3) and t.shape[0] == t.shape[1] == found for _, t in tensors)
    return None if square else found


def _first_of_classes(probing: Probing) -> int | None:
    """The samples of a cross entropy over (samples, classes, positions), whose targets are a tensor of the
    batch. Nothing else in the batch may have as many rows as there are positions, as it has if positions
    come first."""
    tensors = [t for _, t in tensors_in(probing.batch)]
    for result in probing.base.compared:
        t = result.targets
        if t is None or not result.split or t.dim() != 2 or not any(x.shape == t.shape and torch.equal(x, t) for x in tensors):
            continue
        rows, positions = t.shape
        if rows != positions and not any(x.dim() and x.shape[0] == positions for x in tensors):
            return rows
    return None


def _is_graph(batch: Any, samples: int) -> bool:
    """Whether samples are nodes of a graph, which see each other by design."""
    return any(t.layout is not torch.strided or "edge" in name or "adj" in name for name, t in tensors_in(batch))


def _by_sample(result: Compared, samples: int) -> Tensor | None:
    t = result.values
    if t.dim() and t.shape[0] == samples:
        return t
    if t.dim() == 2 and result.targets is not None and t.shape[0] % samples == 0:
        return t.reshape(samples, -1, t.shape[-1])
    return None


def _leftover(change: Tensor, samples: int) -> float:
    """The largest change outside of sample 0, whichever dimension counts the samples. A similarity of every sample with every
    other has two."""
    for dim in range(change.dim()):
        if change.shape[dim] == samples:
            change = change.narrow(dim, 1, samples - 1)
    return float(change.max()) if change.numel() else 0.0


def _has_samples(t: Tensor, samples: int) -> bool:
    return bool(t.numel()) and (samples in t.shape or t.shape[0] % samples == 0)


def _leftovers(change: Tensor, samples: int) -> Iterator[float]:
    """The largest change outside of sample 0 in each layout that the tensor may have. Samples may be
    folded into a larger dimension with heads, frames or windows, next to one that has their size by chance."""
    if samples in change.shape:
        yield _leftover(change, samples)
    for dim in range(min(2, change.dim())):
        size = change.shape[dim]
        if size > samples and size % samples == 0:
            for shape, place in (((samples, size // samples), 0), ((size // samples, samples), 1)):
                laid = change.unflatten(dim, shape).narrow(dim + place, 1, samples - 1)
                yield float(laid.max())


def _first_mix(probing: Probing, samples: int) -> tuple[str, str] | None:
    """The first operation whose result moves for other samples, if it is one that does so by mistake; and its module. Rows of
    features without a second dimension may be one sequence, which a recurrent layer reads on purpose."""
    sequences = any(t.dim() >= 3 or not t.is_floating_point() for _, t in tensors_in(probing.batch) if t.dim() >= 2)
    seen: list[tuple[str, ModuleCall]] = []

    def keep(name: str, call: ModuleCall) -> None:
        if any(samples in t.shape for t in call.outputs):
            inputs = [t.detach().clone() for t in call.inputs[:1]] if name in _LAYOUT else []
            seen.append((name, ModuleCall(call.path, None, inputs, [t.detach().clone() for t in call.outputs])))

    def mixes(before: list[Tensor], after: list[Tensor]) -> bool:
        pairs = [(a, (a.double() - b.double()).abs()) for a, b in zip(before, after, strict=True) if _has_samples(a, samples)]
        return any(all(depends(rest, float(d.max()), a, None) for rest in _leftovers(d, samples)) for a, d in pairs)

    probing.run(recorder=Recorder(probing.model, on_call=keep))
    before = seen.copy()
    seen.clear()
    changed = changed_rows(probing.batch, samples, 0, 1)
    probing.run(recorder=Recorder(probing.model, on_call=keep), batch=changed)
    for (name, was), (other, now) in zip(before, seen, strict=False):
        if name != other or _shapes(was) != _shapes(now):
            return None
        if not mixes(was.outputs, now.outputs):
            continue
        if name in _LAYOUT:
            # Rows that come back from groups were mixed in there, perhaps on purpose.
            known = any(_has_samples(t, samples) for t in was.inputs) and not mixes(was.inputs, now.inputs)
        else:
            whole = any(t.shape == (samples, samples) for t in was.outputs)
            known = (name in _SEQUENCES and sequences) or (name in _OVER_BATCH and not whole)
        return (name, was.path) if known else None
    return None


def _shapes(call: ModuleCall) -> list[torch.Size]:
    return [t.shape for t in (*call.inputs, *call.outputs)]


def input_ignored(probing: Probing) -> Iterator[ProbeResult]:
    """Does each sample's result depend on its own input, and on all of its inputs?"""
    results = list(_samples_ignored(probing))
    whole = list(tensors_ignored(probing)) if any(r.diagnosis is None for r in results) else []
    yield from whole[:1] or results


def _samples_ignored(probing: Probing) -> Iterator[ProbeResult]:
    samples, _ = batch_shape(probing.batch)
    if samples < 2:
        return
    base = probing.base
    other = _other_content(probing, samples)
    if other is None or not any(_rows(result, samples) is not None for result in base.results()):
        return
    still = _unmoved(base, probing.run(batch=other), samples)
    did = "gave every sample other contents"
    if still is None:
        return
    if not bool(still.any()):
        yield ProbeResult("input-ignored", did, "the result of every sample moved")
        return
    if base.draws and bool(still.all()):
        return  # made from noise, as by a generator: the batch is not its input
    # A head that begins at zero shows nothing yet, and a dead unit nothing of some contents.
    weights = probing.weights
    if not weights:
        return
    first = probing.run(shaken(weights))
    for seed in range(TRIES):
        again = _unmoved(first, probing.run(shaken(weights), batch=_other_content(probing, samples, seed)), samples)
        still = None if still is None or again is None else still & again
        if still is None or not bool(still.any()):
            return
    counts = _counted(probing, samples)
    if counts is None:
        return
    ignored = [i for i in torch.nonzero(still & counts).flatten().tolist() if i not in probing.known]
    if not ignored:
        return
    which = "every sample" if len(ignored) == samples else f"sample {few(ignored)}"
    saw = f"the result of {which} stayed the same to the last bit, and it counts in the loss"
    fix = "Look for an input that is never passed on, a mask or length that empties the sample, or a cut that leaves nothing."
    tags = tuple(ignored) if len(ignored) < samples else ()
    yield finding("input-ignored", did, saw, fix, phase="forward", samples=tags)


def _other_content(probing: Probing, samples: int, seed: int = 0) -> Any:
    """The batch with other numbers and tokens; masks and lengths stay. None if there is nothing to change."""
    looked_up = [x.ids for x in probing.base.lookups]
    generator = torch.Generator().manual_seed(seed)
    changed = False

    def change(t: Tensor) -> Tensor:
        nonlocal changed
        if not t.dim() or t.shape[0] != samples or t.layout is not torch.strided or t.dtype == torch.bool or t.is_complex():
            return t
        if bool(((t == 0) | (t == 1)).all()):
            return t.roll(1 + seed, 0) if t.is_floating_point() and t.dim() > 1 else t  # perhaps one-hot features
        if t.is_floating_point():
            noise = torch.randn(t.shape, generator=generator).to(t.device, t.dtype)
            changed = True
            return t.detach().roll(1, 0) + noise * (1 + seed) * t.detach().float().std().clamp(min=1e-3).to(t.dtype)
        if t.dim() < 2 and not any(x.shape == t.shape and torch.equal(x, t) for x in looked_up):
            return t
        pool = torch.unique(t)
        pool = pool[pool >= 0]
        if len(pool) < 2:
            return t
        changed = True
        picks = torch.randint(0, len(pool), t.shape, generator=generator).to(t.device)
        other = pool[picks]
        other = torch.where(other == t, pool[(picks + 1) % len(pool)], other)
        return torch.where(t < 0, t, other)

    made = map_tensors(probing.batch, change)
    return made if changed else None


def _rows(result: Compared, samples: int) -> Tensor | None:
    laid = _by_sample(result, samples)
    return None if laid is None else laid.reshape(samples, -1)


def _unmoved(before: Recorder, after: Recorder, samples: int) -> Tensor | None:
    """Which samples have the same results, to the last bit, in both passes."""
    still: Tensor | None = None
    for a, b in zip(before.results(), after.results(), strict=False):
        x, y = _rows(a, samples), _rows(b, samples)
        if x is None or y is None or x.shape != y.shape:
            continue
        same = (x == y).all(1).cpu()
        still = same if still is None else still & same
    return still


def _counted(probing: Probing, samples: int) -> Tensor | None:
    """Which samples' results the loss depends on."""
    found: list[Tensor] = []

    def look(recorder: Recorder, loss: Tensor) -> None:
        for result in recorder.results():
            if _rows(result, samples) is None or not result.predictions.requires_grad:
                continue
            (gradient,) = torch.autograd.grad(loss, result.predictions, retain_graph=True, allow_unused=True)
            if gradient is not None:
                found.append((gradient.reshape(samples, -1) != 0).any(1).cpu())

    probing.run(look=look)
    return torch.stack(found).any(0) if found else None
