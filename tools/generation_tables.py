"""What was measured of generating with the finite-logits processor, as the documents show it."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
ROWS = {
    "raise": '`on_bad="raise"`',
    "end": '`on_bad="end"`',
}


def cost() -> str:
    """Time of a generated token, as a ratio to that without a processor."""
    path = RESULTS / "generation.json"
    if not path.exists():
        return "Not measured yet: `python -m benchmarks.generation --save` on a CUDA device."
    data = json.loads(path.read_text(encoding="utf-8"))
    settings = data["settings"]
    heads = [f"vocabulary {s['vocabulary'] // 1000} k, batch {s['batch']}" for s in settings]
    lines = [
        "| time of a generated token, as a ratio to none | " + " | ".join(heads) + " |",
        "|---|" + "---:|" * len(settings),
        "| without a processor | " + " | ".join(f"{s['rows']['none']['ms']:.2f} ms" for s in settings) + " |",
    ]
    for name, label in ROWS.items():
        rows = [s["rows"][name] for s in settings]
        lines.append(f"| {label} | " + " | ".join(f"{r['ratio']:.3f} ({r['low']:.3f}-{r['high']:.3f})" for r in rows) + " |")
    alone = [f"{s['alone']['host_us']:.0f} / {s['alone']['whole_us']:.0f} µs" for s in settings]
    lines.append("| one call alone: until the host goes on / until the device is done | " + " | ".join(alone) + " |")
    sizes = sorted({round(s["parameters"] / 1e6) for s in settings})
    lines += [
        "",
        "With `raise` a flag travels with one token in eight, which a tenth percentile leaves out: sent with every token it cost "
        "0.9 to 1.4 %, so it adds about 0.0015.",
        "",
        f"Llama of {' and '.join(map(str, sizes))} M parameters in bf16, sampling with `generate`. Tenth percentiles "
        f"over {min(s['rounds'] for s in settings)} rounds or more of {settings[0]['turn'] - 1} tokens, variants taking turns, "
        f"with 95 % bootstrap intervals. {data['device']}, torch {data['torch']}, transformers "
        f"{data['transformers']}, {data['date']}.",
    ]
    return "\n".join(lines)


BLOCKS = {"generation": cost}
