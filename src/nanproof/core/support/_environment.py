"""What a run ran on: versions, device, optimizer, settings. For the journal and for bundles; no user, host or command line."""

from __future__ import annotations

import math
import os
import platform
import sys
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from nanproof import __version__
from nanproof._policy import Policy
from nanproof.core.judge._optimizers import members_of

FRAMEWORKS = ("transformers", "trl", "peft", "accelerate", "lightning", "pytorch_lightning", "deepspeed")


def versions_now() -> dict[str, str]:
    """Of Python, torch, nanproof and every framework that is in use already."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "nanproof": __version__}
    for name in FRAMEWORKS:
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "?"))
    return found


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def policy_out(policy: Policy) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(policy).items()}


def without_home(value: Any) -> Any:
    """Paths without the user's name: ~ for the home folder."""
    if isinstance(value, str):
        home = os.path.expanduser("~")
        return value.replace(home + os.sep, "~" + os.sep) if len(home) > 1 else value
    if isinstance(value, dict):
        return {key: without_home(item) for key, item in value.items()}
    return [without_home(item) for item in value] if isinstance(value, list) else value


def about(
    model: nn.Module, optimizer: Any, policy: Policy, *, path: str, max_norm: float | str | None, ranks: int, scaled: bool
) -> dict[str, Any]:
    """A run as its first line tells of it."""
    tensors = list(model.parameters())
    device = next((p.device for p in tensors), torch.device("cpu"))
    dtypes: dict[str, int] = {}
    for p in tensors:
        name = str(p.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + p.numel()
    return {
        "versions": versions_now(),
        "platform": platform.platform(),
        "device": str(device),
        "device_name": device_name(device),
        "ranks": ranks,
        "model": type(model).__name__,
        "parameters": sum(p.numel() for p in tensors),
        "trainable": sum(p.numel() for p in tensors if p.requires_grad),
        "dtypes": dtypes,
        "optimizer": ", ".join(type(each).__name__ for each in members_of(optimizer)),
        "path": path,
        "max_norm": str(max_norm) if isinstance(max_norm, float) and not math.isfinite(max_norm) else max_norm,
        "loss_scale": scaled,
        "policy": policy_out(policy),
    }
