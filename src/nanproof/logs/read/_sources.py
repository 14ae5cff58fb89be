"""From what the user named to points: which files are logs, what each of them is, and the reader for it.

    for source in find(["runs/", "train.log", "-"]):
        for item in read(source):
            ...

Formats are told by content. Files of one run that continue each other (rotated logs, TensorBoard's event files of one folder)
are one source; of several checkpoints of one run only the newest `trainer_state.json` counts, since it has the whole history.
"""

from __future__ import annotations

import glob
import io
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

from nanproof._access import open_regular, parse_json
from nanproof._errors import UsageError
from nanproof.files._parts import STEPS, earlier, is_part, number_of, part_lines
from nanproof.logs._points import Item, singly
from nanproof.logs.read import _files as files
from nanproof.logs.read import _tables as tables
from nanproof.logs.read import _tensorboard as tensorboard
from nanproof.logs.read import _wandb as wandb
from nanproof.logs.read._documents import json_document, notebook
from nanproof.logs.text._text import TextReader

FORMATS = (
    "transformers trainer_state",
    "text",
    "JSON",
    "JSON lines",
    "CSV",
    "TensorBoard",
    "Weights & Biases",
    "nanproof",
    "notebook",
)
LOOKED_FOR = "trainer_state.json, *.log, *.out, *.err, *.txt, *.jsonl, *.csv, events.out.tfevents.*, *.wandb, and these with .gz"

_LOG = re.compile(r"trainer_state\.json|.*\.(log|out|err|txt|jsonl|csv|wandb)|events\.out\.tfevents\..*|log_history\.json", re.I)
_ROTATED = re.compile(r"(.+\.(?:log|out|err|txt|jsonl))[.-](\d+)", re.I)
_UNSURE = re.compile(r".*\.(txt|csv|jsonl)(\.gz)?", re.I)
"""Names that data and lists of words have too: such a file is a log if its start holds a point or a note."""
_NEVER = {
    "incidents.jsonl",
    "forecasts.jsonl",
    "requirements.txt",
    "merges.txt",
    "vocab.txt",
    "license.txt",
    "debug.log",
    "debug-internal.log",
    "debug-core.log",
}
_SKIPPED_FOLDERS = {".git", "__pycache__", "node_modules", ".venv", "venv", "site-packages"}
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_PROBE = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """One log: a file, several that continue each other, or standard input."""

    path: str
    """As the user may find it; "-" is standard input."""
    format: str
    """One of `FORMATS`."""
    size: int | None
    """Bytes on disk; None for standard input and other pipes."""
    files: tuple[Path, ...] = ()
    """In the order in which they were written."""
    stream: io.BufferedReader | None = field(default=None, repr=False, compare=False)
    """A pipe, of which the head was looked at."""


def find(paths: Sequence[str | Path]) -> list[Source]:
    """The logs that `paths` name: files, folders that are searched, or "-"."""
    chosen: list[Path] = []
    sources: list[Source] = []
    for given in paths or ["."]:
        path = Path(given)
        if str(given) == "-":
            sources.append(_of_stream("-", files.unpacked(sys.stdin.buffer)))
        elif path.is_dir():
            found = _in_folder(path)
            if not found:
                raise UsageError(
                    f"no log was found in {path}: looked for {LOOKED_FOR}. Name a file to read it whatever it is called"
                )
            chosen += found
        elif path.is_file():
            chosen.append(path)
        elif path.exists():  # a pipe can be opened once
            sources.append(_of_stream(str(path), _open_pipe(path)))
        else:
            matches = [Path(match) for match in sorted(glob.glob(str(given))) if Path(match).is_file()]
            if not matches:
                raise UsageError(f"{path} does not exist")
            chosen += matches
    sources += [_source(group) for group in _grouped(_unique(chosen))]
    return sources


def _of_stream(path: str, stream: io.BufferedReader) -> Source:
    return Source(path, format_of(files.head(stream)), None, (), stream)


