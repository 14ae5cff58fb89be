"""Tables of public programs run under nanproof, and what the loop's own lines cost."""

from __future__ import annotations

import json
from typing import Any

from tools.results import RESULTS

FAULTS = {"sample": "bad sample", "weight": "bad weight", "rate": "bad rate", "loss": "bad loss"}


def _load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return data


def lines_cost() -> str:
    """What a healthy step pays for the loop's own lines."""
    data = _load("lines")
    cost = data["microseconds"]
    return (
        f"A healthy step pays {cost['backward']:.0f} µs at backward and {cost['call']:.0f} µs at the model's call. Reading the "
        f"random state takes {cost['random state']:.0f} µs ({data['device']}, {data['date']}). Working the lines out takes a few "
        "milliseconds, once per place."
    )


LOOPS = {
    "ppo": "PPO update as in cleanrl: Adam, clipping, NumPy indices",
    "classifier": "classifier: SGD with momentum, clipping",
    "char_rnn": "GRU over characters: Adam, clipping",
    "cnn": "CNN with batch norm: AdamW, cosine schedule",
    "gan": "GAN: two models, two Adams",
}


def script_cost() -> str:
    """What `nanproof run` costs in short loops."""
    data = _load("script_cpu")
    lines = ["| loop | ms a step, plain | under `nanproof run` | middle half of the rounds |", "|---|---:|---:|---:|"]
    for name, what in LOOPS.items():
        plain, guarded = data[name]["rows"]["plain"], data[name]["rows"]["nanproof run"]
        lines.append(f"| {what} | {plain['ms']:.1f} | {guarded['ratio']:.2f} | {guarded['low']:.2f}-{guarded['high']:.2f} |")
    where = f"{data['device']}, torch {data['torch']}, {data['date']}"
    lines += ["", f"{where}. Processor time of the median step, plain and guarded in turns."]
    return "\n".join(lines)


def programs() -> str:
    """Public programs, run unchanged and with one fault each."""
    data = _load("programs")
    lines = [
        "| program | repository | same results | " + " | ".join(FAULTS.values()) + " |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in data["programs"]:
        where = f"[{each['repository']}](https://github.com/{each['repository']}) `{each['script']}`"
        same = "yes" if each["identical"] and not each["alarms"] else "no"
        cells = [_cell(each["faults"].get(kind)) for kind in FAULTS]
        lines.append(f"| {each['program']} | {where} | {same} | " + " | ".join(cells) + " |")
    count, explained = data["faults"], data["explained"]
    lines += [
        "",
        f"{len(data['programs'])} programs, {data['identical']} with the same bits as without nanproof. Of {count} faults, "
        f"{data['noticed']} were noticed and **{explained} explained ({explained / count:.0%})**. Before the loop's lines "
        f"were run again: {data['before']}. At the first complete run: {data['first_contact']}. torch {data['torch']}, "
        f"{data['date']}.",
    ]
    return "\n".join(lines)


def _cell(fault: dict[str, Any] | None) -> str:
    if fault is None:
        return ""
    return ("**yes**: " if fault["explained"] else "no: ") + (fault["cause"] or "not noticed")


def not_explained() -> str:
    """The faults that were not explained, and what was said about them."""
    lines = ["| program | fault | what nanproof says | expected |", "|---|---|---|---|"]
    for each in _load("programs")["programs"]:
        for kind, fault in each["faults"].items():
            if not fault["explained"]:
                answer = ": ".join(filter(None, (fault["cause"] or "nothing", fault["why"]))).replace("|", "/")
                lines.append(f"| {each['program']} | {FAULTS[kind]} | {answer} | {', '.join(fault['expected'])} |")
    return "\n".join(lines)
