"""What a scan says: of every tensor, every file, every checkpoint, and in all. Plain data, without torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["clean", "bad", "refused", "unreadable", "skipped"]
_LARGEST_HALF = 65504.0
_WIDER_THAN_HALF = ("float32", "float64", "bfloat16", "complex64", "complex128")


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor of fractions. Complex numbers count as two numbers."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nan: int
    posinf: int
    neginf: int
    min: float | None
    """The smallest finite number; None if there is none."""
    max: float | None
    denormals: int | None
    """None unless they were asked for."""
    excuse: str | None = None
    """Why numbers that are not finite are right in this tensor."""

    @property
    def bad(self) -> bool:
        return bool(self.nan or self.posinf or self.neginf) and self.excuse is None

    @property
    def zeros(self) -> bool:
        """Whether there is nothing in it but zeros."""
        return self.min == 0 == self.max and not (self.nan or self.posinf or self.neginf)

    @property
    def overflows_half(self) -> bool:
        """Whether some number is finite here and infinite in float16."""
        return self.dtype in _WIDER_THAN_HALF and max(abs(self.min or 0), abs(self.max or 0)) > _LARGEST_HALF

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth a look and is no fault."""
        said = [self.excuse] if self.excuse else []
        said += ["all zeros"] if self.zeros else []
        said += ["too large for float16"] if self.overflows_half else []
        said += [f"{self.denormals} denormal"] if self.denormals else []
        return tuple(said)

    def to_json(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("name", "dtype", "nan", "posinf", "neginf", "min", "max")}
        facts |= {"shape": list(self.shape), "bad": self.bad, "notes": list(self.notes)}
        return facts if self.denormals is None else {**facts, "denormals": self.denormals}


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file, or one folder of torch.distributed.checkpoint."""

    path: Path
    status: Status
    why: str = ""
    tensors: tuple[TensorReport, ...] = ()
    whole: int = 0
    """Tensors of whole numbers or truth values, which cannot be bad."""
    bytes: int = 0
    """Bytes of numbers that were looked at."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        facts = {"path": str(self.path), "status": self.status, "why": self.why, "bytes": self.bytes, "seconds": self.seconds}
        return {**facts, "tensors": [t.to_json() for t in self.tensors], "whole_number_tensors": self.whole}


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """One checkpoint: a file, or a folder of them."""

    root: Path
    path: Path
    step: int | None
    files: tuple[FileReport, ...]
    checksums: dict[Path, str] | None = None
    """crc32 of every file, eight hexadecimal digits, if they were asked for."""

    @property
    def status(self) -> Status:
        """The worst of its files: bad, then refused, then unreadable; clean only if something was read."""
        return _worst(file.status for file in self.files)

    def to_json(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"path": str(self.path), "step": self.step, "status": self.status}
        facts["files"] = [file.to_json() for file in self.files]
        if self.checksums is not None:
            facts["crc32"] = {str(path): digits for path, digits in self.checksums.items()}
        return facts


@dataclass(frozen=True, slots=True)
class ScanReport:
    """What was found under the paths that were given."""

    checkpoints: tuple[CheckpointReport, ...]
    seconds: float = 0.0
    last_good: dict[Path, CheckpointReport | None] = field(init=False)
    """For every folder with several checkpoints, the clean one with the highest step."""

    def __post_init__(self) -> None:
        groups: dict[Path, list[CheckpointReport]] = {}
        for checkpoint in self.checkpoints:
            if checkpoint.step is not None:
                groups.setdefault(checkpoint.root.absolute(), []).append(checkpoint)
        latest = {}
        for root, several in groups.items():
            if len(several) > 1:
                clean = [c for c in several if c.status == "clean"]
                latest[root] = max(clean, key=lambda c: c.step or 0, default=None)
        object.__setattr__(self, "last_good", latest)

    @property
    def status(self) -> Status:
        """Bad if anything is; else refused or unreadable if anything was."""
        return _worst(checkpoint.status for checkpoint in self.checkpoints)

    def to_json(self) -> dict[str, Any]:
        good = {str(root): None if c is None else str(c.path) for root, c in self.last_good.items()}
        listed = [c.to_json() for c in self.checkpoints]
        return {"v": 1, "status": self.status, "seconds": self.seconds, "last_good": good, "checkpoints": listed}


def _worst(found: Iterable[Status]) -> Status:
    seen = set(found)
    order: tuple[Status, ...] = ("bad", "refused", "unreadable", "clean")
    return next((status for status in order if status in seen), "skipped")
