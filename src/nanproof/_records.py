"""StepRecord, Incident, Diagnosis: what happened, as plain frozen data. No torch here, so that
readers start fast.

On disk every record is one line of strict JSON. A bare `NaN` is not JSON, so non-finite numbers are
written as the strings "nan", "inf" and "-inf":

    {"v":3,"kind":"step","step":41,"loss":"nan","grad_norm":"nan","action":"skipped","clip":1,"lr":[0.001],"scale":null,...}

The norms of a step are in `norms.bin` (`_blocks`), and older lines in compressed parts (`_parts`). In
version 2 all was in one file: the norms were in the line, and the names in a line before it. Version 1
had what was decided about an incident in the text of `message`. All three are read.
"""

from __future__ import annotations

import json
import logging
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from nanproof import _wording as wording
from nanproof._access import open_regular, parse_json, whole_lines
from nanproof._sound import check_forecast, check_incident, check_record
from nanproof._text import shown
from nanproof.files import _blocks as blocks
from nanproof.files._parts import STEPS, step_lines

log = logging.getLogger("nanproof")
Kind = TypeVar("Kind")

VERSION = 3
_LONGEST = 20_000
"""Characters of a record that are shown as text."""
ABSENT = blocks.ABSENT
"""Stands for "this parameter had no gradient" among norms, which are never negative."""

KINDS = (
    "nonfinite-loss",
    "nonfinite-gradient",
    "nonfinite-weight",
    "gradient-norm-overflow",
    "spike",
    "divergence",
    "no-learning",
    "loss-scale-collapse",
    "exception",
    "generation",
)
ACTIONS = ("recorded", "clipped", "skipped", "salvaged", "healed", "rewound", "rolled-back", "halted")
"""What was done about an incident. "salvaged": the step was taken with what was good of its batch;
"healed": the run goes on under a verified fix; "rewound" and "rolled-back": the run went back to a
good state, in memory or in a checkpoint."""
FORECASTS = (
    "activation-overflow",
    "divergence",
    "stale-second-moment",
    "exploding-depth",
    "loss-scale-collapse",
    "entropy-collapse",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What one step looked like inside, where a guard observes: see `Observe`. Numbers stand in the
    order of `sites`, or of the record's `names` for parameters; `ABSENT` where there is none."""

    sites: tuple[str, ...]
    """Modules whose outputs were looked at, shared by all records of a run."""
    absmax: array[float]
    """Largest absolute value of each output: NaN if there is one in it, else Inf if there is
    one."""
    outputs: dict[str, array[float]] = field(default_factory=dict)
    """Of a full look: "rms"; how many are "nan" and "inf"; the shares "zeros" and "near" (within a
    factor of 8 of the dtype's maximum)."""
    gradients: dict[str, array[float]] = field(default_factory=dict)
    """The same and "absmax" for the gradient of each output, with the loss scale in it."""
    updates: dict[str, array[float]] = field(default_factory=dict)
    """Of a full look, by parameter, from a sample: "ratio" of update to weight, share that
    "changed", RMS of the update "over_lr"."""
    attention: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """By module, from a sample: largest logit; entropy over the largest possible one, of all heads
    and of the sharpest."""
    unmoved: dict[str, float] = field(default_factory=dict)
    """By embedding: share of the sampled rows that never had a gradient."""

    @property
    def by_site(self) -> dict[str, float]:
        """Largest absolute value by module, for those that were called."""
        return {site: value for site, value in zip(self.sites, self.absmax, strict=True) if value != ABSENT}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], sites: Iterable[str]) -> Observed:
        columns = {
            name: {key: _array(values) for key, values in data.get(name, {}).items()}
            for name in ("outputs", "gradients", "updates")
        }
        attention = {name: (decode(a), decode(b), decode(c)) for name, (a, b, c) in data.get("attention", {}).items()}
        unmoved = {name: decode(share) for name, share in data.get("unmoved", {}).items()}
        return cls(sites=tuple(sites), absmax=_array(data["absmax"]), attention=attention, unmoved=unmoved, **columns)

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], sites: tuple[str, ...]) -> Observed | None:
        """Return what a block of `norms.bin` holds; None if it holds nothing of this."""
        if "absmax" not in columns:
            return None
        nested: dict[str, dict[str, array[float]]] = {"outputs": {}, "gradients": {}, "updates": {}}
        for name, values in columns.items():
            kind, dot, key = name.partition(".")
            if dot and kind in nested:
                nested[kind][key] = _numeric(values)
        more = {name: columns[name] for name in ("attention", "unmoved") if name in columns}
        rest = cls.from_json({"absmax": [], **more}, sites)
        return cls(sites=sites, absmax=_numeric(columns["absmax"]), attention=rest.attention, unmoved=rest.unmoved, **nested)


