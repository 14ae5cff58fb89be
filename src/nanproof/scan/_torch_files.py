"""Loading what torch.save wrote, after a look at what the file asks for. Every `torch.load` of the library goes through here.

`weights_only=True` lets no code run. It does not keep a file from asking for all memory: see `_pickles` and `_archives`.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import torch

from nanproof._access import OddFile, open_regular
from nanproof._errors import NanproofError, RefusedFile
from nanproof.scan._archives import ZIP, Record, records
from nanproof.scan._inside import UnreadableFile, first_line
from nanproof.scan._pickles import Suspicious, check_pickle

MOST_PICKLE = 256 << 20
"""Bytes of a pickle. The tensors lie beside it, so that it needs about a hundred bytes for each."""
_PIECE = 4 << 20
_MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
_WIDTHS = {"Double": 8, "Long": 8, "ComplexDouble": 16, "ComplexFloat": 8, "Float": 4, "Int": 4, "QInt32": 4}
_WIDTHS |= {"Half": 2, "BFloat16": 2, "Short": 2, "UInt16": 2, "UInt32": 4, "UInt64": 8, "ComplexHalf": 4}


def load_torch(path: Path, *, mmap: bool = False) -> Any:
    """What a file of torch.save holds. Raises `RefusedFile`, or `UnreadableFile` if it is damaged."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            zipped = check_torch(file, path, 0, size)
            if not (mmap and zipped and _can_be_named(path)):
                file.seek(0)
                return _loaded(file, path)
        return _loaded(path, path, mmap=True)
    except OSError as error:
        raise UnreadableFile(error.strerror or str(error)) from error


def _can_be_named(path: Path) -> bool:
    """Whether torch can open a file by its name: not if the name is not UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def load_entry(data: bytes, name: str) -> Any:
    """The same for what lies in memory."""
    file = io.BytesIO(data)
    check_torch(file, Path(name), 0, len(data))
    file.seek(0)
    return _loaded(file, Path(name))


def check_torch(file: BinaryIO, path: Path, offset: int, length: int) -> bool:
    """Look at what torch.save wrote into this stretch of a file. Returns whether it is an archive (torch 1.6 and later)."""
    file.seek(offset)
    begins = file.read(4)
    try:
        if begins == ZIP:
            _check_archive(file, path, offset, length)
            return True
        if begins[:1] != b"\x80":  # how every pickle of torch.save begins
            raise UnreadableFile("the file is empty" if not begins else "neither safetensors nor a file of torch.save")
        _check_old(file, offset, length)
    except Suspicious as error:
        raise RefusedFile(path, str(error)) from None
    return False


def _loaded(source: Any, path: Path, **options: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old ways of saving, which are not the reader's business
            return torch.load(source, map_location="cpu", weights_only=True, **options)
    except (NanproofError, OddFile):
        raise
    except Exception as error:
        if "weights_only" in str(error) or "GLOBAL" in str(error):
            raise RefusedFile(path, f"it is more than tensors and plain values ({first_line(error)})") from error
        raise UnreadableFile(f"no whole file of torch.save ({first_line(error)})") from error


def _check_archive(file: BinaryIO, path: Path, offset: int, length: int) -> None:
    found = records(file, path, offset, length)
    prefix = next(iter(found), "").partition("/")[0]
    program = found.get(f"{prefix}/data.pkl")
    if program is None:
        raise UnreadableFile("no whole file of torch.save: it has no data.pkl")
    if program.size > MOST_PICKLE:
        raise Suspicious(f"its pickle has {program.size} bytes")

    def judge(kind: str, key: str, count: int) -> None:
        record = found.get(f"{prefix}/data/{key}")
        if record is None or not 0 <= _bytes(kind, count) <= record.size:
            have = "has none" if record is None else f"has {record.size}"
            raise UnreadableFile(f"it refers to {count} numbers of {kind}, and their record {have}")

    check_pickle(_read(file, program), length, judge)


def _check_old(file: BinaryIO, offset: int, length: int) -> None:
    """Five pickles one after another, and the numbers behind them: how torch saved before version 1.6."""
    claimed: set[str] = set()
    total = 0

    def judge(kind: str, key: str, count: int) -> None:
        nonlocal total
        total += _bytes(kind, count) if key not in claimed else 0
        claimed.add(key)
        if count < 0 or total > length:
            raise UnreadableFile(f"it refers to {count} numbers of {kind}, and the file has {length} bytes")

    file.seek(offset)
    data = file.read(min(length, _PIECE))
    whole = len(data) == length
    at = 0
    for _ in range(5 if data.startswith(_MAGIC) else 1):
        while True:
            try:
                at = check_pickle(data, length, judge, at)
                break
            except UnreadableFile:
                if whole:
                    raise
                more = file.read(min(3 * len(data), length - len(data), MOST_PICKLE))
                data += more
                whole = not more or len(data) >= min(length, MOST_PICKLE)


def _bytes(kind: str, count: int) -> int:
    return count * _WIDTHS.get(kind.removesuffix("Storage"), 1)


def _read(file: BinaryIO, record: Record) -> bytes:
    file.seek(record.start)
    data = file.read(record.size)
    if len(data) < record.size:
        raise OddFile(errno.EIO, "the file ends early")
    return data
