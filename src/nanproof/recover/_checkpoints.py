"""Checkpoints: what a user asks for. `state/_store.py` does the work on disk, `_recovery.py` decides when."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nanproof._errors import UsageError


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where checkpoints go, how often, and what makes one good.

        guard = nanproof.Guard(model, optimizer, checkpoints=nanproof.Checkpoints("runs/a/checkpoints", every=500))
        start = guard.resume()

    A checkpoint is a *candidate* when it is written: only finite states are. It is *good* after `prove` more accepted steps.
    """

    folder: str | Path
    """One run's own folder; a second process that writes to it is turned away."""

    every: int = 100
    """Steps from one checkpoint to the next."""

    keep: int = 3
    """Good checkpoints that are kept. The last good one is never deleted."""

    prove: int = 20
    """Accepted steps, without divergence or broken weights, that must follow before a candidate is good."""

    background: bool = True
    """Write while training goes on, in a process or a thread; False waits for the disk."""

    on_signal: bool = False
    """On SIGTERM or SIGUSR1, finish the step, save, and end the program. A second signal ends it at once. The saved state counts
    as good: `resume()` goes on from it, and no step is lost."""

    exit_status: int = 0
    """The exit status after such a signal."""

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("keep", 1), ("prove", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"Checkpoints({name}={value!r}): a whole number of at least {least} is needed")
        if not isinstance(self.on_signal, bool):
            raise UsageError(f"Checkpoints(on_signal={self.on_signal!r}): True or False is needed")
        if isinstance(self.exit_status, bool) or not isinstance(self.exit_status, int) or not 0 <= self.exit_status <= 255:
            raise UsageError(f"Checkpoints(exit_status={self.exit_status!r}): a whole number from 0 to 255 is needed")
        if not isinstance(self.folder, (str, Path)) or not str(self.folder):
            raise UsageError(f"Checkpoints(folder={self.folder!r}): the path of a folder is needed")