def strict_observed(observed: Observed) -> Iterator[tuple[str, str]]:
    """What is observed by name, as strict JSON; only where there is something."""
    for name in ("attention", "unmoved"):
        found = getattr(observed, name)
        if found:
            yield name, _dumps(_encode_tree(found))


def _numeric(values: Any) -> array[float]:
    if not isinstance(values, array):
        raise ValueError("a column that holds no numbers")
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step: what it was judged on, and what was done."""

    step: int
    loss: float
    grad_norm: float
    """Norm of all gradients, before clipping and without the loss scale."""
    action: str
    """"stepped", "clipped" (and stepped) or "skipped"."""
    clip: float
    """What the gradients were divided by; 1.0 is no clipping."""
    lr: tuple[float, ...]
    """One a parameter group."""
    scale: float | None
    """The loss scale, if there is a GradScaler."""
    spike: bool
    """Loss or norm was far above what is usual."""
    typical: tuple[float, float]
    """What was usual before this step: the levels of norm and loss (log of the norm, asinh of the
    loss over its size)."""
    spread: tuple[float, float]
    """Their running deviations."""
    loss_size: float
    """The running mean of the loss's size."""
    weights_checked: bool
    """The weights were looked at after the step, which cost a pass over them (half-precision
    weights only)."""
    names: tuple[str, ...]
    """Parameter names, shared by all records of a run."""
    norms: array[float]
    """Gradient norm of each parameter, before clipping; `ABSENT` where there was no gradient. A step read
    from disk whose norms were not kept has none, and no names."""
    terms: tuple[tuple[str, float], ...] = ()
    """Name and value of each term of the loss, where they are known: without weights, the mean over
    micro-batches."""
    counters: tuple[tuple[str, float], ...] = ()
    """Name and value of what the loop counts itself, as it stood at this step: see
    `Guard.counters`."""
    observed: Observed | None = None
    """Activations, and more, where the guard observes."""
    time: float | None = field(default=None, compare=False)
    """When its verdict reached the host, in seconds since 1970."""

    @property
    def by_parameter(self) -> dict[str, float]:
        """Gradient norm by parameter name, for those that had a gradient."""
        return {name: norm for name, norm in zip(self.names, self.norms, strict=True) if norm != ABSENT}

    def to_json(self) -> dict[str, Any]:
        named = {key: _named(pairs) for key, pairs in (("terms", self.terms), ("counters", self.counters)) if pairs}
        return {
            "v": VERSION,
            "kind": "step",
            "step": self.step,
            "loss": encode(self.loss),
            "grad_norm": encode(self.grad_norm),
            "action": self.action,
            "clip": encode(self.clip),
            "lr": [encode(x) for x in self.lr],
            "scale": encode(self.scale),
            "spike": self.spike,
            "typical": [encode(x) for x in self.typical],
            "spread": [encode(x) for x in self.spread],
            "loss_size": encode(self.loss_size),
            "weights_checked": self.weights_checked,
            "norms": _numbers(self.norms),
            **named,
            "time": self.time,
        }

    def to_line(self) -> str:
        """Return one line of strict JSON, without norms and without what was observed. The same as of a
        dictionary, five times as fast."""
        low, high = self.typical
        narrow, wide = self.spread
        named = "".join(
            [
                f',"{key}":{{{",".join([f"{_quoted(name)}:{_number(x)}" for name, x in pairs])}}}'
                for key, pairs in (("terms", self.terms), ("counters", self.counters))
                if pairs
            ]
        )
        return (
            f'{{"v":{VERSION},"kind":"step","step":{self.step},"loss":{_number(self.loss)},"grad_norm":{_number(self.grad_norm)}'
            f',"action":{_quoted(self.action)},"clip":{_number(self.clip)},"lr":[{",".join(map(_number, self.lr))}]'
            f',"scale":{"null" if self.scale is None else _number(self.scale)},"spike":{"true" if self.spike else "false"}'
            f',"typical":[{_number(low)},{_number(high)}],"spread":[{_number(narrow)},{_number(wide)}]'
            f',"loss_size":{_number(self.loss_size)},"weights_checked":{"true" if self.weights_checked else "false"}{named}'
            f',"time":{"null" if self.time is None else repr(float(self.time))}}}\n'
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any], names: Iterable[str], sites: Iterable[str] = ()) -> StepRecord:
        """The inverse of `to_json`, for lines of all versions. `names` and `sites` belong to the norms and
        to what was observed, where these are in `data`. Numbers keep six significant digits on disk."""
        inside = "norms" in data or data["v"] in (1, 2)
        record = cls(
            step=data["step"],
            loss=decode(data["loss"]),
            grad_norm=decode(data["grad_norm"]),
            action=data["action"],
            clip=decode(data["clip"]),
            lr=tuple(decode(x) for x in data["lr"]),
            scale=None if data["scale"] is None else decode(data["scale"]),
            spike=data["spike"],
            typical=(decode(data["typical"][0]), decode(data["typical"][1])),
            spread=(decode(data["spread"][0]), decode(data["spread"][1])),
            loss_size=decode(data["loss_size"]),
            weights_checked=data["weights_checked"],
            names=tuple(names) if inside else (),
            norms=_array(data["norms"]) if inside else array("d"),
            terms=_pairs(data.get("terms", {})),
            counters=_pairs(data.get("counters", {})),
            observed=Observed.from_json(data["observed"], sites) if "observed" in data else None,
            time=data.get("time"),
        )
        check_record(record)
        return record


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Why it happened, where, how sure that is, and what to do."""

    cause: str
    confidence: float
    phase: str | None = None
    where: str | None = None
    op: str | None = None
    source: str | None = None
    samples: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    rank: int | None = None
    evidence: tuple[str, ...] = ()
    fix: str | None = None
    verified: bool = False
    alternatives: tuple[str, ...] = ()

    @property
    def named(self) -> bool:
        """Whether a cause was named."""
        return self.cause not in ("unknown", "none")

    def __str__(self) -> str:
        return shown(wording.diagnosis(self), _LONGEST)

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = _encode_tree(asdict(self))
        return plain

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Diagnosis:
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in known}
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """Something went wrong at a step."""

    step: int
    kind: str
    action: str
    loss: float | None = None
    grad_norm: float | None = None
    culprits: tuple[tuple[str, float], ...] = ()
    """(parameter, gradient norm) of the guilty parameters, read before any clipping."""
    rank: int | None = None
    """The rank whose own loss or gradient was bad, where that can be told."""
    micro_batch: int | None = None
    """Index of the bad micro-batch of an accumulated step."""
    terms: tuple[tuple[str, float], ...] = ()
    """Name and value of each term of the loss, of the bad micro-batch where that is known; see
    `weighted_sum`."""
    message: str = ""
    """What was seen, in words. What was done about it is in the fields below, and in `outcome` in
    words."""
    diagnosis: Diagnosis | None = None
    bundle: str | None = None
    remedy: str | None = None
    """The verified fix that the run goes on under, in words."""
    undone: tuple[str, ...] = ()
    """Earlier fixes that did not hold, and were taken back."""
    restored_step: int | None = None
    """The step that the run went back to."""
    restored_from: str | None = None
    """Where that state was: "memory", or the name of a checkpoint."""
    stepped_over: int = 0
    """Batches that the data skips after going back."""
    attempt: int = 0
    """How often the run went back because of this trouble, this time included."""
    left_out: tuple[int, ...] = ()
    """Samples of the batch that the step was taken without. A salvaged step without any was taken
    without `micro_batch`."""
    quarantined: tuple[int, ...] = ()
    """Dataset indices that no later batch will hold."""
    cap: str | None = None
    """The limit that was reached: a setting of `Policy`, "no-healthy-row" or "broken-state"."""
    cap_count: int = 0
    """How many refused steps, generations or rollbacks it took to reach it."""
    cap_limit: float | None = None
    """What the policy sets as the limit."""
    bad_samples: tuple[int, ...] = ()
    """Samples of the batch that hold a NaN or an Inf, whether or not that is the cause."""
    same_as: int | None = None
    """The step of the first incident like this one, whose diagnosis holds for this one too."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.action not in ACTIONS:
            raise ValueError(f"unknown incident kind {self.kind!r} or action {self.action!r}")

    def __str__(self) -> str:
        return shown(wording.incident(self), _LONGEST)

    @property
    def outcome(self) -> str:
        """What was done about it, in words; empty where `action` says it all."""
        return wording.outcome(self)

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = _encode_tree(asdict(self))
        for f in fields(self):
            if f.name in _DECISION and getattr(self, f.name) == f.default:
                del plain[f.name]
        if plain.pop("terms"):
            plain["terms"] = _named(self.terms)
        return {"v": VERSION, **plain}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Incident:
        """The inverse of `to_json`. A record of version 1 has none of the fields that say what was
        decided."""
        values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        lists = ("undone", "left_out", "quarantined", "bad_samples")
        values |= {name: tuple(values[name]) for name in lists if isinstance(values.get(name), list)}
        values["culprits"] = tuple((name, decode(norm)) for name, norm in data["culprits"])
        values["terms"] = _pairs(data.get("terms", {}))
        for name in ("loss", "grad_norm"):
            values[name] = None if data[name] is None else decode(data[name])
        if data["diagnosis"] is not None:
            values["diagnosis"] = Diagnosis.from_json(data["diagnosis"])
        incident = cls(**values)
        check_incident(incident)
        return incident


