"""Logs of Lightning, TensorBoard, Weights & Biases, Accelerate, DeepSpeed, Megatron-LM, nanproof itself, and of bug reports.

Weights & Biases is run by the Python that NANPROOF_WANDB_PYTHON names. Megatron-LM cannot be installed without a GPU: its
lines are printed with its own format strings from a real run of a small network.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from corpus_torch import at, scaled, steps
from corpus_transformers import Numbers, Samples
from make_corpus import log, said, scrubbed


def lightning(
    path: Path, data: Any, logger: str, *, epochs: int = 4, lr: float = 3e-3, held: Any = None, width: int = 32
) -> None:
    """Train under Lightning; the log is the logger's file, or what the progress bar printed."""
    import lightning as L
    from lightning.pytorch.callbacks import TQDMProgressBar
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = Numbers(width)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.net(**batch)["loss"]
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.net(**batch)["loss"], prog_bar=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=lr)

    made = {"csv": lambda: CSVLogger("csv"), "tb": lambda: TensorBoardLogger("tb"), "bar": lambda: False}[logger]()
    with said(path if logger == "bar" else Path("spoken.txt")):
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=made,
            enable_checkpointing=False,
            enable_model_summary=False,
            log_every_n_steps=1 if logger != "csv" else 2,
            callbacks=[TQDMProgressBar(refresh_rate=4)],
            num_sanity_val_steps=0,
        )
        loaders = [torch.utils.data.DataLoader(d, batch_size=16) for d in (data, held) if d is not None]
        trainer.fit(Module(), *loaders)
    if logger == "csv":
        shutil.copy(next(Path("csv").rglob("metrics.csv")), path)
    elif logger == "tb":
        events(path, Path("tb"))


def private(data: bytes) -> None:
    """No name of this machine, no folder of it."""
    for secret in (os.uname().nodename, str(Path.cwd()), str(Path.home()), sys.prefix):
        assert not re.search(rb"(?<![\w.])" + re.escape(secret.encode()) + rb"(?![\w])", data), f"{secret} is in the log"


def events(path: Path, source: Path) -> None:
    """The event file, without the name of the machine in its own."""
    path.mkdir(exist_ok=True)
    for i, file in enumerate(sorted(source.rglob("events.out.tfevents.*"))):
        data = file.read_bytes()
        private(data)
        (path / f"events.out.tfevents.1700000000.host.1.{i}").write_bytes(data)


@log("lightning_nan.csv", "Lightning's CSVLogger; a NaN in sample 300 (batch 18 of the first epoch)", "nan", step=(17, 21))
def _(path):
    lightning(path, Samples(bad=300), "csv", held=Samples(64, seed=4))


@log("lightning_tb_nan", "Lightning's TensorBoardLogger; a NaN in sample 300", "nan", step=(17, 19))
def _(path):
    lightning(path, Samples(bad=300), "tb", epochs=2)


@log("lightning_bar_nan.log", "Lightning's progress bar; a NaN in sample 200 (batch 12)", "nan", line=(1, 60))
def _(path):
    lightning(path, Samples(bad=200), "bar", epochs=2)


@log("lightning_overfit.csv", "Lightning's CSVLogger; 32 noisy samples, 120 epochs", "overfit", severity="warning", step=(2, 120))
def _(path):
    lightning(path, Samples(32, noise=2.0), "csv", epochs=120, lr=1e-2, held=Samples(256, seed=9, noise=2.0), width=128)


@log("healthy_lightning.csv", "Lightning's CSVLogger with validation")
def _(path):
    lightning(path, Samples(), "csv", epochs=8, held=Samples(128, seed=4))


@log("healthy_lightning_tb", "Lightning's TensorBoardLogger with validation")
def _(path):
    lightning(path, Samples(), "tb", epochs=4, held=Samples(128, seed=4))


