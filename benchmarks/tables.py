"""Put the measured figures into the README: `python benchmarks/tables.py`. A test fails when the two disagree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from variants import RESULTS

README = Path(__file__).parent.parent / "README.md"
ROWS = {
    "plain clip + step": "`clip_grad_norm_` + fused AdamW, nothing else",
    "nanproof guard.step": "**nanproof**, `guard.step`, all telemetry on",
    "nanproof guard.train_step": "**nanproof**, `guard.train_step`, all telemetry on",
    "isnan loop": "loop over `isnan(p.grad).any()`",
    "mean-and-std skip": "mean-and-std skip in the manner of OLMo-core",
    "stabilityguard": "stabilityguard 0.3.0",
    "DebugUnderflowOverflow": "transformers' DebugUnderflowOverflow",
    "detect_anomaly": "`torch.autograd.detect_anomaly`",
}


def load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return data


def cell(part: dict[str, Any], name: str) -> str:
    row = part["rows"].get(name)
    return "" if row is None else f"{row['ratio']:.2f}" if row["ratio"] >= 1.1 else f"{row['ratio']:.3f}"


def cost_table() -> str:
    gpu, cpu = load("gpu"), load("cpu")
    columns = [gpu["optimizer part"], gpu["whole step"], cpu["whole step"]]
    where = gpu["device"]
    heads = (f"{where}: optimizer's part, 1.1 B", f"{where}: whole step, 271 M Llama", "CPU: whole step, 7 M Llama")
    lines = [
        "| time as a ratio to the first row, in the same run | " + " | ".join(heads) + " |",
        "|---|---:|---:|---:|",
    ]
    lines += [f"| {label} | " + " | ".join(cell(part, name) for part in columns) + " |" for name, label in ROWS.items()]
    first = [part["rows"]["plain clip + step"]["ms"] for part in columns]
    lines.append("")
    lines.append(
        f"First row in milliseconds: {first[0]:.1f}, {first[1]:.1f} and {first[2]:.0f}. "
        f"{where} with torch {gpu['torch']}, {gpu['date']}; {cpu['device']}, torch {cpu['torch']}, {cpu['date']}. "
        "Medians of alternating rounds."
    )
    return "\n".join(lines)


def campaign_line() -> str:
    c = load("campaign")
    accepted = f"{c['harmless']} rightly accepted (they changed nothing that matters)"
    return (
        f"Campaign of {c['injected']} random faults: {c['caught']} refused, {accepted}, {c['reached']} reached the weights; "
        f"{c['false_alarms']} false alarms on {c['healthy']} healthy steps; {c['hangs']} hangs."
    )


BLOCKS = {"cost": cost_table, "campaign": campaign_line}


def filled(text: str) -> str:
    for name, make in BLOCKS.items():
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)"
        assert re.search(pattern, text, flags=re.DOTALL), f"README.md has no block {name}"
        text = re.sub(pattern, lambda match, make=make: match[1] + make() + match[2], text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
    print(f"written to {README}")