_DECISION = (
    "remedy",
    "undone",
    "restored_step",
    "restored_from",
    "stepped_over",
    "attempt",
    "left_out",
    "quarantined",
    "cap",
    "cap_count",
    "cap_limit",
    "bad_samples",
    "same_as",
)
"""Fields of an incident that are written only where they say something."""


@dataclass(frozen=True, slots=True)
class Group:
    """Incidents that are the same trouble and were dealt with in the same way, as places in a list of incidents."""

    members: list[int]
    """Oldest first."""
    origin: int
    """The incident that `same_as` of the members names; the first member where it names none."""


def alike(incidents: Sequence[Incident]) -> list[Group]:
    """Group incidents that have one explanation: `same_as` names the same incident, or the same cause was found at the same
    place. Incidents that were not diagnosed are grouped if kind, culprits and bad terms of the loss are the same."""
    groups: dict[tuple[object, ...], Group] = {}
    for group in _named_alike(incidents):
        first, found = incidents[group.members[0]], incidents[group.origin].diagnosis
        if found is not None:
            why: tuple[object, ...] = (found.cause, found.where, found.fix)
        else:
            terms = tuple(name for name, value in first.terms if not math.isfinite(value))
            why = (first.same_as, tuple(name for name, _ in first.culprits), terms)
        there = groups.setdefault((first.kind, first.action, found is None, *why), group)
        if there is not group:
            there.members.extend(group.members)
    for group in groups.values():
        group.members.sort()
    return list(groups.values())


