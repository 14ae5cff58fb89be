"""The recipe units-sft on this machine: every arm, and `fixed` a second time to see that the same seed gives the same numbers.

`python -m benchmarks.recipes.units_sft --model smollm2-135m --out runs/units-sft --save` writes the table into results/.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from datetime import date
from pathlib import Path

import torch

from nanproof.core.support._environment import device_name
from nanproof_recipes.comparison.comparison import write
from nanproof_recipes.library import write_report
from nanproof_recipes.machine import device
from nanproof_recipes.progress import Progress
from nanproof_recipes.units_sft.arms import FIXED, SETTINGS, Setting
from nanproof_recipes.units_sft.comparing import compare, rft
from nanproof_recipes.units_sft.rejection import Sampling
from nanproof_recipes.units_sft.workshop import Workshop

RESULTS = Path(__file__).parents[1] / "results"


class _Said(Progress):
    """Lines on standard error, without rich: it may be missing where this runs."""

    def say(self, line: str) -> None:
        print(f"{time.monotonic() - _BEGUN:6.1f} s  {line}", file=sys.stderr, flush=True)


_BEGUN = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("runs/units-sft"))
    parser.add_argument("--train", type=int, default=1000)
    parser.add_argument("--valid", type=int, default=1000)
    parser.add_argument("--more", type=int, default=2000)
    parser.add_argument("--ask", type=int, default=None, help="questions asked at once")
    parser.add_argument("--arms", default="", help="these alone (of guarded-tuned, fixed, rft), without the comparison")
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results/")
    asked = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)

    def workshop(out: Path) -> Workshop:
        return Workshop(out, asked.model, train=asked.train, valid=asked.valid, batch=asked.ask, progress=_Said())

    first = workshop(asked.out)
    if asked.arms:
        for name in asked.arms.split(","):
            _ = rft(first, sampling=Sampling(more=asked.more)) if name == "rft" else first.arm(_named(name))
        return
    found = compare(first, {}, Sampling(more=asked.more))
    for arm in found.arms:
        if arm.run is not None:
            write_report(asked.out / arm.run)
    write(found, asked.out)
    print(found.table())
    for check in found.checks:
        print(f"{'holds' if check.holds else 'DOES NOT HOLD'}: {check.claim} ({check.measured})")
    once, twice = first.arm(FIXED), workshop(asked.out / "repeated").arm(FIXED)
    names = ("loss", "valid_loss", "grad_norm", "accuracy", "answer_rate")
    same = {name: (getattr(once, name), getattr(twice, name)) for name in names}
    print("fixed, twice with one seed:", "the same" if all(a == b for a, b in same.values()) else "DIFFERENT", same)
    if asked.save:
        name = "h200" if "H200" in device_name(device()) else "cpu"
        told = {"date": date.today().isoformat(), "torch": torch.__version__, "comparison": found.to_json(), "twice": same}
        (RESULTS / f"units_sft_{name}.json").write_text(json.dumps(told, indent=1) + "\n")


def _named(name: str) -> Setting:
    return next(setting for setting in SETTINGS.values() if setting.name == name)


if __name__ == "__main__":
    main()
