"""Values of a configuration as people write them: YAML read without surprises, types checked, keys that are nearly right."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from nanproof import UsageError
from nanproof_recipes.library import printable

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True, slots=True)
class Limit:
    """What a value must be, besides its type."""

    words: str
    holds: Callable[[Any], bool]


def yaml() -> Any:
    """PyYAML, or a clear word about it."""
    try:
        import yaml as found  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise UsageError('this recipe needs PyYAML. pip install "nanproof[recipes]"') from None
    return found


def read_yaml(text: str, where: str) -> dict[Any, Any]:
    """A mapping out of a file. A key that is there twice is an error: YAML would keep the last, and say nothing. So is a merge:
    a short file of them can become one that no memory holds."""
    library = yaml()
    try:
        wrong = _wrong(library, text)
        made = library.safe_load(text) if wrong is None else None
    except (library.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        why = printable(str(getattr(error, "problem", None) or type(error).__name__)[:200])
        raise UsageError(f"{where}{line}: not YAML ({why})") from None
    if wrong is not None:
        raise UsageError(f"{where}, line {wrong[0]}: {wrong[1]}")
    if made is None:
        return {}
    if not isinstance(made, dict):
        raise UsageError(f"{where}: not a mapping of sections, each with its keys")
    return made


def _wrong(library: Any, text: str) -> tuple[int, str] | None:
    """The line of a key that is there twice or is a merge, and what to do about it. No value is made for that."""
    waiting, looked = [library.compose(text, Loader=library.SafeLoader)], set()
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in looked or not isinstance(node.value, list):
            continue
        looked.add(id(node))
        if not isinstance(node, library.MappingNode):
            waiting += node.value
            continue
        seen = set()
        for key, value in node.value:
            if isinstance(key.value, str):
                if key.value in seen or key.value == "<<":
                    what = "is a merge. Write the keys out" if key.value == "<<" else "is there twice. Put both into one"
                    return key.start_mark.line + 1, f"{key.value[:80]!r} {what}"
                seen.add(key.value)
            waiting.append(value)
    return None


def read_change(change: str, known: Mapping[str, Any]) -> tuple[str, Any]:
    """Key and value of optimizer.lr=5e-5. The value is YAML; where text is wanted, it is what is written."""
    key, sign, written = change.partition("=")
    key = key.strip()
    if not sign or not key:
        raise UsageError(f"{change[:80]!r}: a change is written section.key=value, such as optimizer.lr=5e-5")
    library = yaml()
    try:
        value = library.safe_load(written)
    except (library.YAMLError, ValueError, RecursionError):
        value = written
    if key in known and _plain(known[key])[0] is str and value is not None and not isinstance(value, str):
        value = written.strip()
    return key, value


def typed(key: str, kind: Any, value: Any) -> Any:
    """The value in its type, or a UsageError that names the key. A bool is no number; 5e-5 is one, though YAML says text."""
    limit = next((extra for extra in get_args(kind)[1:] if isinstance(extra, Limit)), None) if _annotated(kind) else None
    plain, optional = _plain(kind)
    if value is None and optional:
        return None
    if get_origin(plain) is Literal:
        if isinstance(value, str) and value in get_args(plain):
            return value
        raise UsageError(f"{key}={seen(value)}: must be one of {', '.join(get_args(plain))}")
    wanted = limit.words if limit is not None else _WORDS[plain] + (", or null" if optional else "")
    made = _as(plain, value)
    if made is None or (limit is not None and not limit.holds(made)):
        raise UsageError(f"{key}={seen(value)}: must be {wanted}")
    return made


def _as(plain: type, value: Any) -> Any:
    """None where it is not of this type."""
    if plain is not float:
        return value if type(value) is plain and value != "" else None
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        made = float(value)
    except OverflowError:
        return None
    return made if math.isfinite(made) else None


def _annotated(kind: Any) -> bool:
    return get_origin(kind) is Annotated


def _plain(kind: Any) -> tuple[Any, bool]:
    """The type itself, and whether it may be None."""
    if _annotated(kind):
        kind = get_args(kind)[0]
    parts = get_args(kind)
    if NoneType in parts:
        return next(part for part in parts if part is not NoneType), True
    return kind, False


def seen(value: Any) -> str:
    """Short, and safe to print, whatever a file holds."""
    if isinstance(value, dict | list | set | tuple):
        return f"a {type(value).__name__}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return "a number of that size"
    return "null" if value is None else f"{str(value).lower() if isinstance(value, bool) else ascii(value)[:80]}"


def nearest(key: str, known: Iterable[str]) -> str:
    """The known key most like this one, by its whole or by its last part."""

    def like(other: str) -> tuple[float, float]:
        whole = SequenceMatcher(None, key, other).ratio()
        last = SequenceMatcher(None, key.rpartition(".")[2], other.rpartition(".")[2]).ratio()
        return max(whole, last), whole

    key = key[:80]
    return max(known, key=like)