def _named_alike(incidents: Sequence[Incident]) -> list[Group]:
    """Group incidents by `same_as`. An incident without it, or whose `same_as` names no earlier incident, starts a group."""
    origins: dict[tuple[str, int], int | None] = {}
    groups: dict[tuple[int, str], Group] = {}
    for place, incident in enumerate(incidents):
        named = None if incident.same_as is None else origins.get((incident.kind, incident.same_as))
        origin = place if named is None else named
        groups.setdefault((origin, incident.action), Group([], origin)).members.append(place)
        key = (incident.kind, incident.step)
        before = origins.setdefault(key, origin)
        if before is not None and incident.diagnosis is not None:  # a step that the run went back to can go wrong in another way
            earlier = incidents[before].diagnosis
            same = earlier is None or (earlier.cause, earlier.where) == (incident.diagnosis.cause, incident.diagnosis.where)
            origins[key] = (before if earlier is not None else place) if same else None
    return list(groups.values())


def halt(incidents: Sequence[Incident], newest: int | None) -> Incident | None:
    """Return the incident that halted a run for good: its last one, with no later step. `newest`: the newest step."""
    last = incidents[-1] if incidents else None
    return last if last is not None and last.action == "halted" and (newest is None or newest <= last.step) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Something is on its way, and has not happened yet. Not an incident: nothing was refused."""

    step: int
    """The step after which it was seen coming."""
    kind: str
    message: str
    where: str | None = None
    """The module or parameter, of several the one that gets there first."""
    steps: float | None = None
    """In how many steps, at this rate."""
    margin: float | None = None
    """Steps more or less."""
    also: tuple[str, ...] = ()
    """Other places of which the same can be said."""

    def __post_init__(self) -> None:
        if self.kind not in FORECASTS:
            raise ValueError(f"unknown kind of forecast {self.kind!r}")

    def __str__(self) -> str:
        return shown(wording.forecast(self), _LONGEST)

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = _encode_tree(asdict(self))
        return {"v": VERSION, **plain}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Forecast:
        values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        numbers = {name: decode(values[name]) for name in ("steps", "margin") if values.get(name) is not None}
        forecast = cls(**{**values, **numbers, "also": tuple(values.get("also", ()))})
        check_forecast(forecast)
        return forecast


def encode(x: float | None) -> float | str | None:
    """A number as strict JSON can hold it: six significant digits, non-finite ones as strings."""
    if x is None:
        return None
    if math.isfinite(x):
        return float(f"{x:.6g}")
    return "nan" if x != x else "inf" if x > 0 else "-inf"


def _number(x: float) -> str:
    """The text of a number in strict JSON, as `encode` has it."""
    if x - x == 0:  # finite
        return f"{x:.6g}"
    return '"nan"' if x != x else '"inf"' if x > 0 else '"-inf"'


@lru_cache(maxsize=1000)
def _quoted(text: str) -> str:
    return json.dumps(text)


def decode(x: float | str) -> float:
    return float(x)


def _named(pairs: Iterable[tuple[str, float]]) -> dict[str, float | str | None]:
    return {name: encode(value) for name, value in pairs}


def _pairs(named: Mapping[str, float | str]) -> tuple[tuple[str, float], ...]:
    return tuple((name, decode(value)) for name, value in named.items())


def _numbers(values: Iterable[float]) -> list[float | str | None]:
    """An array as JSON; what is absent is null."""
    return [None if x == ABSENT else encode(x) for x in values]


def _array(values: Iterable[float | str | None]) -> array[float]:
    return array("d", (ABSENT if x is None else decode(x) for x in values))


def _encode_tree(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _encode_tree(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [_encode_tree(v) for v in x]
    return encode(x) if isinstance(x, float) else x


def line(data: Mapping[str, Any]) -> str:
    """One line of strict JSON; raises on a bare NaN rather than write what no reader accepts."""
    return _dumps(data) + "\n"


def _dumps(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


NOT_A_RECORD = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""What making a record of something else raises."""


