"""What a run and the process that writes its checkpoints say to each other, over a socket that nobody else has."""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_HEAD = struct.Struct("<QI")
_MOST_HANDLES = 250


_KNOWN = (OrderedDict, torch.dtype, torch.Size, torch.device)
"""Classes that every process has, beside the built-in ones."""


class Odd(Exception):
    """A value that the other process may not be able to make, as its class is the user's."""


def send(channel: socket.socket, message: Any, handles: Sequence[int] = ()) -> None:
    if len(handles) > _MOST_HANDLES:
        raise Odd("more blocks of memory than can be handed over at once")
    data = pickle.dumps(message)
    head = _HEAD.pack(len(data), len(handles))
    sent = socket.send_fds(channel, [head], list(handles)) if handles else 0
    channel.sendall(head[sent:] + data)


def receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """Raises `EOFError` when the other side has ended."""
    head, handles, _, _ = socket.recv_fds(channel, _HEAD.size, _MOST_HANDLES)
    if not head:
        raise EOFError
    head += _exactly(channel, _HEAD.size - len(head))
    size, _ = _HEAD.unpack(head)
    return pickle.loads(_exactly(channel, size)), handles


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if not (count := channel.recv_into(view)):
            raise EOFError
        view = view[count:]
    return bytes(data)


def plain_bytes(host: Mapping[str, Any]) -> bytes:
    """The host part of a state. Raises `Odd` for anything but plain values and tensors."""
    buffer = io.BytesIO()
    _Plain(buffer, pickle.HIGHEST_PROTOCOL).dump(dict(host))
    return buffer.getvalue()


class _Plain(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.layout is torch.strided and not value.is_quantized and not value.requires_grad:
            bare = value.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            return tensor_of, (bare.view(torch.uint8).numpy().tobytes(), value.dtype, tuple(value.shape))
        if type(value) in _KNOWN or any(value is known for known in (tensor_of, *_KNOWN)):
            return NotImplemented
        raise Odd(type(value).__name__)


def tensor_of(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
