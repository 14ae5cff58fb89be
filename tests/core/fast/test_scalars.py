"""The verdict in Python's numbers against the same verdict in tensors, which is the reference."""

import itertools
import math

import pytest
import torch
from torch import nn

import nanproof
from nanproof.core.fast._scalars import Scalars
from nanproof.core.judge._stats import RunningStats
from nanproof.core.judge._verdict import judge

CPU = torch.device("cpu")


def _step(step, generator):
    """Norms and loss of one step; every twelfth is bad in one of several ways."""
    norms = torch.rand(13, generator=generator).exp() * (50 if 200 < step < 260 else 1)
    loss = torch.rand((), generator=generator) + (2 if step < 300 else -0.5)
    kind = int(torch.randint(0, 14, (), generator=generator))
    if kind == 0:
        norms[5] = math.nan
    elif kind == 1:
        loss = loss * math.inf
    elif kind == 2:
        norms *= 1e4
    elif kind == 3:
        norms[7] = norms[8] = 3e38
    elif kind == 4:
        norms.zero_()
    elif kind == 5:
        loss = loss * 1e30
    return norms, loss, kind


SETTINGS = [
    *itertools.product([None, 0.5, 0.0, "auto"], [True, False], [True, False], [torch.float32]),
    ("auto", True, True, torch.float64),
]


@pytest.mark.parametrize(("max_norm", "skip_spikes", "loss_decides", "dtype"), SETTINGS)
def test_it_decides_and_learns_as_the_reference_does(max_norm, skip_spikes, loss_decides, dtype):
    """260 steps with NaN, Inf, an overflowing norm, spikes, a new level, bad buffers, gradients of 0 and a latch."""
    generator = torch.Generator().manual_seed(3)
    stats = [RunningStats(CPU, dtype, 20, 8.0) for _ in range(2)]
    latches = [torch.zeros(()) for _ in range(2)]
    scalars = Scalars()
    for step in range(260):
        norms, loss, kind = _step(step, generator)
        norms, loss = norms.to(dtype), loss.to(dtype)
        buffer = torch.tensor(17 if kind == 6 else 0)
        also = torch.tensor(math.nan if kind == 7 else 1.0)
        fast = scalars.judge(loss, norms, also, buffer, loss_decides, max_norm, stats[0], skip_spikes, latches[0])
        slow = judge(
            loss,
            norms,
            also_finite=also,
            bad_buffer=buffer,
            loss_decides=loss_decides,
            scale=None,
            max_norm=max_norm,
            stats=stats[1],
            skip_spikes=skip_spikes,
            held=latches[1] > 0,
        )
        assert fast.skip.item() == slow.skip.item(), step
        clip = 1.0 if fast.divisor is None else fast.divisor.item()
        assert slow.divisor is None or math.isclose(clip, max(slow.divisor.item(), 1.0), rel_tol=1e-5) or not math.isfinite(clip)
        torch.testing.assert_close(fast.packed, slow.packed.to(dtype), rtol=1e-4, atol=1e-4, equal_nan=True)
        refused = slow.skip > 0
        stats[1].take(slow.learned.point, slow.learned.loss, slow.learned.spike, ~refused)
        latches[1].copy_(torch.maximum(latches[1], refused.float()))
        assert latches[0].item() == latches[1].item()
        torch.testing.assert_close(stats[0].state, stats[1].state, rtol=1e-4, atol=1e-4)
        if step % 3 == 0:
            for latch in latches:
                latch.zero_()
    assert stats[0].count > 20


def test_what_a_checkpoint_brings_is_what_it_goes_on_from():
    stats, scalars = RunningStats(CPU, torch.float32, 2, 8.0), Scalars()
    for _ in range(5):
        scalars.judge(torch.tensor(1.0), torch.ones(3), None, None, True, 1.0, stats, False, None)
    saved = stats.state_dict()
    other = RunningStats(CPU, torch.float32, 2, 8.0)
    other.load_state_dict(saved)
    verdicts = [
        scalars.judge(torch.tensor(1.5), torch.full((3,), 2.0), None, None, True, "auto", each, False, None)
        for each in (stats, other)
    ]
    assert torch.equal(verdicts[0].packed, verdicts[1].packed)
    assert torch.equal(stats.state, other.state)
    assert saved["state"][0] == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_guard_works_under_another_default_dtype(dtype):
    """The fused kernels read their flags as fp32, whatever the default is."""
    runs, before = [], torch.get_default_dtype()
    for default in (before, dtype):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        torch.set_default_dtype(default)
        try:
            guard = nanproof.Guard(model, optimizer, max_norm=0.01, policy=nanproof.Policy(diagnose="never"))
            for step in range(5):
                optimizer.zero_grad()
                loss = model(torch.ones(4, 3, dtype=torch.float32)).square().mean() * (math.nan if step == 2 else 1)
                loss.backward()
                guard.step(loss)
            guard.close()
        finally:
            torch.set_default_dtype(before)
        assert [r.action for r in guard.history] == ["clipped", "clipped", "skipped", "clipped", "clipped"]
        runs.append(model)
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in runs), strict=True))
