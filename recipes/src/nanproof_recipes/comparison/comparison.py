"""Several runs of one experiment side by side: what each arm was, how it ended, what was measured, and what that was to show.

A recipe makes a `Comparison` and `write` puts it into a folder: as data, as text, and as one HTML page. Nothing here judges: no
value is called the best, and one that is not finite is shown as such. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from nanproof import UsageError
from nanproof_recipes.library import one_line, replace_file

if TYPE_CHECKING:
    from rich.table import Table

VERSION = 1
DATA, TEXT, PAGE = "comparison.json", "comparison.md", "comparison.html"
Form = Literal["text", "count", "number", "share", "seconds"]
Value = float | int | str | None
_NONFINITE = ("nan", "inf", "-inf")


@dataclass(frozen=True)
class Column:
    """Something that was measured of every arm."""

    key: str
    title: str
    form: Form = "number"
    """How a value is written: "text", "count", "number", "share" (a part of 1, shown in percent) or "seconds"."""
    note: str = ""
    """What it is, in a sentence; shown under the table."""

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise UsageError(f"column {self.key!r}: no such form {self.form!r}. There are {', '.join(get_args(Form))}")


@dataclass(frozen=True)
class Arm:
    """One run of the experiment."""

    name: str
    setting: str
    """One line: what is different about it."""
    ending: str
    """"finished", "halted", "raised ValueError: ..."."""
    values: Mapping[str, Value]
    """By `Column.key`. NaN is shown as nan; None, or a column that is absent, as a dash."""
    story: tuple[str, ...] = ()
    """Sentences: what happened, as it was measured."""
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """ "step", and for example "loss" and "grad_norm", all of one length. None is a step at which it was not logged; NaN one at
    which it was, and was NaN. Without "step" the values are counted from 0."""
    run: str | None = None
    """Folder of the guard's run, relative to that of the comparison: its incidents are shown."""
    samples: tuple[Mapping[str, str], ...] = ()
    """For example question, expected, said, verdict."""

    def __post_init__(self) -> None:
        lengths = {key: len(values) for key, values in self.curves.items()}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{key} {count}" for key, count in lengths.items())
            raise UsageError(
                f"arm {self.name!r}: its curves are of different lengths ({told}). Put None where nothing was logged"
            )
        if not all(isinstance(x, Real) and math.isfinite(x) and x >= 0 for x in self.curves.get("step", ())):
            raise UsageError(f"arm {self.name!r}: its curves have a step that is no whole number from 0 on")


@dataclass(frozen=True)
class Check:
    """Something the experiment was to show, and whether it did."""

    claim: str
    measured: str
    holds: bool


