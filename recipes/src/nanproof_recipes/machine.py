"""What a recipe needs from the machine: its device, its packages, and reproducible numbers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nanproof import UsageError
from nanproof_recipes.library import device_name

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""cuBLAS is only deterministic with this variable."""


def device() -> torch.device:
    """Return the device that this machine trains on."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps") if torch.backends.mps.is_available() else torch.device("cpu")


def needs(*packages: str) -> None:
    """Raise UsageError if a package is missing. All are dependencies of nanproof-recipes, so the installation is broken."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"this installation of nanproof-recipes is broken: {', '.join(missing)} not found. "
            "Repair it: pip install nanproof-recipes"
        )


def nonfinite_tensors(model: nn.Module) -> tuple[int, int]:
    """Return how many trainable tensors hold a NaN or an Inf, and how many there are."""
    tensors = [p for p in model.parameters() if p.requires_grad]
    return sum(not bool(torch.isfinite(p).all()) for p in tensors), len(tensors)


def ran_on() -> str:
    """Return device and torch version as a note: scores from different machines differ."""
    return f"ran on {device_name(device())}, torch {torch.__version__}"


@contextmanager
def reproducible() -> Iterator[None]:
    """Use deterministic kernels, so that the same seed gives the same numbers on the same machine."""
    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(_WORKSPACE)
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    filled: Any = torch.utils.deterministic
    fill, filled.fill_uninitialized_memory = filled.fill_uninitialized_memory, False  # it writes every new tensor twice
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
        filled.fill_uninitialized_memory = fill
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