def tensorboard(path: Path, rows: Any, names: dict[str, str]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter("tb") as writer:
        for row in rows:
            for name, tag in names.items():
                if name in row:
                    writer.add_scalar(tag, row[name], row["step"])
    events(path, Path("tb"))


TAGS = {"loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/lr", "eval_loss": "val/loss"}


@log("tensorboard_nan", "torch.utils.tensorboard; NaN data at step 64", "nan", step=(64, 64))
def _(path):
    tensorboard(path, steps(120, batch=at(64)), TAGS)


@log("tensorboard_divergence", "torch.utils.tensorboard; the rate goes from 3e-3 to 3 at step 100", "divergence", step=(95, 125))
def _(path):
    tensorboard(path, steps(220, lr=lambda s: 3e-3 if s < 100 else 3.0), TAGS)


@log("healthy_tensorboard", "torch.utils.tensorboard, evaluation, a cosine")
def _(path):
    tensorboard(path, steps(250, lr=lambda s: 3e-3 * 0.5 * (1 + math.cos(math.pi * s / 250)), evaluate=25), TAGS)


WANDB = """
import json, sys, wandb
run = wandb.init(project="toy", mode="offline", settings=wandb.Settings(
    host="host", username="user", email="", program="train.py", root_dir=".", console="off", disable_git=True, save_code=False,
    disable_code=True, x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True, silent=True))
for line in open("rows.jsonl"):
    row = json.loads(line)
    run.log({"train/" + k if k != "step" else "train/global_step": v for k, v in row.items()}, step=row["step"])
run.finish()
"""


def wandb(path: Path, rows: Any) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("log.py").write_text(WANDB)
    python = os.environ.get("NANPROOF_WANDB_PYTHON", sys.executable)
    subprocess.run([python, "log.py"], check=True, capture_output=True, timeout=120)
    data = next(Path("wandb").rglob("run-*.wandb")).read_bytes()
    private(data)
    path.write_bytes(data)


@log("wandb_nan.wandb", "Weights & Biases offline; NaN data at step 48", "nan", step=(48, 48))
def _(path):
    wandb(path, steps(90, batch=at(48)))


@log("wandb_rate_zero.wandb", "Weights & Biases offline; a learning rate of 0", "learning-rate-zero", step=(0, 0))
def _(path):
    wandb(path, steps(60, lr=0.0))


@log("healthy_wandb.wandb", "Weights & Biases offline")
def _(path):
    wandb(path, steps(100, evaluate=20))


@log("accelerate_tracker_nan", "Accelerate's TensorBoard tracker; NaN data at step 21", "nan", step=(21, 21))
def _(path):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir="tb")
    accelerator.init_trackers("toy")
    for row in steps(60, batch=at(21)):
        accelerator.log({"train_loss": row["loss"], "learning_rate": row["lr"]}, step=row["step"])
    accelerator.end_training()
    events(path, Path("tb"))


def megatron(row: dict[str, float], total: int, skipped: int, nans: int) -> None:
    """The format strings of Megatron-LM's training_log. A loss that is not above 0, NaN too, is left out of the line."""
    line = " [2026-01-01 00:00:00]" + " iteration {:8d}/{:8d} |".format(int(row["step"]), total)
    line += " consumed samples: {:12d} |".format(32 * int(row["step"]))
    line += f" elapsed time per iteration (ms): {4.2:.1f} |"
    line += f" learning rate: {row['lr']:.6E} |"
    line += f" global batch size: {32:5d} |"
    if row["loss"] > 0.0:
        line += " {}: {:.6E} |".format("lm loss", row["loss"])
    line += f" loss scale: {row.get('scale', 1.0):.1f} |"
    if math.isfinite(row["grad_norm"]):
        line += f" grad norm: {row['grad_norm']:.3f} |"
    line += f" number of skipped iterations: {skipped:3d} |"
    line += f" number of nan iterations: {nans:3d} |"
    print(line)


