"""Points as the tools write them: one line a point, for tests that read them back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

from nanproof.logs._points import Point

Render = Callable[[Point], str]


def shown(value: float) -> str:
    return "nan" if value != value else ("inf" if value > 0 else "-inf") if math.isinf(value) else repr(value)


def as_json(value: float) -> float | str:
    return value if math.isfinite(value) else shown(value)


def transformers(p: Point) -> str:
    pairs = {"loss": p.values["loss"], "grad_norm": p.values["grad_norm"], "learning_rate": p.values["lr"]}
    return "{" + ", ".join(f"'{k}': {shown(v)}" for k, v in pairs.items()) + f", 'epoch': {p.step / 100}" + "}"


def transformers_5(p: Point) -> str:
    pairs = {"loss": p.values["loss"], "grad_norm": p.values["grad_norm"], "learning_rate": p.values["lr"]}
    return "{" + ", ".join(f"'{k}': '{shown(v)}'" for k, v in pairs.items()) + "}"


def nanogpt(p: Point) -> str:
    return f"iter {p.step:.0f}: loss {shown(p.values['loss'])}, time 12.50ms, mfu 31.00%"


def megatron(p: Point) -> str:
    v = {name: shown(value) for name, value in p.values.items()}
    return (
        f" iteration {p.step:8.0f}/  100000 | consumed samples: {8 * p.step:12.0f} | elapsed time per iteration (ms): 4247.9 |"
        f" learning rate: {v['lr']} | global batch size:     8 | lm loss: {v['loss']} | loss scale: 1.0 |"
        f" grad norm: {v['grad_norm']} | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def torchtitan(p: Point) -> str:
    v = {name: shown(value) for name, value in p.values.items()}
    return (
        f"[titan] 2026-05-18 16:04:46,338 - root - INFO - step: {p.step:2.0f}  loss:  {v['loss']}  grad_norm:  {v['grad_norm']}"
        f"  lr: {v['lr']}  memory:  9.46GiB(64.99%)  tps: 7,282  tflops: 0.52  mfu: 0.17%"
    )


def olmo(p: Point) -> str:
    v = {name: shown(value) for name, value in p.values.items()}
    return (
        f"2026-08-08 12:01:00 INFO [olmo_core.train.callbacks.console_logger:68] [step={p.step:.0f}/2000000,epoch=0]\n"
        f"    optim/LR (group 0)={v['lr']}\n    optim/total grad norm={v['grad_norm']}\n    train/CE loss={v['loss']}\n"
        "    throughput/total tokens=1,048,576"
    )


def fairseq(p: Point) -> str:
    v = {name: shown(value) for name, value in p.values.items()}
    return (
        f"| epoch 001:    200 / 1374 loss={v['loss']}, ppl=20899.56, wps=49604, num_updates={p.step:.0f}, lr={v['lr']}, "
        f"gnorm={v['grad_norm']}, clip=0.000, oom=0.000, wall=1061"
    )


def tqdm(p: Point) -> str:
    v = {name: shown(value) for name, value in p.values.items()}
    shown_last = f"loss={v['loss']}, grad_norm={v['grad_norm']}, lr={v['lr']}"
    return f"\rsteps:  12%|█▏  | {p.step:.0f}/1000000 [00:03<00:20, 3.2it/s, {shown_last}]"


def lightning(p: Point) -> str:
    """A bar for each epoch of 50 steps."""
    epoch, count = divmod(int(p.step) - 1, 50)
    return f"\rEpoch {epoch}:  12%|█▏  | {count + 1}/50 [00:03<00:20, 3.2it/s, v_num=0, train_loss={shown(p.values['loss'])}]"


def composer(p: Point) -> str:
    values = f"\t Train time/batch: {p.step:.0f}\n\t Train loss/train/total: {shown(p.values['loss'])}"
    return f"[epoch=1][batch={p.step:.0f}/4800]:\n{values}\n\t Train metrics/train/accuracy: 0.5"


def pairs(p: Point) -> str:
    v = {name: shown(value) for name, value in p.values.items()}
    return f"2024-01-01 10:00:00 INFO train: step={p.step:.0f} train_loss={v['loss']} grad_norm={v['grad_norm']} lr={v['lr']}"


def bars(p: Point) -> str:
    v = {name: shown(value) for name, value in p.values.items()}
    return f"Epoch 1 | Step {p.step:.0f} | Loss: {v['loss']} | Grad Norm: {v['grad_norm']} | LR: {v['lr']}"


def json_line(p: Point) -> str:
    return json.dumps({"step": int(p.step), **{name: as_json(value) for name, value in p.values.items()}})


TEXT: dict[str, tuple[Render, tuple[str, ...], bool]] = {
    "transformers": (transformers, ("loss", "grad_norm", "lr"), False),
    "transformers 5": (transformers_5, ("loss", "grad_norm", "lr"), False),
    "nanoGPT": (nanogpt, ("loss",), True),
    "Megatron": (megatron, ("loss", "grad_norm", "lr"), True),
    "torchtitan": (torchtitan, ("loss", "grad_norm", "lr"), True),
    "OLMo": (olmo, ("loss", "grad_norm", "lr"), True),
    "fairseq": (fairseq, ("loss", "grad_norm", "lr"), True),
    "tqdm": (tqdm, ("loss", "grad_norm", "lr"), True),
    "Lightning": (lightning, ("loss",), True),
    "Composer": (composer, ("loss",), True),
    "pairs": (pairs, ("loss", "grad_norm", "lr"), True),
    "bars": (bars, ("loss", "grad_norm", "lr"), True),
    "JSON": (json_line, ("loss", "grad_norm", "lr"), True),
}
"""By name: how a point is written, which values that shows, and whether it shows the step."""
