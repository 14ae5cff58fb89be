"""Which incidents were diagnosed already, and what that has cost.

An incident is diagnosed unless one like it was diagnosed with success before. What makes two alike
is first what is known for free (its fingerprint), then, where the step can be run again, the module
in which the trouble begins: that costs one run of the step. A diagnosis that named nothing uses
nothing up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from nanproof._policy import Policy
from nanproof._records import Diagnosis, Incident
from nanproof.core.judge._parameters import is_dtensor
from nanproof.core.support._tree import tensors_in
from nanproof.explain._case import bad_in_batch

ALWAYS = 8
"""Diagnoses that are made whatever they cost: the first ones of a run."""

Fingerprint = tuple[Any, ...]


def fingerprint(incident: Incident, *more: Any) -> Fingerprint:
    """What is known of an incident for free. `more`: what the caller knows besides."""
    finite = ("spike", "divergence", "no-learning")
    culprits = incident.culprits[:1] if incident.kind in finite else incident.culprits
    bad_terms = tuple(name for name, value in incident.terms if not math.isfinite(value))
    return incident.kind, incident.rank, _class(incident.loss), tuple(name for name, _ in culprits), bad_terms, *more


def _class(loss: float | None) -> str:
    return "" if loss is None else "finite" if math.isfinite(loss) else str(loss)


@dataclass(frozen=True, slots=True)
class BadData:
    """The part of a step's batches that is NaN or Inf."""

    names: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()

    @classmethod
    def of(cls, batches: Iterable[Any]) -> BadData:
        """Look through the batches of a failed step."""
        found = []
        for batch in batches:
            found += bad_in_batch(batch, [(name, t) for name, t in tensors_in(batch) if not is_dtensor(t)])
        samples = sorted({i for bad in found for i in bad.samples})
        return cls(tuple(bad.name for bad in found), tuple(samples))


class Known:
    """The fingerprints of incidents that were diagnosed with success."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._steps: dict[Fingerprint, dict[str, int]] = {}
        """By fingerprint and origin, the step of the first incident."""
        self._unnamed: set[Fingerprint] = set()
        """Those whose last diagnosis named nothing."""
        self._made, self._began = 0, time.perf_counter()
        self.spent = 0.0
        """Seconds that diagnoses have taken so far."""

    @property
    def affordable(self) -> bool:
        """Whether one more diagnosis fits into the share of the run's time that they may take
        together."""
        share = self._policy.diagnose_share * (time.perf_counter() - self._began)
        return self._made < ALWAYS or self.spent <= share

    def like(self, fingerprint: Fingerprint) -> dict[str, int]:
        """Return the steps of the first incidents with this fingerprint, by where they began."""
        return self._steps.get(fingerprint, {})

    def diagnose(
        self,
        incident: Incident,
        fingerprint: Fingerprint,
        explain: Callable[[], tuple[Diagnosis | None, str]],
        *,
        origin: Callable[[], str] | None = None,
        every: bool = False,
    ) -> Incident:
        """Return the incident with its diagnosis, or with the step of an earlier one like it.

        Args:
            explain: diagnoses it; returns where the trouble begins, too.
            origin: finds only where it begins, where that is what tells two incidents apart.
            every: diagnose it in any case, whatever it costs.
        """
        known = self.like(fingerprint)
        if known and not every:
            if origin is None or not any(known):
                return replace(incident, same_as=next(iter(known.values())))
            if not self.affordable:
                return incident  # it may have begun elsewhere
            with self.timed():
                step = known.get(origin())
            if step is not None:
                return replace(incident, same_as=step)
        if not (every or self.affordable):
            return incident
        self._made += 1
        with self.timed():
            diagnosis, began = explain()
        same_as = known.get(began) if self._policy.diagnose == "new" else None
        if diagnosis is not None and diagnosis.named:
            self._steps.setdefault(fingerprint, {}).setdefault(began, incident.step)
            self._unnamed.discard(fingerprint)
            return replace(incident, diagnosis=diagnosis, same_as=same_as)
        repeated = fingerprint in self._unnamed
        self._unnamed.add(fingerprint)
        return replace(incident, diagnosis=None if repeated and not every else diagnosis)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Open this around whatever runs a step again: its time counts."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spent += time.perf_counter() - start
