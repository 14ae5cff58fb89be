"""Turn records into sentences. This is the only module that does: everything else decides by
fields, never by text.

A sentence is made when something is shown. What is stored is data: the decision in an incident's
fields, the names, the numbers. No torch here, so that readers start fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanproof._records import Diagnosis, Forecast, Incident

_CAPS = {
    "max_consecutive_skips": "{count} {things} in a row {failed} (max_consecutive_skips{limit})",
    "max_skip_rate": "{count} of the last {things} {failed} (max_skip_rate{limit})",
    "max_rollbacks": "the same trouble came back after {count} rollbacks (max_rollbacks{limit})",
    "no-healthy-row": "no row of a generation could be sampled: the model is broken",
    "broken-state": "the run's state is broken",
}
"""By the limit that was reached, the sentence that says so."""


# -- incidents -----------------------------------------------------------------------------------------------------------------


def incident(incident: Incident) -> str:
    """One line: what happened at which step, and what was done about it."""
    like = "" if incident.same_as is None else f"as at step {incident.same_as}"
    sentences = "; ".join(filter(None, (incident.message, outcome(incident), like)))
    return f"step {incident.step}: {incident.kind}, {incident.action}. {sentences}".rstrip(". ")


def outcome(incident: Incident) -> str:
    """What was done about an incident; empty where the action says it all."""
    parts = [f"undid a fix that did not hold: {undone}" for undone in incident.undone]
    if incident.restored_step is not None:
        parts.append(_went_back(incident))
    if incident.remedy is not None:
        parts.append(f"healed: {incident.remedy}")
    if incident.quarantined:
        parts.append(f"quarantined dataset index {few(incident.quarantined)}")
    if incident.action == "salvaged":
        rest = f"{samples(incident.left_out)} of the batch" if incident.left_out else f"micro-batch {incident.micro_batch}"
        parts.append(f"took the step without {rest}")
    if incident.cap is not None:
        parts.append(cap(incident))
    return "; ".join(parts)


def repeated(first: Incident, others: Sequence[int]) -> str:
    """How often the trouble of an incident came again, and at which steps; empty where it did not. Only a diagnosis says that it
    is the same trouble."""
    if not others:
        return ""
    if first.diagnosis is None and first.same_as is None:
        return f"{len(others):,} more not diagnosed: step{'s' * (len(others) > 1)} {spans(others)}"
    times = "once more: step" if len(others) == 1 else f"{len(others):,} more times: steps"
    return f"as at step {first.step if first.same_as is None else first.same_as}, {times} {spans(others)}"


def cap(incident: Incident) -> str:
    """The limit that an incident reached."""
    text = _CAPS.get(incident.cap or "")
    if text is None:
        return incident.cap or ""
    things, failed = "steps", "were refused"
    if incident.kind == "generation":
        things, failed = "generations", "had rows that could not be sampled"
    limit = "" if incident.cap_limit is None else f"={incident.cap_limit:g}"
    return text.format(count=incident.cap_count, limit=limit, things=things, failed=failed)


def verdicts(on_device: bool, note: str) -> str:
    """Where the verdicts of a run are read."""
    place = "verdicts stay on the device" if on_device else "verdicts read on the host"
    return f"{place}: {note}" if note else place


def again(incident: Incident, times: int) -> str:
    """One line for an incident like an earlier one, which was diagnosed. `times`: how many there are, this one included."""
    more = "once more" if times == 1 else f"{times} more times"
    bad = f"not finite: {samples(incident.bad_samples)} of the batch" if incident.bad_samples else ""
    text = f"step {incident.step}: {incident.kind}, {incident.action}: as at step {incident.same_as}, {more}"
    return "; ".join(filter(None, (text, bad, outcome(incident))))


def halted(incident: Incident, explained: Incident | None, nowhere: bool, keeps: bool) -> str:
    """Why training was halted. `explained`: the incident with the best diagnosis; `nowhere`: there
    was no good state to go back to; `keeps`: good states are kept at all."""
    hint = "" if keeps else ": Policy(snapshot_every=...) or Checkpoints(...) keep some"
    text = cap(incident) + (f", and there was no good state to go back to{hint}" if nowhere else "")
    last = f"step {incident.step}: {incident.kind}. {incident.message}"
    if explained is None or explained.diagnosis is None:
        return f"{text}. Last: {last}"
    place = "" if explained.step in (incident.step, incident.same_as) else f"From step {explained.step}: "
    return f"{text}. Last: {last}. {place}{explained.diagnosis}"


def _went_back(incident: Incident) -> str:
    place = "memory" if incident.restored_from == "memory" else f"checkpoint {incident.restored_from}"
    skipping = f", skipping {incident.stepped_over} batches" if incident.stepped_over else ""
    attempt = f" (attempt {incident.attempt})" if incident.attempt else ""
    return f"went back to step {incident.restored_step} from {place}{skipping}{attempt}"


def diagnosis(diagnosis: Diagnosis) -> str:
    """Cause, place and fix in one line."""
    if diagnosis.cause == "none":
        return f"nothing wrong: {'; '.join(diagnosis.evidence)}"
    place = [f"op {diagnosis.op}"] if diagnosis.op else []
    place += [f"at {diagnosis.source}"] if diagnosis.source else []
    place += [f"in {diagnosis.where}"] if diagnosis.where and diagnosis.where != diagnosis.source else []
    named = (("sample", diagnosis.samples), ("token", diagnosis.tokens))
    place += [f"{name} {few(found)}" for name, found in named if found]
    how = "fix verified on the replay" if diagnosis.verified else f"confidence {diagnosis.confidence:.2f}, fix not verified"
    cause = f"cause: {diagnosis.cause}" + (f" ({how})" if diagnosis.cause != "unknown" else "")
    return cause + (f", {', '.join(place)}" if place else "") + (f". {diagnosis.fix}" if diagnosis.fix else "")


def forecast(forecast: Forecast) -> str:
    return f"step {forecast.step}: {forecast.kind} ahead. {forecast.message}"


# -- what was seen of a refused step ---------------------------------------------------------------------------------------------


def bad_gradients(names: Sequence[str], total: int) -> str:
    return f"{len(names)} of {total} gradients are non-finite: {listed(names)}"


def replaced_gradients(step: int, names: Sequence[str]) -> str:
    left = f"step {step}: backward left non-finite gradients ({listed(names)})"
    return f"{left}, and the loop replaced them before its step. nanproof accepts such steps"


def bad_loss(loss: float, bad: Sequence[str], total: int) -> str:
    own = f"the loss is {loss:.4g}" if not math.isfinite(loss) else "the loss of another rank or micro-batch is non-finite"
    return f"{own}; {bad_gradients(bad, total) if bad else 'every gradient is finite'}"


def bad_gradients_of_a_finite_loss(loss: float, bad: Sequence[str], total: int) -> str:
    return f"the loss is finite ({loss:.4g}), but {bad_gradients(bad, total)}"


def broken_before(names: Sequence[str]) -> str:
    return f"weights or optimizer state were non-finite before the step: {listed(names)}"


def broken_state(names: Sequence[str]) -> str:
    return f"weights, buffers or optimizer state are non-finite: {listed(names)}"


def bad_buffers(names: Sequence[str]) -> str:
    return f"the forward made a buffer non-finite: {listed(names)}"


def kept_buffer(name: str) -> str:
    return f"{bad_buffers([name])}; its last finite values were kept. guard.backward refuses such a step"


def found_at_close(names: Sequence[str]) -> str:
    return f"found at close: {listed(names)}"


def spike(loss: float, norm: float) -> str:
    return f"loss {loss:.4g}, gradient norm {norm:.4g}: far above what is usual"


def bad_scale(scale: float) -> str:
    return f"the loss scale is {scale:g}: something other than the guard wrote it"


def collapsed_scale(seen: str, scale: float) -> str:
    return f"{seen}; the loss scale is down to {scale:g}, so it is not a range problem"


def lowest_scale(scale: float | None, error: object) -> str:
    return f"the loss scale is {scale or 1.0:g} and cannot be lowered further: {error}"


def bad_settings(settings: Sequence[str]) -> str:
    """Settings of the optimizer that are NaN or Inf; empty where none is."""
    return listed(settings) if settings else ""


def would_have_broken(settings: Sequence[str], parameters: int) -> str:
    many = f"{parameters} parameter{'s' if parameters != 1 else ''}"
    return f"{bad_settings(settings) or 'a setting of the optimizer is non-finite'}: the step would have made {many} non-finite"


BROKE_IN_THE_STEP = "loss and gradients were finite, but the step made weights or moments non-finite"
NORM_OVERFLOW = "every gradient is finite, but the sum of their squares is not; clipping would have set all of them to 0"
NOT_CLEARED = "the step before was refused too: was zero_grad called in between?"
NO_COPY = "no copy was kept to put back"
TAKEN = "the optimizer stepped on it: this run is only observed"


def located(seen: str, micro_batch: int | None, rank: int | None) -> str:
    """A sentence, with the micro-batch and the rank it is about."""
    parts = [seen] + [f"{name} {i}" for name, i in (("micro-batch", micro_batch), ("rank", rank)) if i is not None]
    return "; ".join(parts)


def bad_terms(terms: Iterable[tuple[str, float]]) -> str:
    """The terms of a loss, those that are not finite first; empty where all of them are finite."""
    ordered = sorted(terms, key=lambda term: math.isfinite(term[1]))
    if not ordered or math.isfinite(ordered[0][1]):
        return ""
    return "of the terms " + ", ".join(f"{name} is {value:.4g}" for name, value in ordered)


def rows_not_sampled(rows: Sequence[int], total: int, where: str, first: object | None) -> str:
    named = f"{'rows' if len(rows) > 1 else 'row'} {few(rows)}"
    said = f"{len(rows)} of {total} completions could not be sampled ({named}){where}"
    return said if first is None else f"{said}; {first}"


# -- lists -----------------------------------------------------------------------------------------------------------------------


def few(numbers: Sequence[int], most: int = 4) -> str:
    """The first numbers, and how many more there are."""
    return _first(list(map(str, numbers)), most)


def samples(numbers: Sequence[int]) -> str:
    return f"sample{'s' if len(numbers) > 1 else ''} {few(numbers)}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    return _first(names, most) if names else "on another rank"


def spans(numbers: Iterable[int], most: int = 6) -> str:
    """20-30, 35 for numbers that follow each other and one that does not."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in found[:most]]
    return ", ".join(texts) + (f" to {found[-1][1]}" if len(found) > most else "")


