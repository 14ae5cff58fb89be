"""PlainTable says what loops over Python numbers say: every dtype, every odd value, every layout, light and full."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanproof._records import ABSENT
from nanproof.observe._tables import COLUMNS, NEAR, PlainTable, Rows, Seen

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def slow(*looks: Tensor) -> list[float]:
    """All columns of one row, from plain Python numbers."""
    values = [(v, torch.finfo(x.dtype).max) for x in looks for v in x.detach().double().reshape(-1).tolist()]
    sizes = [abs(v) for v, _ in values]
    absmax = math.nan if any(v != v for v in sizes) else max(sizes)
    squares = sum(v * v for v in sizes)
    near = sum(math.isfinite(v) and v >= top / NEAR for v, (_, top) in zip(sizes, values, strict=True))
    counts = (sum(v != v for v in sizes), sum(v == math.inf for v in sizes), sum(v == 0 for v in sizes), near)
    return [absmax, float(len(values)), squares, *map(float, counts)]


def made() -> PlainTable:
    return PlainTable(10, CPU)


def seen(*looks: Tensor, full: bool = True) -> Rows:
    table = made()
    table.full = full
    for x in looks:
        table.look(x, 3)
    found = table.send()()
    assert all((row in found.rows) == (full and top != ABSENT) for row, top in enumerate(found.absmax))
    for row, values in found.rows.items():
        assert values[0] == found.absmax[row] or (values[0] != values[0] and found.absmax[row] != found.absmax[row])
    return found.rows if full else {row: [top] for row, top in enumerate(found.absmax) if top != ABSENT}


def same(fast: list[float], oracle: list[float]) -> None:
    assert len(fast) == len(oracle) == len(COLUMNS)
    for name, a, b in zip(COLUMNS, fast, oracle, strict=True):
        exact = name != "squares"
        assert (a != a and b != b) or (a == b if exact else math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-300)), (name, a, b)


def check(*looks: Tensor) -> None:
    oracle = slow(*looks)
    same(seen(*looks)[3], oracle)
    [absmax] = seen(*looks, full=False)[3]
    assert absmax == oracle[0] or (absmax != absmax and oracle[0] != oracle[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_ordinary_values(dtype):
    check((torch.randn(3, 50) * 3).to(dtype))
    check(torch.randn(()).to(dtype))
    check(torch.zeros(7, dtype=dtype))
    check(-torch.rand(5).to(dtype) - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("odd", [(math.nan,), (math.inf,), (-math.inf,), (math.nan, math.inf, -math.inf), (0.0, -0.0)])
def test_odd_values_are_counted_and_never_hidden(dtype, odd):
    x = torch.randn(40)
    x[1 : 1 + len(odd)] = torch.tensor(odd)
    check(x.to(dtype))
    check(torch.full((4,), odd[0], dtype=dtype))
    check(torch.ones(4, dtype=dtype), x.to(dtype), torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_near_the_maximum_and_huge_and_tiny_ones(dtype):
    """Squares of all of them are there: in double, where single would overflow or vanish."""
    top, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    edge = torch.tensor([top / NEAR, -top / NEAR, top, -top], dtype=torch.float64)
    below = torch.nextafter(torch.tensor(top / NEAR, dtype=dtype), torch.tensor(0, dtype=dtype))
    x = torch.cat([edge.to(dtype), below.view(1), torch.ones(3, dtype=dtype)])
    oracle = slow(x)
    assert oracle[6] == 4
    same(seen(x)[3], oracle)
    with_inf = torch.cat([x, torch.tensor([math.inf, math.nan], dtype=dtype)])
    same(seen(with_inf)[3], slow(with_inf))
    check(torch.full((9,), tiny, dtype=dtype))
    check(torch.full((9,), tiny / 4, dtype=dtype))
    if dtype != torch.float16:
        for size in (1e-20, 1e-16, 1e-15, 1e15, 1e16, 1e17, 1e30):
            check(torch.randn(100).to(dtype) * size)
    if dtype == torch.float64:
        check(torch.randn(100).double() * 1e200)  # its square is beyond a Python number


def test_the_sum_of_squares_of_many_values_stays_exact_and_finite():
    for shape in ((1 << 22,), (1 << 12, 1 << 10)):
        for value in (9e15, 0.1):
            assert math.isclose(seen(torch.full(shape, value))[3][2], (1 << 22) * value**2, rel_tol=1e-5)


def test_other_layouts():
    base = torch.randn(6, 8, 4)
    base[1, 2, 3] = math.nan
    for x in (base[:, ::3], base.transpose(0, 2), base[:1].expand(5, 8, 4), base[2:, 1:, ::2], base.permute(2, 0, 1)[1:]):
        check(x)
    check(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    check(torch.randn(3, requires_grad=True))


def test_what_has_no_values_or_no_floating_point_ones_is_not_there():
    for x in (torch.empty(0), torch.empty(3, 0, 2), torch.arange(5), torch.ones(3, dtype=torch.bool), torch.ones(2) * 1j):
        assert seen(x) == {} and seen(x, full=False) == {}
    same(seen(torch.arange(5), torch.ones(2), torch.empty(0))[3], slow(torch.ones(2)))


def test_rows_are_kept_apart_and_sent_once():
    table = made()
    table.full = True
    looks: dict[int, list[Tensor]] = {}
    for i in range(12):
        x = torch.randn(4 + i) * i
        table.look(x, i % 3)
        looks.setdefault(i % 3, []).append(x)
    first = table.send()
    table.look(torch.full((2,), 100.0), 1)
    second = table.send()
    rows = first().rows
    assert rows.keys() == {0, 1, 2}
    for row, tensors in looks.items():
        same(rows[row], slow(*tensors))
    same(second().rows[1], slow(torch.full((2,), 100.0)))
    assert table.send()() == Seen([ABSENT] * 10)
    table.look(torch.ones(2), 0)
    table.clear()
    assert table.send()() == Seen([ABSENT] * 10)


def test_looks_are_of_the_moment():
    """What is written into a tensor after the look is not seen."""
    table = made()
    table.full = True
    x = torch.ones(3)
    table.look(x, 0)
    x.fill_(math.nan)
    same(table.send()().rows[0], slow(torch.ones(3)))


def test_dtypes_are_noted():
    table = made()
    for row, dtype in enumerate(DTYPES):
        table.look(torch.ones(2, dtype=dtype), row)
    table.look(torch.ones(2, dtype=torch.int32), 9)
    assert table.dtypes == [*DTYPES, *[None] * 6]


def test_the_largest_value_of_a_step_of_very_many_looks_is_not_forgotten():
    """Many sites times many micro-batches."""
    table = made()
    table.look(torch.full((1,), 7.0), 0)
    for _ in range(20_000):
        table.look(torch.ones(1), 0)
    assert table.send()().absmax[0] == 7.0


numbers = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 3e38, 65504.0, 1e-40]))


@settings(max_examples=150)
@given(st.lists(st.lists(numbers, min_size=1, max_size=20), min_size=1, max_size=4), st.sampled_from(DTYPES))
def test_any_numbers(parts, dtype):
    check(*(torch.tensor(part, dtype=torch.float64).to(dtype) for part in parts))
