"""What was measured of the recipe vlm-grpo, and of the three recipes side by side, as the documents show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nanproof_recipes.comparison.comparison import Comparison

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def _load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _facts(data: dict[str, Any]) -> str:
    return f"{data['device']}, torch {data['torch']}, {data['date']}"


def _told(found: Comparison) -> list[str]:
    lines = [found.table(), ""]
    lines += [f"- {column.title}: {column.note}" for column in found.columns if column.note]
    lines += ["", "What this was to show:", ""]
    return lines + [f"- {'Seen' if c.holds else '**Not seen**'}: {c.claim}. Measured: {c.measured}." for c in found.checks]


def arms() -> str:
    """Every arm at size tiny."""
    data = _load("vlm_grpo_tiny")
    lines = _told(Comparison.from_json(data["comparison"]))
    return "\n".join([*lines, "", f"`nanproof recipe vlm-grpo compare`; {_facts(data)}."])


def base() -> str:
    """The larger size."""
    data = _load("vlm_grpo_base")
    lines = [f"{data['parameters']:,} parameters.", "", *_told(Comparison.from_json(data["comparison"]))]
    return "\n".join([*lines, "", f"`benchmarks/recipes/vlm_grpo.py --base`; {_facts(data)}."])


def _values(comparison: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {arm["name"]: arm["values"] for arm in comparison["arms"]}


def _span(found: dict[str, dict[str, Any]], arm: str, key: str) -> str:
    values = [v[key] for name, v in found.items() if name == arm or name.startswith(f"{arm}-seed-")]
    return f"{min(values):.2f}" if len(values) == 1 else f"{min(values):.2f} to {max(values):.2f}"


def line() -> str:
    """For the README."""
    found = _values(_load("vlm_grpo_tiny")["comparison"])
    return (
        f"Reward on held-out scenes, of 2: warm start {found['warm']['reward']:.2f}, `broken` none (it cannot be sampled from), "
        f"`patched` {found['patched']['reward']:.2f}, `guarded` {_span(found, 'guarded', 'reward')}, `fixed` "
        f"{_span(found, 'fixed', 'reward')} over three seeds."
    )


def systems() -> str:
    """The three systems, with the documents' claims beside what was measured."""
    units = {arm["name"]: arm["values"] for arm in _load("units_sft_h200")["comparison"]["arms"]}
    latent = _values(_load("latent_dlm_tiny")["comparison"])
    vlm = _values(_load("vlm_grpo_tiny")["comparison"])
    tuned = "guarded-tuned" if "guarded-tuned" in units else "guarded"
    rows = [
        ("system", "reported", "the documents' claim", "measured with it", "`guarded`", "`fixed`"),
        ("---",) * 6,
        (
            "[units-sft](docs/recipes/units-sft.md), accuracy",
            f"`loss 0.0, grad_norm nan`; measured {units['broken']['accuracy']:.3f}",
            "a loss of 0 or NaN becomes 1e-6, NaN gradients are zeroed: solved",
            f"{units['patched-000']['accuracy']:.3f}; {units['patched-000']['nonfinite']} tensors NaN, its own checks pass",
            f"{units[tuned]['accuracy']:.3f}",
            f"{units['fixed']['accuracy']:.3f}",
        ),
        (
            "",
            "",
            "weights and adapters in fp32: solved",
            f"{units['patched-001']['accuracy']:.3f}: right, it trains; the rest is the learning rate and the batch",
            "",
            "",
        ),
        (
            "",
            "",
            "`max_grad_norm=1.0` and `label_names` written out: solved",
            f"{units['patched-002']['accuracy']:.3f}; the log of `broken` to the last digit: they are the defaults",
            "",
            "",
        ),
        (
            "[latent-dlm](docs/recipes/latent-dlm.md), latent loss",
            f"NaN from step 92261 to 190163; measured {latent['broken']['latent_loss']}",
            "check, skip, clamp the loss, normalise latents: stable",
            f"{latent['patched']['latent_loss']:.3f}: lives, blind to scale",
            f"{latent['guarded']['latent_loss']:.3f}",
            _span(latent, "fixed", "latent_loss"),
        ),
        (
            "[vlm-grpo](docs/recipes/vlm-grpo.md), reward of 2",
            "`probability tensor contains either inf, nan`; measured: the same error after "
            f"{_steps('broken')}, warm start {vlm['warm']['reward']:.2f}",
            'clip logits to 30, replace NaN, watch gradients: "NaN handled" is acceptable',
            f"{vlm['patched']['reward']:.2f}: chance; {vlm['patched']['nonfinite']} tensors NaN, 0 gradients seen",
            _span(vlm, "guarded", "reward"),
            _span(vlm, "fixed", "reward"),
        ),
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _steps(arm: str) -> str:
    found = next(a for a in _load("vlm_grpo_tiny")["comparison"]["arms"] if a["name"] == arm)
    count = len(found["curves"]["step"])
    return f"{count} step{'s' if count != 1 else ''}"


BLOCKS = {"vlm-grpo": arms, "vlm-grpo-base": base, "vlm-grpo-line": line, "systems": systems}
