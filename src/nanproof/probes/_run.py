"""Run all probes on a step, within its deadline. A probe that fails says nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from nanproof.explain.replay._replay import CannotReplay
from nanproof.probes._accumulation import accumulation
from nanproof.probes._contract import Probe, ProbeResult
from nanproof.probes._features import padded_features
from nanproof.probes._modes import train_and_eval
from nanproof.probes._probing import DoesNotApply, Probing
from nanproof.probes._resume import state_not_saved
from nanproof.probes._samples import input_ignored, samples_mixed
from nanproof.probes._sequence import causal_leak, packed_documents, padding_changes_loss

log = logging.getLogger("nanproof")

PROBES: Sequence[Probe] = (
    causal_leak,
    packed_documents,
    padding_changes_loss,
    padded_features,
    samples_mixed,
    input_ignored,
    train_and_eval,
    accumulation,
    state_not_saved,
)


def probe(probing: Probing, probes: Sequence[Probe] = PROBES) -> list[ProbeResult]:
    """Return what each probe that applies did and saw."""
    results: list[ProbeResult] = []
    for each in probes:
        try:
            results += each(probing)
        except DoesNotApply as why:
            log.debug("nanproof: a probe does not apply: %s", why)
        except CannotReplay:
            break  # out of time, or other ranks are needed
        except Exception:
            log.debug("nanproof: a probe failed", exc_info=True)
    return results
