"""Bundle: the folder that lets a bad step be run again anywhere: batches, random numbers, weights, mode. docs/format.md has it
in full.

`BundleWriter.write` copies what it needs and returns; the disk is another thread's work. `read_bundle` checks and unpacks. Plain
JSON and safetensors: nothing is ever unpickled.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanproof._errors import UsageError
from nanproof._policy import Policy
from nanproof._records import Incident, StepRecord
from nanproof.core.judge._parameters import clean_name, local, unwrap
from nanproof.core.support._context import Mode, RandomState
from nanproof.core.support._environment import device_name, policy_out, versions_now, without_home
from nanproof.explain._pause import no_collections
from nanproof.explain.bundle._facts import (
    ModeFacts,
    OptimizerFacts,
    all_groups_out,
    mode_out,
    optimizer_out,
    random_out,
    state_out,
    weights_out,
)
from nanproof.explain.bundle._pack import Packer
from nanproof.explain.bundle._shelf import Parcel, Shelf

log = logging.getLogger("nanproof")

FORMAT = 1
"""Goes up when a reader of the old one would go wrong; new fields, which it ignores, do not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A bad step with all it depended on, read from disk."""

    path: Path
    created: str
    incident: Incident
    record: StepRecord | None
    batches: tuple[Any, ...]
    """Mappings and dataclasses are plain dictionaries here, named tuples plain tuples, what was left out None."""
    random: RandomState
    mode: ModeFacts
    weights: dict[str, Tensor] | None
    """Parameters and buffers by name; None where they were left out."""
    optimizer: OptimizerFacts | None
    policy: dict[str, Any] | None
    checkpoint: str | None
    """Where the weights are, if the writer was told."""
    versions: dict[str, str]
    device: str
    device_name: str
    left_out: tuple[str, ...]
    """What is not in the bundle, and why."""


def read_bundle(path: str | Path, *, to_devices: bool = False) -> Bundle:
    """The bundle in a folder, its checksums verified. Raises `UsageError` on anything that is not as it should be.

    Args:
        path: the folder, `run_dir/incidents/step-...`.
        to_devices: put the tensors of batches and optimizer where they were, as far as there is such a device; else on the CPU.
    """
    from nanproof.explain.bundle._unbundle import read  # the reader's half, which a training run does not need

    return read(Path(path), to_devices)


class BundleWriter:
    """Writes bundles into a folder: at most `keep` of them, none larger than `max_bytes`. One writer a folder."""

    def __init__(self, folder: str | Path, *, keep: int = 5, max_bytes: int = 2 << 30) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise UsageError(f"BundleWriter(keep={keep!r}): a whole number of at least 1 is needed")
        if not max_bytes > 0:
            raise UsageError(f"BundleWriter(max_bytes={max_bytes!r}): a number above 0 is needed")
        self.folder, self.max_bytes = Path(folder), max_bytes
        self._shelf = Shelf(self.folder, keep)

    def write(
        self,
        *,
        incident: Incident,
        batches: Sequence[Any],
        random: RandomState,
        mode: Mode,
        model: nn.Module,
        optimizer: Any = None,
        record: StepRecord | None = None,
        policy: Policy | None = None,
        checkpoint: str | Path | None = None,
    ) -> Path | None:
        """Copy everything, and return where the bundle will be; None if there will be none, which is logged. Never raises.

        Weights, buffers and optimizer state are taken as they are now, so call it while they are those of the bad step.
        """
        try:
            with no_collections():
                return self._write(incident, batches, random, mode, model, optimizer, record, policy, checkpoint)
        except Exception as error:
            log.debug("nanproof: a bundle could not be made", exc_info=True)
            self._say(incident, f"{type(error).__name__}: {error}")
            return None

    def failed(self, path: Path) -> bool:
        """Whether a bundle that `write` promised could not be written."""
        return path.name in self._shelf.failed

    def flush(self) -> None:
        """Wait until everything is written."""
        self._shelf.flush()

    def close(self) -> None:
        """Wait until everything is written, and end the thread."""
        self._shelf.close()

    def _write(
        self,
        incident: Incident,
        batches: Sequence[Any],
        random: RandomState,
        mode: Mode,
        model: nn.Module,
        optimizer: Any,
        record: StepRecord | None,
        policy: Policy | None,
        checkpoint: str | Path | None,
    ) -> Path | None:
        if self._shelf.closed:
            self._say(incident, "the writer is closed")
            return None
        batch, numbers, groups = Packer(), Packer(), Packer()
        packed = [batch.pack(b, f"batches[{i}]") for i, b in enumerate(batches)]
        states = numbers.pack(random_out(random), "random")
        names = {id(p): clean_name(name) for name, p in unwrap(model).named_parameters()}
        settings = None if optimizer is None else all_groups_out(optimizer, names, groups)
        left_out: list[str] = []
        weights, renamed = weights_out(model, left_out)
        state, values = state_out(optimizer, names, left_out)

        size = batch.size + numbers.size + groups.size
        if size > self.max_bytes:
            self._say(incident, f"its batch is {_mib(size)}, over the cap of {_mib(self.max_bytes)}")
            return None
        if state is not None and size + weights.size + state.size > self.max_bytes:
            left_out.append(f"optimizer state: with it {_mib(size + weights.size + state.size)}, over {_mib(self.max_bytes)}")
            state, values = None, []
        if renamed is not None and size + weights.size > self.max_bytes:
            left_out.append(f"weights: with them {_mib(size + weights.size)}, over the cap of {_mib(self.max_bytes)}")
            weights, renamed = Packer(), None
        size += weights.size + (0 if state is None else state.size)
        if self._shelf.waiting and self._shelf.waiting + size > self.max_bytes:
            self._say(incident, "earlier ones still wait for the disk")
            return None

        parts = [batch, numbers, groups, weights, *([] if state is None else [state])]
        device = next((local(p).device for p in model.parameters()), torch.device("cpu"))
        manifest = {
            "format": FORMAT,
            "step": incident.step,
            "kind": incident.kind,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": versions_now(),
            "platform": platform.platform(),
            "device": str(device),
            "device_name": device_name(device),
            "batches": packed,
            "random": states,
            "mode": mode_out(mode, model),
            "weights": renamed,
            "optimizer": None if settings is None else optimizer_out(optimizer, settings, values),
            "policy": None if policy is None else policy_out(policy),
            "checkpoint": None if checkpoint is None else without_home(str(checkpoint)),
            "left_out": without_home([*(text for part in parts for text in part.left_out), *left_out]),
        }
        texts = {"incident.json": without_home(incident.to_json())}
        if record is not None:
            texts["record.json"] = {**record.to_json(), "names": list(record.names)}
        tensors = {"batch.safetensors": batch.copies(), "random.safetensors": numbers.copies()}
        if renamed is not None:
            tensors["weights.safetensors"] = weights.copies()
        if settings is not None:
            tensors["optimizer.safetensors"] = {**groups.copies(), **({} if state is None else state.copies())}
        name = self._shelf.free_name(incident.step, incident.kind)
        return self._shelf.put(Parcel(name, manifest, texts, tensors, size))

    def _say(self, incident: Incident, why: str) -> None:
        log.warning("nanproof: no bundle of step %d (%s): %s. Training goes on", incident.step, incident.kind, why)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
