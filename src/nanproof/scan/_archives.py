"""The archives that torch.save writes: zip files in which every record is stored as it is, one after another.

Zip leaves room for much more: records that are packed, upon each other, of one name, or described twice in different ways, so
that two programs see two files. torch never writes such a thing, and here it is refused. What is left, torch's own reader and
this one see alike.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nanproof._errors import RefusedFile
from nanproof.scan._inside import UnreadableFile

ZIP = b"PK\x03\x04"
MOST_RECORDS = 1 << 20
_END, _END64, _LOCATOR = struct.Struct("<4sHHHHIIH"), struct.Struct("<4sQHHIIQQQQ"), struct.Struct("<4sIQI")
_ENTRY, _HEADER = struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s5H3I2H")
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Record:
    """Where the bytes of a record lie in the file."""

    start: int
    size: int


def records(file: BinaryIO, path: Path, offset: int, length: int) -> dict[str, Record]:
    """The records of the archive that fills this stretch of a file, by name, in the order of their places."""
    try:
        count, at, size = _directory(file, offset, length)
        file.seek(offset + at)
        listed = file.read(size)
        found = sorted(_entries(listed, count, path), key=lambda entry: entry[2])
        return _placed(file, path, offset, at, found)
    except struct.error:
        raise UnreadableFile("no whole archive of torch.save") from None


def _directory(file: BinaryIO, offset: int, length: int) -> tuple[int, int, int]:
    """How many records there are, and where the list of them lies within the archive."""
    file.seek(offset + max(0, length - _END.size))
    mark, disk, first, here, count, size, at, comment = _END.unpack(file.read(_END.size))
    if mark != b"PK\x05\x06" or comment:
        raise UnreadableFile("no whole archive of torch.save: it does not end as one")
    end = length - _END.size
    if end >= _LOCATOR.size:
        file.seek(offset + end - _LOCATOR.size)
        mark, _, place, _ = _LOCATOR.unpack(file.read(_LOCATOR.size))
        if mark == b"PK\x06\x07":
            end -= _LOCATOR.size + _END64.size
            if end < 0 or place != end:
                raise UnreadableFile("no whole archive of torch.save: its end is somewhere else")
            file.seek(offset + end)
            mark, rest, _, _, disk, first, here64, count64, size64, at64 = _END64.unpack(file.read(_END64.size))
            told = ((here, here64, _FULL16), (count, count64, _FULL16), (size, size64, _FULL32), (at, at64, _FULL32))
            if mark != b"PK\x06\x06" or rest != 44 or any(short not in (long, full) for short, long, full in told):
                raise UnreadableFile("no whole archive of torch.save: it ends in two ways")
            here, count, size, at = here64, count64, size64, at64
    if disk or first or here != count or at + size != end:
        raise UnreadableFile("no whole archive of torch.save: the list of its records is somewhere else")
    if count > MOST_RECORDS or count * _ENTRY.size > size:
        raise UnreadableFile(f"it claims to have {count} records")
    return count, at, size


def _entries(listed: bytes, count: int, path: Path) -> list[tuple[bytes, int, int]]:
    """(name, size, place of its header) of every record."""
    found, names, at = [], set(), 0
    for _ in range(count):
        entry = _ENTRY.unpack_from(listed, at)
        mark, flags, method, packed, size = entry[0], entry[3], entry[4], entry[8], entry[9]
        name_length, extra, comment, place = entry[10], entry[11], entry[12], entry[16]
        at += _ENTRY.size
        name = listed[at : at + name_length]
        more = listed[at + name_length : at + name_length + extra]
        at += name_length + extra + comment
        if mark != b"PK\x01\x02" or at > len(listed) or comment:
            raise UnreadableFile("no whole archive of torch.save: the list of its records is damaged")
        if _FULL32 in (size, packed, place):
            size, packed, place = _large(more, size, packed, place)
        shown = name.decode("utf-8", "replace")[:200]
        if method or size != packed or flags & 1:
            raise RefusedFile(path, f"its record {shown!r} is compressed, which torch.save never does")
        if name in names:
            raise RefusedFile(path, f"its record {shown!r} is there twice")
        names.add(name)
        found.append((name, size, place))
    if at != len(listed):
        raise UnreadableFile("no whole archive of torch.save: the list of its records is damaged")
    return found


def _large(more: bytes, *values: int) -> list[int]:
    """Sizes and places beyond four gigabytes, which stand apart."""
    at = 0
    while at + 4 <= len(more):
        kind, length = struct.unpack_from("<HH", more, at)
        if kind == 1:
            part = more[at + 4 : at + 4 + length]
            wide = iter(struct.unpack(f"<{len(part) // 8}Q", part[: len(part) // 8 * 8]))
            return [next(wide, -1) if value == _FULL32 else value for value in values]
        at += 4 + length
    raise UnreadableFile("no whole archive of torch.save: a size is missing")


def _placed(file: BinaryIO, path: Path, offset: int, end: int, found: list[tuple[bytes, int, int]]) -> dict[str, Record]:
    """Where each record's bytes are, after its own header, which must be of the same name."""
    made: dict[str, Record] = {}
    before = 0
    total = sum(size for _, size, _ in found)
    if total > end:
        raise RefusedFile(path, f"its records claim {total} bytes, and the file has {end}")
    for name, size, place in found:
        if not before <= place <= end - _HEADER.size:
            raise RefusedFile(path, f"its record {name.decode('utf-8', 'replace')[:200]!r} does not lie where it should")
        file.seek(offset + place)
        header = file.read(_HEADER.size + len(name))
        parts = _HEADER.unpack_from(header)
        start = place + _HEADER.size + parts[9] + parts[10]
        if parts[0] != ZIP or parts[3] or header[_HEADER.size :] != name or parts[9] != len(name):
            raise RefusedFile(path, f"its record {name.decode('utf-8', 'replace')[:200]!r} has two descriptions")
        if size < 0 or start + size > end:
            raise RefusedFile(path, f"its records claim more bytes than the file has, {size} for one of them")
        before = start + size
        made[name.decode("utf-8", "replace")] = Record(offset + start, size)
    return made
