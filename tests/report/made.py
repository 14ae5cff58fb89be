"""Folders of runs for the tests of the report, written line by line as the journal does, without training anything."""

from __future__ import annotations

import json
import math
import random

PARTS = ("q_proj", "k_proj", "up_proj", "norm")
NAMES = [f"model.layers.{i // 4}.{PARTS[i % 4]}.weight" for i in range(200)]
HACK = '<script>window.hacked=1</script>"\'><img src=x onerror="window.hacked=1">'
HOSTILE = [
    HACK,
    "</script><script>window.hacked=1</script>",
    "]]><!--<script>window.hacked=1//",
    "javascript:window.hacked=1",
    "\x1b[2J\x07\x00 \u202egnp.exe\u202c \u2066x\u2069 \u200b\ufeff",
    "\u2028\u2029</style><svg/onload=window.hacked=1>",
    "{{summary}} ${window.hacked=1} `window.hacked=1`",
    "\u0645" * 40 + HACK,
    "x" * (1 << 20) + HACK,
]


def number(x):
    return float(f"{x:.6g}") if math.isfinite(x) else "nan" if x != x else "inf" if x > 0 else "-inf"


def step_line(step, loss=1.0, norm=0.5, action="stepped", lr=1e-3, scale=None, norms=(), time=None, absmax=None, terms=None):
    """One step as `steps.jsonl` has it."""
    data = {"v": 2, "kind": "step", "step": step, "loss": number(loss), "grad_norm": number(norm), "action": action, "clip": 1.0}
    data |= {"lr": [lr], "scale": scale, "spike": False, "typical": [0.0, 0.0], "spread": [0.0, 0.0], "loss_size": 1.0}
    data |= {"weights_checked": False, "norms": [None if x is None else number(x) for x in norms], "time": time}
    data |= {"terms": {name: number(x) for name, x in terms.items()}} if terms else {}
    return json.dumps(data if absmax is None else {**data, "observed": {"absmax": [number(x) for x in absmax]}}) + "\n"


def incident_line(step, kind="nonfinite-loss", action="skipped", message="the loss is nan", **more):
    data = {"v": 2, "step": step, "kind": kind, "action": action, "loss": "nan", "grad_norm": "nan", "culprits": [], "rank": None}
    return json.dumps({**data, "micro_batch": None, "message": message, "diagnosis": None, "bundle": None, **more}) + "\n"


def diagnosis(**kwargs):
    plain = {"cause": "zero-denominator", "confidence": 0.93, "phase": "forward", "where": "loss_fn", "op": "div", "rank": None}
    plain |= {"source": "train.py:12", "samples": [], "tokens": [], "evidence": ["the divisor is 0"], "fix": "Add an epsilon."}
    return {**plain, "verified": True, "alternatives": ["log-of-zero"], **kwargs}


def write_run(folder, steps=300, names=None, sites=(), bad=(), seed=0, incidents=None):
    """A run of so many steps; returns (step, loss, norm, action) of each. Rows of norms repeat, so that it is written quickly."""
    rng = random.Random(seed)
    names = NAMES[:8] if names is None else names
    folder.mkdir(parents=True, exist_ok=True)
    tails = []
    for _ in range(20):
        norms = [math.exp(rng.gauss(-3, 1)) for _ in names]
        absmax = [math.exp(rng.gauss(2, 1)) for _ in sites] if sites else None
        tails.append(step_line(0, norms=norms, absmax=absmax).partition('"lr"')[2])
    told = []
    with open(folder / "steps.jsonl", "w", encoding="utf-8") as file:
        about = {"model": "Toy", "versions": {"torch": "2.13.0"}}
        file.write(json.dumps({"v": 2, "kind": "opened", "time": 1.7e9, "about": about}) + "\n")
        file.write(json.dumps({"v": 2, "kind": "header", "names": list(names), "sites": list(sites)}) + "\n")
        for step in range(steps):
            loss, norm = 1 + 9 * math.exp(-3 * step / steps) + rng.gauss(0, 0.1), math.exp(rng.gauss(-0.3, 0.4))
            action = "clipped" if norm > 1 else "stepped"
            if step in bad:
                loss, norm, action = math.nan, math.nan, "skipped"
                file.write(step_line(step, loss, norm, action, norms=[math.nan] * len(names)))
            else:
                numbers = f'"step":{step},"loss":{loss:.6g},"grad_norm":{norm:.6g},"action":"{action}","clip":1.0'
                file.write(f'{{"v":2,"kind":"step",{numbers},"lr"{tails[step % 20]}')
            told.append((step, loss, norm, action))
    lines = [
        incident_line(step, diagnosis=diagnosis() if i == 0 else None, culprits=[[names[i % len(names)], "nan"]])
        for i, step in enumerate(sorted(bad))
    ]
    (folder / "incidents.jsonl").write_text("".join(lines if incidents is None else incidents), encoding="utf-8")
    return told


def write_gan(folder, incidents=(), others=()):
    """A run of two optimizers, 20 steps of one and 40 of the other, with these lines of incidents."""
    write_run(folder, 20, incidents=incidents)
    write_run(folder / "optimizer-2", 40, incidents=others)
    names = [{"name": "SGD of Critic", "folder": "."}, {"name": "Adam of Generator", "folder": "optimizer-2"}]
    (folder / "optimizers.json").write_text(json.dumps({"v": 1, "optimizers": names}))


def write_terms(folder, steps):
    """A run whose loss has terms: `steps` is a list of mappings, name to value. Returns the losses. Where one is not finite there
    is an incident, up to forty of them."""
    from nanproof import Incident

    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"v": 2, "kind": "header", "names": ["a.weight"], "sites": []}) + "\n"]
    incidents, losses = [], []
    for step, terms in enumerate(steps):
        loss = sum(terms.values())
        bad = not math.isfinite(loss)
        norm = math.nan if bad else math.exp(rng.gauss(-0.3, 0.4))
        lines.append(step_line(step, loss, norm, "skipped" if bad else "stepped", norms=[norm], terms=terms))
        losses.append(loss)
        if bad and len(incidents) < 40:
            found = Incident(
                step=step,
                kind="nonfinite-loss",
                action="skipped",
                loss=loss,
                message="the loss is bad",
                terms=tuple(terms.items()),
            )
            incidents.append(json.dumps(found.to_json()) + "\n")
    (folder / "steps.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "incidents.jsonl").write_text("".join(incidents), encoding="utf-8")
    return losses
