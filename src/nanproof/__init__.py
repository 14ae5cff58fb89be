"""nanproof keeps neural-network training numerically healthy: a bad step never reaches the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanproof.errors import NanproofError, TrainingHalted, UnsupportedError, UsageError
    from nanproof.explain.diagnose import diagnose
    from nanproof.guard import Guard
    from nanproof.integrations import protect
    from nanproof.observe.settings import Observe
    from nanproof.policy import Policy
    from nanproof.preflight import preflight
    from nanproof.records import Diagnosis, Forecast, Incident, StepRecord
    from nanproof.recover.checkpoints import Checkpoints

__version__ = "0.1.0"
__all__ = [
    "Checkpoints",
    "Diagnosis",
    "Forecast",
    "Guard",
    "Incident",
    "NanproofError",
    "Observe",
    "Policy",
    "StepRecord",
    "TrainingHalted",
    "UnsupportedError",
    "UsageError",
    "diagnose",
    "preflight",
    "protect",
]

_HOME = {
    "Checkpoints": "recover.checkpoints",
    "Diagnosis": "records",
    "Forecast": "records",
    "Guard": "guard",
    "Incident": "records",
    "NanproofError": "errors",
    "Observe": "observe.settings",
    "Policy": "policy",
    "StepRecord": "records",
    "TrainingHalted": "errors",
    "UnsupportedError": "errors",
    "UsageError": "errors",
    "diagnose": "explain.diagnose",
    "preflight": "preflight",
    "protect": "integrations",
}


def homes() -> dict[str, str]:
    """The module of each public name."""
    return dict(_HOME)


def __getattr__(name: str) -> Any:
    """Names are imported when first used: the command line and the readers of records never pay for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'nanproof' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"nanproof.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
