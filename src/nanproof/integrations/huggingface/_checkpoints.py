"""The Trainer's own checkpoints, and which of them can be trusted.

A checkpoint is being saved until all of its files are there, then a candidate, good once enough healthy steps have followed, and
suspect if what came shows that the trouble had begun before it. Rotation never deletes the newest good one. Resuming takes the
newest that is whole, readable, finite and not suspect.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import Trainer
from transformers.trainer import safe_globals  # type: ignore[attr-defined]  # where every version has it
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from nanproof._access import remove
from nanproof._errors import UsageError
from nanproof._text import one_line, printable
from nanproof.integrations._protected import ProtectedRun
from nanproof.integrations._saved import (
    MARK,
    PARTIAL,
    Fault,
    begin,
    change,
    contents_faults,
    delete,
    finish,
    json_fault,
    listed,
    mark,
    marked_faults,
    newest_good,
    unfinished,
)
from nanproof.scan._torch_files import load_torch

log = logging.getLogger("nanproof")

_STATE = "nanproof.pt"
_TRAINER_STATE = "trainer_state.json"
_OPTIMIZER, _SCHEDULER, _SCALER = "optimizer.pt", "scheduler.pt", "scaler.pt"
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")
_INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_JIT_PARTIAL = "checkpoint-is-incomplete.txt"
"""What transformers' own callback puts into a folder while it saves on a signal."""


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
        self.last: Path | None = None
        """The checkpoint that was saved last."""

    @contextmanager
    def saving(self, folder: Path, writes: bool, **facts: Any) -> Iterator[None]:
        """Around the trainer's save into this folder, between steps. `writes`: this process is the one that does. `facts` go
        into the mark."""
        state = self._guard.state_dict()
        if not writes:
            yield
            return
        begin(folder)
        if folder.is_dir():
            torch.save(state, folder / _STATE)
        yield
        if not any(path.name not in (MARK, _STATE) for path in folder.glob("*")):  # a trainer that saves elsewhere
            remove(folder)
            return
        step = state["step"]  # a step that has begun does not count
        finish(folder, "candidate", _is_listed, step=step, **facts)
        self.last = folder
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
                    change(candidate.folder, "suspect")
        if not self._guard.engine.watch.settled:
            return
        for candidate in [c for c in self._candidates if self._guard.accepted_so_far - c.accepted_before >= self._prove]:
            self._candidates.remove(candidate)
            change(candidate.folder, "good")

    def rotate(self, best: str | None, only_best: bool = False) -> None:
        """Delete what is over the limit, oldest first; never the one saved last, the best, the newest good one, or the one that
        is next to prove good. What a kill left half saved goes, and counts for nothing."""
        if self.limit is None or self.limit <= 0 or self.last is None:
            return
        states = {
            folder: "" if unfinished(folder) else mark(folder).get("state", "?") for folder in _checkpoints(self.last.parent)
        }
        there = [folder for folder, state in states.items() if state]
        good = [folder for folder in there if states[folder] == "good"]
        newer = there[there.index(good[-1]) + 1 :] if good else there
        proving = [folder for folder in newer if states[folder] == "candidate"]
        keep = {*good[-1:], *proving[:1]} | (set() if only_best and best is not None else {self.last})
        keep |= {folder for folder in there if best is not None and folder.resolve() == Path(best).resolve()}
        over = len(there) - max(self.limit, 1)
        for folder, state in states.items():
            if not state or (over > 0 and folder not in keep):
                over -= bool(state)
                delete(folder, _TRAINER_STATE)

    @staticmethod
    def was_healed(folder: str | Path) -> bool:
        """Whether remedies were in force in the run that saved this checkpoint."""
        try:
            return bool(_guard_state(Path(folder))["heal"]["applied"])
        except Exception:  # no guard, or a file that cannot be read: said where it is loaded
            return False

    @staticmethod
    def load_guard(guard: ProtectedRun, folder: str | Path) -> None:
        """What the guard knew when this checkpoint was saved, if it was there."""
        if not (Path(folder) / _STATE).exists():
            return
        try:
            guard.load_state_dict(_guard_state(Path(folder)))
        except Exception as error:  # a run is not kept from resuming by this
            log.warning("nanproof: %s could not be read, the guard begins anew: %s", Path(folder) / _STATE, error)