def _first(texts: Sequence[str], most: int) -> str:
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


Row = tuple[str, str | None]


def rows(diagnosis: Diagnosis) -> list[Row]:
    """(heading, text) of everything that is known; a text of None is left out."""
    found: list[Row] = [
        ("cause", f"{diagnosis.cause} (confidence {diagnosis.confidence:.2f})"),
        ("place", place(diagnosis) or None),
        ("source", diagnosis.source),
    ]
    found += [("" if i else "evidence", f"- {said}") for i, said in enumerate(diagnosis.evidence)]
    found += [
        ("fix", diagnosis.fix),
        ("verified", "yes, on the step itself" if diagnosis.verified else "no"),
        ("or else", ", ".join(diagnosis.alternatives) or None),
    ]
    return found


def place(diagnosis: Diagnosis) -> str:
    """Where it happened, in a few words."""
    parts = [diagnosis.phase, " in ".join(x for x in (diagnosis.op, diagnosis.where) if x)]
    for name, found in (("sample", diagnosis.samples), ("token", diagnosis.tokens)):
        parts.append(f"{name} {few(found, 8)}" if found else "")
    parts.append(f"rank {diagnosis.rank}" if diagnosis.rank is not None else "")
    return ", ".join(part for part in parts if part)


def called_with(names: Sequence[str], samples: Sequence[int]) -> str:
    """What the model was called with, where that was non-finite."""
    where = f", sample{'s' if len(samples) > 1 else ''} {few(samples)}" if samples else ""
    return f"the model was called with non-finite numbers in {listed(names)}{where}"
