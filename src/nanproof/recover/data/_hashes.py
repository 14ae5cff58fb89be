"""What a sample is known by: a hash of its content that every process and every run agrees on.

Nothing that differs between two runs goes into it: no `hash()`, no `id()`, no pickle, no order of a set.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from nanproof.core.support._tree import tensors_in

_DEEP = 64
"""Below this, only the kind of a value counts: a value that contains itself has no end."""


def sample_hash(sample: Any) -> str:
    """Eight bytes of BLAKE2b, in hex. The dtype and shape of tensors and arrays are part of it; a list and a tuple of the same
    values are the same."""
    found = blake2b(digest_size=8)
    _feed(found, sample, 0)
    return found.hexdigest()


def _feed(found: blake2b, value: Any, depth: int) -> None:
    kind = type(value)
    if value is None or kind in (bool, int):
        _put(found, kind.__name__, str(value).encode())
    elif kind is float:
        _put(found, "float", struct.pack("<d", value))
    elif isinstance(value, Tensor):
        _tensor(found, value, depth)
    elif isinstance(value, str) and not isinstance(value, Enum):
        _put(found, "str", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, (bytes, bytearray, memoryview)):
        _put(found, "bytes", value)
    elif _is_numpy(value):
        _array(found, value, depth)
    elif depth >= _DEEP:
        _put(found, "deep", kind.__qualname__.encode())
    elif isinstance(value, Mapping):
        _unordered(found, "dict", ((key, each) for key, each in value.items()), depth)
    elif isinstance(value, Set):
        _unordered(found, "set", value, depth)
    elif isinstance(value, Sequence):
        _put(found, "list", str(len(value)).encode())
        for each in value:
            _feed(found, each, depth + 1)
    else:
        _object(found, value, depth)


def _put(found: blake2b, kind: str, data: Any) -> None:
    """The kind and the length keep ("a", "b") apart from ("ab",)."""
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    found.update(f"{kind}:{size}:".encode())
    found.update(data)


def _unordered(found: blake2b, kind: str, values: Iterable[Any], depth: int) -> None:
    digests = []
    for value in values:
        one = blake2b(digest_size=16)
        _feed(one, value, depth + 1)
        digests.append(one.digest())
    _put(found, kind, b"".join(sorted(digests)))


def _tensor(found: blake2b, tensor: Tensor, depth: int) -> None:
    _put(found, "tensor", f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    elif plain.is_quantized:
        plain = plain.int_repr()
    plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
    size = plain.numel() * plain.element_size()
    if size:
        found.update((ctypes.c_char * size).from_address(plain.data_ptr()))


def _array(found: blake2b, array: Any, depth: int) -> None:
    numpy = sys.modules["numpy"]
    _put(found, "array", f"{array.dtype.str} {array.shape}".encode())
    if array.dtype.hasobject:
        _feed(found, array.tolist(), depth + 1)
    else:
        found.update(numpy.ascontiguousarray(array).tobytes())


def _object(found: blake2b, value: Any, depth: int) -> None:
    kind = type(value)
    if kind.__module__.startswith("PIL.") and hasattr(value, "tobytes"):
        # An image. Its class tells which kind of file it came from: its pixels are what counts.
        _put(found, "image", f"{value.mode} {value.size}".encode())
        _put(found, "bytes", value.tobytes())
        return
    _put(found, "object", f"{kind.__module__}.{kind.__qualname__}".encode())
    if is_dataclass(value):
        for field in fields(value):
            _feed(found, (field.name, getattr(value, field.name, None)), depth + 1)
    elif isinstance(value, Enum):
        _put(found, "name", value.name.encode())
    elif getattr(value, "__dict__", None):
        _unordered(found, "fields", vars(value).items(), depth)
    elif " at 0x" not in (text := repr(value)):  # an address differs between runs
        _put(found, "repr", text.encode("utf-8", "surrogatepass"))


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def is_row(single: Any, batch: Any, row: int, samples: int) -> bool:
    """Whether a batch of one sample is that row of a larger batch: every tensor of it is found there, and there is one. NaN
    equals NaN. Padding that the larger batch has more of does not count."""
    rows = [t.detach()[row].cpu() for _, t in tensors_in(batch) if t.dim() and len(t) == samples]
    wanted = [t.detach()[0].cpu() for _, t in tensors_in(single) if t.dim()]
    return bool(wanted) and all(any(_begins(t, there) for there in rows) for t in wanted)


def _begins(t: Tensor, there: Tensor) -> bool:
    if t.dim() != there.dim() or t.dtype != there.dtype or any(a > b for a, b in zip(t.shape, there.shape, strict=True)):
        return False
    part = there[tuple(slice(0, size) for size in t.shape)]
    return bool(torch.equal(t, part) or torch.allclose(t.double(), part.double(), 0, 0, equal_nan=True))