def read_steps(path: str | Path) -> Iterator[StepRecord]:
    """The steps of a run, from its folder or its `steps.jsonl`. A run that was resumed into the
    same folder repeats the steps it took again.

    Of older steps the norms of each parameter are thinned: such a record has no `names` and no `norms`.
    A line that is not a record is skipped, and counted in one warning at the end. Raises OSError if
    the file cannot be read."""
    path = Path(path)
    path = path / STEPS if path.is_dir() else path
    names: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    with Norms(path.parent if path.name == STEPS else None) as norms:

        def record(data: Any) -> StepRecord | None:
            nonlocal names, sites
            if data["kind"] == "header":
                names, sites = tuple(data["names"]), tuple(data.get("sites", ()))
            return norms.with_norms(StepRecord.from_json(data, names, sites)) if data["kind"] == "step" else None

        yield from _records(path, step_lines(path), record)


class Norms:
    """Finds the norms of steps in the `norms.bin` of a folder, as it is now. Without one, or with a
    damaged one, it finds fewer."""

    _MOST = 2_000_000
    """Blocks that are found again."""

    def __init__(self, folder: Path | None) -> None:
        self._file: BinaryIO | None = None
        self._reader = blocks.BlockReader()
        self._places: dict[tuple[int, float | None], int] = {}
        if folder is not None:
            with suppress(OSError):
                self._file = open_regular(folder / blocks.NORMS)

    def __enter__(self) -> Norms:
        with suppress(OSError):
            for block, payload in self._reader.blocks(self._file) if self._file is not None else ():
                if block.kind == blocks.HEADER:
                    self._reader.take_header(block, payload)
                elif len(self._places) < self._MOST:
                    self._places[block.key] = block.offset
        return self

    def __exit__(self, *why: object) -> None:
        if self._file is not None:
            self._file.close()

    def with_norms(self, record: StepRecord) -> StepRecord:
        """Return the step with its norms and what was observed, if they are there."""
        place = self._places.get((record.step, record.time))
        if place is None or self._file is None or record.names:
            return record
        try:
            block, payload = next(blocks.BlockReader(place).blocks(self._file))
            return with_columns(record, *self._reader.names_of(block), blocks.unpacked_columns(payload))
        except (OSError, StopIteration, *NOT_A_RECORD):
            return record


