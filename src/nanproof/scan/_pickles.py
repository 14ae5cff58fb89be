"""Look at the opcodes of a pickle before anything unpickles it.

A pickle is a program, and a few bytes of it can ask for gigabytes: a memo with an index of 2**28, a text that is longer than the
file, `bytearray(2**33)`. Tuples that are nested a million deep end the process as soon as one of them is hashed. None of that
needs a name that a reader would refuse. So the program is followed here first, on stand-ins: what is on the stack, what it calls
with which numbers, how deep it nests. It takes about as long as unpickling.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nanproof.scan._inside import UnreadableFile

DEEPEST = 1000
"""Levels of nesting, and marks that are open at a time."""
LONGEST_LINE = 4096
"""Bytes of a name."""
LONGEST_NUMBER = 1024
OPCODES = 3 << 20
"""Opcodes that every pickle may have: each makes a hundred bytes at most. One of a large checkpoint may have more."""
MOST_HASHED = 1 << 24
_SHORT = 200
"""Of a longer text nothing is asked."""

Storage = Callable[[str, str, int], None]
"""Judges a storage that a pickle refers to: its class, its key, how many numbers it claims to have."""


class Suspicious(Exception):
    """A pickle asks for what no checkpoint needs."""


class _Name(str):
    """A class or function that a pickle asks for."""

    __slots__ = ()


_DEEP = f"its pickle nests more than {DEEPEST} deep"
_CUT = "its pickle is cut short"
_CLAIMS = "its pickle claims more bytes than there are"


@contextmanager
def collector_paused() -> Iterator[None]:
    """Python's garbage collector looks through all objects again and again while millions of them are made: ten times as long as
    making them takes."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def check_pickle(data: bytes, size: int, storage: Storage | None = None, start: int = 0) -> int:
    """Follow the pickle that starts at `start`, and return where it ends.

    `size` is that of the whole checkpoint, in bytes: the larger it is, the longer its pickle may be. Raises `Suspicious`, or
    `UnreadableFile` if the pickle is damaged or cut short.
    """
    try:
        with collector_paused():
            return _Machine(data, size, storage).run(start)
    except (IndexError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise UnreadableFile(f"its pickle is damaged or cut short ({type(error).__name__})") from None


def _above(items: list[Any]) -> int:
    """One more than the depth of the deepest."""
    deepest = 0
    for item in items:
        if (type(item) is list or type(item) is tuple) and item[0] >= deepest:
            deepest = item[0] + 1
    if deepest > DEEPEST:
        raise Suspicious(_DEEP)
    return deepest


def _hashed(items: list[Any]) -> int:
    """How many values are visited to hash a tuple. One that holds another twice, sixty deep, takes forever as a key."""
    visited = 1 + len(items)
    for item in items:
        if type(item) is tuple:
            visited += item[2]
    if visited > MOST_HASHED:
        raise Suspicious("its pickle has tuples that hold each other again and again")
    return visited


class _Machine:
    """The unpickler's stack and memo, with stand-ins: a tuple is (depth, its items, values to hash), whatever else holds things
    is [depth], and a name is a `_Name`. Numbers and short texts are themselves, and None is all the rest."""

    def __init__(self, data: bytes, size: int, storage: Storage | None) -> None:
        self._data, self._size, self._storage = data, size, storage
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._asked = 0
        """Bytes that calls ask for."""

    def run(self, at: int) -> int:
        """What nearly all opcodes are is dealt with here, the rest in methods."""
        data, memo, marks, stack, end = self._data, self._memo, self._marks, self._stack, len(self._data)
        for _ in range(OPCODES + self._size // 128):
            code = data[at]
            at += 1
            if code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif code == 0x71:  # BINPUT
                memo[data[at]] = stack[-1]
                at += 1
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == 0x72:  # LONG_BINPUT
                index = int.from_bytes(data[at : at + 4], "little")
                at += 4
                if index > end:  # the C unpickler makes room for as many as the index says, and a pickler counts from 0
                    raise Suspicious(f"its pickle numbers an object {index}, and has {end} bytes")
                memo[index] = stack[-1]
            elif code == 0x28:  # MARK
                if len(marks) >= DEEPEST:
                    raise Suspicious(_DEEP)
                marks.append(stack)
                stack = []
            elif code == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif code == 0x4D:  # BININT2
                stack.append(int.from_bytes(data[at : at + 2], "little"))
                at += 2
            elif code == 0x4A:  # BININT
                stack.append(int.from_bytes(data[at : at + 4], "little", signed=True))
                at += 4
            elif code == 0x58 or code == 0x8C:  # BINUNICODE, SHORT_BINUNICODE
                width = 4 if code == 0x58 else 1
                count = int.from_bytes(data[at : at + width], "little")
                at += width
                if count > end - at:
                    raise UnreadableFile(_CLAIMS)
                stack.append(str(data[at : at + count], "utf-8", "replace") if count < _SHORT else None)
                at += count
            elif 0x85 <= code <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
                items = stack[0x84 - code :]
                if len(items) != code - 0x84:
                    raise UnreadableFile(_CUT)
                del stack[0x84 - code :]
                stack.append((_above(items), items, _hashed(items)))
            elif code == 0x74:  # TUPLE
                items, stack = stack, marks.pop()
                stack.append((_above(items), items, _hashed(items)))
            elif code == 0x75 or code == 0x65:  # SETITEMS, APPENDS
                items, stack = stack, marks.pop()
                holder = stack[-1]
                if type(holder) is list:
                    holder[0] = max(holder[0], _above(items))
            elif code == 0x62 or code == 0x61:  # BUILD, APPEND
                items = [stack.pop()]
                holder = stack[-1]
                if type(holder) is list:
                    holder[0] = max(holder[0], _above(items))
            elif code == 0x52 or code == 0x81:  # REDUCE, NEWOBJ
                given = stack.pop()
                self._called(stack.pop(), given)
                stack.append([_above([given])])
            elif code == 0x29:  # EMPTY_TUPLE
                stack.append((0, (), 1))
            elif code in b"]}\x8f":  # EMPTY_LIST, EMPTY_DICT, EMPTY_SET
                stack.append([0])
            elif code in b"N\x88\x89":  # NONE, NEWTRUE, NEWFALSE
                stack.append(None)
            elif code == 0x2E:  # STOP
                stack.pop()
                return at
            else:
                step = _RARE.get(code)
                if step is None:
                    raise Suspicious(f"its pickle has the opcode {code:#04x}, which no checkpoint needs")
                self._at, self._stack = at, stack
                step(self)
                at, stack = self._at, self._stack
        raise Suspicious("its pickle is far longer than its tensors need")

    # -- arguments -------------------------------------------------------------------------------------------------------------

    def _count(self, width: int) -> int:
        self._at += width
        return int.from_bytes(self._data[self._at - width : self._at], "little")

    def _skipped(self, count: int) -> None:
        if count > len(self._data) - self._at:
            raise UnreadableFile(_CLAIMS)
        self._at += count

    def _line(self, most: int = LONGEST_LINE) -> bytes:
        end = self._data.find(b"\n", self._at, self._at + most)
        if end < 0:
            raise UnreadableFile("its pickle has a line without an end")
        line = self._data[self._at : end]
        self._at = end + 1
        return line

    # -- values ----------------------------------------------------------------------------------------------------------------

    def protocol(self) -> None:
        if self._count(1) > pickle.HIGHEST_PROTOCOL:
            raise UnreadableFile("its pickle has a protocol that does not exist")

    def frame(self) -> None:
        if self._count(8) > len(self._data) - self._at:
            raise UnreadableFile(_CLAIMS)

    def long1(self) -> None:
        self._long(self._count(1))

    def long4(self) -> None:
        self._long(self._count(4))

    def _long(self, count: int) -> None:
        if count > LONGEST_NUMBER:
            raise Suspicious(f"its pickle has a number of {count} bytes")
        self._at += count
        self._stack.append(int.from_bytes(self._data[self._at - count : self._at], "little", signed=True))

    def number_line(self) -> None:
        text = self._line(LONGEST_NUMBER).strip().rstrip(b"L")
        self._stack.append(int(text) if text.lstrip(b"-").isdigit() else None)

    def float8(self) -> None:
        self._at += 8
        self._stack.append(None)

    def text_line(self) -> None:
        line = self._line(len(self._data))
        self._stack.append(str(line, "utf-8", "replace").strip("'\"") if len(line) < _SHORT else None)

    def text1(self) -> None:
        self._text(1)

    def text4(self) -> None:
        self._text(4)

    def text8(self) -> None:
        self._text(8)

    def _text(self, width: int) -> None:
        count = self._count(width)
        self._skipped(count)
        self._stack.append(str(self._data[self._at - count : self._at], "utf-8", "replace") if count < _SHORT else None)

    # -- containers ------------------------------------------------------------------------------------------------------------

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def set_item(self) -> None:
        items = [self._stack.pop(), self._stack.pop()]
        holder = self._stack[-1]
        if type(holder) is list:
            holder[0] = max(holder[0], _above(items))

    def add_items(self) -> None:
        items = self._since_mark()
        holder = self._stack[-1]
        if type(holder) is list:
            holder[0] = max(holder[0], _above(items))

    def of_mark(self) -> None:
        """A list, a dictionary or a frozen set."""
        items = self._since_mark()
        self._stack.append([_above(items)])

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._since_mark()

    def pop_mark(self) -> None:
        self._since_mark()

    def double(self) -> None:
        self._stack.append(self._stack[-1])

    def put_line(self) -> None:
        index = int(self._line(LONGEST_NUMBER))
        if not 0 <= index <= len(self._data):
            raise Suspicious(f"its pickle numbers an object {index}, and has {len(self._data)} bytes")
        self._memo[index] = self._stack[-1]

    def get_line(self) -> None:
        self._stack.append(self._memo[int(self._line(LONGEST_NUMBER))])

    # -- names and calls -------------------------------------------------------------------------------------------------------

    def name_lines(self) -> None:
        module, name = (str(self._line(), "utf-8", "replace") for _ in range(2))
        self._stack.append(_Name(f"{module}.{name}"))

    def name(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(_Name(f"{module}.{name}"))

    def call_with_names(self) -> None:
        named, given = self._stack.pop(), self._stack.pop()
        self._called(self._stack.pop(), given)
        self._stack.append([_above([given, named])])

    def _called(self, what: Any, given: Any) -> None:
        """A class that makes as much memory as the number it is called with."""
        if type(what) is _Name and what.endswith(_MAKES_MEMORY) and type(given) is tuple:
            self._asked += sum(abs(x) for x in given[1] if type(x) is int)
            if self._asked > self._size:
                raise Suspicious(f"its pickle asks {what} for memory that its tensors do not need")

    def refer(self) -> None:
        """To something outside the pickle: the numbers of a tensor."""
        named = self._stack.pop()
        items: Any = named[1] if type(named) is tuple else ()
        if self._storage is not None and len(items) >= 5 and items[0] == "storage":
            kind, key, count = items[1], items[2], items[4]
            if type(kind) is not _Name or type(key) is not str or type(count) is not int:
                raise UnreadableFile("its pickle refers to numbers in a way that torch.save never does")
            self._storage(kind.rpartition(".")[2], key, count)
        self._stack.append(None)


_MAKES_MEMORY = ("Storage", "Tensor", "bytearray", "builtins.bytes", "__builtin__.bytes")
_RARE = {
    code: step
    for codes, step in (
        (b"\x80", _Machine.protocol),
        (b"\x95", _Machine.frame),
        (b"\x8a", _Machine.long1),
        (b"\x8b", _Machine.long4),
        (b"ILF", _Machine.number_line),
        (b"G", _Machine.float8),
        (b"SV", _Machine.text_line),
        (b"UC", _Machine.text1),
        (b"TB", _Machine.text4),
        (b"\x8d\x8e\x96", _Machine.text8),
        (b"s", _Machine.set_item),
        (b"\x90", _Machine.add_items),
        (b"ld\x91", _Machine.of_mark),
        (b"0", _Machine.pop),
        (b"1", _Machine.pop_mark),
        (b"2", _Machine.double),
        (b"p", _Machine.put_line),
        (b"g", _Machine.get_line),
        (b"c", _Machine.name_lines),
        (b"\x93", _Machine.name),
        (b"\x92", _Machine.call_with_names),
        (b"Q", _Machine.refer),
    )
    for code in codes
}
"""By number. Extensions, persistent texts, buffers outside the pickle and Python 2's ways of making objects are missing."""
