"""Every reader of files that nanproof has, as a function of a path, to be called in a process of its own (see tests/limits.py).

A reader may answer, or refuse with an error that it documents. Anything else leaves the function, and is a defect: so is a raw
control character in what is printed or logged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
import traceback
import unicodedata
from pathlib import Path

import torch
import torch.distributed.checkpoint.default_planner  # imports are not counted
import torch.distributed.checkpoint.state_dict_loader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import nanproof
import nanproof.scan._chunks
import nanproof.scan._dcp
import nanproof.watch._plain
from nanproof.cli import app


class Raw(Exception):
    """Something printed or logged steers the terminal."""


class Traceback(Exception):
    """A command ended with a traceback, or with an exit status that means something else."""


def scan(path):
    manifest = (Path(path) / "manifest.json").is_file()
    return _command("scan", str(path), *["--checksums"] * manifest)


def doctor(path):
    _command("doctor", "--json", str(path))
    return _command("doctor", str(path))


def report(path):
    _command("report", str(path), "--out", "-")
    _command("report", str(path), "--json")
    return _command("report", str(path), "--markdown")


def watch(path):
    _command("watch", str(path), "--json")
    return _command("watch", str(path), "--once")


def replay(path):
    return _command("replay", str(path), "--entry", "fuzz.readers:build", "--seconds", "2")


def load(path):
    state = {"w": torch.zeros(4, 3), "more": {"b": torch.zeros(2, dtype=torch.bfloat16), "n": 0, "t": ""}}
    try:
        nanproof.load(state, Path(path), no_dist=True)
    except (nanproof.NanproofError, OSError) as error:
        _clean(str(error))
        return f"refused: {error}"
    return "loaded"


def resume(path):
    """Of a copy, since a guard writes into its folder."""
    with _copy(path) as folder, _logged() as said:
        guard = _guard(checkpoints=nanproof.Checkpoints(folder / "checkpoints", every=2, keep=3, prove=1))
        try:
            step = guard.resume()
        except (nanproof.NanproofError, OSError) as error:
            _clean(str(error))
            return {"refused": str(error), "said": said}
        finally:
            guard.close()
        return {"step": step, "said": said}


def guard(path):
    """A guard that goes on in a run's folder, with its quarantine."""
    with _copy(path) as folder, _logged() as said:
        try:
            guard = _guard(run_dir=folder / "run")
            with guard:
                data = guard.wrap(DataLoader(TensorDataset(*_batch()), 4))
                for x, y in data:
                    guard.train_step((x, y))
        except (nanproof.NanproofError, OSError) as error:
            _clean(str(error))
            return {"refused": str(error), "said": said}
        return {"said": said}


def records(path):
    counts = []
    with _logged():
        for read in (nanproof.read_steps, nanproof.read_incidents, nanproof.read_forecasts):
            try:
                counts.append(sum(bool(str(record)) for record in read(path)))
            except (nanproof.NanproofError, OSError) as error:
                _clean(str(error))
                counts.append(str(error))
    return counts


def build():
    """What `nanproof replay --entry` builds."""
    model = net()
    return {"model": model, "loss_fn": loss, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss(model, batch):
    x, y = batch
    return (model(x) - y).pow(2).mean()


def _batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 4, generator=generator), torch.randn(16, 1, generator=generator)


def _guard(**where):
    model = net()
    policy = nanproof.Policy(diagnose="never")
    return nanproof.Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn=loss, policy=policy, **where)


def _command(*words):
    """The command as a user calls it."""
    outcome = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"}, prog_name="nanproof")
    text = outcome.stdout + outcome.stderr
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raised = "".join(traceback.format_exception(outcome.exception)[-6:])
        raise Traceback(f"{words[0]}: {type(outcome.exception).__name__}: {outcome.exception}\n{raised}"[:1900])
    if outcome.exit_code not in (0, 1, 2) or "Traceback (most recent call last)" in outcome.stderr:
        raise Traceback(f"{words[0]}: exit status {outcome.exit_code}: {text[-1500:]}")
    if words[0] == "scan" and (outcome.exit_code == 1) != (": bad: " in text):
        raise Traceback(f"scan: exit status {outcome.exit_code}, though it printed {text[-1500:]}")
    if "--json" in words and outcome.exit_code != 2:
        json.loads(outcome.stdout.splitlines()[0], parse_constant=lambda name: _raise(Raw(name)))
    _clean(text)
    return {"exit": outcome.exit_code, "text": text[:6000]}


def _raise(error):
    raise error


def _clean(text):
    """Raise if a text holds what a terminal would act on, or what cannot be seen."""
    for character in set(text) - set("\n\t"):
        if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp"):
            at = text.index(character)
            raise Raw(f"raw {character!r} in {text[max(0, at - 80) : at + 40]!r}")


@contextlib.contextmanager
def _copy(path):
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(path, copy, symlinks=True, copy_function=_copied)
        yield copy


def _copied(source, target):
    """Pipes and links are made again as what they are."""
    if Path(source).is_fifo():
        import os

        os.mkfifo(target)
        return target
    return shutil.copy2(source, target, follow_symlinks=False)


@contextlib.contextmanager
def _logged():
    """What is logged meanwhile, which must be clean too."""
    said = []

    class Handler(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    handler, log = Handler(), logging.getLogger("nanproof")
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)
    for text in said:
        _clean(text)
