"""What protection costs in the Trainer of transformers: `python -m benchmarks.trainer --out DIR`, on the CPU or a CUDA device.

Trainers over the same model and data, in alternating rounds: as it comes, protected, and, with --filter-off, bare with its NaN
filter off. Time is of the steps in the middle of a run, logging not among them. On CUDA the host's waits are counted too, by
torch's own sync debug mode, over steps without a log.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import nanproof
from benchmarks.variants import table
from tools.results import RESULTS, save

VARIANTS = ["Trainer as it comes", "protected"]
MODELS = {
    "small": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 704, "vocab_size": 4000},
    "271 M": {
        "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "intermediate_size": 2816, "vocab_size": 32000,
    },
}  # fmt: skip


JOBS = [("271 M", 4, 4), ("small", 1, 12), ("small", 4, 6), ("271 M", 1, 4)]
"""Size, accumulation, rounds."""


class Clock(TrainerCallback):
    """The median time of a step in the middle of a run (the Trainer itself waits for the device in every one); and, on CUDA, how
    often the host waited in the steps behind them."""

    def __init__(self, first: int, last: int, count_syncs: bool) -> None:
        self._first, self._last, self._count = first, last, count_syncs
        self._ends: list[float] = []
        self.syncs: list[str] = []
        self._caught: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if self._first <= step <= self._last:
            self._ends.append(time.perf_counter())
        if self._count and step == self._last:
            self._caught = warnings.catch_warnings(record=True)
            self._seen = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        elif self._count and step == self._last + 10:
            torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(None, None, None)
            self.syncs = [f"{Path(w.filename).name}:{w.lineno}" for w in self._seen if "synchroniz" in str(w.message)]

    @property
    def seconds(self) -> float:
        return statistics.median(b - a for a, b in itertools.pairwise(self._ends))


def rows(count: int, length: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def one_run(variant: str, model: Any, data: Any, batch: int, accumulation: int, steps: int, count_syncs: bool) -> Clock:
    clock = Clock(steps // 3, steps, count_syncs)
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
            max_steps=steps + 11, logging_steps=10_000, save_strategy="no", report_to=[], disable_tqdm=True, learning_rate=1e-5,
            bf16=cuda, use_cpu=not cuda, logging_nan_inf_filter=variant == "Trainer as it comes", dataloader_pin_memory=cuda,
        )  # fmt: skip
        trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[clock])
        if variant == "protected":
            guard = nanproof.protect(trainer)
        trainer.train()
        if variant == "protected":
            assert not guard.incidents and guard.path.startswith("device"), guard.path
    del trainer
    gc.collect()
    return clock


def compare(size: str, batch: int, length: int, accumulation: int, rounds: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(**MODELS[size], max_position_embeddings=length, use_cache=False)
    model = LlamaForCausalLM(config)
    data = rows(batch * accumulation * (steps + 12), length, MODELS[size]["vocab_size"])
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    syncs: dict[str, list[str]] = {}
    order = random.Random(0)
    for round_ in range(rounds + 1):  # the first warms up
        now = list(VARIANTS)
        order.shuffle(now)
        for name in now:
            clock = one_run(name, model, data, batch, accumulation, steps, torch.cuda.is_available() and round_ == 0)
            if round_:
                times[name].append(clock.seconds)
            else:
                syncs[name] = clock.syncs
    found = {}
    for name in VARIANTS:
        ratios = sorted(a / b for a, b in zip(times[name], times[VARIANTS[0]], strict=True))
        found[name] = {
            "ms": 1e3 * statistics.median(times[name]),
            "ratio": statistics.median(ratios),
            "low": ratios[len(ratios) // 4],
            "high": ratios[(3 * len(ratios)) // 4],
            "rounds": rounds,
            "syncs in 10 steps": len(syncs[name]),
            "where": sorted(set(syncs[name])),
        }
    parameters = sum(p.numel() for p in model.parameters())
    return {"parameters": parameters, "batch": [batch, length], "accumulation": accumulation, "rows": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--scale", type=float, default=1.0, help="rounds, as a multiple of the usual number")
    parser.add_argument("--filter-off", action="store_true")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if not cuda:
        torch.set_num_threads(1)
    if options.filter_off:
        VARIANTS.append("Trainer, NaN filter off")
    device = torch.cuda.get_device_name() if cuda else "CPU, 1 thread"
    results: dict[str, Any] = {}
    for size, accumulation, rounds in JOBS if cuda else [job for job in JOBS if job[0] == "small"]:
        batch, length = (8, 1024) if size != "small" else (8, 256) if cuda else (4, 32)
        steps = 45 if size == "small" else 18
        found = compare(size, batch, length, accumulation, max(1, round(rounds * options.scale)), steps)
        name = f"{size}, accumulation {accumulation}"
        results[name] = found
        print(table(f"{name}: {found['parameters'] / 1e6:.0f} M parameters, batch {batch} x {length}", found["rows"]), flush=True)
        for variant, row in found["rows"].items():
            print(f"  {variant}: {row['syncs in 10 steps']} host waits in 10 steps {row['where'][:6]}", flush=True)
        save("trainer_gpu" if cuda else "trainer_cpu", device, results, options.out)


if __name__ == "__main__":
    main()
