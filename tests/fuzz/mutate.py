"""Changes to the bytes of a file: blind ones, and such as know JSON, pickles and zip archives."""

from __future__ import annotations

import gzip
import io
import json
import pickletools
import random
import re
import zipfile
import zlib
from hashlib import sha256
from pathlib import Path

from nanproof._access import read_bytes

INTERESTING = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    0x0FFFFFFF,
    1 << 40,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
MOST = 4 << 20
"""Bytes of a mutated file."""


def mutated(data: bytes, rng: random.Random, others: list[bytes], canary: Path) -> bytes:
    """A file that is like `data`, and not quite."""
    if data[:2] == b"\x1f\x8b" and rng.random() < 0.8:
        return gzip.compress(mutated(gzip.decompress(data), rng, others, canary), mtime=0)
    if data[:4] == b"NPB1" and rng.random() < 0.7:
        return _checked(_blindly(data, rng, others, canary))
    if data[:4] == b"PK\x03\x04" and rng.random() < 0.6:
        return _in_zip(data, rng, others, canary)
    return _blindly(data, rng, others, canary)


def _blindly(data: bytes, rng: random.Random, others: list[bytes], canary: Path) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        kinds = [_flip, _flip, _cut, _delete, _double, _insert, _number, _number, _splice]
        if data[:1] == b"\x80" or b"\x80\x02" in data[:64]:
            kinds += [_opcode] * 9
        if data.lstrip()[:1] in (b"{", b"[") or b'{"' in data[:16]:
            kinds += [_token] * 12
        kind = rng.choice(kinds)
        extra = {_splice: others, _opcode: canary}.get(kind)
        data = (kind(data, rng) if extra is None else kind(data, rng, extra))[:MOST]
    return data


def _checked(data: bytes) -> bytes:
    """Blocks of `norms.bin` whose checksums fit what is in them now."""
    out = bytearray(data)
    at = 0
    while (at := data.find(b"NPB1", at)) >= 0 and at + 44 <= len(data):
        length = int.from_bytes(data[at + 8 : at + 12], "little")
        out[at + 36 : at + 40] = zlib.crc32(data[at + 44 : at + 44 + length]).to_bytes(4, "little")
        out[at + 40 : at + 44] = zlib.crc32(out[at : at + 40]).to_bytes(4, "little")
        at += 4
    return bytes(out)


def sealed(manifest: Path) -> None:
    """Make the checksums of a manifest fit its files, and those of good.json the manifest, as far as they are there."""
    try:
        facts = json.loads(manifest.read_text())
        for name, entry in facts["files"].items():
            data = read_bytes(manifest.parent / name)  # the name may be /dev/zero by now
            entry["bytes"] = len(data)
            if "crc32" in entry:
                entry["crc32"] = f"{zlib.crc32(data):08x}"
            if "sha256" in entry:
                entry["sha256"] = sha256(data).hexdigest()
        manifest.write_text(json.dumps(facts))
        good = manifest.with_name("good.json")
        mark = json.loads(good.read_text())
        mark["manifest"] = f"{zlib.crc32(manifest.read_bytes()):08x}"
        good.write_text(json.dumps(mark))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # the mutation was in one of these


# -- blind ---------------------------------------------------------------------------------------------------------------------


def _place(data: bytes, rng: random.Random) -> int:
    """Rather near the start, where headers are."""
    if not data:
        return 0
    return rng.randrange(min(len(data), 200)) if rng.random() < 0.4 else rng.randrange(len(data))


def _flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    for _ in range(rng.choice((1, 2, 8))):
        at = _place(data, rng)
        changed[at] = rng.choice((changed[at] ^ 1 << rng.randrange(8), 0, 0xFF, rng.randrange(256)))
    return bytes(changed)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: _place(data, rng)]


def _delete(data: bytes, rng: random.Random) -> bytes:
    at = _place(data, rng)
    return data[:at] + data[at + rng.choice((1, 4, 64, 1000)) :]


def _double(data: bytes, rng: random.Random) -> bytes:
    at = _place(data, rng)
    piece = data[at : at + rng.choice((1, 8, 200, 4000))]
    return data[:at] + piece * rng.choice((2, 3, 300)) + data[at:]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = _place(data, rng)
    byte = rng.choice((b"\0", b" ", b"(", b"[", b"<", b"\x1b[2J", b"\xe2\x80\xae", bytes([rng.randrange(256)])))
    return data[:at] + byte * rng.choice((1, 16, 5000, 200_000)) + data[at:]


def _number(data: bytes, rng: random.Random) -> bytes:
    at, width = _place(data, rng), rng.choice((1, 2, 4, 8))
    value = rng.choice(INTERESTING) & (1 << 8 * width) - 1
    return data[:at] + value.to_bytes(width, rng.choice(("little", "little", "big"))) + data[at + width :]


