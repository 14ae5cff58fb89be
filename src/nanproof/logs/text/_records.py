"""One value a line: the tables of Stable-Baselines, the summaries of rsl_rl, a piece of a `trainer_state.json`.

Lines below each other with different names are one point. A name that comes again begins the next.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from nanproof.logs.text._forms import EPOCH, STEP, Pairs
from nanproof.logs.text._names import is_reward, meaning
from nanproof.logs.text._values import ANY, parse, plain

MOST = 100
"""Lines that are looked at before and after one that has a value alone."""
_GAP = 3
"""Lines between the values of one point that say something else."""
_LINE = re.compile(
    rb"[ \t|>]*[\"']?([A-Za-z][\w ./()%@-]{0,60}?)[\"']?[ \t]*[:=|][ \t]*[\"']?("
    + ANY
    + rb")[\"']?[ \t]*(?:[|,]|\([-+.\deEnaif]{1,24}\))?[ \t]*\r?"
)
_STAMPED = re.compile(
    rb"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?\s{0,3}\| +([A-Za-z][\w ./()%@-]{0,60}?)\s{2,}(" + ANY + rb")[ \t]*\r?"
)
"""rlpyt's and rllab's: the time, a bar, and a column for the values."""
_HEADING = re.compile(
    rb"[\s=#*-]*(?:Learning |Training )?(epoch|iteration|step|round)\s?[#:]?\s?(\d{1,9})(?:\s?/\s?\d{1,9})?[\s=#*:-]*", re.I
)
_COMPOSER = re.compile(rb"(?:\[epoch=\d{1,9}\])?\[batch=(\d{1,15})/(\d{1,15})\]:\s*")
_COQUI = re.compile(rb"\s*-+> STEP: \d{1,15}/\d{1,15} -- GLOBAL_STEP: (\d{1,15})\s*")
_OLMO = re.compile(rb"\[step=(\d{1,15})/(\d{1,15})(?:,epoch=(\d{1,9}))?\]\s*$")
_EDGE = re.compile(rb"[{}\[\],\s]+|\s*[-=#*]{8,}.*")
_OTHER = re.compile(rb"loss|grad|nan|error|traceback", re.I)


@dataclass(slots=True)
class Record:
    """Names and values that belong together."""

    pairs: Pairs = field(default_factory=list)
    names: set[bytes] = field(default_factory=set)
    lines: list[int] = field(default_factory=list)
    """Of each pair: how many lines below the first."""
    settings: dict[str, float] = field(default_factory=dict)
    start: int = 0
    """Where its first line begins."""


def is_value(text: bytes) -> bool:
    """Whether a line is a name and a value, and nothing else."""
    return len(text) <= 200 and _pair(text) is not None


def _pair(text: bytes) -> re.Match[bytes] | None:
    return _LINE.fullmatch(text) or (_STAMPED.fullmatch(text) if b" | " in text[:40] else None)


def records(data: bytes, low: int, start: int) -> tuple[list[Record], int, int]:
    """The points around the line that starts at `start`, back to `low` at most; the place where they begin, and where they end.
    No points where fewer than three values stand together."""
    begin = _first(data, low, start)
    found, last = _parsed(data, begin, start)
    whole = [record for record in found if record.pairs]
    if max((len(record.names) for record in whole), default=0) < 3:
        return [], begin, last
    return whole, begin, last


def unfinished(data: bytes) -> int:
    """Where the values begin that the next block may go on with; the end of `data` if there are none."""
    begin = _first(data, 0, len(data)) if data.endswith(b"\n") else len(data)
    found, _ = _parsed(data, begin, len(data))
    return max((record.start for record in found if record.pairs), default=begin)


def _parsed(data: bytes, begin: int, start: int) -> tuple[list[Record], int]:
    """Records from `begin` on, beyond `start` as long as there are values, and where they end."""
    found: list[Record] = [Record()]
    at, last, gap = begin, begin, 0
    for line in range(2 * MOST):
        end = data.find(b"\n", at)
        end = len(data) if end < 0 else end
        text = plain(data[at : min(end, at + 201)])
        if at >= len(data) or (gap > _GAP and at > start):
            break
        gap = 0 if _take(found, text, line, at) else gap + 1
        if gap and _OTHER.search(text):
            break
        at, last = end + 1, last if gap else end
    else:
        if len(found) > 1 and found[-1].names:  # the last may go on
            last = found.pop().start
    return found, last


def _take(found: list[Record], text: bytes, line: int, at: int) -> bool:
    if len(text) > 200:
        return False
    if (heading := _headed(text)) is not None:
        pairs, total = heading
        found.append(Record(pairs, {b""}, [line] * len(pairs), {} if total is None else {"steps": total}, at))
        return True
    if _EDGE.fullmatch(text) and text.strip():
        found.append(Record())
        return True
    match = _pair(text)
    if match is None:
        return False
    name = match[1].strip()
    if is_reward(name.decode("ascii", "replace")):
        found[-1].settings["rewards"] = 1.0
    if name in found[-1].names:
        found.append(Record())
    if not found[-1].names:
        found[-1].start = at
    found[-1].names.add(name)
    known = meaning(name.decode("ascii", "replace"))
    if known is not None:
        found[-1].pairs.append((known, parse(match[2])))
        found[-1].lines.append(line)
    return True


def _headed(text: bytes) -> tuple[Pairs, float | None] | None:
    """The step or the epoch that a line names, and nothing else; and the steps that are planned."""
    if (heading := _HEADING.fullmatch(text)) is not None:
        return [(EPOCH if heading[1].lower() == b"epoch" else STEP, float(heading[2]))], None
    if (batch := _COMPOSER.fullmatch(text)) is not None:
        return [(STEP, float(batch[1]))], float(batch[2])
    if (trained := _COQUI.fullmatch(text)) is not None:
        return [(STEP, float(trained[1]))], None
    if b"[step=" in text and (logged := _OLMO.search(text)) is not None:
        epoch = [] if logged[3] is None else [(EPOCH, float(logged[3]))]
        return [(STEP, float(logged[1])), *epoch], float(logged[2])
    return None


def _first(data: bytes, low: int, start: int) -> int:
    """Where the values begin that stand without a gap before a line."""
    begin, at, gap = start, start, 0
    for _ in range(MOST):
        if at <= low:
            break
        before = data.rfind(b"\n", low, at - 1) + 1
        before = max(before, low)
        text = plain(data[before : at - 1])
        if len(text) > 200:
            break
        fits = _pair(text) or _headed(text)
        if not fits and (gap >= _GAP or _EDGE.fullmatch(text) or _OTHER.search(text)):
            break
        gap = 0 if fits else gap + 1
        begin, at = before if fits else begin, before
    return begin
