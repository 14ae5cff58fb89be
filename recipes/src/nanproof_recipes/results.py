"""What the results of all recipes share: a file of strict JSON beside the model, read again instead of training twice."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from nanproof import UsageError
from nanproof_recipes.library import decode, strict_json, write_whole

FILE = "result.json"
Own = TypeVar("Own", bound="Saved")


@dataclass(frozen=True, slots=True)
class Saved:
    """A base of frozen dataclasses with `name`, `setting` and `curves`. Numbers that are not finite are strings in the file."""

    NUMBERS: ClassVar[tuple[str, ...]] = ()
    """Fields that may be not finite."""

    def to_json(self) -> dict[str, Any]:
        return {"v": 1, **{name: plain(value) for name, value in asdict(self).items()}}

    def save(self, folder: Path) -> None:
        write_whole(folder / FILE, strict_json(self.to_json()))

    @classmethod
    def load(cls: type[Own], folder: Path) -> Own:
        path = folder / FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            known = {f.name for f in fields(cls)}
            found = {name: value for name, value in data.items() if name in known}
            for name in cls.NUMBERS:
                found[name] = None if found.get(name) is None else decode(found[name])
            found["curves"] = {k: [None if x is None else decode(x) for x in v] for k, v in found.get("curves", {}).items()}
            if not isinstance(found.get("setting"), dict):
                raise TypeError("it has no setting")
            return cls(**found)
        except FileNotFoundError:
            raise UsageError(f"{path} is not there: what is in {folder} is not done. Train it") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is not a result of this recipe ({error}): delete it, or choose another --out") from error


def few(value: float | None) -> str:
    """Four digits of it."""
    return "none" if value is None else f"{value:.4g}"


def plain(value: Any) -> Any:
    """As strict JSON holds it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # all digits: two runs are compared by them
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def shared(settings: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What has one value in all of them."""
    first = settings[0] if settings else {}
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in settings)}
