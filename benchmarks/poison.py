"""Poison a run from outside, in every part of its state: is it found, and does the run end where undisturbed ones do?

python -m benchmarks.poison [--save]

A small network learns a function with dropout, BatchNorm, AdamW, a schedule and a loss scale. Mid-run one number of the
weights, moments, running statistics or the loss scale is overwritten. The final loss (the mean over all samples, without
dropout) is compared with those of undisturbed runs with other seeds, and the weights with the undisturbed run of the same seed.
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nanproof
from tools.results import save

STEPS, AT, SEEDS = 240, 133, 8
Harm = Callable[[nanproof.Guard, float], None]


def weight(guard: nanproof.Guard, value: float) -> None:
    with torch.no_grad():
        guard.model[0].weight[1, 2] = value  # type: ignore[index,union-attr]


def moment(key: str) -> Harm:
    def harm(guard: nanproof.Guard, value: float) -> None:
        guard.optimizer.state[guard.model[4].weight][key][0, 3] = value  # type: ignore[index,union-attr]

    return harm


def buffer(name: str) -> Harm:
    def harm(guard: nanproof.Guard, value: float) -> None:
        getattr(guard.model[1], name)[5] = value  # type: ignore[index]

    return harm


def scale(guard: nanproof.Guard, value: float) -> None:
    assert guard.parts.stepper.scale is not None
    guard.parts.stepper.scale.tensors()["scale"].fill_(value)


HARMS: dict[str, Harm] = {
    "a weight": weight,
    "Adam's first moment": moment("exp_avg"),
    "Adam's second moment": moment("exp_avg_sq"),
    "BatchNorm's mean": buffer("running_mean"),
    "BatchNorm's variance": buffer("running_var"),
    "the loss scale": scale,
}


def samples() -> TensorDataset:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(640, 8, generator=g)
    return TensorDataset(x, torch.sin(x @ torch.randn(8, 1, generator=g)))


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def run(seed: int, harm: Harm | None, value: float, place: str) -> tuple[nanproof.Guard, float]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    policy = nanproof.Policy(diagnose="never", snapshot_every=10 if place == "memory" else 0)
    with tempfile.TemporaryDirectory() as folder:
        where = nanproof.Checkpoints(folder, every=20, prove=10) if place == "disk" else None
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        guard = nanproof.Guard(
            model, optimizer, loss_fn=loss_fn, scaler=scaler, scheduler=scheduler, policy=policy, checkpoints=where
        )
        loader = DataLoader(samples(), 32, shuffle=True, generator=torch.Generator().manual_seed(seed))
        data, done = guard.wrap(loader), False
        while guard.next_step < STEPS:
            for batch in data:
                if guard.next_step == AT and harm is not None and not done:
                    done = True
                    harm(guard, value)
                guard.train_step(batch)
                if guard.next_step >= STEPS:
                    break
        guard.close()
    model.eval()
    with torch.no_grad():
        return guard, float(loss_fn(model, list(samples().tensors)))


def state(guard: nanproof.Guard) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in guard.parts.recovery.state.tensors().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    logging.getLogger("nanproof").setLevel(logging.ERROR)
    undisturbed = [run(seed, None, 0.0, "nowhere") for seed in range(SEEDS)]
    spread = [loss for _, loss in undisturbed]
    wanted = [state(guard) for guard, _ in undisturbed]
    rows: dict[str, dict[str, Any]] = {}
    for name, harm in HARMS.items():
        row = {"runs": 0, "found": 0, "within the spread": 0, "bit-identical": 0}
        for place in ("memory", "disk"):
            for value in (math.nan, math.inf):
                for seed in (0, 1):
                    guard, loss = run(seed, harm, value, place)
                    found = state(guard)
                    row["runs"] += 1
                    row["found"] += any(i.action in ("rewound", "rolled-back") for i in guard.incidents)
                    row["within the spread"] += min(spread) <= loss <= max(spread)
                    row["bit-identical"] += all(torch.equal(found[n], wanted[seed][n]) for n in found)
        rows[name] = row
        print(f"{name:24} {row}", flush=True)
    print(f"final loss of {SEEDS} undisturbed seeds: {min(spread):.4f} to {max(spread):.4f}")
    if options.save:
        save("poison", "cpu", {"spread": [min(spread), max(spread)], "seeds": SEEDS, "rows": rows})


if __name__ == "__main__":
    main()
