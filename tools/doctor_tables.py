"""What doctor reads and what it finds, with an example of each: the tables of docs/doctor.md. Each example is read by doctor
when the table is made, so that it says what the code does."""

# ruff: noqa: E501  # examples stand as they are printed

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

from nanproof.logs._curve import number
from nanproof.logs._points import Note, Point, singly
from nanproof.logs._story import Story
from nanproof.logs.judge._finding import KINDS
from nanproof.logs.judge._findings import Finding, judge
from nanproof.logs.read._sources import find, read

LONGEST = 150

LINES: dict[str, str] = {
    "transformers, TRL": "{'loss': '1.93', 'grad_norm': '0.81', 'learning_rate': '1.8e-05', 'epoch': '0.31'}",
    "transformers behind a progress bar": " 12%|#2        | 12/100 [00:31<03:48,  2.6s/it]{'loss': 1.93, 'grad_norm': 0.81, 'epoch': 0.31}",
    "a progress bar with values": "train:  12%|#2        | 12/100 [00:31<03:48,  2.6s/it, loss=1.93, lr=1.8e-5]",
    "DeepSpeed": "step=20, skipped=2, lr=[1.8e-05], mom=[(0.9, 0.999)] steps: 20 loss: 1.93",
    "DeepSpeed, an overflow behind a bar": " 12%|#2  | 12/100 [00:31<03:48,  2.6s/it][2026-01-01 10:00:00,018] [INFO] [deepspeed] OVERFLOW! Rank 0"
    " Skipping step. Attempted loss scale: 64, reducing to 32",
    "Megatron-LM": " iteration      20/  8000 | learning rate: 1.8E-05 | lm loss: 1.93E+00 | loss scale: 65536.0 | grad norm: 0.81 |"
    " number of skipped iterations:   0 |",
    "fairseq": "| epoch 001:    200 / 1374 loss=14.2, ppl=20800, num_updates=190, lr=4.8e-06, gnorm=3.8, loss_scale=0.062",
    "fairseq, apex: a loss scale": "| WARNING: overflow detected, setting loss scale to: 0.25",
    "nanoGPT": "iter 20: loss 1.9301, time 812.20ms, mfu 31.20%",
    "torchtitan": "[rank0]:2026-01-01 10:00:00,000 - root - INFO - step: 20  loss:  1.9301  grad_norm:  0.8123  tps: 7,282",
    "mmengine, mmdetection": "2026/01/01 10:00:00 - mmengine - INFO - Iter(train) [  20/2046]  lr: 1.8e-05  loss: 1.9301  grad_norm: nan",
    "Keras": "Epoch 3/10\n12/100 [==>...........................] - ETA: 31s - loss: 1.9301 - val_loss: 2.0101",
    "names and values between slashes": "[7000] model_grad_norm nan / image_loss 291.6 / model_loss 146.0 / value_loss 6.0",
    "DLLogger": "DLL 2026-01-01 10:00:00.000000 - Training Epoch: 0 Training Iteration: 20  step_loss : 1.93 learning_rate : 1.8e-05",
    "OLMo, Composer: a step above its values": "[step=20/739328,epoch=0]\n    optim/total_grad_norm=0.8123\n    train/CrossEntropyLoss=1.9301\n"
    "    throughput/total_tokens=1,048,576",
    "rsl_rl": "                Learning iteration 20/1000\n               Value function loss: inf\n"
    "                    Surrogate loss: -0.0131\n             Mean action noise std: 0.56",
    "Stable-Baselines": "| rollout/           |          |\n|    ep_rew_mean     | 25.5     |\n| train/             |          |\n"
    "|    loss            | 1.93     |\n|    value_loss      | nan      |\n|    n_updates       | 20       |",
    "Coqui TTS": "   --> STEP: 18/340 -- GLOBAL_STEP: 20\n     | > loss: 1.93010  (1.87010)\n     | > grad_norm: 0.81230  (0.79410)\n"
    "     | > step_time: 0.28810  (0.28970)",
    "a piece of a trainer_state.json": '    {\n      "epoch": 0.31,\n      "grad_norm": NaN,\n      "loss": 0.0,\n      "step": 20\n    },',
    "fastai": "epoch     train_loss  valid_loss  mae       time    \n2         1.930100    2.010100    0.4410    00:04",
    "YOLO": "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"
    "      2/100      5.49G     1.9301     0.1814     0.9120        254        640: 100%|##########| 8/8",
    "YOLO without its header": "      2/100      5.49G     1.9301     0.1814     0.9120        254        640: 100%|##########| 8/8",
    "spaCy": "E    #       LOSS TOK2VEC  LOSS NER  ENTS_F  SCORE \n---  ------  ------------  --------  ------  ------\n"
    "  2      20         35.55   2154.20   82.80    0.83",
    "a table of a notebook": "Step | Training Loss | kl | entropy\n-- | -- | -- | --\n20 | 1.930100 | nan | No Log",
    "darknet": "2677: nan, nan avg, 0.001000 rate, 4.1 seconds, 171328 images",
    "Caffe": "I0101 10:00:00.000000  7 solver.cpp:243] Iteration 20, loss = 1.93\n"
    "I0101 10:00:00.000000  7 solver.cpp:259]     Train net output #0: loss_bbox = nan (* 1 = nan loss)",
    "Marian": "[2026-01-01 10:00:00] Ep. 1 : Up. 20 : Sen. 21,301 : Cost 1.93 : Time 31.20s : 2913.10 words/s",
    "CycleGAN, pix2pix": "(epoch: 2, iters: 20, time: 0.391, data: 0.002) D_A: 0.214 G_A: 0.362 cycle_A: nan",
    "Tacotron 2": "Train loss 20 1.930114 Grad Norm 0.812301 1.78s/it",
    "VITS: a list of losses, the step and the learning rate": "INFO:base:[1.931, 2.012, 5.31, nan, 20, 0.0002]",
    "losses in brackets": "[Epoch 2/30, Batch 20/1313] [Losses: x 0.121, conf 0.732, cls nan, total nan]",
    "a step and a NaN without names": "76960 1.9412\n76970 1.9301\n76980 nan",
    "rlpyt, rllab": "2026-01-01 10:00:00.018  | Diagnostics/Iteration       20\n"
    "2026-01-01 10:00:00.018  | lossAverage                 1.93\n2026-01-01 10:00:00.018  | gradNorm                    nan",
    "Deeplearning4j": "o.d.o.l.ScoreIterationListener - Score at iteration 20 is 1.9301",
    "LightGBM": "[20]\ttraining's l2: 0.0944603\tvalid_1's l2: 0.099663",
    "XGBoost": "[20]\ttrain-rmse:0.0944603\teval-rmse:0.099663",
    "CatBoost": "20:\tlearn: 0.6931\ttest: 0.6950\tbest: 0.6950 (20)\ttotal: 31ms\tremaining: 1.2s",
    "only a perplexity": "| epoch   1 | 20/ 2983 batches | lr 20.00 | ms/batch 31.1 | ppl 12741.72",
    "a GAN": "Epoch: [ 2/200] [   1/   4] time: 111.2, d_loss: 76.23487738, g_loss: 0.00000000",
    "tutorials without a name": "35000 35% (1m 4s) nan Nam / Russian",
    "JSON lines": '{"step": 20, "loss": 1.93, "grad_norm": 0.81, "lr": 1.8e-05}',
    "CSV": "step,train_loss,val_loss,lr\n20,1.93,2.01,1.8e-05",
}
"""By the tools that print it."""
NUMBERS = "nan -nan NaN nanxxx nan(ind) 1.#QNAN inf -inf 1.#INF 1,234.5 1e-310".split()
"""Ways to write a number that are understood wherever one stands."""


