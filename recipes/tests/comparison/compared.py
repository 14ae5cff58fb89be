"""Comparisons for the tests: the arms of a small experiment, and one whose every text is hostile. Nothing is trained."""

from __future__ import annotations

import math
import random

from nanproof_recipes.comparison.comparison import Arm, Check, Column, Comparison
from report import made

COLUMNS = (
    Column("loss", "last loss", note="As the trainer logged it: a NaN is logged as 0."),
    Column("accuracy", "accuracy", "share", "Of 60 held-out questions, those answered within 5 percent."),
    Column("nan_parameters", "NaN parameters", "count"),
    Column("skipped", "skipped", "count"),
    Column("seconds", "time", "seconds"),
)


def curves(steps=150, dies=None, logged=None, seed=0, every=1):
    """Loss, gradient norm and learning rate; from step `dies` on the norm is NaN and the loss is what is logged instead."""
    rng = random.Random(seed)
    at = list(range(1, steps + 1, every))
    loss = [0.4 + 3 * math.exp(-4 * x / steps) + rng.gauss(0, 0.05) for x in at]
    norm = [math.exp(rng.gauss(0, 0.5)) for _ in at]
    if dies is not None:
        loss = [x if step < dies else logged for step, x in zip(at, loss, strict=True)]
        norm = [x if step < dies else math.nan for step, x in zip(at, norm, strict=True)]
    rate = [2e-4 * min(1, step / 50) * (1 - step / (steps + 1)) for step in at]
    return {"step": at, "loss": loss, "grad_norm": norm, "learning_rate": rate}


def arm(name, loss, accuracy, bad=0, skipped=None, ending="finished", **more):
    values = {"loss": loss, "accuracy": accuracy, "nan_parameters": bad, "skipped": skipped, "seconds": 381.4}
    return Arm(name, more.pop("setting", f"what {name} does"), ending, {**values}, **more)


def small(folder=None):
    """Five arms. With a folder, the guarded one has a run in it, and a report of that."""
    samples = (
        {
            "question": "How many inches are 70 m?",
            "expected": "2756",
            "said": "70 * 39.37 = <answer>2756</answer>",
            "verdict": "right",
        },
        {"question": "How many feet are 3 km?", "expected": "9843", "said": "<answer>984</answer>", "verdict": "wrong"},
    )
    if folder is not None:
        like = made.incident_line(41, action="rewound", same_as=40, restored_step=30, restored_from="memory")
        incidents = [made.incident_line(40, diagnosis=made.diagnosis()), like, made.incident_line(90)]
        made.write_run(folder / "runs" / "guarded", 150, bad=(40, 41, 90), incidents=incidents)
        (folder / "runs" / "guarded" / "report.html").write_text("a report")
    arms = (
        arm("broken", 0.0, 0.0, 1_234_567, curves=curves(dies=2, logged=0.0), setting="fp16 weights, AdamW with eps 1e-8",
            story=("Step 1 made 120 of 120 LoRA tensors NaN.", "The trainer logged loss 0.0 from step 2 on, and grad_norm nan.")),
        arm("patched 000", 1e-6, 0.0, 1_234_567, setting="a loss of 0 or NaN becomes 1e-6",
            curves=curves(dies=2, logged=1e-6, seed=1), story=("Its own check passed: no loss was NaN.",)),
        arm("patched 001", math.nan, None, 1_234_567, ending="raised ValueError: Attempting to unscale FP16 gradients.",
            curves=curves(20, dies=12, logged=math.nan, seed=2)),
        arm("guarded", 0.61, 0.5, 0, 3, curves=curves(seed=3), run="runs/guarded", setting="as broken, under nanproof",
            story=("3 steps were refused, the cause was named and healed.",)),
        arm("fixed", 0.42, 0.53333, 0, 0, curves=curves(seed=4), samples=samples, setting="fp32 weights, bf16 autocast, lr 2e-3"),
    )  # fmt: skip
    return Comparison(
        recipe="units-sft",
        title="Unit conversion, fine-tuned in fp16",
        lead="A small language model learned nothing from fine-tuning. Four settings of the same run, one seed, 150 steps each.",
        columns=COLUMNS,
        arms=arms,
        checks=(
            Check("The broken arm ends with NaN parameters", "1,234,567 of 1,234,567", True),
            Check("The guarded arm learns as much as the fixed one", "accuracy 0.50 and 0.53", False),
        ),
        settings={"model": "SmolLM2-135M", "learning_rate": 2e-4, "steps": 150, "arms": ["broken", "fixed"], "cap": math.inf},
        environment={"versions": {"torch": "2.13.0", "nanproof": "0.8"}, "device": "cpu", "ranks": 1},
    )


def large(arms=12, steps=5000, names=("loss", "grad_norm", "learning_rate", "entropy", "kl")):
    """As many arms as a recipe has, each of which logs all of its steps, with NaN here and there."""
    made_of = []
    for i in range(arms):
        rng = random.Random(i)
        told = {name: [math.nan if rng.random() < 0.02 else rng.gauss(3, 1) for _ in range(steps)] for name in names}
        made_of.append(arm(f"arm {i}", 1.0, 0.5, curves={"step": list(range(steps)), **told}))
    return Comparison("r", "Twelve arms", "Long ones.", COLUMNS, tuple(made_of))


def hostile(folder=None):
    """Hostile strings wherever there can be one."""
    arms, columns = [], []
    for i, text in enumerate(made.HOSTILE):
        columns.append(Column(f"c{i}", text, "text", text))
    for i, text in enumerate(made.HOSTILE):
        if folder is not None:
            known = made.diagnosis(cause=text, evidence=[text], fix=text, where=text, source=text, alternatives=[text])
            made.write_run(folder / f"run{i}", 30, names=[text], incidents=[made.incident_line(3, message=text, diagnosis=known)])
        run = f"run{i}" if folder is not None else text
        values = {f"c{k}": each for k, each in enumerate(made.HOSTILE)}
        told = {"step": [1.0, 2.0], text: [1.0, math.nan], "loss": [1.0, math.nan]}
        arms.append(Arm(text, text, text, values, (text,) * 3, told, run, ({text: text, "said": text},)))
    checks = tuple(Check(text, text, i % 2 == 0) for i, text in enumerate(made.HOSTILE))
    facts = {text: text for text in made.HOSTILE}
    return Comparison(made.HACK, made.HACK + "{{lead}}", made.HACK, tuple(columns), tuple(arms), checks, facts, {"x": facts})
