"""Run functions on two gloo ranks on this machine, and bring back what each rank returned."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Job = tuple[str, tuple[Any, ...], dict[str, Any]]
"""("module:function", args, kwargs); called as function(rank, *args, **kwargs), returns what JSON can hold."""


def two_ranks(*jobs: Job, timeout: float = 60) -> list[tuple[Any, Any]]:
    """For each job, what rank 0 and rank 1 returned. A hang ends in gloo's time-out, which raises here."""
    with tempfile.TemporaryDirectory() as folder:
        arguments, how = (folder, list(jobs), timeout, {**os.environ}), forking().get_start_method()
        mp.start_processes(_worker, args=arguments, nprocs=2, start_method=how)
        zero, one = (json.loads(Path(folder, f"{rank}.json").read_text()) for rank in (0, 1))
        return list(zip(zero, one, strict=True))


@cache
def forking() -> Any:
    """Processes are forked from one that has imported torch and never computes anything: importing it takes longer than most of
    what they do. Started anew where there is no fork."""
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "nanproof._guard"])
    return context


def _worker(rank: int, folder: str, jobs: list[Job], timeout: float, environment: dict[str, str]) -> None:
    os.environ.clear()  # that of the process forked from is as old as the first call
    os.environ.update(environment)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=timeout)
    )
    results = []
    for name, args, kwargs in jobs:
        module, function = name.split(":")
        results.append(getattr(importlib.import_module(module), function)(rank, *args, **kwargs))
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    # Not destroy_process_group: taking gloo down after DDP aborts now and then ("terminate called without an active
    # exception", 2 of 25 plain runs of torch 2.13 without nanproof).
    os._exit(0)
