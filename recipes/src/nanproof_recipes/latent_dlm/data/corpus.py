"""Text as the recipe reads it: bytes, with an end after every document, cut into windows."""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from nanproof import UsageError
from nanproof_recipes.latent_dlm.data.docstrings import SEPARATOR
from nanproof_recipes.library import printable

log = logging.getLogger("nanproof")

END = 256
"""After the last byte of a document."""
MASK = 257
"""Stands for a token that is to be predicted."""
PAD = 258
"""Fills a window; never predicted, never part of a loss."""
OUT = 257
"""Ids that can be predicted: the bytes and END."""
IDS = 259
"""Ids that can be read."""

SHIPPED = "docstrings.txt.gz"
SHA256 = "8d1982208e7ca1c5a08005d0597de5ee6435d20d6d92cdfef375984ea1ffe7d9"
"""Of the shipped text, unpacked."""
_HIDDEN_MASK = "\N{LIGHT SHADE}".encode()


def documents(source: str | Path | None = None) -> list[bytes]:
    """Of a file or folder, or those that ship. Form feeds separate documents inside a file; otherwise a file is one."""
    if source is None:
        return _shipped().split(SEPARATOR)
    root = Path(os.path.expanduser(source))
    if not os.path.exists(root):  # unlike Path.exists, False too for a name that no file can have
        raise UsageError(f"data.text: {printable(str(source))} is not there. Give a file, a folder of text files, or null")
    found = [part for path in ([root] if not root.is_dir() else sorted(_below(root))) for part in _read(path)]
    if not found:
        raise UsageError(f"data.text: no text was found in {printable(str(source))}")
    return found


def _shipped() -> bytes:
    try:
        text = gzip.decompress((files("nanproof_recipes.latent_dlm.data") / "assets" / SHIPPED).read_bytes())
    except (OSError, EOFError, zlib.error):
        text = b""
    if hashlib.sha256(text).hexdigest() != SHA256:
        raise UsageError(f"{SHIPPED}, the text of this recipe, is missing or damaged. Install nanproof-recipes again")
    return text


def _below(root: Path) -> Iterator[Path]:
    """Every file that is not hidden. Linked folders are followed, each folder once: links may run in a circle."""
    seen = set()
    for folder, inside, names in os.walk(root, followlinks=True, onerror=_skipped):
        try:
            about = os.stat(folder)
        except OSError as error:
            _skipped(error)
            continue
        place = (about.st_dev, about.st_ino)
        if place in seen:
            inside.clear()
            continue
        seen.add(place)
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _read(path: Path) -> list[bytes]:
    """Its documents; none, with a line in the log, where it is no text."""
    try:
        if not path.is_file():  # a pipe would be waited for, a link may lead nowhere
            raise OSError(0, "not a file")
        text = path.read_bytes()
    except OSError as error:
        _skipped(error, path)
        return []
    if b"\0" in text[:8192]:
        _skipped(OSError(0, "binary"), path)
        return []
    return [part for part in text.split(SEPARATOR) if part.strip()]


def _skipped(error: OSError, path: Path | None = None) -> None:
    where = printable(str(path if path is not None else error.filename))
    log.warning("nanproof: %s was left out: %s", where, error.strerror or type(error).__name__)


def split(docs: Sequence[bytes], share: float, seed: int) -> tuple[list[bytes], list[bytes]]:
    """Documents to train on, and that share of them to be tested on. No text is in both, and which goes where depends on the
    texts and the seed alone, not on their order."""
    if not 0 < share < 1:
        raise UsageError(f"data.valid_share={share}: a number above 0 and below 1 is needed")
    mixed = sorted(set(docs), key=lambda text: hashlib.sha256(b"%d\n" % seed + text).digest())
    if len(mixed) == 1 and len(mixed[0]) > 1:
        text = mixed[0]
        cut = min(max(round(len(text) * (1 - share)), 1), len(text) - 1)
        return [text[:cut]], [text[cut:]]
    if len(mixed) < 2:
        raise UsageError("data.text: too little text to train on one part and test on another")
    count = min(max(round(len(mixed) * share), 1), len(mixed) - 1)
    return mixed[count:], mixed[:count]


def windows(docs: Sequence[bytes], length: int, packed: bool) -> Tensor:
    """[N, length], int64. Packed: documents follow each other, and only the last window is padded. Otherwise each document starts
    a window of its own."""
    if length < 1:
        raise UsageError(f"model.text_length={length}: a window needs a token or more")
    step = 1 if packed else length
    sizes = [-(-(len(text) + 1) // step) * step for text in docs]  # with END, rounded up to whole windows unless packed
    ids = torch.full((-(-sum(sizes) // length) * length,), PAD, dtype=torch.int64)
    at = 0
    for text, size in zip(docs, sizes, strict=True):
        if text:
            ids[at : at + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        ids[at + len(text)] = END
        at += size
    return ids.view(-1, length)


def decode(ids: Tensor | Sequence[int], past_end: bool = False) -> str:
    """Ids of one window as text, up to the first END; with `past_end` all of them, END as a line break. A mask is shown as
    a light shade. Bytes that are no UTF-8 are replaced; control characters are left for whoever prints it."""
    out = bytearray()
    for token in ids.reshape(-1).tolist() if isinstance(ids, Tensor) else ids:
        if not 0 <= token < IDS:
            raise UsageError(f"{token} is no id of this recipe: they are 0 to {IDS - 1}")
        if token == END and not past_end:
            break
        if token < 256:
            out.append(token)
        elif token != PAD:
            out += b"\n" if token == END else _HIDDEN_MASK
    return out.decode("utf-8", "replace")
