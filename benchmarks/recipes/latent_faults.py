"""Random faults for the long run of latent-dlm, and that run: the same 20,000 steps undisturbed, disturbed by the machine, and
disturbed by the machine and the data.

Faults of the machine: Inf in a gradient or NaN in an activation for one step (a bit that flipped), Inf in a weight, NaN in a
moment of Adam (memory that was damaged), and the process killed. All of them are over when they have happened, so a run that
loses nothing ends with exactly the weights of the undisturbed one. Damaged samples stay damaged; what is left out of them cannot
be the same run, but the loss has to come to the same place.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanproof import read_incidents
from nanproof_recipes.latent_dlm.arms import FIXED
from nanproof_recipes.latent_dlm.config import Config
from nanproof_recipes.latent_dlm.data.dataset import Pairs, Prepared, make
from nanproof_recipes.latent_dlm.model.model import MMDiT
from nanproof_recipes.latent_dlm.train.stepping import LOG
from nanproof_recipes.latent_dlm.train.training import train
from nanproof_recipes.machine import reproducible

KINDS = {"gradient": 18, "activation": 8, "weight": 6, "moment": 5, "kill": 3}
"""How many of each there are: one in 500 steps, of 20,000."""
DAMAGED = 12
"""Damaged samples."""


class Faults:
    """Inf in one gradient, once, when it is armed."""

    def __init__(self) -> None:
        self.armed, self.fired = False, []

    def into(self, weight: nn.Parameter) -> None:
        def hit(gradient: Tensor) -> Tensor | None:
            if not self.armed:
                return None
            self.armed = False
            self.fired.append("gradient")
            gradient = gradient.clone()
            gradient.view(-1)[3] = math.inf
            return gradient

        weight.register_hook(hit)


class Machine:
    """A machine that fails now and then: each fault once, also over kills, as what has happened is written down."""

    def __init__(self, plan: list[tuple[int, str]], told: Path) -> None:
        self._plan, self._told = dict(plan), told
        done = [json.loads(line)["step"] for line in told.read_text().splitlines()] if told.exists() else []
        self._left = {step: kind for step, kind in self._plan.items() if step not in done}
        self._gradient, self._activation = Faults(), False

    def prepare(self, model: MMDiT) -> None:
        self._model = model
        self._gradient.into(model.blocks[0].latent.qkv.weight)

        def spoil(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
            if not self._activation or not module.training:
                return None
            self._activation = False
            output = output.clone()
            output.view(-1)[5] = math.nan
            return output

        model.blocks[-1].text.mlp.register_forward_hook(spoil)

    def tick(self, done: int, said: str, optimizer: torch.optim.Optimizer) -> None:
        kind = self._left.pop(done, None)
        if kind is None:
            return
        with self._told.open("a") as file:
            file.write(json.dumps({"step": done, "kind": kind, "time": time.time()}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        weight = self._model.blocks[-1].latent.out.weight
        with torch.no_grad():
            if kind == "gradient":
                self._gradient.armed = True
            elif kind == "activation":
                self._activation = True
            elif kind == "weight":
                weight.view(-1)[11] = math.inf
            else:
                optimizer.state[weight]["exp_avg_sq"].view(-1)[4] = math.nan


def plan(steps: int, seed: int) -> list[tuple[int, str]]:
    """As many of each kind as at 20,000 steps, at random steps."""
    chosen = random.Random(seed)
    kinds = [kind for kind, many in KINDS.items() for _ in range(max(1, round(many * steps / 20_000)))]
    chosen.shuffle(kinds)
    places = sorted(chosen.sample(range(100, steps - 50), len(kinds)))
    return list(zip(places, kinds, strict=True))


class LongRun:
    """Four runs of it, each a process of its own."""

    runs = ("undisturbed", "other-seed", "machine", "machine-and-data")

    def __init__(self, config: Config, out: Path) -> None:
        self.config, self.out = config, out

    def work(self, kind: str) -> None:
        """One run, in this process, to its end or to its kill."""
        torch.set_num_threads(1)
        folder = self.out / kind
        folder.mkdir(parents=True, exist_ok=True)
        config = self.config.with_(**{"training.seed": 1}) if kind == "other-seed" else self.config
        data = make(config)
        if kind == "machine-and-data":
            data = _damaged(data)
        machine = Machine(plan(config.training.steps, 5) if "machine" in kind else [], folder / "faults.jsonl")
        optimizers: list[torch.optim.Optimizer] = []
        made = torch.optim.AdamW.__init__

        def remember(self: Any, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            optimizers.append(self)

        torch.optim.AdamW.__init__ = remember  # type: ignore[method-assign]
        with reproducible():
            trained = train(
                config,
                replace(FIXED, heal=True, damaged=False),
                data,
                folder,
                tick=lambda done, said: machine.tick(done, said, optimizers[-1]),
                prepare=machine.prepare,
            )
        digest = {name: float(p.detach().double().abs().sum()) for name, p in trained.model.named_parameters()}
        torch.save({name: p.detach() for name, p in trained.model.named_parameters()}, folder / "weights.pt")
        told = {
            "ending": trained.ending,
            "steps": trained.steps,
            "measured": trained.measured.to_json(),
            "nonfinite": trained.nonfinite,
            "checksum": sum(digest.values()),
        }
        (folder / "end.json").write_text(json.dumps(told) + "\n")

    def all(self, words: list[str]) -> dict[str, Any]:
        """Start them beside each other, and again where one was killed, until all have ended."""
        words = [*words, "--out", str(self.out)] if "--out" not in words else words
        begun = time.time()
        kills = dict.fromkeys(self.runs, 0)
        running = {kind: self._start(words, kind) for kind in self.runs}
        while running:
            for kind, process in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                del running[kind]
                if code == -signal.SIGKILL:
                    kills[kind] += 1
                    running[kind] = self._start(words, kind)
                elif code:
                    print(f"{kind} ended with {code}", flush=True)
            time.sleep(0.2)
        return self.compared(kills, time.time() - begun)

    def _start(self, words: list[str], kind: str) -> subprocess.Popen[bytes]:
        (self.out / kind).mkdir(parents=True, exist_ok=True)
        with (self.out / kind / "output.txt").open("ab") as log:
            return subprocess.Popen([sys.executable, "-W", "ignore", _main(), *words, "--kind", kind], stdout=log, stderr=log)

    def compared(self, kills: dict[str, int], seconds: float) -> dict[str, Any]:
        found: dict[str, Any] = {"steps": self.config.training.steps, "seconds": seconds}
        calm = self.out / "undisturbed" / "weights.pt"
        same = torch.load(calm, weights_only=True) if calm.exists() else None
        for kind in self.runs:
            folder = self.out / kind
            if not (folder / "end.json").exists():
                found[kind] = {"ending": "did not end"}
                continue
            own = torch.load(folder / "weights.pt", weights_only=True)
            incidents = list(read_incidents(folder / "nanproof" / "incidents.jsonl")) if (folder / "nanproof").exists() else []
            faults = [json.loads(line) for line in _lines(folder / "faults.jsonl")]
            found[kind] = {
                **json.loads((folder / "end.json").read_text()),
                "identical": same is not None and all(torch.equal(own[name], same[name]) for name in same),
                "faults": {k: sum(f["kind"] == k for f in faults) for k in KINDS},
                "kills": kills[kind],
                "incidents": len(incidents),
                "actions": {a: sum(i.action == a for i in incidents) for a in {i.action for i in incidents}},
                "causes": {
                    c: sum(i.diagnosis is not None and i.diagnosis.cause == c for i in incidents)
                    for c in {i.diagnosis.cause for i in incidents if i.diagnosis is not None}
                },
                "curve": _curve(folder),
            }
        print(
            json.dumps(
                {k: v if not isinstance(v, dict) else {a: b for a, b in v.items() if a != "curve"} for k, v in found.items()},
                indent=1,
            )
        )
        return found


def _damaged(data: Prepared) -> Prepared:
    chosen = random.Random(9).sample(range(len(data.train)), DAMAGED)
    train: Pairs = data.train
    for index in chosen:
        train = train.corrupt(index)
    return replace(data, train=train)


def _curve(folder: Path) -> list[dict[str, float]]:
    """What was evaluated, step by step; of a step that was come to twice, the last."""
    lines = [json.loads(line) for line in _lines(folder / LOG)]
    by_step = {line["step"]: line for line in lines if "eval_text_loss" in line}
    return [by_step[step] for step in sorted(by_step)]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _main() -> str:
    return str(Path(__file__).parent / "latent_dlm.py")