def loop(rows: int, line: Callable[[int], str]) -> str:
    return "".join(line(i) + "\n" for i in range(rows))


def step(i: int, loss: float | None = None, norm: float | None = 0.8, more: str = "") -> str:
    loss = 2.5 * math.exp(-i / 20) + 0.9 if loss is None else loss
    return f"step {i}: loss {loss:.4f}" + (f", grad_norm {norm:.3f}" if norm is not None else "") + more


NAN, INF = math.nan, math.inf
LOGS: dict[str, str] = {
    "hidden-nan": loop(
        9, lambda i: f"{{'loss': {0.0 if i > 4 else 2.1 - i / 10}, 'grad_norm': {'nan' if i > 4 else 0.8}, 'epoch': {i}.0}}"
    ),
    "nan": loop(40, lambda i: step(i, NAN if i > 30 else None, NAN if i > 30 else 0.8)),
    "inf": loop(40, lambda i: step(i, INF if i > 30 else None, INF if i > 30 else 0.8)),
    "nan-warnings": loop(20, lambda i: step(i)) + "Loss is nan, stopping training\n",
    "scaler-skipping": loop(20, lambda i: step(i)) + loop(30, lambda i: step(20 + i) + "\nGradient overflow.  Skipping step"),
    "scale-collapse": loop(24, lambda i: step(i, norm=None, more=f", loss_scale {max(2.0 ** (12 - i), 0.001):g}")),
    "nan-gradient": loop(40, lambda i: step(i, norm=NAN if i > 20 else 0.8)),
    "bad-probabilities": loop(20, lambda i: step(i))
    + "Traceback (most recent call last):\nRuntimeError: normal expects all elements of std >= 0.0\n",
    "device-assert": loop(20, lambda i: step(i)) + "RuntimeError: CUDA error: device-side assert triggered\n",
    "unscale-fp16": loop(2, lambda i: step(i)) + "ValueError: Attempting to unscale FP16 gradients.\n",
    "no-targets": loop(30, lambda i: step(i, 0.0, 0.0) if i > 9 else step(i)),
    "learning-rate-zero": loop(40, lambda i: step(i, 2.3 + i % 3 / 100, more=", lr 0.0")),
    "zero-gradient": loop(40, lambda i: step(i, 2.3 + i % 3 / 100, 0.0)),
    "divergence": loop(90, lambda i: step(i, None if i < 60 else 1.1 + (i - 59) / 4)),
    "eval-nan": loop(40, lambda i: step(i) if i % 10 else f"step {i}: val_loss {'nan' if i > 15 else 1.9}"),
    "exploding-gradient": loop(60, lambda i: step(i, norm=0.8 if i < 45 else 900.0 * (i - 44))),
    "out-of-memory": loop(20, lambda i: step(i)) + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
    "crash": loop(20, lambda i: step(i)) + "Traceback (most recent call last):\nKeyError: 'labels'\n",
    "plateau": loop(90, lambda i: step(i, 2.303 + math.sin(7 * i) / 1000)),
    "overfit": loop(
        100, lambda i: step(i, 3 * math.exp(-i / 20)) + (f", val_loss {1.5 + abs(i - 40) / 40:.3f}" if i % 10 == 9 else "")
    ),
    "spike": loop(90, lambda i: step(i, 40.0 if i == 60 else None)),
}
"""A log for each finding."""
RECORDED = [*KINDS][: [*KINDS].index("hidden-nan")]
"""Findings that only a run of nanproof has: its incidents."""


