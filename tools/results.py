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


def save(name: str, device: str, results: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write the figures with the device's name and the date."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    facts = {
        "device": device,
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "nanproof": nanproof.__version__,
    }
    path.write_text(json.dumps({**facts, **results}, indent=1) + "\n")
    return path
