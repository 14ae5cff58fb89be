"""Bytes of a log, a bounded piece at a time: gzip is unpacked, UTF-16 is turned into UTF-8, and no line is too long."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

BLOCK = 1 << 18
"""Bytes read at a time. Several searches go over each block, so it should stay in the processor's cache."""
LONGEST = 1 << 20
"""Of a longer line the rest is skipped."""
HEAD = 1 << 16
"""How much is looked at to tell a format."""


def unpacked(stream: BinaryIO) -> io.BufferedReader:
    """The stream itself, or what is packed in it, with at least `HEAD` bytes to peek at."""
    raw: io.BufferedReader[Any] = io.BufferedReader(_Whole(stream), HEAD)
    if raw.peek(2)[:2] == b"\x1f\x8b":
        raw = io.BufferedReader(_Whole(gzip.GzipFile(fileobj=raw)), HEAD)  # type: ignore[arg-type]
    return raw


def head(stream: io.BufferedReader) -> bytes:
    return stream.peek(HEAD)[:HEAD]


def blocks(stream: io.BufferedReader, size: int = BLOCK) -> Iterator[bytes]:
    """The text in pieces that end where a line ends. A carriage return ends a line too: progress bars have no other end."""
    rest = b""
    skipping = False
    for piece in _utf8(stream, size):
        if skipping:
            at = _first_end(piece)
            if at < 0:
                continue
            piece, skipping = piece[at:], False
        piece = rest + piece if rest else piece
        cut = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
        if cut:
            yield piece[:cut]
        rest = piece[cut:]
        if len(rest) > LONGEST:
            yield rest[:LONGEST]
            rest, skipping = b"", True
    if rest:
        yield rest


def whole_lines(stream: io.BufferedReader, size: int = BLOCK) -> Iterator[bytes]:
    """The text in pieces that end where a line ends, the last one included."""
    last = b""
    for block in blocks(stream, size):
        text = last + block if last else block
        cut = text.rfind(b"\n") + 1
        if cut:
            yield text[:cut]
        last = text[cut : cut + LONGEST]
    if last:
        yield last + b"\n"


def lines(stream: io.BufferedReader, size: int = BLOCK) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line), without the line's end."""
    number = 0
    for text in whole_lines(stream, size):
        for line in text[:-1].split(b"\n"):
            number += 1
            yield number, line


def _utf8(stream: io.BufferedReader, size: int) -> Iterator[bytes]:
    start = stream.peek(4)[:4]
    wide = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}.get(start[:2])
    pieces = iter(lambda: stream.read(size), b"")
    if wide is not None:
        decoder = codecs.getincrementaldecoder(wide)(errors="replace")
        stream.read(2)
        pieces = (decoder.decode(piece).encode("utf-8", "replace") for piece in pieces)
    elif start[:3] == codecs.BOM_UTF8:
        stream.read(3)
    return _filled(pieces)


def _filled(pieces: Iterable[bytes]) -> Iterator[bytes]:
    return (piece for piece in pieces if piece)


def _first_end(piece: bytes) -> int:
    ends = [at for at in (piece.find(b"\n"), piece.find(b"\r")) if at >= 0]
    return min(ends, default=-1)


class _Whole(io.RawIOBase):
    """Reads as much as was asked for, from pipes too, so that a peek shows a whole head. A gzip file that is cut short or
    damaged ends there."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream
        self._read = getattr(stream, "read1", stream.read)  # gives what there is before it raises
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view) and not self._ended:
            try:
                piece = self._read(len(view) - done)
            except (EOFError, zlib.error, gzip.BadGzipFile):
                piece = b""
            self._ended = not piece
            view[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def close(self) -> None:
        self._stream.close()
        super().close()
