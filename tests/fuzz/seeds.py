"""The files that the mutations start from, written by the tools themselves: torch, safetensors, DCP and a guard at run time; logs
are those of tests/logs/corpus, which their frameworks wrote."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import nanproof
from fuzz.readers import loss, net

CORPUS = Path(__file__).parents[1] / "logs" / "corpus"
LOGS = {
    "text": "hf_rate_too_high.log",
    "bar": "held_tqdm_spike.log",
    "jsonl": "torch_pure_fp16.jsonl",
    "csv": "lightning_nan.csv",
    "state": "hf_overfit_state.json",
    "tensorboard": "lightning_tb_nan/events.out.tfevents.1700000000.host.1.0",
    "wandb": "wandb_nan.wandb",
    "gz": "held_resumed_twice.log.gz",
}


@dataclass(frozen=True)
class Seed:
    """Something for a reader to read, and which file of it is changed."""

    reader: str
    name: str
    folder: Path
    """Copied for each mutation."""
    file: str
    """The one that is changed, inside the folder."""
    what: str = ""
    """What the reader is given, inside the folder; the folder itself if empty."""
    seal: str = ""
    """The manifest whose checksums are made to fit again, in half of the cases."""


def made(root: Path) -> list[Seed]:
    """Write all seeds under a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [*_files(root / "files"), *_dcp(root / "dcp"), *_run(root / "run"), *_logs(root / "logs")]


def _files(root: Path) -> list[Seed]:
    root.mkdir(parents=True)
    g = torch.Generator().manual_seed(0)
    weights = {"a.weight": torch.randn(5, 4, generator=g), "a.bias": torch.zeros(4).half(), "ids": torch.arange(6)}
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model, (torch.randn(2, 4, generator=g), torch.zeros(2, 1))).backward()
    optimizer.step()
    views = torch.randn(6, 6, generator=g)
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "views": [views[1:], views.t()]}
    whole |= {"sparse": torch.eye(3).to_sparse(), "one": torch.ones(1).expand(1000), "name": "x", "parameter": model[0].weight}
    found = []

    def add(name, file, what="", files=()):
        found.extend(Seed("scan", name, root / name, each, what) for each in (file, *files))

    for name in ("safetensors", "zip", "legacy", "pickle", "sharded", "lightning"):
        (root / name).mkdir()
    save_file(weights, root / "safetensors" / "model.safetensors", metadata={"format": "pt"})
    add("safetensors", "model.safetensors", "model.safetensors")
    torch.save(whole, root / "zip" / "model.pt")
    add("zip", "model.pt", "model.pt")
    torch.save(whole, root / "legacy" / "model.pth", _use_new_zipfile_serialization=False)
    add("legacy", "model.pth", "model.pth")
    (root / "pickle" / "pytorch_model.bin").write_bytes(pickle.dumps({"a": [1, 2.0, "x"], "b": (1, None)}, 2))
    add("pickle", "pytorch_model.bin", "pytorch_model.bin")
    torch.save({"state_dict": model.state_dict(), "callbacks": {"ModelCheckpoint": {"best": torch.tensor(1.0)}}, "epoch": 1},
               root / "lightning" / "epoch=1-step=20.ckpt")  # fmt: skip
    add("lightning", "epoch=1-step=20.ckpt")
    shards = {"model-00001-of-00002.safetensors": ["a.weight"], "model-00002-of-00002.safetensors": ["a.bias", "ids"]}
    for name, keys in shards.items():
        save_file({key: weights[key] for key in keys}, root / "sharded" / name)
    mapped = {key: name for name, keys in shards.items() for key in keys}
    text = json.dumps({"metadata": {"total_size": 136}, "weight_map": mapped}, indent=2)
    (root / "sharded" / "model.safetensors.index.json").write_text(text)
    add("sharded", "model.safetensors.index.json", "", ["model-00001-of-00002.safetensors"])
    return found


def _dcp(root: Path) -> list[Seed]:
    state = {"w": torch.randn(4, 3), "more": {"b": torch.ones(2, dtype=torch.bfloat16), "n": 3, "t": "text"}}
    dcp.save(state, checkpoint_id=root / "saved", no_dist=True)
    files = (".metadata", "__0_0.distcp")
    return [Seed(reader, "dcp", root, file=f"saved/{file}", what="saved") for reader in ("scan", "load") for file in files]


