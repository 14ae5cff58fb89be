"""Look at the opcodes of a pickle before anything unpickles it.

A pickle is a program, and a few bytes of it can ask for gigabytes: a memo with an index of 2**28, a text that is longer than the
file, `bytearray(2**33)`. Tuples that are nested a million deep end the process as soon as one of them is hashed. None of that
needs a name that a reader would refuse. So the program is followed here first, on stand-ins: what is on the stack, what it calls
with which numbers, how deep it nests. It takes about half a microsecond an opcode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanproof.scan._inside import UnreadableFile

DEEPEST = 1000
"""Levels of nesting, and marks that are open at a time."""
LONGEST_LINE = 4096
"""Bytes of a name or of a number that is written as text."""
LONGEST_NUMBER = 1024
OPCODES = 3 << 20
"""Opcodes that every pickle may have. One of a large checkpoint may have more (see `check_pickle`)."""
_SHORT = 200
"""Of a longer text nothing is asked."""

Storage = Callable[[str, str, int], None]
"""Judges a storage that a pickle refers to: its class, its key, how many numbers it claims to have."""


class Suspicious(Exception):
    """A pickle asks for what no checkpoint needs."""


class _Name:
    """A class or function that a pickle asks for."""

    __slots__ = ("text",)
    depth = 0

    def __init__(self, text: str) -> None:
        self.text = text


class _Made:
    """Anything that holds other things."""

    __slots__ = ("depth", "items")

    def __init__(self, depth: int = 0, items: list[Any] | None = None) -> None:
        self.depth, self.items = depth, items
        """`items` of a tuple."""


def check_pickle(data: bytes, size: int, storage: Storage | None = None, start: int = 0) -> int:
    """Follow the pickle that starts at `start`, and return where it ends.

    `size` is that of the whole checkpoint, in bytes: the larger it is, the longer its pickle may be. Raises `Suspicious`, or
    `UnreadableFile` if the pickle is damaged or cut short.
    """
    try:
        return _Machine(data, size, storage).run(start)
    except (IndexError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise UnreadableFile(f"its pickle is damaged ({type(error).__name__})") from None


class _Machine:
    def __init__(self, data: bytes, size: int, storage: Storage | None) -> None:
        self._data, self._size, self._storage = data, size, storage
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._asked = 0
        """Bytes that calls ask for."""
        self._opcodes_left = OPCODES + size // 128
        self._things_left = self._opcodes_left // 2

    def run(self, start: int) -> int:
        self._at = start
        data, steps, end, left = self._data, _STEPS, len(self._data), self._opcodes_left
        while self._at < end:
            code = data[self._at]
            self._at += 1
            if code == 46:  # STOP
                self._stack.pop()
                return self._at
            step = steps[code]
            if step is None:
                raise Suspicious(f"its pickle has the opcode {code:#04x}, which no checkpoint needs")
            step(self)
            left -= 1
            if left < 0:
                raise Suspicious("its pickle is far longer than its tensors need")
        raise UnreadableFile("its pickle is cut short")

    # -- arguments --------------------------------------------------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        data = self._data[self._at : self._at + count]
        if len(data) < count:
            raise UnreadableFile("its pickle is cut short")
        self._at += count
        return data

    def _count(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _skip(self, width: int) -> int:
        """Pass over something with its length before it."""
        count = self._count(width)
        if count > len(self._data) - self._at:
            raise UnreadableFile("its pickle claims more bytes than there are")
        self._at += count
        return count

    def _line(self, most: int = LONGEST_LINE) -> bytes:
        end = self._data.find(b"\n", self._at, self._at + most)
        if end < 0:
            raise UnreadableFile("its pickle has a line without an end")
        line = self._data[self._at : end]
        self._at = end + 1
        return line

    def _grown(self) -> None:
        self._things_left -= 1
        if self._things_left < 0:
            raise Suspicious("its pickle makes far more objects than its tensors need")

    # -- values -----------------------------------------------------------------------------------------------------------------

    def nothing(self) -> None:
        self._stack.append(None)

    def protocol(self) -> None:
        self._take(1)

    def frame(self) -> None:
        if self._count(8) > len(self._data) - self._at:
            raise UnreadableFile("its pickle claims more bytes than there are")

    def int4(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def int1(self) -> None:
        self._stack.append(self._count(1))

    def int2(self) -> None:
        self._stack.append(self._count(2))

    def long1(self) -> None:
        self._long(self._count(1))

    def long4(self) -> None:
        self._long(self._count(4))

    def _long(self, count: int) -> None:
        if count > LONGEST_NUMBER:
            raise Suspicious(f"its pickle has a number of {count} bytes")
        self._stack.append(int.from_bytes(self._take(count), "little", signed=True))

    def number_line(self) -> None:
        text = self._line(LONGEST_NUMBER).strip().rstrip(b"L")
        self._stack.append(int(text) if text.lstrip(b"-").isdigit() else None)

    def float8(self) -> None:
        self._take(8)
        self._grown()
        self._stack.append(None)

    def text_line(self) -> None:
        line = self._line(len(self._data))
        self._grown()
        self._stack.append(line.decode("utf-8", "replace").strip("'\"") if len(line) < _SHORT else None)

    def _text(self, width: int) -> None:
        count = self._skip(width)
        self._grown()
        self._stack.append(self._data[self._at - count : self._at].decode("utf-8", "replace") if count < _SHORT else None)

    def text1(self) -> None:
        self._text(1)

    def text4(self) -> None:
        self._text(4)

    def text8(self) -> None:
        self._text(8)

    def made(self) -> None:
        """An empty list, dictionary, set or tuple."""
        self._grown()
        self._stack.append(_Made(0, []))

    # -- containers -------------------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        if len(self._marks) >= DEEPEST:
            raise Suspicious(f"its pickle nests more than {DEEPEST} deep")
        self._marks.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._marks.pop()
        return items

    def _into(self, items: list[Any]) -> None:
        """Put items into what is on top of the stack."""
        holder = self._stack[-1]
        if type(holder) is _Made:
            holder.depth = max(holder.depth, self._above(items))

    def _above(self, items: list[Any]) -> int:
        """One more than the deepest of them."""
        deepest = 0
        for item in items:
            if type(item) is _Made and item.depth >= deepest:
                deepest = item.depth + 1
        if deepest > DEEPEST:
            raise Suspicious(f"its pickle nests more than {DEEPEST} deep")
        return deepest

    def append(self) -> None:
        self._into([self._stack.pop()])

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._into([key, value])

    def extend(self) -> None:
        self._into(self._since_mark())

    def of_mark(self) -> None:
        self._tuple(self._since_mark())

    def _tuple(self, items: list[Any]) -> None:
        self._grown()
        self._stack.append(_Made(self._above(items), items))

    def _last(self, count: int) -> None:
        if len(self._stack) < count:
            raise UnreadableFile("its pickle is damaged")
        items = self._stack[-count:]
        del self._stack[-count:]
        self._tuple(items)

    def one(self) -> None:
        self._last(1)

    def two(self) -> None:
        self._last(2)

    def three(self) -> None:
        self._last(3)

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._since_mark()

    def pop_mark(self) -> None:
        self._since_mark()

    def double(self) -> None:
        self._stack.append(self._stack[-1])

    # -- memo -------------------------------------------------------------------------------------------------------------------

    def _put(self, index: int) -> None:
        """A pickler counts its objects, and each takes a byte or more. The C unpickler has room for as many as the index says."""
        if not 0 <= index <= len(self._data):
            raise Suspicious(f"its pickle numbers an object {index}, and has {len(self._data)} bytes")
        self._grown()
        self._memo[index] = self._stack[-1]

    def put_line(self) -> None:
        self._put(int(self._line(LONGEST_NUMBER)))

    def put1(self) -> None:
        self._put(self._count(1))

    def put4(self) -> None:
        self._put(self._count(4))

    def memoize(self) -> None:
        self._put(len(self._memo))

    def get_line(self) -> None:
        self._stack.append(self._memo[int(self._line(LONGEST_NUMBER))])

    def get1(self) -> None:
        self._stack.append(self._memo[self._count(1)])

    def get4(self) -> None:
        self._stack.append(self._memo[self._count(4)])

    # -- names and calls --------------------------------------------------------------------------------------------------------

    def name_lines(self) -> None:
        module, name = (self._line().decode("utf-8", "replace") for _ in range(2))
        self._grown()
        self._stack.append(_Name(f"{module}.{name}"))

    def name(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._grown()
        self._stack.append(_Name(f"{module}.{name}"))

    def call(self) -> None:
        given, what = self._stack.pop(), self._stack.pop()
        self._called(what, given)

    def call_with_names(self) -> None:
        named, given, what = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self._called(what, given)
        self._stack[-1].depth = max(self._stack[-1].depth, self._above([named]))

    def _called(self, what: Any, given: Any) -> None:
        items = given.items if type(given) is _Made and given.items is not None else []
        if type(what) is _Name and _makes_memory(what.text):
            self._asked += sum(abs(x) for x in items if type(x) is int)
            if self._asked > self._size:
                raise Suspicious(f"its pickle asks {what.text} for memory that its tensors do not need")
        self._grown()
        self._stack.append(_Made(self._above([given])))

    def build(self) -> None:
        self._into([self._stack.pop()])

    def refer(self) -> None:
        """To something outside the pickle: the numbers of a tensor."""
        named = self._stack.pop()
        items = named.items if type(named) is _Made and named.items is not None else []
        if self._storage is not None and len(items) >= 5 and items[0] == "storage":
            kind, key, count = items[1], items[2], items[4]
            if type(kind) is not _Name or type(key) is not str or type(count) is not int:
                raise UnreadableFile("its pickle refers to numbers in a way that torch.save never does")
            self._storage(kind.text.rpartition(".")[2], key, count)
        self._stack.append(_Made())


def _makes_memory(name: str) -> bool:
    """Whether what is called with a number makes so much memory."""
    return name.endswith(("Storage", "Tensor", "bytearray", "builtins.bytes", "__builtin__.bytes"))


_STEPS: list[Callable[[_Machine], None] | None] = [None] * 256
for _codes, _step in (
    (b"N\x88\x89", _Machine.nothing),
    (b"\x80", _Machine.protocol),
    (b"\x95", _Machine.frame),
    (b"J", _Machine.int4),
    (b"K", _Machine.int1),
    (b"M", _Machine.int2),
    (b"\x8a", _Machine.long1),
    (b"\x8b", _Machine.long4),
    (b"ILF", _Machine.number_line),
    (b"G", _Machine.float8),
    (b"SV", _Machine.text_line),
    (b"UC\x8c", _Machine.text1),
    (b"TBX", _Machine.text4),
    (b"\x8d\x8e\x96", _Machine.text8),
    (b"]})\x8f", _Machine.made),
    (b"(", _Machine.mark),
    (b"a", _Machine.append),
    (b"s", _Machine.set_item),
    (b"eu\x90", _Machine.extend),
    (b"tld\x91", _Machine.of_mark),
    (b"\x85", _Machine.one),
    (b"\x86", _Machine.two),
    (b"\x87", _Machine.three),
    (b"0", _Machine.pop),
    (b"1", _Machine.pop_mark),
    (b"2", _Machine.double),
    (b"p", _Machine.put_line),
    (b"q", _Machine.put1),
    (b"r", _Machine.put4),
    (b"\x94", _Machine.memoize),
    (b"g", _Machine.get_line),
    (b"h", _Machine.get1),
    (b"j", _Machine.get4),
    (b"c", _Machine.name_lines),
    (b"\x93", _Machine.name),
    (b"R\x81", _Machine.call),
    (b"\x92", _Machine.call_with_names),
    (b"b", _Machine.build),
    (b"Q", _Machine.refer),
):
    for _code in _codes:
        _STEPS[_code] = _step
