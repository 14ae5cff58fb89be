"""Which checkpoints lie under a path, and of which files each consists. Only names and folders are looked at here.

A folder is a collection if its folders or files are named after steps (checkpoint-100, step-00000100, epoch=3-step=900.ckpt);
each of these is one checkpoint, with everything beneath it. What else lies in the folder itself is one more, without a step.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanproof._access import open_regular, read_json
from nanproof._errors import RefusedFile
from nanproof.scan._inside import METADATA, UnreadableFile, first_line, path_inside
from nanproof.scan._manifest import MANIFEST

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
INDEX = ".index.json"
MOST_INDEX = 24 << 20
"""Bytes. The index of a model with 140,000 tensors has 14 MB."""
_STEP = re.compile(r"(?:step|checkpoint|ckpt|iter|batch)[-_=]?(\d+)", re.IGNORECASE)
_EPOCH = re.compile(r"epoch[-_=]?(\d+)", re.IGNORECASE)
_WITHOUT_WEIGHTS = ("training_args.bin", "rng_state*.pth", "random_states*")
"""Files that trainers put beside the weights, and that hold classes of theirs or states of random generators."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint and where it belongs."""

    root: Path
    """The folder in which it is compared with others."""
    path: Path
    step: int | None
    units: tuple[Path, ...]
    """What is read as one: a file, an index, or a folder of torch.distributed.checkpoint."""


def step_of(path: Path) -> int | None:
    """The step in a name, else its epoch."""
    match = (_STEP.search(path.name) or _EPOCH.search(path.name)) if "-of-" not in path.name else None
    return int(match[1]) if match else None


def is_dcp(folder: Path) -> bool:
    """Also where the save was cut short, and `.metadata`, which is written last, is missing."""
    return folder.is_dir() and (is_file(folder / METADATA) or any(folder.glob("*.distcp")))


def holds_no_weights(path: Path) -> bool:
    return any(fnmatch.fnmatch(path.name, pattern) for pattern in _WITHOUT_WEIGHTS)


def checkpoints(path: Path) -> list[Found]:
    """What lies under a path, in the order of its steps."""
    if not path.is_dir() or (step_of(path) is not None and not _holds_several(path)):
        units = tuple(_units(path)) if path.is_dir() else (path,)
        return [Found(path.absolute().parent, path, step_of(path), units)]
    return sorted(_collected(path), key=lambda f: (str(f.root), f.step is None, f.step or 0, f.path.name))


def _holds_several(folder: Path) -> bool:
    """A folder of checkpoints whose own name has a number: it has nothing but folders that are named after steps."""
    inside = [path for path in folder.iterdir() if not path.name.startswith(".")]
    steps = [path for path in inside if path.is_dir() and step_of(path) is not None]
    return len(steps) > 1 and not any(not path.is_dir() and is_readable(path) for path in inside)


def _collected(folder: Path) -> Iterator[Found]:
    own: list[Path] = [folder] if is_dcp(folder) else []
    other_folders = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or (path.is_dir() and (path.is_symlink() or _is_bundle(path))):
            continue  # a link like 'latest' leads to what is found anyway
        if path.is_dir():
            if step_of(path) is not None:
                yield Found(folder, path, step_of(path), tuple(_units(path)))
            else:
                other_folders.append(path)
        elif is_readable(path):
            if step_of(path) is not None and not path.name.endswith(INDEX):
                yield Found(folder, path, step_of(path), (path,))
            else:
                own.append(path)
    if own:
        beneath = [unit for inner in other_folders for unit in _units(inner)]
        yield Found(folder, folder, None, tuple(_indices_first(own) + beneath))
    else:
        for inner in other_folders:
            if os.access(inner, os.R_OK | os.X_OK):
                yield from _collected(inner)
            else:
                yield Found(folder, inner, None, (inner,))


def _units(folder: Path) -> Iterator[Path]:
    """Everything readable beneath a folder."""
    if is_dcp(folder):
        yield folder
    try:
        inside = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    except PermissionError:
        yield folder  # whoever reads it says why it cannot
        return
    yield from _indices_first([path for path in inside if not path.is_dir() and is_readable(path)])
    for path in inside:
        if path.is_dir() and not path.is_symlink() and not _is_bundle(path):
            yield from _units(path)


def is_readable(path: Path) -> bool:
    """By its name; a .bin that torch cannot have written is somebody's data."""
    if path.name.endswith(INDEX):
        return True
    if path.suffix not in SUFFIXES or path.is_dir():
        return False
    if path.suffix != ".bin" or not path.is_file():  # a pipe, or a link that leads nowhere: whoever reads it says so
        return True
    try:
        with open_regular(path) as file:
            return file.read(1) in (b"P", b"\x80", b"")
    except OSError:
        return True  # whoever reads it says what is wrong


def _indices_first(paths: list[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: not path.name.endswith(INDEX))


def _is_bundle(folder: Path) -> bool:
    """The folder of an incident holds bad numbers on purpose."""
    return is_file(folder / "incident.json") and is_file(folder / MANIFEST)


def is_file(path: Path) -> bool:
    """False also in a folder that may not be looked into."""
    try:
        return path.is_file()
    except PermissionError:
        return False


def shards(index: Path) -> dict[str, Path]:
    """The file of every tensor that an index names. Links are followed: the cache of the Hugging Face hub consists of them."""
    try:
        named = read_json(index, MOST_INDEX)["weight_map"]
        pairs = {str(tensor): str(name) for tensor, name in named.items()}
    except OSError as error:
        raise UnreadableFile(error.strerror or str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedFile(index, f"no index of shards ({first_line(error)})") from error
    return {tensor: path_inside(index.parent, name, index, links=True) for tensor, name in pairs.items()}
