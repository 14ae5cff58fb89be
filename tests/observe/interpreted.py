"""Runs the Triton kernels on a CPU, in Triton's interpreter, and compares them with plain torch. A program of its own: Triton
decides when its kernels are defined. Called by `test_kernels_interpreted.py`."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.runtime.interpreter as interpreter
from torch import Tensor

from nanproof._records import ABSENT
from nanproof.observe import _kernels
from nanproof.observe._kernels import CHUNK, TOGETHER, TritonTable
from nanproof.observe._tables import COLUMNS, PlainTable, Seen

warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of NaN and Inf
CPU = torch.device("cpu")
patch_tensor: Any = interpreter._patch_lang_tensor


def with_index(tensor: Any, scope: Any) -> None:
    """NumPy 2.4 makes no Python number of an array with one dimension, as Triton 3.6 wants it to."""
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


class AtOnce:
    """As the device does: what is sent is what is there now."""

    def send(self, vector: Tensor) -> Callable[[], list[float]]:
        values: list[float] = vector.tolist()
        return lambda: values


class OnCPU(TritonTable):
    """The table with the kernels interpreted; counts launches."""

    def __init__(self, rows: int, memory: int = 1 << 40) -> None:
        torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=memory)  # type: ignore[assignment]
        super().__init__(rows, torch.device("cpu", 0))
        self._device, self._courier = CPU, AtOnce()  # type: ignore[assignment]
        self.uploads = 0

    def _upload(self, numbers: Any) -> Tensor:
        self.uploads += 1
        return torch.tensor(numbers)


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid: Any) -> Any:
        self.launches += 1
        return self.kernel[grid]


def same(a: float, b: float, tolerance: float = 0.0) -> bool:
    """Squares are summed in single precision, where tiny ones vanish."""
    return (a != a and b != b) or a == b or (tolerance > 0 and math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-30))


def compare(fast: Seen, slow: Seen, name: Any) -> None:
    assert len(fast.absmax) == len(slow.absmax) and all(map(same, fast.absmax, slow.absmax)), (name, fast.absmax, slow.absmax)
    assert fast.rows.keys() == slow.rows.keys(), name
    for row in slow.rows:
        for column, a, b in zip(COLUMNS, fast.rows[row], slow.rows[row], strict=True):
            assert same(a, b, 1e-5 if column == "squares" else 0.0), (name, row, column, a, b)


def check(tensors: list[tuple[Tensor, int]], full: bool, name: Any, rows: int = 8) -> OnCPU:
    fast, slow = OnCPU(rows), PlainTable(rows, CPU)
    fast.full = slow.full = full
    for x, row in tensors:
        fast.look(x, row)
        slow.look(x, row)
    compare(fast.send()(), slow.send()(), name)
    assert fast.send()() == Seen([ABSENT] * rows), "the table is empty after it was read"
    assert fast.dtypes == slow.dtypes
    return fast


def numbers() -> None:
    """Every size around the edges of a word, of a block and of a chunk; every odd value; every place for it."""
    sizes = [1, 2, 3, 5, 17, 4095, 4097, 8192, 2 * CHUNK - 1, 2 * CHUNK + 1]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for full in (False, True):
            plain = [((torch.randn(size) * 3).to(dtype), i % 8) for i, size in enumerate(sizes)]
            check(plain, full, (dtype, full))
            tiny = () if full and dtype == torch.bfloat16 else (1e-40,)  # the interpreter makes it 0 there
            for odd in (*tiny, math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 65519.0, 65504.0, 1e-7):
                for size in (1, 2, 4097):
                    for place in {0, size // 2, size - 1}:
                        x = (torch.randn(size) / 100).to(dtype)
                        x[place] = odd
                        check([(x, 1)], full, (dtype, full, odd, size, place))
    x = torch.full((9,), math.nan)
    x.view(torch.int32)[:] |= torch.tensor(-(1 << 31), dtype=torch.int32)
    check([(x, 0)], False, "NaN with a sign")


def layouts() -> None:
    """Addresses that are no multiple of a word or of 16 bytes, other layouts, several dtypes and calls in one launch."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        base = torch.randn(6, 8, 4, 4).to(dtype)
        flat = base.view(-1)
        base[3, 1, 2, 3] = math.inf
        for full in (False, True):
            for x in (
                flat[1:],
                flat[1:8],
                flat[3:4],
                flat[8:40],
                base[:, ::3],
                base.transpose(0, 2),
                base[:1].expand(5, 8, 4, 4),
            ):
                check([(x, 2)], full, (dtype, x.shape, x.stride()))
            check([(base.to(memory_format=torch.channels_last), 0), (base[1:, 1:], 0), (flat[::2], 3)], full, dtype)
    mixed = [(torch.randn(100 + i).to((torch.float32, torch.bfloat16, torch.float16)[i % 3]) * i, i % 5) for i in range(40)]
    for full in (False, True):
        check(mixed, full, "mixed")
        check([*mixed, (torch.randn(7, dtype=torch.float64), 6), (torch.empty(0), 7), (torch.arange(4), 7)], full, "others")


def launches() -> None:
    """All outputs of a step in one launch, and no new table of addresses while they stay the same."""
    kernel = _kernels._largest = Counted(_kernels._largest)  # type: ignore[attr-defined]
    table = OnCPU(2 * 48)
    outputs = [torch.randn(64).to(torch.bfloat16 if i % 3 else torch.float32) for i in range(48)]
    for step in range(5):
        for row, x in enumerate(outputs):
            table.look(x, row)
        assert not step or not table._waiting, "from the second step on nothing waits for the end of backward"
        table.send()
    assert kernel.launches == 5 and table.uploads == 1, (kernel.launches, table.uploads)
    for x, row in [(outputs[0], 0)] * (2 * TOGETHER):
        table.look(x, row)
    assert kernel.launches == 7 and not table._waiting
    small = OnCPU(8, memory=128 * 1000)
    for i in range(50):
        small.look(torch.zeros(100), i % 3)
        assert sum(x.nbytes for x, _, _ in small._waiting) <= 1000, "what waits is kept in memory"


def written() -> None:
    """An output that is written after the hook is left out once, and looked at at once from then on."""
    table = OnCPU(4)
    for step in range(2):
        x = torch.ones(4)
        table.look(x, 0)
        x.fill_(math.nan)
        table.look(torch.ones(2), 1)
        assert table.send()().absmax == [1.0 if step else ABSENT, 1.0, ABSENT, ABSENT]
    table.look(torch.ones(2), 1)
    table.clear()
    assert table.send()() == Seen([ABSENT] * 4)


if __name__ == "__main__":
    interpreter._patch_lang_tensor = with_index
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc]
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.manual_seed(0)
    for name in sys.argv[1:]:
        globals()[name]()
    print("as plain torch")
