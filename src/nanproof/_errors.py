"""What nanproof raises.

NanproofError
├── UsageError         the call cannot be right: what was wrong, where, and what to do (also a ValueError)
│   └── AlreadyGuarded what should be guarded has a guard
├── UnsupportedError   the combination is known not to work; the message names what does
├── TrainingHalted     the cap on refused steps was reached; carries the incident
├── BadLogits          a model gave logits from which nothing can be sampled; carries the rows
└── RefusedFile        a file was not read because reading it could execute code, or it is not what it says
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nanproof._text import shown

if TYPE_CHECKING:
    from nanproof._records import Incident


class NanproofError(Exception):
    """Base of everything nanproof raises on purpose."""

    def __str__(self) -> str:
        """The message, in which names from files steer no terminal."""
        return shown(super().__str__(), 10_000)


class UsageError(NanproofError, ValueError):
    """A call or an argument that cannot be right."""


class AlreadyGuarded(UsageError):
    """What should be guarded has a guard."""


class UnsupportedError(NanproofError):
    """A combination that is known not to work."""


class TrainingHalted(NanproofError):
    """Training was stopped because refusing more steps would only hide a bug."""

    def __init__(self, message: str, incident: Incident) -> None:
        super().__init__(message)
        self.incident = incident
        """The refused step that reached the cap."""

    def __reduce__(self) -> tuple[type[TrainingHalted], tuple[str, Incident]]:
        return type(self), (str(self), self.incident)


class BadLogits(NanproofError):
    """A model gave logits from which nothing can be sampled."""

    def __init__(self, message: str, rows: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.rows = list(rows)
        """The `nanproof.numerics.generation.BadRow` of each."""

    def __reduce__(self) -> tuple[type[BadLogits], tuple[str, list[Any]]]:
        return type(self), (str(self), self.rows)


class RefusedFile(NanproofError):
    """A file was not read because reading it could execute code, or it is not what it says."""

    def __init__(self, path: str | os.PathLike[str], why: str) -> None:
        super().__init__(f"{path} was refused: {why}. Nothing in it was executed")
        self.path, self.why = str(path), why

    def __reduce__(self) -> tuple[type[RefusedFile], tuple[str, str]]:
        return type(self), (self.path, self.why)  # ranks send each other what they raised


for _error in (NanproofError, UsageError, AlreadyGuarded, UnsupportedError, TrainingHalted, BadLogits, RefusedFile):
    _error.__module__ = "nanproof"  # where users import it from: a traceback names it so
