"""Simulated training logs, healthy and failing, to stress a log doctor with. The same seed always gives the same log."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

NAN, INF = math.nan, math.inf
# fmt: off
# How each framework writes its log: the file, what it can log besides the loss, a row, and an evaluation (if apart).
# In a template § is where values begin, a part in «» is left out without its column, «*» is repeated for every other column.
FORMATS = {
    "hf": ("train.log", "grad_norm lr other eval", "«\r{bar:3d}%|███       | {step}/{steps} [03:12<12:31, 1.9it/s]\r      \r»" +
        "§{{'loss': {rounded}, 'grad_norm': {grad_norm}, 'learning_rate': {lr}«*, '{key}': {value}», 'epoch': {progress}}}\n",
        "{{'eval_loss': {value}, 'eval_runtime': 12.3456, 'epoch': {progress}}}\n"),
    "hf-strings": ("train.log", "grad_norm lr other eval", "{{'loss': '{loss:.4g}', 'grad_norm': '{grad_norm:.4g}', " +
        "'learning_rate': '{lr:.4g}'«*, '{key}': '{value:.4g}'», 'epoch': '{progress:.4g}'}}\n",
        "{{'eval_loss': '{value:.4g}', 'eval_runtime': '12.35', 'epoch': '{progress:.4g}'}}\n"),
    "jsonl": ("log.jsonl", "grad_norm lr scale other eval", '{{"step": {step}«, "{label}": {loss}»«, "lr": {lr}»«, "scale": ' +
        '{scale}»«, "grad_norm": {grad_norm:g}»«*, "{key}": {value}»}}\n', '{{"step": {step}, "val_loss": {value}}}\n'),
    "csv": ("log.csv", "grad_norm lr scale other eval",
        "{step}«,{loss:.6g}»«,{grad_norm:.6g}»«,{lr:.6g}»«,{scale}»«*,{value:.6g}»«,{val_loss}»\n", ""),
    "lightning": ("metrics.csv", "grad_norm lr other eval",
        "{begun_epoch}«,{loss}»«,{grad_norm}»«,{lr}»«*,{value}»«,{val_loss}»,{step}\n", "the same"),
    "nanogpt": ("out.log", "eval", "iter {begun}: loss {loss:.4f}, time {ms:.2f}ms, mfu 38.21%\n",
        "step {step}: train loss {train:.4f}, val loss {value:.4f}\n"),
    "tqdm": ("slurm.out", "lr grad_norm other", "\r§Epoch {epoch}/{epochs}: {percent:3d}%|███   | {inside}/{per_epoch} " +
        "[03:12<12:31, 2.1it/s«, loss={loss:.4g}»«, lr={lr:.3g}»«, grad_norm={grad_norm:.3g}»«*, {key}={value:g}»]{close}", ""),
    "megatron": ("pretrain.log", "grad_norm lr scale eval", " [{clock}] iteration {step:8d}/{steps:8d} | elapsed " +
        "time per iteration (ms): {ms:.1f} | learning rate: {lr:.6E} | «lm loss: {loss:.6E} | »«loss scale: {scale:.1f} " +
        "| »«grad norm: {grad_norm:.3f} | »number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |\n",
        " validation loss at iteration {step} | lm loss value: {value:.6E} | \n"),
    "fairseq": ("train.log", "grad_norm lr scale eval", "{clock} | INFO | train_inner | epoch {epoch:03d}: {inside:6d} /" +
        " {per_epoch} loss={loss:.3f}, ppl={ppl:.2f}, num_updates={step}, lr={lr:g}, gnorm={grad_norm:.3f}«, loss_scale=" +
        "{scale:g}»\n", "{clock} | INFO | valid | valid on 'valid' subset | loss {value:.3f} | num_updates {step}\n"),
    "mmengine": ("20250301.log", "grad_norm lr other", "{clock} - mmengine - INFO - Epoch(train) [{epoch}][{inside:5d}/" +
        "{per_epoch}]  lr: {lr:.4e}  eta: 3:12:05  grad_norm: {grad_norm:.4f}  loss: {loss:.4f}«*  {key}: {value:.4f}»\n", ""),
    "torchtitan": ("train.log", "grad_norm", "[titan] {clock},512 - root - INFO - step: {step:2d}  loss: {loss:7.4f}  " +
        "grad_norm: {grad_norm:7.4f}  memory: 43.21GiB(45.40%)  tps: 3,412  tflops: 151.20  mfu: 39.71%\n", ""),
    "keras": ("nohup.out", "other eval", "Epoch {epoch}/{epochs}\n§{per_epoch}/{per_epoch} [====================] - 3s " +
        "27ms/step - loss: {loss:.4f}«* - {key}: {value:.4f}»« - val_loss: {val_loss:.4f}»\n", ""),
    "tutorial": ("train.log", "lr other eval", "Epoch [{epoch}/{epochs}], Step [{inside}/{per_epoch}]«, Loss: {loss:.4f}»" +
        "«, LR: {lr:.6f}»«*, {key}: {value:.4f}»\n", "Epoch [{epoch}/{epochs}] Validation Loss: {value:.4f}\n"),
    "deepspeed": ("ds.log", "lr", "{overflows}steps: {step} loss: {loss:.4f} iter time (s): 0.412 samples/sec: 77\n[{clock}]" +
        " [INFO] [logging.py:96:log_dist] [Rank 0] step={step}, skipped={all_skipped}, lr=[{lr:.6g}], mom=[(0.9, 0.95)]\n", ""),
    "kv": ("kv.log", "grad_norm lr scale other eval", "step {step}« | loss {loss:.5f}»« | lr {lr:.3e}»« | norm {grad_norm:g}»" +
        "« | scale {scale:g}»«* | {key} {value:.5g}» | dt {ms:.1f}\n", "step {step} | val loss {value:.5f}\n"),
}
ALL, OWN, HF, TABLES = tuple(FORMATS), ("jsonl", "csv", "kv", "lightning"), ("hf", "hf-strings"), ("jsonl", "csv", "lightning")
LOOPS, GRAD = (*OWN, "tqdm", "tutorial"), (*HF, *OWN, "torchtitan", "mmengine")
SHAPES = {  # of healthy runs: the fewest rows that show it, and the formats that people log it in
    "pretraining": (1, tuple(k for k in ALL if k != "keras")), "classifier": (1, ALL), "finetuning": (1, ALL), "dpo": (3, HF),
    "staircase": (30, (*OWN, *HF, "tutorial")), "batch-of-one": (1, (*LOOPS, *HF, "nanogpt")), "diffusion": (8, LOOPS),
    "warm-up-rise": (80, ALL), "curriculum": (80, (*OWN, *HF, "megatron", "torchtitan", "deepspeed", "fairseq")),
    "slow-start": (60, (*LOOPS, "keras")), "large-sum": (1, (*LOOPS, "keras")),
    "small-mse": (1, (*TABLES, "hf-strings", "tqdm")), "negative": (1, (*LOOPS, "keras")), "gan": (6, LOOPS), "vae": (6, LOOPS),
    "perplexity": (1, (*OWN, "tqdm")), "ppo": (10, OWN), "ppo-growing-returns": (40, OWN), "grpo": (4, (*HF, "jsonl")),
    "parts": (4, ("mmengine", "jsonl", "csv")), "converged": (60, ALL),
}
# Of each failure: the formats that can show it (fairseq stops at a NaN), the kinds that are right answers, the columns that it
# needs, and what is logged j rows after the onset, instead of a loss and a gradient norm that stay where they were.
FAILURES: dict[str, tuple[Sequence[str], str, str, Callable[[Any, int], dict[str, float]]]] = {
    "nan": (tuple(k for k in ALL if k != "fairseq"), "nan", "", lambda c, j: {"loss": NAN, "grad_norm": NAN}),
    "inf-nan": ((*LOOPS, *GRAD, "nanogpt", "keras"), "inf nan", "", lambda c, j: {"loss": NAN if j else INF, "grad_norm": NAN}),
    "hidden-nan": (HF, "hidden-nan nan", "", lambda c, j: {"loss": c.loss * (j == 0 and c.every > 1), "grad_norm": NAN}),
    "part-nan": ((*OWN, "mmengine"), "nan", "", lambda c, j: dict.fromkeys(("loss", c.part)[c.part == "approx_kl" :], NAN)),
    "eval-nan": (tuple(k for k in ALL if "eval" in FORMATS[k][1]), "eval-nan", "", lambda c, j: {}),
    "stopped": (("tutorial", "tqdm", "kv"), "nan nan-warnings crash", "", lambda c, j: {}),
    "nan-gradient": (GRAD, "nan-gradient nan", "grad_norm", lambda c, j: {"grad_norm": NAN}),
    "slow-divergence": (ALL, "divergence", "", lambda c, j: {"loss": c.loss + 2 * c.up * (j / c.left) ** 0.8}),
    "sudden-divergence": (ALL, "divergence", "", lambda c, j: {"loss": c.loss + c.up * min(1, j / 2 + 0.5)}),
    "explosion": (ALL, "divergence exploding-gradient inf", "",
        lambda c, j: {k: min(c.top, v * c.fast ** min(40, j + 1)) for k, v in c.stay.items()}),
    "exploding-gradient": ((*GRAD, "megatron", "fairseq"), "exploding-gradient", "grad_norm",
        lambda c, j: {"loss": c.loss * (1 + c.rise * min(1, j / 5)), "grad_norm": c.norm * 10 ** min(c.high, j + 2)}),
    "scale-collapse": (("jsonl", "csv", "kv", "megatron"), "scale-collapse scaler-skipping nan-gradient", "scale grad_norm",
        lambda c, j: {"grad_norm": INF, "scale": max(2.0**-40, c.scale * 0.5 ** (c.every * (j + 1)))}),
    "scaler-skipping": (("megatron", "deepspeed"), "scaler-skipping scale-collapse", "scale", lambda c, j: {"scale": 1.0}),
    "no-targets": (GRAD, "no-targets", "grad_norm", lambda c, j: {"loss": 0.0, "grad_norm": 0.0}),
    "vanishing": (GRAD, "no-targets zero-gradient", "grad_norm",
        lambda c, j: {k: v * 0.01 ** (j + 1) * (j < 2) for k, v in c.stay.items()}),
    "zero-rate": (tuple(k for k in ALL if "lr" in FORMATS[k][1]), "learning-rate-zero plateau", "lr", lambda c, j: {"lr": 0.0}),
    "zero-gradient": ((*GRAD, "fairseq"), "zero-gradient", "grad_norm", lambda c, j: {"grad_norm": 0.0}),
    "plateau": (ALL, "plateau", "", lambda c, j: {}),
}
CHATTER = ("parameters: 124.44M\n", "grad_clip: 1.0, skip_nan_batches: False\n", "check_for_nan_in_loss_and_grad ..... True\n")
# fmt: on


@dataclass
class Run:
    """What one run logs, row by row, before it is written down."""

    rng: Random
    form: str
    columns: dict[str, list[float]]  # loss, grad_norm, lr, scale; a column of any other name is logged under that name
    every: int  # steps from row to row
    per_epoch: int
    index: Sequence[int]  # where in the run each row is: it goes back on a resume
    evals: dict[int, float] = field(default_factory=dict)
    skipped: dict[int, int] = field(default_factory=dict)  # steps of a row that the loss scaler left out
    end: str = ""

    def known(self, i: int, steps: int) -> dict[str, Any]:
        """All that the template of a row can name."""
        step, clock, skipped = (self.index[i] + 1) * self.every, 7 * i + 40, self.skipped.get(i, 0)
        (epoch, inside), loss = divmod(step - 1, self.per_epoch), self.columns["loss"][i] if "loss" in self.columns else NAN
        lost, scale = set(), int(self.columns["scale"][i - 1]) if i and self.form == "deepspeed" and skipped else 65536
        if self.form == "megatron":  # prints neither a NaN loss nor, of steps that were all skipped, loss and gradient
            lost = {"loss", "grad_norm"} if skipped == self.every else set() if loss > 0 else {"loss"}
        said = "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {}, reducing to {}\n"
        overflows = [said.format(max(1, scale >> k), max(1, scale >> k + 1)) for k in range(skipped)]
        values: dict[str, Any] = {k: v[i] for k, v in self.columns.items() if k not in lost}
        if i in self.evals if self.form == "keras" else self.evals:
            values["val_loss"] = self.evals.get(i, "") if self.form != "lightning" else ""
        return values | {
            "step": step, "begun": step - self.every, "steps": steps, "per_epoch": self.per_epoch, "inside": inside + 1,
            "epoch": epoch + 1, "begun_epoch": epoch, "epochs": -(-steps // self.per_epoch), "overflows": "".join(overflows),
            "percent": 100 * (inside + 1) // self.per_epoch, "close": "\n" * (inside + 1 == self.per_epoch), "skipped": skipped,
            "ms": self.rng.gauss(134, 2), "train": loss, "ppl": 2**loss if loss < 1000 else INF, "rounded": round(loss, 4),
            "clock": f"2025-03-{1 + clock // 86400:02d} {clock // 3600 % 24:02d}:{clock // 60 % 60:02d}:{clock % 60:02d}",
            "progress": round(step / self.per_epoch, 2), "all_skipped": sum(v for k, v in self.skipped.items() if k <= i),
        }  # fmt: skip


def _fill(template: str, known: dict[str, Any], others: dict[str, Any]) -> str:
    """A template with its values; see `FORMATS`."""
    for part in re.findall("«([^»]*)»", template):
        shown = part.format(**known) if part[0] != "*" and known.keys() >= set(re.findall(r"{(\w+)", part)) else ""
        rest = [part[1:].format(key=k, value=v) for k, v in others.items() if part[0] == "*"]
        template = template.replace(f"«{part}»", "".join([shown, *rest]))
    text = template.format(**known)
    return text.replace(": nan", ": NaN").replace(": inf", ": Infinity") if text[:2] == '{"' else text  # as json does


def _write(run: Run) -> tuple[str, dict[tuple[str, int], int]]:
    """The text of a log, and where in it each row ("train", i), evaluation ("eval", i) and the end ("end", 0) begins."""
    (_, _, template, evaluation), rows, last, rng, begins = FORMATS[run.form], len(run.index), max(run.index) + 1, run.rng, {}
    told = "" if run.form in (*TABLES, "tqdm", "keras") else "".join(rng.sample(CHATTER, rng.randrange(4)))
    label, bars, own = rng.choice(("loss", "train_loss", "train/loss")), rng.randrange(3), ("loss", "grad_norm", "lr", "scale")
    other = {k: v for k, v in run.columns.items() if k not in own}
    names = [label if k == "loss" else k for k in own if k in run.columns] + [*other, *["val_loss"] * bool(run.evals)]
    head = {"csv": ["step", *names], "lightning": ["epoch", *names, "step"]}.get(run.form, [])
    text = ",".join(head) + "\n" * bool(head)
    for i in range(rows):
        text += told if i == 0 or run.index[i] <= run.index[i - 1] else ""
        known = run.known(i, last * run.every) | {"label": label} | ({"bar": 100 * (run.index[i] + 1) // last} if bars else {})
        row = _fill(template, known, {k: v[i] for k, v in other.items()})
        begins["train", i] = begins["eval", i] = len(text) + max(0, row.find("§"))
        text += row.replace("§", "")
        if i in run.evals and evaluation:
            begins["eval", i], known["value"] = len(text), run.evals[i]
            blank = dict.fromkeys(run.columns, "") | {"val_loss": run.evals[i]} if run.form == "lightning" else {}
            text += _fill(template if blank else evaluation, known | blank, dict.fromkeys(other, ""))
        text += f"Saving model checkpoint to out/checkpoint-{known['step']}\n" * (told > "" and i % 50 == 49)
    if run.form == "hf" and label == "train_loss":
        text += f"{{'train_runtime': 1234.5678, 'train_loss': {fmean(run.columns['loss'])}, 'epoch': 3.0}}\n"
    text += "\n" * (run.end != "" and text[-1] != "\n")
    return text + run.end, begins | {("end", 0): len(text)}


def _noise(rng: Random, n: int, size: float, kind: str = "") -> list[float]:
    """Factors around 1 with some kind of noise."""
    kind, slow, memory = kind or rng.choice(("gauss", "lognormal", "heavy", "uneven", "slow")), 0.0, rng.uniform(0.5, 0.95)
    (first, last), factors = rng.choice(((0.4, 2.0), (2.0, 0.4))), []
    for i in range(n):
        g = rng.gauss(0, 1)
        slow = memory * slow + min(1, 0.04 / size) * math.sqrt(1 - memory**2) * g
        heavy = 0.6 * g / math.sqrt(rng.gammavariate(1.5, 2) / 3)  # Student's t with 3 degrees of freedom
        g = {"heavy": heavy, "uneven": g * (first + (last - first) * i / n), "slow": slow}.get(kind, g)
        factors.append(math.exp(size * g) if kind == "lognormal" else max(0.15, 1 + size * g))
    return factors


def _decay(rng: Random, n: int, start: float, floor: float) -> list[float]:
    """A fall from `start` towards `floor`, exponential or as a power law."""
    rate, wide, power, law = 10 ** rng.uniform(0.6, 1.7), n / 10 ** rng.uniform(0.7, 2.5), rng.uniform(0.4, 1.2), rng.random()
    return [floor + (start - floor) * (math.exp(-rate * i / n) if law < 0.5 else (1 + i / wide) ** -power) for i in range(n)]


def _column(rng: Random, name: str, n: int) -> list[float]:
    """Learning rates: warm-up, then constant or down to a tenth or 0. Or gradient norms, with spikes that come back at once."""
    if name == "lr":
        peak, warm, kind, first = 10 ** rng.uniform(-5, -2.6), n * rng.choice((0, 3, 9)) // 100, rng.randrange(4), rng.random()
        times = [i / max(1, n - 1 - warm) for i in range(n - warm)]
        down = [(1.0, 1 - t, (1 + math.cos(math.pi * t)) / 2, 0.55 + 0.45 * math.cos(math.pi * t))[kind] for t in times]
        return [peak * v for v in [(i + round(first)) / warm for i in range(warm)] + down]
    level, wild, drift = 10 ** rng.uniform(-1, 0.8), rng.choice((1, 3, 12)), rng.choice((0.4, 1, 1, 2))
    size, spikes = rng.uniform(0.06, 0.4), [rng.uniform(4, 60) if i < n - 5 and rng.random() < 0.004 else 1 for i in range(n)]
    drifts = [level * drift ** (i / n) * (1 + (wild - 1) * math.exp(-40 * i / n)) for i in range(n)]
    return [a * b * math.exp(rng.gauss(0, size)) for a, b in zip(drifts, spikes, strict=True)]


def _losses(rng: Random, shape: str, n: int, epochs: int) -> tuple[dict[str, list[float]], list[float]]:
    """The losses of a healthy run, with what goes with them, and the trend of the loss where an evaluation can follow it."""
    u, g, exp, wave = rng.uniform, rng.gauss, math.exp, math.sin
    s, at, up, drop = u(0.6, 2.5), u(0.2, 0.45), u(0.04, 0.14), u(0.06, 0.3)
    start, floor = rng.choice(((u(7, 11.5), u(1.8, 4)), (2.303, u(0.05, 1.2)), (6.908, u(0.8, 2.5))))
    start, floor, size = {
        "finetuning": (s, s * u(0.9, 0.98), u(0.02, 0.1)), "staircase": (s, s, u(0.02, 0.08)), "large-sum": (4e5 * s, 2e4, 0.1),
        "batch-of-one": (start, start * u(0.3, 0.7), u(0.3, 0.7)), "small-mse": (s / 10, 10 ** u(-5.5, -4), u(0.03, 0.2)),
        "diffusion": (1, u(0.02, 0.2), u(0.2, 0.5)), "converged": (floor, floor, u(0.01, 0.06)),
    }.get(shape, (start, floor, 10 ** u(-2, -1.1)))  # fmt: skip
    bend: Callable[[float], float] = {
        "curriculum": lambda p: 1 + up * (p >= at) * exp(-(p - at) / 0.1),  # new data, a little harder
        "warm-up-rise": lambda p: 1 + 3 * up * wave(math.pi * min(1, p / (at / 6))),
        "staircase": lambda p: (1 - drop) ** int(p * epochs) * (1 - 0.02 * (p * epochs % 1)),
        "converged": lambda p: 1 + 3 * exp(-60 * p),
    }.get(shape, lambda p: 1.0)
    wait, grows = int(n * at * 0.8) if shape == "slow-start" else 0, shape == "ppo-growing-returns"
    trend = [v * bend(i / n) for i, v in enumerate([start] * wait + _decay(rng, n - wait, start, floor))]
    row: Callable[[float, float, float], dict[str, float]] = {  # of its trend, its loss, and how much is learned, from 0 to 1
        "negative": lambda t, v, r: {"loss": t - floor - 2 * s + g(0, 0.15), "log_det": 3 * r + g(0, 0.1)},
        "perplexity": lambda t, v, r: {"ppl": exp(min(v, 11.5))} | ({"loss": v} if s < 1.2 else {}),
        "ppo": lambda t, v, r: {  # with growing returns the critic has more to predict
            "policy_loss": (policy := g(0, 0.015)), "value_loss": (v := (t / start, 0.02 + r / 10)[grows] * exp(g(0, 0.25))),
            "entropy": 1.79 - 0.9 * r, "approx_kl": 0.008 * exp(g(0, 0.5)), "ep_rew_mean": 90 + 150 * r + g(0, 12),
        } | ({"loss": policy + v / 2} if s < 1.5 else {}),
        "grpo": lambda t, v, r: {
            "loss": 0.04 * (kl := 0.15 * r**2 * exp(g(0, 0.3))) * (s < 1.5) + g(0, 0.01) * (r > 0) * (s >= 1.5),
            "reward": 0.25 + r / 2 + g(0, 0.04), "reward_std": u(0.1, 0.3), "kl": kl},
        "dpo": lambda t, v, r: {
            "loss": 0.6931 - 0.3 * r + r * g(0, 0.05), "rewards/margins": 2 * r * (1 + g(0, 0.2)),
            "rewards/accuracies": min(8, int(8 * (0.4 + r / 2 + r * g(0, 0.1)))) / 8},
        "gan": lambda t, v, r: {
            "Loss_D": u(0.5, 1.1) * (1 + 0.3 * wave(60 * at * r)),
            "Loss_G": (1.2 + (s > 1.5) * r) * (1 - 0.3 * wave(60 * at * r)) * exp(g(0, 0.2))},
        "vae": lambda t, v, r: {"loss": 40 * v + 30 + (kl := 3 * s * min(1, 8 * r)), "recon_loss": 40 * v + 30, "kl_loss": kl},
        "parts": lambda t, v, r: {"loss": v, "loss_cls": v * (part := min(0.9, g(0.6, 0.03))), "loss_bbox": v * (1 - part)},
    }.get(shape.partition("-")[0], lambda t, v, r: {"loss": v})  # fmt: skip
    noise = _noise(rng, n, size, "lognormal" if size > 0.15 else "")
    rows = [row(t, t * f, 1 - exp(-4 * i / n)) for i, (t, f) in enumerate(zip(trend, noise, strict=True))]
    return {k: [v[k] for v in rows] for k in rows[0]}, trend if rows[0].keys() <= {"loss", "loss_cls", "loss_bbox"} else []


def _begin(rng: Random, form: str, shape: str, n: int, needs: str = "") -> tuple[Run, list[float]]:
    """A healthy run from its first row to its last, without evaluations, and the trend of its loss."""
    every, epochs = rng.choice((10, 20, 50) if "scale" in needs else (1, 1, 5, 10, 20, 50, 100)), rng.randrange(2, 6)
    every, epochs = (rng.randrange(40, 900), n) if form == "keras" else (every, epochs)
    (columns, trend), logs = _losses(rng, shape, n, epochs), FORMATS[form][1]
    for name in ("grad_norm", "lr"):
        if name in logs and (name in needs or form not in LOOPS or rng.random() < 0.6):
            columns[name] = _column(rng, name, n)
    run = Run(rng, form, columns, every, -(-n // epochs) * every, range(n))
    half = ("scale" in logs or form in (*HF, "deepspeed")) and not needs and n > 15 and rng.random() < 0.3
    if half or "scale" in needs:  # float16
        scale, first, scales = 65536.0, min(every, rng.randrange(1, 6)), []
        for i in range(n):
            over = i > 0 and i * every // 2000 > (i - 1) * every // 2000  # 2000 steps later: it doubles, or overflows
            lost = int(first * (i == 0) if every > 1 else i < first) or int(over and i < n - 5 and rng.random() < 0.5)
            scale *= 2 if over and not lost else 0.5**lost
            run.skipped |= {i: lost} if lost else {}
            scales.append(scale)
            if lost == every and "grad_norm" in columns:
                columns["grad_norm"][i] = rng.choice((NAN, INF))
        columns |= {"scale": scales} if form not in HF else {}
    return run, trend


def _healthy(seed: int) -> tuple[Run, str, set[str], tuple[str, int]]:
    """One healthy run and its shape. Nothing is a right answer."""
    rng = Random(f"healthy {seed}")
    shape, (low, forms) = rng.choice(list(SHAPES.items()))
    form, top, u = rng.choice(forms), 3000 if rng.random() < 0.05 else 600, rng.uniform
    n = rng.randint(low, max(low, 30)) if rng.random() < 0.25 else int(10 ** u(math.log10(max(30, low)), math.log10(top)))
    run, trend = _begin(rng, form, shape, n := min(n, 150) if form == "keras" else n)
    for _ in range(rng.choice((0, 0, 1, 3)) if trend and n >= 20 and form != "keras" else 0):  # a bad batch
        run.columns["loss"][rng.randrange(3, n - 5)] *= u(1.5, 6 if run.every < 20 else 2.5)
    if n >= 40 and rng.random() < 0.1 and form not in ("tqdm", "keras"):  # a resume from an older checkpoint
        stop = rng.randrange(n // 3, n)
        run.index = [*range(stop), *range(stop - rng.randrange(1, stop // 2), n)]
        run.columns = {k: [v[i] for i in run.index] for k, v in run.columns.items()}
        run.skipped = {i: run.skipped[j] for i, j in enumerate(run.index) if j in run.skipped}
    if trend and n >= 30 and "eval" in FORMATS[form][1] and rng.random() < 0.6:  # it goes flat, or rises a little
        gap, up, often = u(1.01, 1.1), u(0, 0.05), 1 if form == "keras" else n // rng.randrange(4, 13)
        values = [max(v, trend[n // 2]) * gap * (1 + up * i / n) * rng.gauss(1, 0.004) for i, v in enumerate(trend)]
        run.evals = {i: values[j] for i, j in enumerate(run.index) if (j + 1) % often == 0}
    return run, shape, set(), ("train", 0)


def _failing(seed: int) -> tuple[Run, str, set[str], tuple[str, int]]:
    """One failing run, its failure, the kinds that are right answers, and where it shows first."""
    rng = Random(f"failing {seed}")
    failure, (forms, right, needs, change) = rng.choice(list(FAILURES.items()))
    form, kinds, u, shape = rng.choice(forms), set(right.split()), rng.uniform, rng.choice(("pretraining", "classifier"))
    if failure == "part-nan":
        shape = "parts" if form == "mmengine" else rng.choice(("ppo", "vae"))
    n = int(10 ** u(2 if "divergence" in failure else 1.8, 2.1 if form == "keras" else 2.8))
    run, trend = _begin(rng, form, shape, n, needs or "-" * ("divergence" not in failure))
    early = rng.random() < {"zero-rate": 1, "plateau": 1, "nan": 0.2, "no-targets": 0.2, "zero-gradient": 0.2}.get(failure, 0)
    columns, onset = run.columns, 0 if early else rng.randint(int(n * 0.3), int(n * 0.6))
    c = SimpleNamespace(every=run.every, left=n - onset, loss=trend[onset] if trend else 1.0, rise=rng.choice((0, 2)))
    c.norm = median([v for v in columns.get("grad_norm", [1.0]) if math.isfinite(v)])
    c.part = {"parts": "loss_bbox", "vae": "kl_loss"}.get(shape, rng.choice(("value_loss", "approx_kl")))
    c.fast, c.top, c.high, c.scale = u(2.5, 10), 10 ** u(8, 14), u(3, 6), columns.get("scale", [1.0] * n)[onset]
    c.up = max([*trend[:1], 2.5 * c.loss]) * u(1, 1.5) - c.loss
    c.stay = {} if failure in ("part-nan", "eval-nan", "stopped") else {"loss": c.loss, "grad_norm": c.norm}
    more = {"zero-gradient": ["plateau"] * (onset == 0), "exploding-gradient": ["divergence"] * bool(c.rise)}
    kinds |= {*more.get(failure, ["nan-gradient"] * (failure == "nan" and form == "megatron"))}  # which prints no such loss
    for j, factor in enumerate(_noise(rng, n - onset, 0.0005 if failure == "plateau" else 0.03, "gauss")):
        for name, value in (c.stay | change(c, j)).items():
            if name in columns:
                columns[name][onset + j] = value * {"loss": factor, "grad_norm": factor**10}.get(name, 1.0)
        if failure in ("scale-collapse", "scaler-skipping"):
            run.skipped[onset + j] = run.every
    if failure == "eval-nan":
        often = 1 if form == "keras" else n // 12
        run.evals = {i: trend[i] * 1.02 if i < onset else NAN for i in range(often - 1, n, often)}
        return run, failure, kinds, ("eval", min(i for i in run.evals if i >= onset))
    if failure == "stopped":
        run.index, run.end = range(onset), "Loss is nan, stopping training\n"
    return run, failure, kinds, ("end", 0) if run.end else ("train", onset)


def healthy(seed: int) -> tuple[str, str]:
    """File name and text of one healthy run."""
    run, *_ = _healthy(seed)
    return FORMATS[run.form][0], _write(run)[0]


def failing(seed: int) -> tuple[str, str, tuple[str, ...], int]:
    """File name and text of one failing run, the kinds that are right answers, and the first line that shows the failure."""
    run, _, kinds, key = _failing(seed)
    text, begins = _write(run)
    return FORMATS[run.form][0], text, tuple(sorted(kinds)), text.count("\n", 0, begins[key]) + 1


def run(judged: Callable[[str, str], list[dict[str, Any]]], healthy: int, failing: int, first: int = 0) -> dict[str, Any]:
    """Judge many runs, beginning with the seed `first`. `judged` gets the name and the text of a log and returns findings with
    kind, severity and line."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    examples: dict[str, list[tuple[int, list[str]]]] = defaultdict(list)
    for make, seed in [(_healthy, first + i) for i in range(healthy)] + [(_failing, first + i) for i in range(failing)]:
        simulated, shape, right, key = make(seed)
        text, begins = _write(simulated)
        found = [f for f in judged(FORMATS[simulated.form][0], text) if f["severity"] in ("failure", "warning")]
        # A progress bar goes back with \r. A line may be counted there, as Python does, or not, as grep does: both are right.
        lines = [(len(re.findall(end, text[: begins[key]])) + 1, len(re.findall(end, text))) for end in ("\n", "\r\n|\r|\n")]
        fits = [f["line"] for f in found if f["kind"] in right]
        near = any(line and abs(line - at) <= max(2, 0.05 * of) for line in fits for at, of in lines)
        if found if not right else not near:
            what = "wrong line" if fits else "false alarm" if not right else "wrong kind" if found else "missed"
            kinds = sorted({f["kind"] for f in found})
            counts[what].update(["runs", f"of {shape}", f"in {simulated.form}", *(f"as {k}" for k in kinds)])
            examples[what] += [(seed, kinds)] if len(examples[what]) < 20 else []
    return {"healthy": healthy, "failing": failing, "counts": {k: dict(v) for k, v in counts.items()}, "examples": {**examples}}
