"""Score preflight on models that are wrong in what they compute: 36 faults with whole twins, and 14 healthy models.

python -m zoo.reported.probed [--save] [--only 03 17]

Written by somebody who had not seen the code, on 24 model families; expectations were fixed before any run. `probes.json` is the
index, `probes/` holds one file each: `build(fixed)` returns model, optimizer, batch and loss_fn.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import nanproof
from tools.results import cpu_name, save

HERE = Path(__file__).parent


def causes(name: str, fixed: bool) -> tuple[list[str], float]:
    """What preflight says about a case, and how long it took."""
    spec = importlib.util.spec_from_file_location(name, HERE / "probes" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[str, Any] = module.build(fixed=fixed)
    start = time.perf_counter()
    found = nanproof.preflight(
        made["model"], made["optimizer"], made["batch"], made["loss_fn"], accumulate=made.get("accumulate", 1)
    )
    return [d.cause for d in found], time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    index = json.loads((HERE / "probes.json").read_text())
    faults = found = whole = alarms = 0
    seconds = []
    for name, want in sorted(index.items()):
        if options.only and name[:2] not in options.only:
            continue
        if want["group"] != "healthy":
            said, took = causes(name, False)
            faults, found = faults + 1, found + bool(set(said) & set(want["accept"]))
            seconds.append(took)
            print(f"{name} | {want['cause']} | {', '.join(said) or 'nothing'} | {took:.2f} s", flush=True)
        said, took = causes(name, True)
        whole, alarms = whole + 1, alarms + bool(said)
        seconds.append(took)
        if said:
            print(f"{name} | FALSE ALARM {', '.join(said)}", flush=True)
    seconds.sort()
    median, longest = seconds[len(seconds) // 2], seconds[-1]
    print(f"{found} of {faults} found, {alarms} false alarms in {whole}, {median:.2f} s in the middle, {longest:.2f} s at most")
    if options.save:
        score = {"found": [found, faults], "false alarms": [alarms, whole], "seconds": [round(median, 3), round(longest, 3)]}
        save("probed", cpu_name(), score)


if __name__ == "__main__":
    main()
