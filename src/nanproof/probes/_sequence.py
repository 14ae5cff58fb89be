"""Probe the order of tokens: does a position see what it must not see?

Tokens are changed in the embedding lookup, so masks, positions and labels stay as they are. A
position depends on a token if its numbers change with it and the gradient says so too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nanproof.probes._contract import ProbeResult, finding
from nanproof.probes._probing import SHARE, Probing, depends, gradient_share, laid_out, moved, shaken, values_laid_out
from nanproof.probes._recorder import ModuleCall, Recorder
from nanproof.probes._tokens import as_rows, documents, next_token, others, padding, streams, swap, text_of_batch

BOUNDARY = 1e-3
"""Share of the gradient that padding may have: a convolution sees a little of it behind the last token."""


def causal_leak(probing: Probing) -> Iterator[ProbeResult]:
    """Does a prediction depend on tokens after it?"""
    found = next_token(probing)
    if found is None:
        return
    ids, (samples, length) = found.ids, found.ids.shape
    columns = torch.arange(length, device=ids.device)
    supervised = torch.nonzero(found.supervised)[:, 1]
    t = min(int(supervised.median()), length - 2)
    later = (columns > t).expand(samples, length)
    seeing = found.supervised & (columns[: found.supervised.shape[1]] <= t)
    new = others(ids, later)
    answer = _dependence(probing, ids, new, later, found.result, seeing, ~(columns <= t)[: seeing.shape[1]].expand_as(seeing))
    if answer is None:
        return
    depends_on_it, change, control = answer
    did = f"changed the tokens after position {t}"
    if not depends_on_it:
        yield ProbeResult("causal-leak", did, f"predictions up to {t} stayed, later ones moved by {control:.2g}")
        return
    where = _first_module(probing, ids, new, columns <= t)
    saw = f"predictions up to {t} moved by {change:.2g}, though their targets are among the changed tokens"
    fix = "Mask attention to later positions (is_causal=True), and let no pooling, convolution or normalisation look ahead."
    yield finding("causal-leak", did, saw, fix, phase="forward", where=where)


def packed_documents(probing: Probing) -> Iterator[ProbeResult]:
    """Do packed documents see each other?"""
    for ids in text_of_batch(probing):
        found = documents(probing, ids)
        if found is None:
            continue
        name, numbers = found
        first, second = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        for row in range(len(ids)):
            long = [n for n in torch.unique(numbers[row]).tolist() if n >= 0 and int((numbers[row] == n).sum()) >= 2]
            if len(long) >= 2:
                first[row], second[row] = numbers[row] == long[0], numbers[row] == long[1]
        new = others(ids, first)
        for i, result in enumerate(probing.base.results()):
            values = values_laid_out(result, *ids.shape)
            if values is None:
                continue
            positions = values.shape[1]
            answer = _dependence(probing, ids, new, first, i, second[:, :positions], first[:, :positions])
            if answer is None:
                continue
            did = f"changed the tokens of one packed document ({name} marks them)"
            if not answer[0]:
                yield ProbeResult("packed-documents-mix", did, f"the next document stayed, its own moved by {answer[2]:.2g}")
                return
            rows = tuple(torch.nonzero(second.any(1)).flatten().tolist())
            saw = f"predictions of the next document in the row moved by {answer[1]:.2g}"
            fix = "Give attention a mask or cu_seqlens by document, and reset convolutions and recurrent states at each one."
            where = _first_module(probing, ids, new, second)
            yield finding("packed-documents-mix", did, saw, fix, phase="forward", where=where, samples=rows)
            return


def padding_changes_loss(probing: Probing) -> Iterator[ProbeResult]:
    """Does the loss depend on what the padding holds, or count it?"""
    for ids in text_of_batch(probing):
        found = padding(probing, ids)
        if found is None:
            continue
        name, pads = found
        # With two texts (an encoder and a decoder) it is not known whose positions a prediction has.
        alone = len(text_of_batch(probing)) == 1 and not _another_text(probing, ids)
        rows = tuple(torch.nonzero(pads.any(1)).flatten().tolist())
        result = _padding_is_seen(probing, ids, pads, alone, name, rows)
        counted = (
            _padding_is_counted(probing, ids, pads, rows) if alone and (result is None or result.diagnosis is None) else None
        )
        if counted is not None:
            yield counted
        elif result is not None:
            yield result
        return


def _another_text(probing: Probing, ids: Tensor) -> bool:
    """Whether a lookup reads a second text: as long as another tensor of the batch, or not the positions 0, 1, 2."""
    for other in streams(probing.base):
        if other.shape[0] != ids.shape[0] or torch.equal(other, ids):
            continue
        steps = other[:, 1:] - other[:, :-1]
        if not bool(((steps == 1) | (steps == 0) | (steps < 0)).all()) and len(torch.unique(other)) > 4:
            return True
    return False


def _padding_is_seen(
    probing: Probing, ids: Tensor, pads: Tensor, alone: bool, name: str, rows: tuple[int, ...]
) -> ProbeResult | None:
    real = ~pads
    new = others(ids, pads, real)
    padded = pads.any(1)
    known: ProbeResult | None = None
    for i, result in enumerate(probing.base.results()):
        values = values_laid_out(result, *ids.shape) if alone else None
        if values is None and result.values.dim() >= 2 and result.values.shape[0] == len(ids):
            # An encoder's own output has a row for the padding too, which may move.
            values = result.values if 0 <= ids.shape[1] - result.values.shape[1] <= 1 else None
        if values is not None:
            seeing = real[:, : values.shape[1]] & padded.unsqueeze(1)
        elif result.values.shape[:1] == (len(ids),):
            seeing = padded
        else:
            continue
        control = others(ids, real & (real.cumsum(1) <= 2))
        answer = _dependence(probing, ids, new, pads, i, seeing, None, control, BOUNDARY)
        if answer is None:
            continue
        did = f"put other tokens into the padding ({name} marks it)"
        if not answer[0]:
            known = ProbeResult("padding-changes-loss", did, f"nothing moved; another first token moves it by {answer[2]:.2g}")
            continue
        saw = f"predictions for real tokens moved by {answer[1]:.2g}"
        fix = "Pass the padding mask to every layer that mixes positions (attention, pooling, recurrence), or pack the sequences."
        where = _first_module(probing, ids, new, real & padded.unsqueeze(1)) if alone else None
        return finding("padding-changes-loss", did, saw, fix, phase="forward", where=where, samples=rows)
    return known


def _padding_is_counted(probing: Probing, ids: Tensor, pads: Tensor, rows: tuple[int, ...]) -> ProbeResult | None:
    """Whether the loss has a gradient at positions whose input is padding. One a row is fine: the end of the text is predicted
    from there, or the first token."""
    counted: list[Tensor] = []

    def look(recorder: Recorder, loss: Tensor) -> None:
        for result in recorder.compared:
            laid = laid_out(result, *ids.shape)
            if laid is None or not result.classes or not result.predictions.requires_grad:
                continue
            (gradient,) = torch.autograd.grad(loss, result.predictions, retain_graph=True, allow_unused=True)
            if gradient is not None:
                counted.append((gradient != 0).reshape(laid.shape).any(-1))

    probing.run(look=look)
    for places in counted:
        mine = pads[:, : places.shape[1]]
        if int((places & ~mine).sum()) == 0:
            continue
        many = (places & mine).sum(1)
        if int(many.max()) >= 2:
            did = "took the gradient of the loss at each position"
            saw = f"{int(many.sum())} of {int(places.sum())} positions that count in the loss are padding"
            fix = "Set the labels of padding to -100 (ignore_index), or multiply the loss by the mask before averaging."
            return finding("padding-changes-loss", did, saw, fix, phase="data", samples=rows)
    return None


def _dependence(
    probing: Probing,
    ids: Tensor,
    new: Tensor,
    where: Tensor,
    result: int,
    seeing: Tensor,
    control: Tensor | None,
    control_ids: Tensor | None = None,
    least: float = SHARE,
) -> tuple[bool, float, float] | None:
    """Put `new` ids in. Return whether the result at `seeing` depends on them, how far it moved, and how far it moves where it
    must: at `control`, or with other ids. None if even that does not move.

    Layers that begin at zero hide what they see, so a step that looks right is tried again with a little noise in the weights.
    Where a little may be seen on purpose, `least` is the share of the gradient that is too much.
    """
    arguments = (probing, ids, new, where, result, seeing, control, control_ids, least)
    answer = _dependence_once(*arguments)
    weights = probing.weights
    if weights and (answer is None or (not answer[0] and least == SHARE)):
        again = _dependence_once(*arguments, noise=weights)
        answer = again if again is not None and (answer is None or again[0]) else answer
    return answer


def _dependence_once(
    probing: Probing,
    ids: Tensor,
    new: Tensor,
    where: Tensor,
    result: int,
    seeing: Tensor,
    control: Tensor | None,
    control_ids: Tensor | None,
    least: float,
    noise: Sequence[Tensor] = (),
) -> tuple[bool, float, float] | None:
    samples, length = ids.shape

    def values(recorder: Recorder) -> Tensor:
        found = recorder.results()[result]
        laid = values_laid_out(found, samples, length) if seeing.dim() == 2 else None
        return found.values if laid is None else laid

    shares: list[float | None] = []

    def look(recorder: Recorder, _loss: Tensor) -> None:
        found = recorder.results()[result]
        laid = laid_out(found, samples, length) if seeing.dim() == 2 else None
        target = found.predictions if laid is None else laid
        weights = seeing.reshape(*seeing.shape, *[1] * (target.dim() - seeing.dim())).to(target.device, torch.float32)
        mine = [x for x in recorder.lookups if x.ids.numel() == ids.numel() and torch.equal(as_rows(x.ids), ids)]
        place = where.reshape(mine[0].ids.shape) if mine else where
        shares.append(gradient_share(target, weights, mine, place) if mine else None)

    before = probing.run(shaken(noise), look=look)
    after = probing.run(shaken(noise), swap=swap(ids, new))
    if result >= min(len(before.results()), len(after.results())):
        return None
    change = moved(values(before), values(after), seeing)
    if control is not None:
        must = moved(values(before), values(after), control)
    else:
        assert control_ids is not None
        must = moved(values(before), values(probing.run(shaken(noise), swap=swap(ids, control_ids))), seeing)
    if must == 0:
        return None
    return depends(change, must, values(before)[seeing], shares[0] if shares else None, least), change, must


def _first_module(probing: Probing, ids: Tensor, new: Tensor, places: Tensor) -> str | None:
    """The first module whose output moves at places where it must not. If its input moves there already, the module around it
    is named: it mixes positions in its own code."""
    samples, length = ids.shape
    seen: list[ModuleCall] = []
    where = places.expand(samples, length)

    def keep(call: ModuleCall) -> None:
        inputs, outputs = ([t.detach() for t in side if t.shape[:2] == (samples, length)] for side in (call.inputs, call.outputs))
        seen.append(ModuleCall(call.path, call.caller, inputs, outputs))

    def moves(before: list[Tensor], after: list[Tensor]) -> bool:
        return any(depends(moved(a, b, where), moved(a, b), a, None) for a, b in zip(before, after, strict=True))

    probing.run(recorder=Recorder(probing.model, on_module=keep))
    before = seen.copy()
    seen.clear()
    probing.run(recorder=Recorder(probing.model, swap=swap(ids, new), on_module=keep))
    root = before[-1].path if before else None
    for was, now in zip(before, seen, strict=False):
        if was.path != now.path or len(was.outputs) != len(now.outputs) or len(was.inputs) != len(now.inputs):
            return None
        if moves(was.outputs, now.outputs):
            given = moves(was.inputs, now.inputs)
            return was.caller if given and was.caller not in (None, root) else was.path
    return None
