"""Measured figures as JSON, with device and date: benchmarks write them, documents are made from them."""

from __future__ import annotations

import json
import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch

import nanproof

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def facts() -> dict[str, str]:
    """The date and the versions that figures were measured with."""
    return {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "nanproof": nanproof.__version__,
    }


def add(name: str, device: str, parts: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write these parts, and keep others that were measured on the same device. Each part keeps the date and the version of torch
    that it was measured with."""
    path, kept = folder / f"{name}.json", {}
    old = json.loads(path.read_text()) if path.exists() else {}
    if old.get("device") == device:
        kept = {key: part for key, part in old.items() if isinstance(part, dict)}
        for part in kept.values():
            for key in ("date", "torch"):
                part.setdefault(key, old[key])
    now = facts()
    fresh = {key: {**part, "date": now["date"], "torch": now["torch"]} for key, part in parts.items()}
    return save(name, device, {**kept, **fresh}, folder)


def save(name: str, device: str, results: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write the figures with the device's name and the date."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"device": device, **facts(), **results}, indent=1) + "\n")
    return path
