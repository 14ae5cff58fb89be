"""Arms in processes of their own, several at a time: each is a call of the command line, and could be made by hand.

A tiny model does not keep two cores busy; two trainings do. Each process has one thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from nanproof import NanproofError, UsageError
from nanproof_recipes.library import shown
from nanproof_recipes.results import FILE
from nanproof_recipes.vlm_grpo.arms import Setting
from nanproof_recipes.vlm_grpo.results import Result
from nanproof_recipes.vlm_grpo.running import Workshop
from nanproof_recipes.vlm_grpo.train.warm import schooling_for

ENDED = (0, 1)
"""What the command ends with when there is a result: 1 says that weights are not finite, or that it did not finish."""
TOLD = ("steps", "lr", "batch", "group", "beta", "temperature", "max_norm", "rank", "precision", "seed", "trainer")
"""Settings that the command takes."""
TAIL = 12
"""Lines of a process that failed."""
LOOK = 0.1
"""Seconds between looks at the processes."""
LAST_WORD = 5.0
"""Seconds that a process has to end when it is told to."""


@dataclass(frozen=True, slots=True)
class _Job:
    setting: Setting
    process: subprocess.Popen[bytes]
    said: IO[bytes]


def train_apart(workshop: Workshop, settings: Sequence[Setting], jobs: int) -> None:
    """Train arms, at most `jobs` at a time. Scenes and warm start have to be there. Results are in their folders then."""
    if workshop.schooling != schooling_for(workshop.model_name, workshop.schooling.steps):
        raise UsageError("arms in processes of their own: of the warm start the command line takes the steps alone")
    waiting, running = list(settings), list[_Job]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_begun(workshop, waiting.pop(0)))
            ended = [job for job in running if job.process.poll() is not None]
            for job in ended:
                running.remove(job)
                _ended(workshop, job)
            if not ended:
                time.sleep(LOOK)
    finally:
        _end(running)  # one has failed, or somebody has pressed Ctrl-C


def command(workshop: Workshop, setting: Setting) -> list[str]:
    """What trains this arm."""
    words = ["recipe", "vlm-grpo", "train", "--arm", setting.arm, "--variant", setting.variant, "--out", str(workshop.out)]
    words += ["--model", workshop.model_name, "--sft-steps", str(workshop.schooling.steps)]
    for name in ("train", "valid"):
        words += [f"--{name}", str(len(workshop.sets[name]))]
    for name in TOLD:
        words += [f"--{name.replace('_', '-')}", str(getattr(setting, name))]
    return [sys.executable, "-m", "nanproof", *words, "--json"]


def _begun(workshop: Workshop, setting: Setting) -> _Job:
    workshop.progress.say(f"{setting.name}: {setting.says}")
    said = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that nobody reads would stop the process
    process = subprocess.Popen(
        command(workshop, setting),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=said,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return _Job(setting, process, said)


def _ended(workshop: Workshop, job: _Job) -> None:
    name, code = job.setting.name, job.process.returncode
    with job.said as said:
        if code not in ENDED or not (workshop.out / name / FILE).exists():  # a traceback ends with 1 too
            said.seek(0)
            lines = said.read().decode(errors="replace").splitlines()[-TAIL:]
            told = "\n".join(shown(line, 500) for line in lines) or "it said nothing"
            raise NanproofError(f"{name}: its process ended with status {code}:\n{told}")
    done = Result.load(workshop.out / name)
    workshop.progress.say(f"{name}: {done.ending}, {done.steps} steps in {done.seconds or 0:.0f} s")


def _end(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        job.process.terminate()
    for job in jobs:
        try:
            job.process.wait(LAST_WORD)
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()
        job.said.close()
