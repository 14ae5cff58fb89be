"""nanproof keeps neural-network training numerically healthy: a bad step never reaches the weights.

The names below are public. So are these modules: `nanproof.numerics.generation`, `.losses`, `.precision` and `.rl`;
`nanproof.integrations.transformers` and `nanproof.integrations.lightning`; `nanproof.cli:app`, the command line. Everything
else is private.
"""

from __future__ import annotations

import logging as _logging
from typing import TYPE_CHECKING, Any

from nanproof._text import legible as _legible

if TYPE_CHECKING:
    from nanproof._errors import (
        AlreadyGuarded,
        BadLogits,
        NanproofError,
        RefusedFile,
        TrainingHalted,
        UnsupportedError,
        UsageError,
    )
    from nanproof._guard import Guard
    from nanproof._policy import Policy
    from nanproof._preflight import preflight
    from nanproof._records import Diagnosis, Forecast, Incident, Observed, StepRecord, read_forecasts, read_incidents, read_steps
    from nanproof._sampling import GuardedSampling
    from nanproof.explain._diagnose import diagnose
    from nanproof.explain.lines._recorded import call_again
    from nanproof.integrations import protect
    from nanproof.integrations._protected import ProtectedRun
    from nanproof.observe._settings import Observe
    from nanproof.recover._checkpoints import Checkpoints
    from nanproof.scan._dcp import load
    from nanproof.scan._report import ScanReport
    from nanproof.scan._scan import first_bad, scan

_logging.getLogger("nanproof").addFilter(_legible)  # every module logs there

__version__ = "0.1.0"
__all__ = [
    "AlreadyGuarded",
    "BadLogits",
    "Checkpoints",
    "Diagnosis",
    "Forecast",
    "Guard",
    "GuardedSampling",
    "Incident",
    "NanproofError",
    "Observe",
    "Observed",
    "Policy",
    "ProtectedRun",
    "RefusedFile",
    "ScanReport",
    "StepRecord",
    "TrainingHalted",
    "UnsupportedError",
    "UsageError",
    "call_again",
    "diagnose",
    "first_bad",
    "load",
    "preflight",
    "protect",
    "read_forecasts",
    "read_incidents",
    "read_steps",
    "scan",
]

_HOME = {
    "AlreadyGuarded": "_errors",
    "BadLogits": "_errors",
    "Checkpoints": "recover._checkpoints",
    "Diagnosis": "_records",
    "Forecast": "_records",
    "Guard": "_guard",
    "GuardedSampling": "_sampling",
    "Incident": "_records",
    "NanproofError": "_errors",
    "Observe": "observe._settings",
    "Observed": "_records",
    "Policy": "_policy",
    "ProtectedRun": "integrations._protected",
    "RefusedFile": "_errors",
    "ScanReport": "scan._report",
    "StepRecord": "_records",
    "TrainingHalted": "_errors",
    "UnsupportedError": "_errors",
    "UsageError": "_errors",
    "call_again": "explain.lines._recorded",
    "diagnose": "explain._diagnose",
    "first_bad": "scan._scan",
    "load": "scan._dcp",
    "preflight": "_preflight",
    "protect": "integrations",
    "read_forecasts": "_records",
    "read_incidents": "_records",
    "read_steps": "_records",
    "scan": "scan._scan",
}


def _homes() -> dict[str, str]:
    """Return the module that defines each public name."""
    return dict(_HOME)


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the command line and the readers of records never pay for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'nanproof' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"nanproof.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