@log(
    "megatron_collapse.log",
    "Megatron-LM's format (printed by a loop, see above); fp16 overflows on every batch after iteration 60",
    "scale-collapse",
    step=(61, 70),
)
def _(path):
    with said(path):
        before, skipped = 65536.0, 0
        for row in scaled(150, lambda step: step > 60):
            skipped += row["scale"] < before
            before = row["scale"]
            if row["step"] % 5 == 0:
                megatron(row, 150, skipped, 0)
                skipped = 0


@log(
    "megatron_nan.log",
    "Megatron-LM's format, which leaves a NaN loss out and counts it; bf16, NaN data at iteration 42",
    "nan",
    step=(42, 42),
)
def _(path):
    with said(path):
        for row in steps(80, batch=at(42), first=1):
            megatron(row, 80, 0, int(not math.isfinite(row["loss"])))


@log("healthy_megatron.log", "Megatron-LM's format; bf16, warm-up and cosine")
def _(path):
    with said(path):
        for row in steps(400, first=1, lr=lambda s: 3e-3 * min(s / 40, 0.5 * (1 + math.cos(math.pi * s / 400)))):
            if row["step"] % 4 == 0:
                megatron(row, 400, 0, 0)


def guarded(path: Path, bad: tuple[int, ...] = (), n: int = 80) -> None:
    """nanproof's own run folder: records of steps, and of what it refused."""
    import nanproof

    torch.manual_seed(0)
    model = Numbers()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = Samples(1024)
    guard = nanproof.Guard(model, opt, loss_fn=lambda m, b: m(**b)["loss"], run_dir="run")
    for step in range(n):
        chosen = torch.arange(16) + 16 * (step % 64)
        x = data.x[chosen].clone()
        if step in bad:
            x[0, 0] = math.nan
        guard.train_step({"features": x, "labels": data.y[chosen]})
    guard.close()
    path.mkdir(exist_ok=True)
    for name in ("steps.jsonl", "incidents.jsonl"):
        if (Path("run") / name).exists():
            (path / name).write_text(scrubbed((Path("run") / name).read_text()))


@log(
    "nanproof_refused",
    "nanproof's own folder; NaN data at step 30, refused: the run goes on",
    "nan",
    severity="warning",
    step=(30, 30),
)
def _(path):
    guarded(path, (30,))


@log("healthy_nanproof", "nanproof's own folder of a healthy run")
def _(path):
    guarded(path)


DEEPSPEED = """
import os, sys, math, torch, deepspeed
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1], RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
kind, bad = sys.argv[2], int(sys.argv[3])
deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))
config = {"train_micro_batch_size_per_gpu": 16, "steps_per_print": 2, "zero_optimization": {"stage": 1},
          "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}}, "gradient_clipping": 1.0}
if kind != "fp32":
    config[kind] = {"enabled": True, **({"initial_scale_power": 8, "hysteresis": 1} if kind == "fp16" else {})}
from deepspeed.accelerator import get_accelerator
get_accelerator().is_fp16_supported = lambda: True  # its check, not its arithmetic
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
dtype = next(engine.module.parameters()).dtype
truth = torch.randn(16, 10)
for step in range(1, 61):
    x = torch.randn(16, 16)
    y = (x @ truth).argmax(1)
    if bad and step >= bad:
        x[0] = 7e4 if kind == "fp16" else math.nan
    loss = torch.nn.functional.cross_entropy(engine(x.to(dtype)).float(), y)
    engine.backward(loss)
    engine.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
sys.stdout.flush()
os._exit(0)
"""


