"""`fit(ckpt_path=...)`: a file that is damaged or not finite gives way to the newest good one beside it.

Lightning writes a checkpoint under another name and renames it, so a kill leaves the old file whole. A full disk, a copy that
was cut off or a NaN still leave one that cannot be resumed from. It is looked at before Lightning unpickles anything.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanproof._errors import UsageError
from nanproof._text import printable
from nanproof.integrations._patches import Patches
from nanproof.integrations._saved import Fault, contents_faults, newest_good
from nanproof.scan._torch_files import load_torch

log = logging.getLogger("nanproof")

NEEDED = ("state_dict", "optimizer_states", "lr_schedulers", "loops")
"""What a fit that goes on reads from a checkpoint."""


class CheckpointChoice:
    """Stands between one trainer and the checkpoint that its fit resumes from."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._patches = trainer, Patches()
        self._patches.wrap(trainer._checkpoint_connector, "resume_start", self._start)

    def let_go(self) -> None:
        self._patches.undo()

    def _start(self, original: Callable[..., Any], checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        # A pipe or a device counts too: Lightning would wait for it forever.
        if isinstance(checkpoint_path, (str, Path)) and os.path.exists(checkpoint_path) and not Path(checkpoint_path).is_dir():
            chosen = self._choose(Path(checkpoint_path), _plain_values_only(original, args, kwargs))
            checkpoint_path = checkpoint_path if chosen == Path(checkpoint_path) else chosen
        return original(checkpoint_path, *args, **kwargs)

    def _choose(self, path: Path, plain: bool) -> Path:
        """On every rank what the first one chose: another could see another folder."""
        strategy = self._trainer.strategy
        chosen, error = _chosen(path, plain) if strategy.is_global_zero else (path, "")
        chosen, error = strategy.broadcast((chosen, error))
        if error:
            raise UsageError(error)
        return Path(chosen)


def _chosen(path: Path, plain: bool) -> tuple[Path, str]:
    """The file to resume from, or why there is none."""
    fault = next(_faults(path, plain), None)
    if fault is None:
        return path, ""
    log.warning("nanproof: %s cannot be resumed from: %s", printable(path.name), fault.reason)
    beside = [other for other in path.parent.glob(f"*{path.suffix}") if other.is_file() and other.resolve() != path.resolve()]
    one, _ = newest_good(sorted(beside, key=lambda other: other.stat().st_mtime, reverse=True), lambda p: _faults(p, plain))
    if one is None:
        hint = "train without ckpt_path, or, if you trust what is in the file, call fit(..., weights_only=False)"
        name = printable(str(path))
        return path, f"ckpt_path: {name} cannot be resumed from, and no other file beside it can: {fault.reason}\nhint: {hint}"
    log.warning("nanproof: resuming from %s instead", printable(one.name))
    return one, ""


def _faults(path: Path, plain: bool) -> Iterator[Fault]:
    """`plain`: Lightning will refuse to load more than plain values. If not, what cannot be read without executing it is the
    user's own affair."""
    yield from contents_faults([path], refuses=plain)
    try:
        loaded = load_torch(path, mmap=True)
    except Exception:  # reported above, or allowed
        return
    missing = [name for name in NEEDED if name not in loaded] if isinstance(loaded, dict) else NEEDED
    if missing:
        yield Fault(f"it has no {missing[0]}")


def _plain_values_only(load: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether Lightning loads this file with `weights_only=True`. Before 2.6 it does not, and has no such argument."""
    known = inspect.signature(load).parameters
    asked = args[0] if args else kwargs.get("weights_only")
    forced = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true")
    return "weights_only" in known and (not forced if asked is None else bool(asked))
