"""Memory that another process can read: blocks without a name, which the system frees when the last process that has them ends.

`/dev/shm` is not used: containers often allow it 64 MB, and what a killed process leaves there stays.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref

import torch
from torch import Tensor

SMALLEST = mmap.PAGESIZE


class SharedBlock:
    """Zeroed bytes that a process is given by handing it `handle`."""

    def __init__(self, size: int) -> None:
        """Raises `OSError` where the system has no such memory, or not that much."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self.size = max(size, SMALLEST)
        self.handle = os.memfd_create("nanproof-checkpoints")
        weakref.finalize(self, os.close, self.handle)
        os.posix_fallocate(self.handle, 0, self.size)  # now, as an error: later it would be a signal
        self.bytes = mapped(self.handle, self.size)[:size]


def mapped(handle: int, size: int) -> Tensor:
    """The bytes of a block. They stay mapped for as long as the tensor or a part of it is used."""
    return torch.frombuffer(mmap.mmap(handle, size), dtype=torch.uint8)


def part(block: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A part of a block. In host memory it has a storage of its own size: what writes it to the disk need not copy it first."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if block.device.type != "cpu" or not size:
        return block[start : start + size].view(dtype).view(shape)
    return torch.frombuffer(block.numpy(), dtype=dtype, count=count, offset=start).view(shape)