def deepspeed(path: Path, kind: str, bad: int, port: int) -> None:
    Path("ds.py").write_text(DEEPSPEED)
    done = subprocess.run(
        [sys.executable, "ds.py", str(port), kind, str(bad)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        text=True,
    )
    text = scrubbed(done.stdout)
    assert "step=60" in text or "step 60" in text or "minimum" in text, text[-600:]
    private(text.encode())
    path.write_text(text)


@log("deepspeed_fp16.log", "DeepSpeed, ZeRO 1, fp16; features beyond fp16's range from step 21", "scale-collapse", step=(21, 22))
def _(path):
    deepspeed(path, "fp16", 21, 29761)


@log(
    "deepspeed_nan.log",
    "DeepSpeed, ZeRO 1, bf16; NaN data from step 31: it skips every step from there",
    "scaler-skipping",
    line=(18, 20),
)
def _(path):
    deepspeed(path, "bf16", 31, 29762)


@log("healthy_deepspeed.log", "DeepSpeed, ZeRO 1, bf16")
def _(path):
    deepspeed(path, "bf16", 0, 29763)


# Bug reports: only the lines of logs that they quote.


def quoted(name: str, text: str, *known: Any, **more: Any) -> None:
    @log(name, *known, **more)
    def _(path: Path) -> None:
        path.write_text(text)


quoted(
    "report_zero_loss.log",
    "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 0.00018, 'epoch': 0.31}\n"
    "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 0.00016, 'epoch': 0.62}\n",
    "Two lines of a bug report: a NaN loss shown as 0.0",
    "hidden-nan",
    line=(1, 1),
)
quoted(
    "report_skipped_steps.log",
    "{'loss': 0.6104, 'grad_norm': nan, 'learning_rate': 0.00019583333333333334, 'epoch': 0.31}\n"
    "{'loss': 1.0662, 'grad_norm': nan, 'learning_rate': 0.00018958333333333332, 'epoch': 0.62}\n"
    "{'loss': 0.5875, 'grad_norm': nan, 'learning_rate': 0.0001875, 'epoch': 0.94}\n",
    "Three lines of a bug report: the learning rate has moved 6 of 30 steps",
    "scaler-skipping",
    line=(1, 1),
)
quoted(
    "healthy_report.log",
    "{'loss': 2.27, 'grad_norm': 1.55, 'learning_rate': 0.0002, 'epoch': 0.31}\n"
    "{'loss': 2.15, 'grad_norm': 1.82, 'learning_rate': 0.00019, 'epoch': 0.62}\n"
    "{'loss': 1.98, 'grad_norm': 1.73, 'learning_rate': 0.00018, 'epoch': 0.94}\n",
    "What a bug report expects after its repair",
)
quoted(
    "healthy_report_short.log",
    "{'loss': 2.27, 'grad_norm': 1.55, 'learning_rate': 0.0002, 'epoch': 0.0}\n"
    "{'loss': 2.29, 'grad_norm': 1.81, 'learning_rate': 0.00013, 'epoch': 0.01}\n"
    "{'loss': 1.50, 'grad_norm': 1.70, 'learning_rate': 0.0001, 'epoch': 0.02}\n",
    "What another bug report expects after its repair",
)
quoted(
    "report_warnings.log",
    "".join(
        f"Warning: NaN gradient detected at step {step}\n" for step in (*range(92261, 92361), *range(92400, 190163, 200), 190163)
    ),
    "The warnings of a bug report, from step 92261 to 190163, most of those in between left out",
    "nan-warnings",
    step=(92261, 92261),
)


quoted(
    "report_sampling.log",
    "Traceback (most recent call last):\nRuntimeError: probability tensor contains either `inf`, `nan` or element < 0\n",
    "The error of a bug report, from torch.multinomial",
    "bad-probabilities",
    line=(2, 2),
)
quoted(
    "report_monitor.log",
    "[Step 10] Gradient Statistics:\n  Mean grad norm: 0.823456\n  Max grad norm: 1.234567\n  NaN count: 0, Inf count: 0\n"
    + "=" * 70
    + "\n\u26a0 GRADIENT ISSUE DETECTED at step 42\n"
    + "=" * 70
    + "\n  NaN detected: True (total count: 1)\n  Total gradient norm: inf\n"
    "\u26a0 WARNING: NaN detected in logits (occurrence #1)\n",
    "What the monitors of a bug report print",
    "nan-warnings",
    line=(6, 10),
)
