"""The table of what a guarded step costs, out of every file of figures there is: `docs/cost.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tools.results import RESULTS

PARTS = {
    "gpu": {
        "optimizer part": "optimizer's part, 1.1 B",
        "whole step": "271 M Llama",
        "whole step compiled": "271 M Llama, `torch.compile`",
        "whole step graphs": '271 M Llama, `mode="reduce-overhead"`',
        "5 M": "5 M Llama",
        "5 M compiled": "5 M Llama, `torch.compile`",
        "5 M graphs": '5 M Llama, `mode="reduce-overhead"`',
        "resnet50": "ResNet-50",
        "fsdp2": "271 M Llama, FSDP2, one rank",
        "muon": "271 M Llama, Muon + AdamW",
    },
    "host_gpu": {},
    "cpu": {"whole step": "7 M Llama"},
    "host_cpu": {},
}
"""Files and their parts, in the order of the table. A file of host.py has a part for each number of tensors."""
COLUMNS = {
    "nanproof guard.step": "`guard.step`",
    "nanproof guard.train_step": "`guard.train_step`",
    "nanproof guard.step, no folder": "`guard.step`, no `run_dir`",
    "nanproof guard.step, capture": "`guard.step`, captured",
    "nanproof guard.train_step, capture": "`guard.train_step`, captured",
    "isnan loop": "`isnan` loop",
    "stabilityguard": "stabilityguard 0.3.0",
    "arc-training": "arc-training 5.2.0",
    "detect_anomaly": "`detect_anomaly`",
}


class Line(NamedTuple):
    """One measured part."""

    label: str
    device: str
    when: str
    rows: dict[str, dict[str, Any]]
    host_only: bool


def lines() -> Iterator[Line]:
    """Every part that was measured."""
    for name, parts in PARTS.items():
        path = RESULTS / f"{name}.json"
        if not path.exists():
            continue
        data = json.loads(path.read_text())
        host_only = name.startswith("host")
        counts = sorted((key for key in data if key.isdigit()), key=int) if host_only else ()
        for key, label in (parts or {count: f"optimizer's part, {int(count):,} tensors" for count in counts}).items():
            if key in data:
                part = data[key]
                rows = host_rows(part["rows"]) if host_only else part["rows"]
                where = "CPU" if name.endswith("cpu") else data["device"].removeprefix("NVIDIA ")
                when = f"torch {part.get('torch', data['torch'])}, {part.get('date', data['date'])}"
                yield Line(f"{where}: {label}", data["device"], when, rows, name == "host_gpu")


def host_rows(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Like the other parts, `guard.step` is the one with all telemetry on."""
    names = {"nanproof guard.step": "nanproof guard.step, no folder", "nanproof guard.step, run_dir": "nanproof guard.step"}
    return {names.get(name, name): row for name, row in rows.items()}


def number(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 1.1 else f"{ratio:.3f}"


def cell(row: dict[str, Any] | None, host_only: bool) -> str:
    """Wall time, then host time where it was measured apart."""
    if row is None:
        return ""
    if "failed" in row:
        return "fails"
    if host_only:
        return f"· {number(row['ratio'])}"
    return number(row["ratio"]) + (f" · {number(row['host_ratio'])}" if "host_ratio" in row else "")


def first_cell(row: dict[str, Any], host_only: bool) -> str:
    ms = f"{row['ms']:.3g}"
    if host_only:
        return f"· {ms}"
    return ms + (f" · {row['host_ms']:.3g}" if "host_ms" in row else "")


def costs() -> str:
    found = list(lines())
    columns = [name for name in COLUMNS if any(name in line.rows for line in found)]
    text = [
        "| ratio to clip + fused step | that step, ms | " + " | ".join(COLUMNS[name] for name in columns) + " |",
        "|---|" + "---:|" * (len(columns) + 1),
    ]
    for line in found:
        cells = [cell(line.rows.get(name), line.host_only) for name in columns]
        text.append(f"| {line.label} | {first_cell(next(iter(line.rows.values())), line.host_only)} | {' | '.join(cells)} |")
    measured: dict[str, list[str]] = {}
    for line in found:
        times = measured.setdefault(line.device, [])
        if line.when not in times:
            times.append(line.when)
    text += ["", *(f"- {device}: {'; '.join(times)}." for device, times in measured.items()), *remarks(found)]
    return "\n".join(text)


def remarks(found: list[Line]) -> Iterator[str]:
    """What failed, and where steps were captured."""
    for line in found:
        for name, row in line.rows.items():
            if "failed" in row:
                yield f"- {line.label}, {COLUMNS.get(name, name)}: `{row['failed'].replace('`', '')}`"
            if "replays" in row:
                yield f"- {line.label}, {COLUMNS.get(name, name)}: {row['path']}; {row['replays']} replays."
