"""What was measured of the recipe latent-dlm, as the documents show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nanproof_recipes.comparison.comparison import Comparison

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
RUNS = {
    "undisturbed": "undisturbed",
    "machine": "40 faults of the machine",
    "machine-and-data": "the same, and 12 damaged samples",
    "other-seed": "undisturbed, another seed",
}


def _load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"latent_dlm_{name}.json").read_text(encoding="utf-8"))
    return found


def _facts(data: dict[str, Any]) -> str:
    return f"{data['device']}, torch {data['torch']}, {data['date']}"


def arms() -> str:
    """Every arm at size tiny."""
    data = _load("tiny")
    found = Comparison.from_json(data["comparison"])
    lines = [found.table(), ""]
    lines += [f"- {column.title}: {column.note}" for column in found.columns if column.note]
    lines += ["", "What this was to show:", ""]
    lines += [f"- {'Seen' if c.holds else '**Not seen**'}: {c.claim}. Measured: {c.measured}." for c in found.checks]
    return "\n".join([*lines, "", f"`nanproof recipe latent-dlm compare`; {_facts(data)}."])


def base() -> str:
    """The reported size, on one device."""
    data = _load("base")
    run, measured = data["run"], data["run"]["measured"]
    gradient, weight = run["faults"]
    lines = [
        f"{run['parameters']:,} parameters.",
        "",
        "| guarded against unguarded steps | tokens a step | unguarded | guarded | ratio (95 %) |",
        "|---|---:|---:|---:|---|",
    ]
    for pair in data["pairs"]:
        batch = f"{pair['accumulation']} x {pair['batch']}" if pair["accumulation"] > 1 else str(pair["batch"])
        ratio = f"{pair['ratio']:.4f} ({pair['low']:.4f} to {pair['high']:.4f})"
        said = f"batch {batch}, {pair['rounds']} interleaved pairs of {pair['steps'] // pair['rounds']} steps"
        times = f"{pair['unguarded_ms']:.1f} ms | {pair['guarded_ms']:.1f} ms"
        lines.append(f"| {said} | {pair['tokens_a_step']:,} | {times} | {ratio} |")
    lines += [
        "",
        f"`train --arm fixed` for {run['steps']:,} steps (`{run['settings']}`), with two faults: {run['step_ms']:.0f} ms a step, "
        f"{run['tokens_per_second']:,.0f} tokens a second with checkpoints, evaluations and faults in it, "
        f"{run['memory_gib']:.1f} GiB of the device. Held-out text loss {measured['text_loss']:.3f}, masked accuracy "
        f"{measured['text_accuracy']:.3f}, with the latent given {measured['text_accuracy_given_latent']:.3f}; latent loss "
        f"{measured['latent_loss']:.3f}, with the text given {measured['latent_loss_given_text']:.3f}.",
        "",
        f"- An Inf in one gradient at step {gradient['step']}: refused, found to be gone when run again ({gradient['cause']}), "
        f"run again. {gradient['seconds']:.1f} s from fault to recovery, with the diagnosis; nothing lost.",
        f"- An Inf in a weight at step {weight['step']}: found at the next step, {weight['message'].rpartition('; ')[2]}. "
        f"{weight['seconds']:.1f} s to be back there, with the diagnosis.",
        f"- Parameters that are not finite at the end: {run['nonfinite']}.",
        "",
        f"{_facts(data)}; `benchmarks/recipes/latent_dlm.py pairs` and `run`.",
    ]
    return "\n".join(lines)


def samples() -> str:
    found = _load("base")["run"]["samples"]

    def mean(mode: str) -> float:
        return sum(found[mode]["agreement"]) / len(found[mode]["agreement"])

    return "\n".join(
        [
            f"Unconditional, text and latent from nothing (agreement {mean('unconditional'):.2f}, mean of 8):",
            "",
            *_quoted(found["unconditional"]["text"][0]),
            "",
            f"Latent to text (agreement {mean('latent_to_text'):.2f}). The latent of",
            "",
            *_quoted(found["given"][0]),
            "",
            "was given, and nothing else; drawn:",
            "",
            *_quoted(found["latent_to_text"]["text"][0]),
            "",
            f"Text to latent: agreement {mean('text_to_latent'):.2f}.",
        ]
    )


def _quoted(text: str) -> list[str]:
    shown = "".join(c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:360])
    return ["```text", *shown.split("\n"), "```"]


def long() -> str:
    data = _load("long")
    found = data["long"]
    lines = [
        "| run | faults | incidents | held-out text loss | latent loss | against undisturbed |",
        "|---|---:|---|---:|---:|---|",
    ]
    for kind, said in RUNS.items():
        run, measured = found[kind], found[kind]["measured"]
        did = ", ".join(f"{many} {action}" for action, many in sorted(run["actions"].items())) or "none"
        damaged = 12 if kind == "machine-and-data" else 0
        same = "every weight bit-identical" if run["identical"] else _apart(found["undisturbed"]["curve"], run["curve"])
        if kind == "undisturbed":
            same = ""
        numbers = f"{measured['text_loss']:.4f} | {measured['latent_loss']:.4f}"
        lines.append(f"| {said} | {sum(run['faults'].values()) + damaged} | {did} | {numbers} | {same} |")
    faults = ", ".join(f"{many} {kind}" for kind, many in found["machine"]["faults"].items())
    return "\n".join(
        [
            *lines,
            "",
            f"{found['steps']:,} steps at size tiny (`{found['settings']}`), four processes at once. Faults of the machine, at "
            f"random steps: {faults}. {_facts(data)}.",
        ]
    )


def _apart(one: list[dict[str, float]], other: list[dict[str, float]]) -> str:
    most = max(abs(a["eval_text_loss"] - b["eval_text_loss"]) for a, b in zip(one, other, strict=True))
    return f"text loss within {most:.3f} at all {len(one)} evaluations"


def line() -> str:
    data = _load("base")
    pair, found = data["pairs"][0], _load("long")["long"]
    machine = found["machine"]
    return (
        f"At {data['run']['parameters'] / 1e6:.0f} M parameters on an {data['device']} a guarded step takes {pair['ratio']:.3f} "
        f"of an unguarded one (95 %: {pair['low']:.3f} to {pair['high']:.3f}). {found['steps']:,} steps at the small size with "
        f"{sum(machine['faults'].values())} random faults, {machine['kills']} of them kills, ended with "
        + ("exactly the weights" if machine["identical"] else "other weights than those")
        + " of the undisturbed run."
    )


BLOCKS = {
    "latent-dlm": arms,
    "latent-dlm-base": base,
    "latent-dlm-samples": samples,
    "latent-dlm-long": long,
    "latent-dlm-line": line,
}
