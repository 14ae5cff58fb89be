"""The recipe latent-dlm, measured. Each part prints what it found and writes JSON; `--save` puts it into benchmarks/results/.

python -m benchmarks.recipes.latent_dlm pairs   # base on CUDA: guarded against unguarded steps, in interleaved pairs
python -m benchmarks.recipes.latent_dlm run     # base on CUDA: the recipe itself, with an Inf in a gradient and one in a weight
python -m benchmarks.recipes.latent_dlm long    # tiny: 20,000 steps with random faults beside 20,000 without
python -m benchmarks.recipes.latent_dlm tiny    # every arm at tiny size, with several seeds
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nanproof
from benchmarks.recipes.latent_faults import Faults, LongRun
from benchmarks.variants import synchronize
from nanproof import read_incidents
from nanproof.core.support._environment import device_name
from nanproof.numerics.precision import choose
from nanproof_recipes.latent_dlm.arms import FIXED, SETTINGS, configured
from nanproof_recipes.latent_dlm.config import Config
from nanproof_recipes.latent_dlm.data.corpus import decode
from nanproof_recipes.latent_dlm.data.dataset import make
from nanproof_recipes.latent_dlm.model.diffusion import Noiser
from nanproof_recipes.latent_dlm.model.model import MMDiT, count
from nanproof_recipes.latent_dlm.model.sampling import draw
from nanproof_recipes.latent_dlm.train.stepping import forever, rate
from nanproof_recipes.latent_dlm.train.training import Losses, Trained, train
from nanproof_recipes.machine import device
from tools.results import save


def pairs(config: Config, rounds: int, steps: int) -> dict[str, Any]:
    """Both with a model, an optimizer, a schedule and a loader of their own, from the same seed. In each round one takes some
    steps and then the other, in turns which is first."""
    data, place = make(config), device()
    noiser = Noiser(config, padded=data.train.padded)
    opened: dict[str, Callable[[], None]] = {}
    folder = tempfile.TemporaryDirectory()
    guards = []
    for name in ("unguarded", "guarded"):
        torch.manual_seed(0)
        with torch.device(place):
            model = MMDiT(config.model)
        precision = choose(model, place, config.training.dtype)
        losses = Losses(FIXED, config, noiser, precision, place)
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, weight_decay=0.01, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate(config))
        loader: Any = torch.utils.data.DataLoader(
            data.train, config.training.train_batch_size, shuffle=True, drop_last=True, pin_memory=place.type == "cuda"
        )
        if name == "guarded":
            guard = nanproof.Guard(
                model,
                optimizer,
                loss_fn=losses,
                max_norm=config.optimizer.grad_clip_norm,
                scheduler=schedule,
                run_dir=folder.name,
            )
            guards.append(guard)
            opened[name] = _guarded(guard, forever(guard.wrap(loader)), config)
        else:
            opened[name] = _plain(model, optimizer, schedule, losses, forever(loader), config)
    parameters = count(model)
    micro, tokens = config.training.gradient_accumulation_steps, config.model.text_length + config.model.latent_length
    tokens *= config.training.train_batch_size * micro

    def seconds(step: Callable[[], None]) -> float:
        synchronize(place.type)
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize(place.type)
        return (time.perf_counter() - begun) / steps

    for step in opened.values():
        seconds(step)
    times: dict[str, list[float]] = {name: [] for name in opened}
    for round_ in range(rounds):
        for name in list(opened)[:: 1 if round_ % 2 else -1]:
            times[name].append(seconds(opened[name]))
    for guard in guards:
        guard.close()
        assert not guard.incidents, guard.incidents
    ratios = [math.log(g / u) for g, u in zip(times["guarded"], times["unguarded"], strict=True)]
    mean, error = statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(len(ratios))
    low, high = math.exp(mean - 1.96 * error), math.exp(mean + 1.96 * error)
    found = {
        "parameters": parameters,
        "rounds": rounds,
        "steps": rounds * steps,
        "tokens_a_step": tokens,
        "unguarded_ms": 1e3 * statistics.median(times["unguarded"]),
        "guarded_ms": 1e3 * statistics.median(times["guarded"]),
        "tokens_per_second": tokens / statistics.median(times["guarded"]),
        "ratio": math.exp(mean),
        "ratio_median": math.exp(statistics.median(ratios)),
        "low": low,
        "high": high,
        "batch": config.training.train_batch_size,
        "accumulation": micro,
    }
    print(
        f"{parameters:,} parameters, {tokens} tokens a step: unguarded {found['unguarded_ms']:.2f} ms, guarded "
        f"{found['guarded_ms']:.2f} ms, ratio {found['ratio']:.4f} "
        f"(95 %: {low:.4f} to {high:.4f}), {rounds} pairs of {steps} steps"
    )
    folder.cleanup()
    return found


def _plain(model: nn.Module, optimizer: Any, schedule: Any, losses: Losses, batches: Any, config: Config) -> Callable[[], None]:
    micro = config.training.gradient_accumulation_steps

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(micro):
            (losses(model, next(batches)) / micro).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip_norm or 1e6)
        optimizer.step()
        schedule.step()

    return step


def _guarded(guard: nanproof.Guard, batches: Any, config: Config) -> Callable[[], None]:
    def step() -> None:
        guard.train_step(*(next(batches) for _ in range(config.training.gradient_accumulation_steps)))

    return step


def run(config: Config, out: Path) -> dict[str, Any]:
    """The recipe as a user runs it, and two faults: Inf in one gradient for one step, and Inf in a weight between two steps."""
    data, faults, ticks = make(config), Faults(), []
    steps = config.training.steps
    gradient_at, weight_at = int(0.5 * steps), int(0.9 * steps)
    model_: list[MMDiT] = []

    def prepare(model: MMDiT) -> None:
        model_.append(model)
        faults.into(model.blocks[config.model.layers // 2].text.qkv.weight)

    def tick(done: int, said: str) -> None:
        ticks.append((time.perf_counter(), done))
        if done == gradient_at and not faults.armed and not faults.fired:
            faults.armed = True
        if done == weight_at and len(faults.fired) == 1:
            faults.fired.append("weight")
            with torch.no_grad():
                model_[0].blocks[0].latent.out.weight.view(-1)[7] = math.inf
        if done % 50 == 0:
            print(f"step {done}: {said}", flush=True)

    # Healing runs a step again whose fault was the machine's and has gone.
    setting = replace(FIXED, heal=True, damaged=False)
    trained = train(config, setting, data, out, tick=tick, prepare=prepare)
    incidents = list(read_incidents(out / "nanproof" / "incidents.jsonl"))
    usual = statistics.median(b[0] - a[0] for a, b in itertools.pairwise(ticks))
    found = {
        "parameters": count(model_[0]),
        "steps": trained.steps,
        "seconds": trained.seconds,
        "tokens_per_second": trained.tokens / trained.seconds,
        "step_ms": 1e3 * usual,
        "memory_gib": None if trained.memory is None else trained.memory / 2**30,
        "measured": trained.measured.to_json(),
        "nonfinite": trained.nonfinite,
        "faults": [
            {
                "step": incident.step,
                "kind": incident.kind,
                "action": incident.action,
                "message": incident.message[:400],
                "cause": None if incident.diagnosis is None else incident.diagnosis.cause,
                "verified": None if incident.diagnosis is None else incident.diagnosis.verified,
                "seconds": _gap(ticks, incident.step, usual),
            }
            for incident in incidents
        ],
        "log": [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()][::5],
    }
    found["samples"] = samples(trained, data, config)
    print(json.dumps({k: v for k, v in found.items() if k != "log"}, indent=1))
    return found


def _gap(ticks: list[tuple[float, int]], step: int, usual: float) -> float:
    """Seconds that the loop stood still for a fault: the longest step near it, less what a step takes."""
    near = [b[0] - a[0] for a, b in itertools.pairwise(ticks) if abs(a[1] - step) <= 6]
    return max(near, default=math.nan) - usual


def samples(trained: Trained, data: Any, config: Config) -> dict[str, Any]:
    """Of every mode: what was given, what was drawn, and how well text and latent fit, of eight."""
    told: dict[str, Any] = {}
    given, latent = data.valid.ids[:8], data.valid.latents[:8]
    for mode in ("unconditional", "text_to_latent", "latent_to_text"):
        drawn = draw(
            trained.model,
            config,
            data.scale,
            mode=mode,
            count=8,
            steps=250,
            temperature=0.8,
            ids=given if mode == "text_to_latent" else None,
            latent=latent if mode == "latent_to_text" else None,
        )
        told[mode] = {"agreement": drawn.agreement, "text": [decode(row, past_end=True) for row in drawn.ids[:2]]}
    told["given"] = [decode(row, past_end=True) for row in given[:2]]
    return told


def tiny(config: Config, out: Path, arms: list[str], seeds: list[int]) -> dict[str, Any]:
    """Figures of every arm and seed, without the comparison."""
    data, found = make(config), {}
    for seed in seeds:
        for arm in arms:
            setting = replace(SETTINGS[arm], seed=seed)
            folder = out / setting.name
            folder.mkdir(parents=True)
            trained = train(configured(config, setting), setting, data, folder)
            causes = [i.diagnosis.cause for i in trained.incidents if i.diagnosis is not None]
            found[setting.name] = {**trained.measured.to_json(), "seconds": trained.seconds, "causes": causes}
            m = trained.measured
            print(
                f"{setting.name}: text {m.text_loss:.4f}, accuracy {m.text_accuracy:.4f}, latent {m.latent_loss:.4f}, given "
                f"{m.text_loss_given_latent:.4f} {m.latent_loss_given_text:.4f}, {trained.skipped} skipped, {trained.nonfinite}/"
                f"{trained.tensors}, {trained.seconds:.1f} s, {causes}",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["pairs", "run", "long", "tiny"])
    parser.add_argument("--config", default=None)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--arms", default="fixed,guarded")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--kind", default="all", help="of long: which run, or all of them beside each other")
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    config = Config.load(asked.config or ("base" if asked.part in ("pairs", "run") else "tiny"), asked.set)
    out = asked.out or Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    if asked.part == "pairs":
        found = pairs(config, asked.rounds, asked.steps)
    elif asked.part == "run":
        found = run(config, out)
    elif asked.part == "tiny":
        found = tiny(config, out, asked.arms.split(","), [int(s) for s in asked.seeds.split(",")])
    else:
        long = LongRun(config, out)
        if asked.kind != "all":
            long.work(asked.kind)
            return
        found = long.all(sys.argv[1:])
    (out / f"{asked.part}.json").write_text(json.dumps(found, indent=1) + "\n")
    if asked.save:
        place = device_name(device())
        save(f"latent_dlm_{asked.part}", place, {asked.part: found})


if __name__ == "__main__":
    main()
