"""Score the guard on the reported failures: what is detected, named, dated and verified, and what healthy twins make it say.

python -m zoo.reported [--save] [--only a03 b10]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from tools.results import cpu_name, save
from zoo.guarded import Told, run
from zoo.registry import Training

HERE = Path(__file__).parent


def build(name: str, fixed: bool) -> Training:
    """The training of a case, or of its healthy twin."""
    spec = importlib.util.spec_from_file_location(name, HERE / "cases" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[str, Any] = module.build(fixed=fixed)
    return Training(
        model=made["model"],
        optimizer=made["optimizer"],
        loss_fn=made["loss_fn"],
        batches=made["batches"],
        max_norm=made.get("max_grad_norm"),
        scaler=made.get("scaler"),
        scheduler=made.get("scheduler"),
        own_loop=not made.get("zero_grad", True),
    )


def score(want: dict[str, Any], told: Told) -> dict[str, bool]:
    """What was right about a broken run; only what the index has an expectation for."""
    first = told.first
    said = first.diagnosis if first is not None else None
    causes = [i.diagnosis.cause for i in told.incidents if i.diagnosis is not None]
    marks = {"detected": first is not None}
    if want["group"] == "double":
        named = [any(c in accept for c in causes) for accept in (want["accept"], want["second"])]
        return {**marks, "both faults named": all(named)}
    right = said is not None and said.cause in want["accept"]
    marks |= {"cause": right, "verified": right and said is not None and said.verified}
    if "step" in want:
        marks["step"] = first is not None and first.step == want["step"]
    if "sample" in want:
        marks["sample"] = said is not None and said.samples == (want["sample"],)
    return marks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    index = json.loads((HERE / "index.json").read_text())
    chosen = {name: want for name, want in index.items() if not options.only or name[:3] in options.only}
    right, of = Counter[str](), Counter[str]()
    for name, want in chosen.items():
        row = []
        if want["group"] != "healthy":
            told = run(build(name, False))
            marks = score(want, told)
            right.update(key for key, good in marks.items() if good)
            of.update(marks.keys())
            said = [i.diagnosis.cause for i in told.incidents[:3] if i.diagnosis is not None]
            row = [f"{key} {'+' if good else '-'}" for key, good in marks.items()] + [f"named {', '.join(said) or 'nothing'}"]
        quiet = run(build(name, want["group"] != "healthy"))
        of["quiet"] += 1
        right["quiet"] += not quiet.incidents and quiet.error is None
        row += ["quiet" if not quiet.incidents else f"FALSE ALARM {quiet.incidents[0]}"]
        print(f"{name} | {want['cause']} | {' | '.join(row)}", flush=True)
    print(", ".join(f"{key} {right[key]} of {of[key]}" for key in of))
    if options.save:
        save("reported", cpu_name(), {"cases": len(chosen), "score": {key: [right[key], of[key]] for key in of}})


if __name__ == "__main__":
    main()
