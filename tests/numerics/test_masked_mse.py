"""The mean square over what a mask keeps: against float64 from the definition, and untouched by what does not count."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import nanproof
from nanproof import UsageError
from nanproof.numerics.losses import masked_mse

NAN, INF = math.nan, math.inf


def oracle(prediction, target, mask):
    """Element by element in float64; the gradient from the definition too."""
    whole = torch.ones(prediction.shape, dtype=torch.bool)
    for _ in range(prediction.dim() - mask.dim()):
        mask = mask.unsqueeze(-1)
    whole = whole & mask
    p, t = prediction.detach().double().flatten().tolist(), target.double().flatten().tolist()
    counts = whole.flatten().tolist()
    size = sum(counts)
    value = sum((a - b) ** 2 for a, b, c in zip(p, t, counts, strict=True) if c) / size
    gradient = [2 * (a - b) / size if c else 0.0 for a, b, c in zip(p, t, counts, strict=True)]
    return value, torch.tensor(gradient, dtype=torch.float64).reshape(prediction.shape)


@settings(max_examples=80)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    masked=st.integers(0, 4),
    thin=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**31),
    dirt=st.sampled_from([0.0, NAN, INF, -INF, 6e4]),
)
def test_value_and_gradient(shape, masked, thin, dtype, seed, dirt):
    """Any shape, any mask over its first dimensions, whatever stands where it is false."""
    torch.manual_seed(seed)
    prediction, target = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    kept = [1 if thin and i == 0 else size for i, size in enumerate(shape[:masked])]
    mask = torch.rand(kept) < 0.6
    mask.view(-1)[0] = True
    outside = ~mask.reshape(*mask.shape, *[1] * (len(shape) - mask.dim())).expand(shape)
    prediction[outside], target[outside] = dirt, -dirt
    prediction.requires_grad_()
    loss = masked_mse(prediction, target, mask)
    loss.backward()
    clean = prediction.detach().masked_fill(outside, 0), target.masked_fill(outside, 0)
    value, gradient = oracle(*clean, mask)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.item() == pytest.approx(value, rel=1e-5, abs=1e-12)
    rough = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
    torch.testing.assert_close(prediction.grad.double(), gradient, rtol=rough, atol=1e-7)
    assert bool((prediction.grad[outside] == 0).all())


def test_without_a_mask_it_is_torchs_own():
    prediction = torch.randn(3, 5, 2, requires_grad=True)
    target = torch.randn(3, 5, 2)
    torch.testing.assert_close(masked_mse(prediction, target), F.mse_loss(prediction, target))


def test_half_is_squared_in_fp32():
    """300 squared is more than fp16 holds."""
    prediction = torch.full((4,), 300.0, dtype=torch.float16, requires_grad=True)
    loss = masked_mse(prediction, torch.zeros(4, dtype=torch.float16))
    loss.backward()
    assert loss.item() == 90000.0 and prediction.grad.tolist() == [150.0] * 4


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("which", ["prediction", "target"])
def test_what_counts_is_not_hidden(value, which):
    prediction, target = torch.zeros(2, 3), torch.zeros(2, 3)
    (prediction if which == "prediction" else target)[1, 2] = value
    mask = torch.tensor([[False, True, True], [False, False, True]])
    prediction.requires_grad_()
    loss = masked_mse(prediction, target, mask)
    loss.backward()
    assert not math.isfinite(loss.item()) and not math.isfinite(prediction.grad[1, 2].item())
    assert prediction.grad[0].tolist() == [0.0] * 3


def test_a_mean_over_nothing():
    """Named, refused, or exactly 0: as for the cross entropy, gradients included."""
    target, mask = torch.zeros(2, 3), torch.zeros(2, dtype=torch.bool)
    with pytest.raises(UsageError, match=r"nowhere true over prediction \[2, 3\]: the mean is 0/0"):
        masked_mse(torch.ones(2, 3), target, mask)
    with pytest.raises(UsageError, match="0/0"):
        masked_mse(torch.ones(0, 3), torch.ones(0, 3))
    for dirt in (1.0, 0.0, NAN):
        prediction = torch.full((2, 3), dirt, requires_grad=True)
        refused = masked_mse(prediction, target, mask, empty="refuse")
        refused.backward()
        assert math.isnan(refused.item()) and bool(prediction.grad.isnan().all())
        prediction.grad = None
        neutral = masked_mse(prediction, target, mask, empty="neutral")
        neutral.backward()
        assert neutral.item() == 0.0 and prediction.grad.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("empty", ["refuse", "neutral"])
def test_where_something_counts_the_choice_changes_nothing(empty):
    prediction, target, mask = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3), torch.tensor([True, False])
    assert torch.equal(masked_mse(prediction, target, mask, empty=empty), masked_mse(prediction, target, mask))


def test_a_guard_refuses_the_empty_batch():
    model = nn.Linear(3, 2)
    guard = nanproof.Guard(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss_fn=lambda m, b: masked_mse(m(b[0]), b[1], b[2], empty="refuse"),
        policy=nanproof.Policy(diagnose="never"),
    )
    with guard:
        for keeps in (True, False, True):
            guard.train_step((torch.randn(4, 3), torch.randn(4, 2), torch.full((4,), keeps)))
    assert [r.action == "skipped" for r in guard.history] == [False, True, False]
    assert [(i.step, i.kind) for i in guard.incidents] == [(1, "nonfinite-loss")]


@pytest.mark.parametrize(
    ("prediction", "target", "mask", "empty", "said"),
    [
        (torch.ones(2, 3), torch.ones(2, 1), None, "raise", r"target \[2, 1\] does not fit prediction \[2, 3\]"),
        (torch.ones(2, 3), torch.ones(2, 3), torch.ones(3, dtype=torch.bool), "raise", r"mask \[3\] does not fit"),
        (torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3, 1, dtype=torch.bool), "raise", r"mask \[2, 3, 1\] does not fit"),
        (torch.ones(2, 3), torch.ones(2, 3), torch.ones(2), "raise", "the mask is torch.float32; bool is needed"),
        (torch.ones(2).long(), torch.ones(2), None, "raise", "prediction torch.int64"),
        (torch.ones(2), torch.ones(2, dtype=torch.complex64), None, "raise", "target torch.complex64"),
        (torch.ones(2), torch.ones(2), None, "zero", "empty='zero'"),
    ],
)
def test_what_is_wrong_is_named(prediction, target, mask, empty, said):
    with pytest.raises(UsageError, match=said):
        masked_mse(prediction, target, mask, empty=empty)