def with_columns(record: StepRecord, names: tuple[str, ...], sites: tuple[str, ...], columns: Mapping[str, Any]) -> StepRecord:
    """Return a step with what a block of `norms.bin` holds. Raises ValueError if it is of other names."""
    norms, observed = _numeric(columns.get("norms")), Observed.from_columns(columns, sites)
    if len(norms) != len(names) or (observed is not None and len(observed.absmax) != len(sites)):
        raise ValueError("a block for other names")
    return replace(record, names=names, norms=norms, observed=observed)


def read_incidents(path: str | Path) -> Iterator[Incident]:
    """The incidents of a run, from its folder or its `incidents.jsonl`; lines that are not records
    as in `read_steps`."""
    return _read(path, "incidents.jsonl", lambda data: None if data["kind"] == "gap" else Incident.from_json(data))


def read_forecasts(path: str | Path) -> Iterator[Forecast]:
    """The forecasts of a run, from its folder or its `forecasts.jsonl`; lines that are not records
    as in `read_steps`. A folder without that file has none: it is made with the first one."""
    if Path(path).is_dir() and not (Path(path) / "forecasts.jsonl").exists():
        return iter(())
    return _read(path, "forecasts.jsonl", lambda data: None if data["kind"] == "gap" else Forecast.from_json(data))


def _read(path: str | Path, name: str, make: Callable[[Any], Kind | None]) -> Iterator[Kind]:
    """What the lines of a file hold; one cut short by a kill is left out."""
    path = Path(path)
    path = path / name if path.is_dir() else path
    with open_regular(path) as file:
        yield from _records(path, whole_lines(file), make)


def _records(path: Path, lines: Iterable[bytes], make: Callable[[Any], Kind | None]) -> Iterator[Kind]:
    broken = 0
    for text in lines:
        try:
            record = make(parse_json(text))
        except NOT_A_RECORD:
            broken += 1
            continue
        if record is not None:
            yield record
    if broken:
        log.warning("nanproof: %d line(s) of %s are not records and were skipped", broken, path)