def _splice(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    other = rng.choice(others)
    return data[: _place(data, rng)] + other[_place(other, rng) :]


# -- JSON ----------------------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null|[\[\]{}:,]')
_VALUES = (
    b"1" + b"0" * 400,
    b"-1" + b"0" * 5000,
    b"1e400",
    b"-1e400",
    b"NaN",
    b"Infinity",
    b"-1",
    b"0",
    b"1.5",
    b"9007199254740993",
    b"true",
    b"null",
    b'""',
    b"[]",
    b"{}",
    b"[null]",
    b'{"a": 1}',
    b"[" * 100_000,
    b"[" * 900 + b"]" * 900,
    b'{"a":' * 50_000,
    b'"\\u001b[2J\\u202e\\u0000"',
    b'"../../etc/passwd"',
    b'"/dev/zero"',
    b'"' + b"x" * 300_000 + b'"',
    b'"\\ud800"',
    b"18446744073709551616",
    b"4294967296",
    b'"nan"',
)


def _token(data: bytes, rng: random.Random) -> bytes:
    window = _place(data, rng) if len(data) > 100_000 else 0
    tokens = [(match.start(), match.end()) for match in _TOKEN.finditer(data, window, window + 100_000)]
    if not tokens:
        return data
    start, end = rng.choice(tokens)
    if rng.random() < 0.1:
        return data[:start] + data[end:]
    if rng.random() < 0.1:
        other, stop = rng.choice(tokens)
        return data[:start] + data[other:stop] + data[end:]
    return data[:start] + rng.choice(_VALUES) + data[end:]


# -- pickles -------------------------------------------------------------------------------------------------------------------


def _opcode(data: bytes, rng: random.Random, canary: Path) -> bytes:
    """Something between two opcodes of a pickle."""
    begins = [match.start() for match in re.finditer(rb"\x80[\x02-\x05]", data[:200_000])][:6] or [0]
    begin = rng.choice(begins)
    places = []
    try:
        for _, _, place in pickletools.genops(io.BytesIO(data[begin:])):
            places.append(begin + place)
    except Exception:
        pass
    if not places:
        return data
    at = rng.choice(places)
    name = str(canary).encode()
    made = rng.choice(
        (
            b"cposix\nmkdir\n(V" + name + b"\ntR0",
            b"\x8c\x05posix\x8c\x05mkdir\x93\x8c" + bytes([len(name)]) + name + b"\x85R0",
            b"(V" + name + b"\niposix\nmkdir\n0",
            b"(cposix\nmkdir\nV" + name + b"\no0",
            b"c__builtin__\neval\n(V__import__('os').mkdir('" + name + b"')\ntR0",
            b"ctorch.utils._config_module\ninstall_config_module\n0",
            b"r\xff\xff\xff\x0f",
            b"r\xff\xff\xff\x7f",
            b"p4294967295\n",
            b"j\xff\xff\xff\x7f",
            b"g9999999\n",
            b"N\x8d" + (1 << 40).to_bytes(8, "little"),
            b"X\xff\xff\xff\x7f",
            b"\x8e" + (1 << 62).to_bytes(8, "little"),
            b"\x8b\xff\xff\xff\x7f",
            b"T\xff\xff\xff\x7f",
            b"\x96" + (1 << 33).to_bytes(8, "little"),
            b"\x95" + (1 << 60).to_bytes(8, "little"),
            b"\x82\x01",
            b"\x84\xff\xff\xff\x7f",
            b"I" + b"9" * 6000 + b"\n",
            b"Pabc\n",
            b"(Q",
            b"N" + b"\x85" * 100_000,
            b"]" * 100_000 + b"a" * 99_999,
            b"(" * 100_000,
            b"N\x85" * 1000,
            b"N" + b"2\x86" * 60,
            b"}(NNu",
            b"s",
            b"R",
            b"b",
            b"\x81",
            b"0",
            b"2",
            b"t",
            b".",
            b"l",
            b"d",
            b"\x90",
            b"\x91",
            b"cbuiltins\nbytearray\n(J\xff\xff\xff\x7ftR0",
            b"c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R0",
            b"ctorch\nTensor\n\x8a\x05\x00\x00\x00\x00\x02\x85R0",
            b"ctorch\nFloatStorage\nJ\xff\xff\xff\x7f\x85R0",
            b"ccollections\nOrderedDict\n)Rq\x00(V\x1b[2J\nNu0",
        )
    )
    return data[:at] + made + data[at:]


def _in_zip(data: bytes, rng: random.Random, others: list[bytes], canary: Path) -> bytes:
    """One record changed, and the archive written anew."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = [(record.filename, archive.read(record)) for record in archive.infolist()]
    except Exception:
        return _flip(data, rng)
    which = next((i for i, (name, _) in enumerate(records) if name.endswith("data.pkl")), 0)
    which = which if rng.random() < 0.8 else rng.randrange(len(records))
    out = io.BytesIO()
    packed = zipfile.ZIP_DEFLATED if rng.random() < 0.05 else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", packed) as archive:
        for i, (name, content) in enumerate(records):
            if i == which and rng.random() < 0.1:
                name = rng.choice((records[0][0], "../" + name, "\x1b[2J", "a/", name * 50))
            archive.writestr(name, mutated(content, rng, others, canary) if i == which else content)
    return out.getvalue()
