"""Public names for transformers' Trainer: monitors that people know by name, and checks of a loss.

The monitors report what the run's guard sees. Where nobody called `nanproof.protect(trainer)`, they attach it.
"""

from __future__ import annotations

from nanproof.integrations.huggingface._callbacks import (
    ActivationMonitorCallback,
    GradientMonitorCallback,
    GradientMonitoringCallback,
    LossCheckCallback,
)
from nanproof.integrations.huggingface._losses import safe_compute_loss
from nanproof.integrations.huggingface._replay import replay_loss

__all__ = [
    "ActivationMonitorCallback",
    "GradientMonitorCallback",
    "GradientMonitoringCallback",
    "LossCheckCallback",
    "replay_loss",
    "safe_compute_loss",
]