# -- resuming --------------------------------------------------------------------------------------------------------------------


def choose(trainer: Trainer, asked: Any) -> Any:
    """What the trainer resumes from. `asked`: what the user gave. What is passed over is logged.

    True is the newest checkpoint that is good, and an error if there are some, and no good one among them. A path is the user's
    choice: one warning says what is wrong with it. One that cannot be loaded at all gives way to the newest good one.
    """
    if asked is True:
        return _newest(trainer, _named(trainer), True)
    if not isinstance(asked, (str, Path)) or not Path(asked).is_dir():
        return asked
    folder, there = Path(asked), _named(trainer)
    faults = _agreed(trainer, lambda: _faults(trainer, folder))
    fatal = next((fault for fault in faults if not fault.loads), None)
    others = [path for path in there if path.resolve() != folder.resolve()]
    if fatal is not None and len(others) < len(there):
        log.warning("nanproof: %s cannot be resumed from: %s", printable(folder.name), fatal.reason)
        return _newest(trainer, others, asked)
    if faults:
        log.warning("nanproof: resuming from %s, as asked: %s", printable(folder.name), faults[0].reason)
    return asked


def _newest(trainer: Trainer, there: list[Path], otherwise: Any) -> Any:
    """The newest good one of these. None if no save was ever finished; `otherwise` if there is nothing to choose from."""
    one, passed = newest_good(reversed(there), lambda path: iter(_agreed(trainer, lambda: islice(_faults(trainer, path), 1))))
    if one is not None:
        own = _has_own_layout(trainer) or _saves_optimizer_itself(trainer)
        if not own and not (one / _OPTIMIZER).is_file():
            log.warning("nanproof: %s holds no optimizer state: optimizer and schedule start anew", one.name)
        return str(one)
    if there and all(map(unfinished, _named(trainer))):
        log.warning("nanproof: no save of this run was ever finished: training starts from the beginning")
        return None
    if not there or otherwise is not True:
        return otherwise
    raise UsageError(
        f"resume_from_checkpoint=True: none of the {len(there)} checkpoints in {there[0].parent} is whole, finite and from "
        f"before the run went wrong ({passed[0][0].name}: {passed[0][1].reason})\n"
        f'hint: start anew, or name one to use it all the same: resume_from_checkpoint="{there[-1]}"'
    )


def _faults(trainer: Trainer, folder: Path) -> Iterator[Fault]:
    """What is wrong with a checkpoint, in view of the files that this trainer loads."""
    yield from marked_faults(folder)
    if (folder / _JIT_PARTIAL).exists():
        yield Fault(PARTIAL, loads=True)
    state, wrong = json_fault(folder / _TRAINER_STATE)
    step = state.get("global_step") if isinstance(state, dict) else None
    if wrong or not isinstance(step, int):
        yield Fault(wrong or f"{_TRAINER_STATE} is not the state of a Trainer")
    elif _step(folder) not in (None, step):
        yield Fault(f"{_TRAINER_STATE} is of step {one_line(step, 50)}", loads=True)
    if _has_own_layout(trainer):
        yield from contents_faults([folder])
        return
    loaded: list[Path] = []
    if type(trainer)._load_from_checkpoint is Trainer._load_from_checkpoint:
        loaded += _weights(folder)
        yield from _weights_faults(folder, loaded)
    if not _saves_optimizer_itself(trainer):
        loaded += [folder / name for name in (_OPTIMIZER, _SCHEDULER, _SCALER) if (folder / name).exists()]
        yield from _missing(trainer, folder)
    random_states = sorted(folder.glob("rng_state*.pth"))
    yield from (Fault(f"{path.name} is not a file") for path in (*loaded, *random_states) if not path.is_file())
    yield from contents_faults([path for path in loaded if path.is_file()])
    yield from contents_faults([path for path in random_states if path.is_file()], safe_globals)