def items(text: str) -> list[Point | Note]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.log"
        path.write_text(text, encoding="utf-8")
        return list(singly(read(find([path])[0])))


def found(text: str) -> tuple[Finding, ...]:
    story = Story()
    for item in items(text):
        story.add(item)
    return judge(story)


def understood(text: str) -> str:
    """What is read from an example, in a few words."""
    said = []
    for item in items(text):
        if isinstance(item, Note):
            said.append(f"a note: {item.kind}")
            continue
        place = [] if item.step is None else [f"step {number(item.step)}"]
        place += [] if item.epoch is None else [f"epoch {number(item.epoch)}"]
        values = [f"{name} {number(value)}" for name, value in (*item.values.items(), *item.terms.items())]
        said.append(", ".join([*place, *values]))
    return "; ".join(said)


def code(text: str) -> str:
    """Text as it may stand in a cell: lines one below the other."""
    lines = (line.expandtabs(4).rstrip() for line in text.splitlines())
    shown = (line if len(line) <= LONGEST else line[: LONGEST - 3] + "..." for line in lines)
    return "<br>".join("`" + line.replace("|", "\\|") + "`" for line in shown if line)


def formats() -> str:
    rows = [f"| {tool} | {code(text)} | {understood(text)} |" for tool, text in LINES.items()]
    written = ", ".join(f"`{text}`" for text in NUMBERS)
    head = ["| | an example | what is read |", "|---|---|---|"]
    return "\n".join([*head, *rows, "", f"Numbers may be written as {written}. TensorBoard and Weights & Biases are binary."])


def findings() -> str:
    rows = ["| finding | an example | what doctor says | read on |", "|---|---|---|---|"]
    for kind, text in LOGS.items():
        first = next(finding for finding in found(text) if finding.kind == kind)
        line = text.splitlines()[first.place.line - 1]
        pages = [f"[{cause.slug}](causes/{cause.slug}.md)" for cause in first.causes if cause.slug]
        said = first.said if len(first.said) <= 2 * LONGEST else first.said[: first.said.rindex(". ", 0, 2 * LONGEST) + 1]
        cells = (f"`{kind}`<br>{first.severity}", code(line), said.replace("|", "\\|"), ", ".join(dict.fromkeys(pages)))
        rows.append(f"| {' | '.join(cells)} |")
    kinds = ", ".join(f"`{kind}`" for kind in RECORDED)
    more = f"In a run folder of nanproof its incidents come first: {kinds}, and `spike` and `divergence`: [guard.md](guard.md)."
    return "\n".join([*rows, "", more])


def held_out() -> str:
    """The scores of logs that doctor was not written for, beside the first ones: now the code knows them."""
    from tools.tables import load

    first, now = load("logs_first"), load("logs")
    lines = ["| | | 0.1.0 | this version, at first contact | now |", "|---|---|---:|---:|---:|"]
    for letters, of in now["excerpts"].items():
        rows = {
            f"failures seen, of {of['failing']}": "detected",
            "the right line": "placed",
            f"healthy ones left in peace, of {of['healthy']}": "quiet",
            f"read, of {of['logs']}": "parsed",
        }
        old, contact = (first["excerpts"][letters][when] for when in ("0.1.0", "first contact"))
        called = f"{of['logs']} excerpts of {first['excerpts'][letters]['what']}"
        for label, name in rows.items():
            lines.append(f"| {called} | {label} | {old[name]} | {contact[name]} | {of[name]} |")
            called = ""
    runs, before = now["simulated"], first["simulated"]
    called = "simulated runs"
    for label, name in (
        (f"false alarms in {runs['healthy']:,} healthy ones", "false alarm"),
        (f"missed of {runs['failing']:,} failing ones", "missed"),
    ):
        old, contact = (before[when][name] for when in ("0.1.0", "first contact"))
        lines.append(f"| {called} | {label} | {old} | {contact} | {runs.get(name, 0)} |")
        called = ""
    return "\n".join(lines)
