"""Counts of the loop's own that travel with a step's verdict: what sampling had to end, how many tokens it made, and the like.

They lie on the device. Read one by one, each would make the host wait for it; behind the verdict's numbers they come with the
one copy that is made anyway. Nothing here waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nanproof.core.judge._parameters import moved
from nanproof.core.judge._terms import Terms

log = logging.getLogger("nanproof")

Counters = Callable[[], Mapping[str, Tensor]]
"""Returns scalars on the device by name, as they stand now."""


def counted(sources: list[Counters], device: torch.device) -> Terms | None:
    """Of all sources, by name. One that raises, or has something else than scalars, is dropped from the list with a warning:
    counting is never the reason that a run dies."""
    names: list[str] = []
    values: list[Tensor] = []
    for source in list(sources):
        try:
            found = source()
            vector = [moved(value.detach().reshape(()), device, torch.float32) for value in found.values()]
        except Exception as error:
            sources.remove(source)
            log.warning("nanproof: a counter is left out of the records from now on: %r", error)
            continue
        names += found
        values += vector
    return Terms(tuple(names), torch.stack(values)) if values else None