@dataclass(frozen=True)
class Comparison:
    """The arms of one experiment, with what they have in common."""

    recipe: str
    title: str
    lead: str
    """What was compared and why, in a few sentences."""
    columns: tuple[Column, ...]
    arms: tuple[Arm, ...]
    checks: tuple[Check, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What all arms share."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Versions, device and so on, as a run's journal has them."""

    def table(self) -> str:
        """The table as Markdown: a row an arm."""
        from nanproof_recipes.comparison.text import markdown_table

        return markdown_table(self)

    def to_json(self) -> dict[str, Any]:
        """As strict JSON holds it: non-finite numbers are the strings "nan", "inf" and "-inf"."""
        return {
            "v": VERSION,
            "kind": "comparison",
            "recipe": self.recipe,
            "title": self.title,
            "lead": self.lead,
            "columns": [{"key": c.key, "title": c.title, "form": c.form, "note": c.note} for c in self.columns],
            "arms": [_arm_out(arm) for arm in self.arms],
            "checks": [{"claim": c.claim, "measured": c.measured, "holds": bool(c.holds)} for c in self.checks],
            "settings": _plain(self.settings),
            "environment": _plain(self.environment),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Comparison:
        """The inverse of `to_json`. In a column of text, "nan" stays text; in settings and environment it does everywhere."""
        if not isinstance(data, Mapping) or data.get("v") != VERSION:
            raise UsageError(f"not a comparison that this version can read: it has to be an object with v = {VERSION}")
        try:
            columns = tuple(Column(**_texts(one, "key", "title", "form", "note")) for one in data["columns"])
            forms = {column.key: column.form for column in columns}
            return cls(
                **_texts(data, "recipe", "title", "lead"),
                columns=columns,
                arms=tuple(_arm_in(one, forms) for one in data["arms"]),
                checks=tuple(Check(**_texts(one, "claim", "measured"), holds=one["holds"] is True) for one in data["checks"]),
                settings=_mapping(data["settings"]),
                environment=_mapping(data["environment"]),
            )
        except UsageError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"not a comparison: {one_line(f'{type(error).__name__}: {error}', 200)}") from error


def write(comparison: Comparison, folder: str | Path) -> Path:
    """Put it into the folder as `comparison.json`, `comparison.md` and `comparison.html`, each of them whole or as it was before;
    the path of the last. Runs of the guard are read from the folder."""
    from nanproof_recipes.comparison.page import page
    from nanproof_recipes.comparison.text import markdown

    folder = Path(folder)
    data = json.dumps(comparison.to_json(), allow_nan=False, separators=(",", ":"))
    texts = {DATA: data + "\n", TEXT: markdown(comparison), PAGE: page(comparison, folder)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            replace_file(folder / name, text)
    except OSError as error:
        raise UsageError(f"{folder}: the comparison cannot be written: {error.strerror or error}. Name another folder") from error
    return folder / PAGE


def read(folder: str | Path) -> Comparison:
    """The comparison that `write` put into a folder."""
    path = Path(folder) / DATA
    try:
        return Comparison.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}. Give the folder of a comparison") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {one_line(error, 300)}") from error


def rich_table(comparison: Comparison) -> Table:
    """The table for a terminal of any width: a row an arm, in several pieces where not all columns fit."""
    from nanproof_recipes.comparison.text import terminal_table

    return terminal_table(comparison)


def _arm_out(arm: Arm) -> dict[str, Any]:
    return {
        "name": arm.name,
        "setting": arm.setting,
        "ending": arm.ending,
        "values": _plain(arm.values),
        "story": list(arm.story),
        "curves": _plain(arm.curves),
        "run": arm.run,
        "samples": [{str(key): str(said) for key, said in sample.items()} for sample in arm.samples],
    }


def _arm_in(data: Any, forms: Mapping[str, Form]) -> Arm:
    run = data["run"]
    return Arm(
        **_texts(data, "name", "setting", "ending"),
        values={key: _value(x, forms.get(key, "number")) for key, x in _mapping(data["values"]).items()},
        story=tuple(_text(said) for said in data["story"]),
        curves={key: [_point(x) for x in values] for key, values in _mapping(data["curves"]).items()},
        run=None if run is None else _text(run),
        samples=tuple({key: _text(said) for key, said in _mapping(sample).items()} for sample in data["samples"]),
    )


def _plain(value: Any) -> Any:
    """What JSON can hold, with all digits of a number."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else "nan" if number != number else "inf" if number > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, Sequence) else str(value)


def _value(x: Any, form: Form) -> Value:
    if isinstance(x, str) and form != "text" and x in _NONFINITE:
        return float(x)
    if x is None or isinstance(x, (str, int, float)):
        return x
    raise ValueError("a value that is neither a number nor a text")


def _point(x: Any) -> float | None:
    value = _value(x, "number")
    if isinstance(value, str):
        raise ValueError(f"{one_line(value, 80)} where a number of a curve should be")
    return value


def _texts(data: Any, *names: str) -> dict[str, Any]:
    return {name: _text(data[name]) for name in names}


def _text(x: Any) -> str:
    if not isinstance(x, str):
        raise ValueError(f"{one_line(x, 80)} where a text should be")
    return x


def _mapping(x: Any) -> dict[str, Any]:
    if not isinstance(x, dict):
        raise ValueError(f"{one_line(x, 80)} where an object should be")
    return x
