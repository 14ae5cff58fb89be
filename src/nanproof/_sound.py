"""Whether a record that was read from a file is what it says: every field of its kind. Those who show it need not ask again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanproof._records import Diagnosis, Forecast, Incident, StepRecord

_LARGEST = 1 << 53
"""Whole numbers beyond this are not exact everywhere."""


def check_incident(incident: Incident) -> None:
    """Raise `ValueError` where a field has the wrong type."""
    check_step(incident.step)
    _need(isinstance(incident.message, str) and isinstance(incident.kind, str) and isinstance(incident.action, str))
    _need(all(isinstance(name, str) and isinstance(norm, float) for name, norm in incident.culprits))
    _need(all(isinstance(name, str) and isinstance(x, float) for name, x in incident.terms))
    _need(all(x is None or _whole(x) for x in (incident.rank, incident.micro_batch)))
    texts = (incident.bundle, incident.remedy, incident.restored_from, incident.cap)
    _need(all(text is None or isinstance(text, str) for text in texts))
    _need(all(step is None or _is_step(step) for step in (incident.restored_step, incident.same_as)))
    _need(all(_whole(x) and x >= 0 for x in (incident.stepped_over, incident.attempt, incident.cap_count)))
    _need(incident.cap_limit is None or type(incident.cap_limit) in (int, float))
    _need(_all(incident.undone, str))
    listed = incident.left_out, incident.quarantined, incident.bad_samples
    _need(all(isinstance(found, tuple) and all(map(_whole, found)) for found in listed))
    if incident.diagnosis is not None:
        _check_diagnosis(incident.diagnosis)


def check_forecast(forecast: Forecast) -> None:
    check_step(forecast.step)
    _need(isinstance(forecast.message, str))
    _need(forecast.where is None or isinstance(forecast.where, str))
    _need(_all(forecast.also, str))


def check_record(record: StepRecord) -> None:
    check_step(record.step)
    check_action(record.action)
    _need(_all(record.names, str) and all(isinstance(name, str) for name, _ in (*record.terms, *record.counters)))
    _need(record.time is None or (isinstance(record.time, (int, float)) and abs(record.time) < _LARGEST))


def check_step(step: int) -> None:
    """Raise `ValueError` for a step beyond any real run: it could not be plotted."""
    _need(_is_step(step))


def check_action(action: Any) -> None:
    """A word, as a step has it."""
    _need(isinstance(action, str) and len(action) <= 40 and action.isprintable())


def _check_diagnosis(diagnosis: Diagnosis) -> None:
    texts = (diagnosis.phase, diagnosis.where, diagnosis.op, diagnosis.source, diagnosis.fix)
    _need(isinstance(diagnosis.cause, str) and all(text is None or isinstance(text, str) for text in texts))
    _need(isinstance(diagnosis.confidence, (int, float)) and abs(diagnosis.confidence) < _LARGEST)
    _need(all(isinstance(found, tuple) and all(map(_whole, found)) for found in (diagnosis.samples, diagnosis.tokens)))
    _need(_all(diagnosis.evidence, str) and _all(diagnosis.alternatives, str))
    _need(isinstance(diagnosis.verified, bool) and (diagnosis.rank is None or _whole(diagnosis.rank)))


def _need(right: bool) -> None:
    if not right:
        raise ValueError("a field of another kind")


def _is_step(x: Any) -> bool:
    return _whole(x) and 0 <= x < 1 << 40


def _whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and abs(x) < _LARGEST


def _all(values: Any, kind: type) -> bool:
    return isinstance(values, tuple) and all(isinstance(x, kind) for x in values)