def read(source: Source) -> Iterator[Item]:
    """Points and notes in the order of the log. Needs little memory, however large the log is."""
    if source.stream is not None:
        yield from _read_stream(source.stream, source.format)
    elif source.format == "text":
        yield from TextReader().read(chain.from_iterable(map(_blocks, source.files)))
    elif source.format == "TensorBoard":
        yield from tensorboard.points(chain.from_iterable(map(_events, source.files)))
    else:
        for path in source.files:
            if source.format == "nanproof" and is_part(path):
                yield from tables.json_lines(text for text, _ in part_lines(path))
                continue
            with closing(_open(path)) as stream:
                yield from _read_stream(stream, source.format, _tail(path))


def format_of(head: bytes) -> str:
    """By the first bytes, after unpacking."""
    if head.startswith(wandb.MAGIC):
        return "Weights & Biases"
    if tensorboard.is_events(head):
        return "TensorBoard"
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        head = head[: len(head) // 2 * 2].decode("utf-16", "replace").encode()
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    first, _, rest = text.partition(b"\n")
    if text[:1] == b"{":
        if (found := _json_lines(first, not rest.strip())) is not None:
            return found
        if b'"cell_type"' in head and b'"log_history"' not in head:
            return "notebook"
        if b'"log_history"' in head:
            return "transformers trainer_state"
        if re.match(rb'\{\s*"(?:[^"\\]|\\.)*"\s*:', text) and not first.rstrip().endswith(b"}"):
            return "JSON"
    if re.match(rb"\[\s*\{\s*\"", text):
        return "JSON"
    if tables.is_table(first, rest.partition(b"\n")[0]):
        return "CSV"
    return "text"


def _json_lines(first: bytes, alone: bool) -> str | None:
    if re.match(rb'\{"v":\d+,"kind":"(?:opened|header|step|part|thinned)"', first):
        return "nanproof"  # its first line may be longer than the head
    try:
        data = parse_json(first)
    except ValueError:
        return None
    if not isinstance(data, dict):
        return None
    if "log_history" in data:
        return "transformers trainer_state"
    if isinstance(data.get("cells"), list):
        return "notebook"
    columns = alone and any(isinstance(value, list) and len(value) > 1 for value in data.values())
    return "JSON" if columns else "JSON lines"


def _open(path: Path) -> io.BufferedReader:
    try:
        return files.unpacked(open_regular(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error


def _open_pipe(path: Path) -> io.BufferedReader:
    """What the user named, for which somebody else writes: a pipe, such as `<(ssh host cat train.log)`, or a terminal."""
    try:
        raw: BinaryIO = open(path, "rb", buffering=0)  # noqa: SIM115  # the caller closes what is wrapped
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    if not (stat.S_ISFIFO(os.fstat(raw.fileno()).st_mode) or raw.isatty()):
        raw.close()
        raise UsageError(f"{path} cannot be read: it is a device or a socket, not a log")
    return files.unpacked(raw)


def _blocks(path: Path) -> Iterator[bytes]:
    with closing(_open(path)) as stream:
        yield from files.blocks(stream)
    yield b"\n"  # the next file starts a new line


def _events(path: Path) -> Iterator[bytes]:
    with closing(_open(path)) as stream:
        yield from tensorboard.records(stream)


def _read_stream(stream: io.BufferedReader, format: str, tail: bytes = b"") -> Iterator[Item]:
    if format == "Weights & Biases":
        yield from wandb.points(stream)
    elif format == "TensorBoard":
        yield from tensorboard.points(tensorboard.records(stream))
    elif format in ("JSON lines", "nanproof"):
        yield from tables.json_lines(files.whole_lines(stream))
    elif format == "CSV":
        yield from tables.csv_rows(files.lines(stream))
    elif format == "notebook":
        yield from TextReader().read(notebook(stream))
    elif format in ("JSON", "transformers trainer_state"):
        yield from json_document(stream, tail)
    else:
        yield from TextReader().read(files.blocks(stream))


def _tail(path: Path) -> bytes:
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        return file.read(4096)


# -- which files -----------------------------------------------------------------------------------------------------------


def _in_folder(folder: Path) -> list[Path]:
    """Logs by name. Links to folders are not followed, so there are no loops."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        for name in sorted(names):
            plain = name[:-3] if name.lower().endswith(".gz") else name
            if name.lower() in _NEVER or not (_LOG.fullmatch(plain) or _ROTATED.fullmatch(plain)):
                continue
            path = Path(place) / name
            if is_part(path):  # of the steps.jsonl above it, with which it is read
                continue
            if not path.is_file() or not os.access(path, os.R_OK):
                continue
            if _UNSURE.fullmatch(name) is None or _holds_something(path):
                found.append(path)
    return _newest_states(found)


def _holds_something(path: Path) -> bool:
    try:
        with closing(_open(path)) as stream:
            start = stream.read(_PROBE)
    except (UsageError, OSError):
        return False
    if start[:2] not in (b"\xff\xfe", b"\xfe\xff") and b"\x00" in start[:4096]:
        return False
    whole = start[: start.rfind(b"\n") + 1] or start
    format = format_of(whole[: files.HEAD])
    if format == "nanproof":
        return True  # a run that failed in its first step has incidents, and no point
    items = singly(_read_stream(files.unpacked(io.BytesIO(whole)), format))
    try:
        return next(islice(items, 1), None) is not None
    except UsageError:
        return False


def _newest_states(found: list[Path]) -> list[Path]:
    """Without the `trainer_state.json` of checkpoints that a later one of the same run repeats."""
    newest: dict[Path, tuple[int, Path]] = {}
    for path in found:
        if path.name == "trainer_state.json":
            checkpoint = _CHECKPOINT.fullmatch(path.parent.name)
            run = path.parent.parent if checkpoint else path.parent
            step = _global_step(path)
            order = step if step is not None else int(checkpoint[1]) if checkpoint else 0
            if run not in newest or order >= newest[run][0]:
                newest[run] = order, path
    kept = {path for _, path in newest.values()}
    return [path for path in found if path.name != "trainer_state.json" or path in kept]


def _global_step(path: Path) -> int | None:
    try:
        with open_regular(path) as file:
            match = re.search(rb'"global_step"\s*:\s*(\d+)', file.read(4096))
    except OSError:
        return None
    return int(match[1]) if match is not None else None


def _unique(paths: Iterable[Path]) -> list[Path]:
    seen: dict[Path, Path] = {}
    for path in paths:
        seen.setdefault(path.resolve(), path)
    return list(seen.values())


def _grouped(paths: list[Path]) -> list[list[Path]]:
    """Files that continue each other, oldest first. The order of the rest is kept."""
    groups: dict[tuple[Path, str], list[tuple[float, str, Path]]] = {}
    for path in paths:
        plain = path.name[:-3] if path.name.lower().endswith(".gz") else path.name
        rotated = _ROTATED.fullmatch(plain)
        if plain.startswith("events.out.tfevents."):
            key, order = "events", 0.0
        elif rotated is not None:  # log.2 is older than log.1, log-20240101 older than log-20240102
            count = int(rotated[2])
            key, order = rotated[1], float(count if count > 10_000 else -count)
        else:
            key, order = plain, float("inf")
        groups.setdefault((path.parent, key), []).append((order, path.name, path))
    return [[path for _, _, path in sorted(group)] for group in groups.values()]


def _source(paths: list[Path]) -> Source:
    with closing(_open(paths[-1])) as stream:
        head = files.head(stream)
    format = format_of(head)
    if format == "nanproof" and paths[-1].name == STEPS:
        with open_regular(paths[-1]) as file:
            paths = [*(path for _, path in earlier(paths[-1].parent, number_of(file))), *paths]
    size = sum(path.stat().st_size for path in paths)
    name = str(paths[-1]) if len(paths) == 1 or not paths[0].name.startswith("events") else str(paths[0].parent)
    return Source(name, format, size, tuple(paths))