def _run(root: Path) -> list[Seed]:
    """A run with two good checkpoints, an incident with its bundle, and samples in quarantine."""
    model = net()
    x = torch.randn(16, 4)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.randn(16, 1)), 4)
    with nanproof.Guard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss_fn=loss,
        run_dir=root / "run",
        checkpoints=nanproof.Checkpoints(root / "checkpoints", every=2, keep=3, prove=1, background=False),
        policy=nanproof.Policy(salvage=True),
    ) as guard:
        x[13, 1] = float("nan")
        wrapped = guard.wrap(data)
        for _ in range(2):
            for batch in wrapped:
                guard.train_step(batch)
    _put_away(root / "run")
    (root / "run" / "forecasts.jsonl").write_text(
        json.dumps({"v": 3, "step": 5, "kind": "divergence", "message": "soon", "where": "0", "steps": 8.0, "margin": 1.0}) + "\n"
    )
    bundle = next(path for path in (root / "run" / "incidents").iterdir() if path.is_dir())
    shutil.copytree(bundle, root / "bundle")
    newest = max(path.name for path in (root / "checkpoints").iterdir() if (path / "good.json").is_file())
    found = []
    inside = ("manifest.json", "good.json", ".metadata", "host-0.pt", "__0_0.distcp")
    for file in inside:
        place = f"checkpoints/{newest}/{file}"
        sealed = f"checkpoints/{newest}/manifest.json"
        found.append(Seed("resume", "checkpoint", root, place, seal=sealed))
        found.append(Seed("scan", "checkpoint", root, place, what=f"checkpoints/{newest}", seal=sealed))
    files = sorted(path.name for path in (root / "bundle").iterdir())
    found += [Seed("replay", "bundle", root, f"bundle/{file}", what="bundle", seal="bundle/manifest.json") for file in files]
    lines = ("steps.jsonl", "incidents.jsonl", "forecasts.jsonl", "norms.bin", "steps/000001.jsonl.gz", "quarantine.jsonl")
    for file in lines:
        found += [Seed(reader, "run", root, f"run/{file}", what="run") for reader in ("report", "watch")]
        found.append(Seed("guard", "run", root, f"run/{file}"))
    found += [Seed("records", "run", root, f"run/{file}", what="run") for file in lines[:5]]
    found.append(Seed("doctor", "run", root, "run/steps/000001.jsonl.gz", what="run"))
    relative = bundle.relative_to(root)
    for file in ("manifest.json", "batch.safetensors"):
        found.append(Seed("report", "samples", root, f"{relative}/{file}", what="run"))
    return found


def _put_away(run: Path) -> None:
    """Make the first steps an earlier part, as a longer run would."""
    lines = (run / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (run / "steps").mkdir()
    (run / "steps" / "000001.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:5])))
    (run / "steps.jsonl").write_bytes(b'{"v":3,"kind":"part","part":2,"time":1.0}\n' + b"".join(lines[5:]))


def _logs(root: Path) -> list[Seed]:
    found = []
    for name, source in LOGS.items():
        (root / name).mkdir(parents=True)
        file = Path(source).name
        shutil.copy(CORPUS / source, root / name / file)
        found.append(Seed("doctor", name, root / name, file, file))
    (root / "notebook").mkdir()
    table = "<table><tr><th>Step</th><th>Training Loss</th></tr>" + "".join(
        f"<tr><td>{i}</td><td>{2 - i / 40}</td></tr>\n" for i in range(30)
    )
    cells = [
        {"cell_type": "code", "outputs": [{"data": {"text/html": [table + "</table>"]}}], "source": []},
        {"cell_type": "code", "outputs": [{"text": [f"step {i} loss {2 - i / 50:.3f}\n" for i in range(40)]}]},
        {"cell_type": "code", "outputs": [{"ename": "ValueError", "traceback": ["Traceback", "ValueError: nan"]}]},
    ]
    (root / "notebook" / "train.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}, indent=1))
    found.append(Seed("doctor", "notebook", root / "notebook", "train.ipynb", "train.ipynb"))
    (root / "columns").mkdir()
    (root / "columns" / "history.json").write_text(
        json.dumps({"loss": [2.0, 1.5, 1.2], "val_loss": [2.1, 1.7], "lr": [1e-3]}, indent=1)
    )
    found.append(Seed("doctor", "columns", root / "columns", "history.json", "history.json"))
    return found
