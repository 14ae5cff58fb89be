"""What the recipe vlm-grpo comes to: every arm at size tiny on a CPU, and the larger size on one GPU.

    python -m benchmarks.recipes.vlm_grpo --tiny runs/vlm-grpo # takes the comparison of `nanproof recipe vlm-grpo compare`
    python -m benchmarks.recipes.vlm_grpo --base runs/vlm-base # trains: warm start, broken, patched, guarded, fixed; needs a GPU

Results go to benchmarks/results/vlm_grpo_{tiny,base}.json with --save.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
from pathlib import Path
from typing import Any

import torch

from nanproof.core.support._environment import device_name
from nanproof_recipes.comparison.comparison import read, write
from nanproof_recipes.machine import device
from nanproof_recipes.progress import Progress
from nanproof_recipes.vlm_grpo.apart import train_apart
from nanproof_recipes.vlm_grpo.arms import Setting, setting
from nanproof_recipes.vlm_grpo.comparing import told
from nanproof_recipes.vlm_grpo.models import load
from nanproof_recipes.vlm_grpo.running import Workshop
from nanproof_recipes.vlm_grpo.train.warm import schooling_for

RESULTS = Path(__file__).parents[1] / "results"


def facts() -> dict[str, Any]:
    place = device()
    return {"device": device_name(place), "torch": torch.__version__, "date": datetime.date.today().isoformat()}


def base(out: Path, sft: int, steps: int, batch: int, lr: float, seeds: int, progress: Progress) -> dict[str, Any]:
    """About 50 M parameters, groups of 8, in the recipe's own loop: TRL need not be there."""
    workshop = Workshop(out, "base", train=6000, valid=1000, schooling=schooling_for("base", sft), progress=progress)
    more: dict[str, Any] = {"trainer": "loop", "batch": batch, "group": 8, "lr": lr, "steps": steps}
    asked: list[Setting] = [setting(arm, **more) for arm in ("broken", "guarded", "fixed")]
    asked.insert(1, setting("patched", **{**more, "steps": min(steps, 20)}))
    asked += [setting("fixed", seed=seed, **more) for seed in range(1, seeds + 1)]
    results = [workshop.warm()]
    train_apart(workshop, [one for one in asked if one.may_lose_device], 1)
    for one in asked:
        results.append(workshop.arm(one))
        progress.say("\n".join(results[-1].lines()[:5]))
    found = told(workshop, results)
    write(found, out)
    parameters = sum(p.numel() for p in load("base").model.parameters())
    return {**facts(), "parameters": parameters, "comparison": found.to_json(), "results": [r.to_json() for r in results]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", type=Path, help="folder of a comparison that is done")
    parser.add_argument("--base", type=Path, help="folder to train the larger size in")
    parser.add_argument("--sft", type=int, default=400)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/vlm_grpo_*.json")
    asked = parser.parse_args()
    logging.getLogger("nanproof").setLevel(logging.ERROR)
    made: dict[str, dict[str, Any]] = {}
    if asked.tiny is not None:
        made["tiny"] = {**facts(), "comparison": read(asked.tiny).to_json()}
    if asked.base is not None:
        from rich.console import Console

        progress = Progress(Console(stderr=True))
        made["base"] = base(asked.base, asked.sft, asked.steps, asked.batch, asked.lr, asked.seeds, progress)
    for name, data in made.items():
        print(name, json.dumps({k: v for k, v in data.items() if k not in ("comparison", "results")}))
        if asked.save:
            text = json.dumps(data, indent=1, allow_nan=False) + "\n"
            (RESULTS / f"vlm_grpo_{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
