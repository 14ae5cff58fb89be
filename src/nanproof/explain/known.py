"""Which incidents were diagnosed already, and what that has cost.

An incident is diagnosed unless one like it was diagnosed with success before. What makes two alike
is first what is known for free (its fingerprint), then, where the step can be run again, the module
in which the trouble begins: that costs one run of the step. A diagnosis that named nothing uses
nothing up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from nanproof.core.parameters import is_dtensor
from nanproof.core.tree import tensors_in
from nanproof.explain.case import bad_in_batch
from nanproof.policy import Policy
from nanproof.records import Diagnosis, Incident

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
    """What of a step's batches holds a NaN or an Inf."""

    names: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()

    @classmethod
    def of(cls, batches: Iterable[Any]) -> BadData:
        """One pass over the batch: for failures."""
        found = []
        for batch in batches:
            named = ((name, t) for name, t in tensors_in(batch) if t.layout is torch.strided and not is_dtensor(t))
            with suppress(RuntimeError):  # dtypes of one byte cannot be asked
                found += bad_in_batch(batch, [(name, t) for name, t in named if t.element_size() > 1])
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
        self._made, self._spent, self._began = 0, 0.0, time.perf_counter()

    @property
    def affordable(self) -> bool:
        """Whether one more diagnosis fits into the share of the run's time that they may take
        together."""
        share = self._policy.diagnose_share * (time.perf_counter() - self._began)
        return self._made < ALWAYS or self._spent <= share

    def like(self, incident: Fingerprint) -> dict[str, int]:
        """The steps of the first incidents with this fingerprint, by where they began."""
        return self._steps.get(incident, {})

    def learn(self, incident: Fingerprint, origin: str, step: int, diagnosis: Diagnosis | None) -> bool:
        """Remember a diagnosis. Says whether there is anything new in it: a second one that names
        nothing is not."""
        if diagnosis is not None and diagnosis.cause not in ("unknown", "none"):
            self._steps.setdefault(incident, {}).setdefault(origin, step)
            self._unnamed.discard(incident)
            return True
        new = incident not in self._unnamed
        self._unnamed.add(incident)
        return new

    @contextmanager
    def timed(self, diagnosis: bool = True) -> Iterator[None]:
        """Open this around a diagnosis, or around a look that only tells whether one is due."""
        start = time.perf_counter()
        self._made += diagnosis
        try:
            yield
        finally:
            self._spent += time.perf_counter() - start