def _weights_faults(folder: Path, weights: list[Path]) -> Iterator[Fault]:
    """No weights, or a configuration beside them that cannot be read. Their content is looked at later."""
    if not weights:
        yield Fault("there are no weights in it")
    needed = [path.parent / "adapter_config.json" for path in weights if path.name in _ADAPTER]
    there = [path for path in (folder / "config.json",) if path.exists()]
    for config in needed + there:
        _, wrong = json_fault(config)
        if wrong:
            yield Fault(wrong)


def _missing(trainer: Trainer, folder: Path) -> Iterator[Fault]:
    """What the training needs besides weights. transformers does without, silently. A mark says whether it was saved at all;
    where there is none, the trainer's settings do."""
    saved = listed(folder)
    if saved is None and not trainer.args.save_only_model:
        scaler = [_SCALER] if getattr(trainer.accelerator, "scaler", None) is not None else []
        for name in (_OPTIMIZER, _SCHEDULER, *scaler):
            if not (folder / name).is_file():
                yield Fault(f"{name} is missing", loads=True)
    if _OPTIMIZER in saved if saved is not None else not trainer.args.save_only_model:
        ranks = mark(folder).get("ranks")
        if len(list(folder.glob("rng_state*.pth"))) < (ranks if isinstance(ranks, int) else 1):
            yield Fault("the state of a random generator is missing", loads=True)


def _weights(folder: Path) -> list[Path]:
    """The files with weights that the Trainer would load, in its order."""
    for name in _WHOLE:
        if (folder / name).exists():
            return [folder / name]
    adapters = [path for place in (folder, *folder.glob("*/")) for name in _ADAPTER if (path := place / name).exists()]
    return adapters or [folder / name for name in _INDEX if (folder / name).exists()][:1]


def _is_listed(name: str) -> bool:
    """Whether a file must be there when the checkpoint is resumed from, though no rule says so: the optimizer, if it was saved;
    adapters and shards in folders. Weights and random states come in several shapes, which are looked for."""
    top = "/" not in name
    if top:
        return name in (_OPTIMIZER, _SCHEDULER, _SCALER, _TRAINER_STATE, *_ADAPTER, "optimizer.bin")
    return name.endswith((".safetensors", ".bin", ".pt", ".distcp", ".metadata", "adapter_config.json"))


def _saves_optimizer_itself(trainer: Trainer) -> bool:
    """Whether the class of this trainer saves the optimizer in a way of its own."""
    return type(trainer)._save_optimizer_and_scheduler is not Trainer._save_optimizer_and_scheduler


def _has_own_layout(trainer: Trainer) -> bool:
    """Whether weights and optimizer lie in a layout that is not the Trainer's own."""
    return bool(trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)


def _agreed(trainer: Trainer, faults: Callable[[], Iterator[Fault]]) -> list[Fault]:
    """What the first process of any machine finds wrong, on every rank alike."""
    args = trainer.args
    own = list(faults()) if args.local_process_index == 0 else []
    if args.world_size == 1 or not distributed.is_initialized():
        return own
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, own)
    return next((found for found in gathered if found), [])


def _guard_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = load_torch(folder / _STATE)
    return state


def _named(trainer: Trainer) -> list[Path]:
    """The checkpoints in the trainer's folder, oldest first; on every rank those that the first one sees."""
    output = trainer.args.output_dir
    there = _checkpoints(Path(output)) if output else []
    if trainer.args.world_size > 1 and distributed.is_initialized():
        shared: list[Any] = [[path.name for path in there]]
        distributed.broadcast_object_list(shared, src=0)
        there = [Path(str(output)) / name for name in shared[0]]
    return there


def _step(folder: Path) -> int | None:
    match = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", folder.name)
    return int(match[1]) if match else None


def _checkpoints(folder: Path) -> list[Path]:
    """Oldest first, by their step."""
    found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if _step(path) is not None and path.is_dir()]
    return sorted(found, key=lambda path: _step(path) or 0)
