"""The Trainer's own checkpoints, and which of them can be trusted.

A checkpoint is a candidate when it is saved, good once enough healthy steps have followed, suspect if what came shows that the
trouble had begun before it. Rotation never deletes the newest good one; resuming passes over suspect and broken ones.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from nanproof._errors import NanproofError, UsageError
from nanproof.core.support._files import strict_json, write_whole
from nanproof.integrations._protected import ProtectedRun
from nanproof.scan._scan import scan

log = logging.getLogger("nanproof")

_MARK = "nanproof.json"
_STATE = "nanproof.pt"


@dataclass(slots=True)
class _Candidate:
    folder: Path
    step: int
    accepted_before: int


class TrainerCheckpoints:
    """What becomes of the checkpoints of one run."""

    def __init__(self, guard: ProtectedRun, limit: int | None, prove: int = 20) -> None:
        self._guard, self.limit, self._prove = guard, limit, prove
        self._candidates: list[_Candidate] = []
        self._seen = len(guard.incidents)
        self._folder: Path | None = None

    def saved(self, folder: Path, writes: bool) -> None:
        """The trainer saves into this folder, between steps. `writes`: this process is the one that does."""
        state = self._guard.state_dict()
        if not writes:
            return
        self._folder = folder.parent
        torch.save(state, folder / _STATE)
        step = state["step"]  # a step that has begun does not count
        _mark(folder, "candidate", step)
        self._candidates.append(_Candidate(folder, step, self._guard.accepted_so_far))

    def look(self) -> None:
        """After a step: which candidates have proved good, which have not."""
        new, self._seen = self._guard.incidents[self._seen :], len(self._guard.incidents)
        for incident in new:
            # A refused step spoils nothing, however many there were, nor does one that was healed or salvaged.
            broken = incident.kind == "nonfinite-weight" and incident.action not in ("skipped", "healed", "salvaged")
            if incident.kind == "divergence" or broken:
                for candidate in [c for c in self._candidates if c.step > incident.step - self._prove]:
                    self._candidates.remove(candidate)
                    _mark(candidate.folder, "suspect", candidate.step)
        if not self._guard.engine.watch.settled:
            return
        for candidate in [c for c in self._candidates if self._guard.accepted_so_far - c.accepted_before >= self._prove]:
            self._candidates.remove(candidate)
            _mark(candidate.folder, "good", candidate.step)

    def rotate(self, best: str | None, only_best: bool = False) -> None:
        """Delete what is over the limit, oldest first; never the newest, the best, the newest good one, or the one that is next
        to prove good."""
        if self.limit is None or self.limit <= 0 or self._folder is None:
            return
        there = _checkpoints(self._folder)
        good = [folder for folder in there if _state(folder) == "good"]
        newer = there[there.index(good[-1]) + 1 :] if good else there
        proving = [folder for folder in newer if _state(folder) == "candidate"]
        keep = {*there[len(there) if only_best and best is not None else -1 :], *good[-1:], *proving[:1]}
        keep |= {folder for folder in there if best is not None and folder.resolve() == Path(best).resolve()}
        over = len(there) - max(self.limit, 1)
        for folder in there:
            if over > 0 and folder not in keep:
                shutil.rmtree(folder, ignore_errors=True)
                over -= 1

    @staticmethod
    def newest_usable(output_dir: str | None) -> str | None:
        """The newest checkpoint that is whole, finite and not suspect; what is passed over is logged. None if there is none at
        all; an error if there are some, and no good one among them."""
        there = _checkpoints(Path(output_dir)) if output_dir else []
        for folder in reversed(there):
            if _state(folder) == "suspect":
                log.warning("nanproof: passed over %s: the run had gone wrong before it", folder.name)
                continue
            bad = _broken(folder)
            if bad:
                log.warning("nanproof: passed over %s: %s", folder.name, bad)
                continue
            return str(folder)
        if there:
            raise UsageError(
                f"resume_from_checkpoint=True: none of the {len(there)} checkpoints in {output_dir} is finite and from before "
                f'the run went wrong. Start anew, or name one to use it all the same: resume_from_checkpoint="{there[-1]}"'
            )
        return None

    @staticmethod
    def was_healed(folder: str | Path) -> bool:
        """Whether remedies were in force in the run that saved this checkpoint."""
        try:
            state = torch.load(Path(folder) / _STATE, map_location="cpu", weights_only=True)
            return bool(state["heal"]["applied"])
        except Exception:  # no guard, or a file that cannot be read: said where it is loaded
            return False

    @staticmethod
    def load_guard(guard: ProtectedRun, folder: str | Path) -> None:
        """What the guard knew when this checkpoint was saved, if it was there."""
        path = Path(folder) / _STATE
        if not path.is_file():
            return
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            guard.load_state_dict(state)
        except Exception as error:  # a run is not kept from resuming by this
            log.warning("nanproof: %s could not be read, the guard begins anew: %s", path, error)


def _checkpoints(folder: Path) -> list[Path]:
    """Oldest first, by their step."""
    found = []
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        match = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def _mark(folder: Path, state: str, step: int) -> None:
    if folder.is_dir():
        write_whole(folder / _MARK, strict_json({"version": 1, "state": state, "step": step}))


def _state(folder: Path) -> str:
    try:
        return str(json.loads((folder / _MARK).read_text())["state"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _broken(folder: Path) -> str:
    """What is wrong with the files of a checkpoint; "" if nothing is. Files that hold no tensors are not looked at."""
    try:
        report = scan([folder])
    except (NanproofError, OSError) as error:
        return str(error)
    for file in (file for checkpoint in report.checkpoints for file in checkpoint.files):
        if file.status == "bad":
            return f"{file.path.name} holds NaN or Inf in {next(tensor.name for tensor in file.tensors if tensor.bad)}"
        if file.status == "unreadable":
            return f"{file.path.name}: {file.why}"
    return ""
