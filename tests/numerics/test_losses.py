"""The masked cross entropy against torch's own in float64, its exactness under accumulation, and the check of a dataset."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanproof import UsageError
from nanproof.numerics import losses
from nanproof.numerics.losses import Supervision, check_supervised, masked_cross_entropy, supervised_tokens

VOCABULARY = 11


def batch(samples=4, length=9, dtype=torch.float32):
    logits = (3 * torch.randn(samples, length, VOCABULARY)).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (samples, length))
    labels[torch.rand(samples, length) < 0.4] = -100
    return logits, labels


def oracle(logits, labels, num_items=None, shift=True, smoothing=0.0):
    """Token by token in float64, from the definition."""
    wide = logits.detach().double().requires_grad_()
    terms = []
    for i in range(len(labels)):
        for t in range(labels.shape[1]):
            at = t - 1 if shift else t
            if labels[i, t] != -100 and at >= 0:
                log = wide[i, at] - torch.logsumexp(wide[i, at], 0)
                terms.append(-(1 - smoothing) * log[labels[i, t]] - smoothing * log.mean())
    loss = torch.stack(terms).sum() / (len(terms) if num_items is None else num_items)
    loss.backward()
    return loss.detach(), wide.grad


@pytest.mark.parametrize("chunk", [1, 40, 2**24])
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_value_and_gradient(monkeypatch, chunk, shift, smoothing):
    """In however many pieces the rows are computed."""
    monkeypatch.setattr(losses, "_CHUNK", chunk)
    logits, labels = batch()
    loss = masked_cross_entropy(logits, labels, shift=shift, label_smoothing=smoothing)
    loss.backward()
    wanted, gradient = oracle(logits, labels, shift=shift, smoothing=smoothing)
    torch.testing.assert_close(loss.detach().double(), wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits.grad.double(), gradient, rtol=1e-5, atol=1e-7)


def test_it_is_torchs_own_where_that_is_right():
    logits, labels = batch()
    again = logits.detach().clone().requires_grad_()
    masked_cross_entropy(logits, labels, label_smoothing=0.2).backward()
    F.cross_entropy(again[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.2).backward()
    torch.testing.assert_close(logits.grad, again.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_half_logits_are_summed_in_fp32(dtype):
    """The value is that of the same numbers in float64, to fp32 rounding; 20000 tokens of loss 2.4 would not fit into fp16."""
    logits, labels = batch(40, 500, dtype)
    loss = masked_cross_entropy(logits, labels, num_items=1)
    flat = F.cross_entropy(logits.detach().double()[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and flat > 65504 / 2
    torch.testing.assert_close(loss.detach().double(), flat, rtol=1e-6, atol=0)
    loss.backward()
    assert logits.grad.dtype == dtype


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_accumulation_is_exact(kind):
    """Micro-batches that hold 1 to 12 supervised tokens: losses and gradients add up to the whole batch's; the mean of means,
    which most loops compute, does not come near."""
    torch.manual_seed(3)
    model = nn.Linear(5, VOCABULARY)
    x, labels = torch.randn(4, 13, 5), torch.randint(0, VOCABULARY, (4, 13))
    for sample, kept in enumerate((1, 2, 4, 12)):
        labels[sample, 1 : 13 - kept] = -100
    items = int(supervised_tokens(labels).sum())
    assert items == 19
    wide = nn.Linear(5, VOCABULARY).double()
    wide.load_state_dict(model.state_dict())
    whole = F.cross_entropy(wide(x.double())[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    whole.backward()
    parts = [masked_cross_entropy(model(x[i : i + 1]), labels[i : i + 1], num_items=kind(items)) for i in range(4)]
    for part in parts:
        part.backward()
    torch.testing.assert_close(sum(p.detach() for p in parts).double(), whole.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(model.weight.grad.double(), wide.weight.grad, rtol=1e-5, atol=1e-7)
    means = sum(masked_cross_entropy(model(x[i : i + 1]), labels[i : i + 1]).detach() for i in range(4)) / 4
    assert abs(means - whole.detach()) > 0.02 * whole


def test_a_micro_batch_without_a_token_adds_nothing():
    """Under accumulation the others have some: 0 over their number, with gradients of 0, whatever `empty` says."""
    logits, labels = batch()
    for empty in ("raise", "refuse", "neutral"):
        logits.grad = None
        loss = masked_cross_entropy(logits, torch.full_like(labels, -100), num_items=7, empty=empty)
        loss.backward()
        assert loss == 0 and bool((logits.grad == 0).all())


def test_a_mean_over_nothing():
    """Raised with the samples, or NaN in value and gradient, or exactly 0 in both."""
    logits, labels = batch()
    nothing = torch.full_like(labels, -100)
    with pytest.raises(UsageError, match=r"none of 4 samples \(0, 1, 2, 3\) has a supervised token: the mean is 0/0"):
        masked_cross_entropy(logits, nothing)
    first = nothing.clone()
    first[:, 0] = 3  # the label of the first token is never used
    with pytest.raises(UsageError, match="none of 4 samples"):
        masked_cross_entropy(logits, first)
    refused = masked_cross_entropy(logits, nothing, empty="refuse")
    refused.backward()
    assert refused.isnan() and bool(logits.grad.isnan().all())
    logits.grad = None
    neutral = masked_cross_entropy(logits, nothing, empty="neutral")
    neutral.backward()
    assert neutral == 0 and bool((logits.grad == 0).all())


def test_a_wrong_number_of_items_is_not_made_up_for():
    """0 items of which there are some: an error, or Inf; never a number."""
    logits, labels = batch()
    with pytest.raises(UsageError, match=r"num_items is 0, but \d+ tokens are supervised"):
        masked_cross_entropy(logits, labels, num_items=0)
    for empty in ("refuse", "neutral"):
        assert masked_cross_entropy(logits, labels, num_items=torch.tensor(0), empty=empty) == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_does_not_count_does_not_leak(value):
    """Logits at positions without a label: the loss and every other gradient are those of finite logits; theirs are exactly 0.
    torch's own cross entropy hides NaN in the value and shows it in the gradient."""
    logits, labels = batch()
    clean, gradient = oracle(logits, labels)
    counts = torch.zeros_like(labels, dtype=torch.bool)
    counts[:, :-1] = labels[:, 1:] != -100
    bad = logits.detach().clone()
    bad[~counts] = value
    bad.requires_grad_()
    loss = masked_cross_entropy(bad, labels)
    loss.backward()
    torch.testing.assert_close(loss.detach().double(), clean, rtol=1e-6, atol=0)
    torch.testing.assert_close(bad.grad.double(), gradient, rtol=1e-5, atol=1e-7)
    assert bool((bad.grad[~counts] == 0).all())
    leaks = bad.detach().clone().requires_grad_()
    F.cross_entropy(leaks[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    assert not bool(leaks.grad.isfinite().all())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_counts_stays_visible(value):
    """One bad logit at a supervised position: the loss is not finite, nor is the gradient there."""
    logits, labels = batch()
    at = tuple(torch.nonzero(labels[:, 1:] != -100)[3])
    bad = logits.detach().clone()
    bad[(*at, 5)] = value
    bad.requires_grad_()
    loss = masked_cross_entropy(bad, labels)
    loss.backward()
    assert not loss.isfinite() and not bool(bad.grad[at].isfinite().all())
    assert bool(bad.grad.flatten(0, 1)[[i for i in range(36) if i != at[0] * 9 + at[1]]].isfinite().all())


def test_banned_tokens_are_fine_unless_they_are_the_target():
    logits, labels = batch()
    labels[labels == 2] = 3
    with torch.no_grad():
        logits[..., 2] = -math.inf
    masked_cross_entropy(logits, labels).backward()
    assert bool(logits.grad.isfinite().all()) and bool((logits.grad[..., 2] == 0).all())
    labels[0, 1] = 2
    assert masked_cross_entropy(logits, labels) == math.inf


def test_labels_out_of_range():
    """An error that says which, on a CPU whatever `empty` says. Another ignored index may be a token of the vocabulary."""
    logits, labels = batch()
    for wrong in (VOCABULARY, -1):
        other = labels.clone()
        other[2, 4] = wrong
        for empty in ("raise", "refuse", "neutral"):
            with pytest.raises(UsageError, match=rf"1 labels are not below 11.*: {wrong} in sample 2; samples 2\. Check the tok"):
                masked_cross_entropy(logits, other, empty=empty)
    labels[labels == -100] = 0
    loss = masked_cross_entropy(logits, labels, ignore_index=0)
    wanted = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=0)
    torch.testing.assert_close(loss, wanted)


def test_a_label_out_of_range_is_nan_where_nobody_is_asked(monkeypatch):
    """What a device does, on a CPU: without the look the value is NaN, and so is the gradient of that row alone."""
    monkeypatch.setattr(losses, "_look", lambda *args: None)
    logits, labels = batch()
    labels[2, 4] = 99
    loss = masked_cross_entropy(logits, labels, empty="refuse")
    loss.backward()
    assert loss.isnan()
    assert logits.grad.isnan().all(-1).nonzero().tolist() == [[2, 3]]


def test_what_is_kept_for_backward():
    """No fp32 copy of half-precision logits: the logits themselves, and a few numbers a row."""
    logits, labels = batch(8, 64, torch.bfloat16)
    kept: dict[int, int] = {}

    def pack(t):
        if t.data_ptr() != logits.data_ptr():
            kept[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        masked_cross_entropy(logits, labels)
    assert 0 < sum(kept.values()) < 4 * logits.numel() / 2


def test_calls_that_cannot_be_meant():
    logits, labels = batch()
    for wrong in (
        lambda: masked_cross_entropy(logits[:, :-1], labels),
        lambda: masked_cross_entropy(logits, labels.float()),
        lambda: masked_cross_entropy(logits, labels, empty="skip"),
        lambda: masked_cross_entropy(logits, labels, label_smoothing=1.0),
        lambda: masked_cross_entropy(logits, labels, num_items=-1),
        lambda: masked_cross_entropy(logits, labels, num_items=torch.ones(2)),
    ):
        with pytest.raises(UsageError):
            wrong()


def test_a_guard_refuses_an_empty_batch():
    """`empty="refuse"`: the step leaves no trace, and the cause has a name."""
    import nanproof

    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
    guard = nanproof.Guard(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss_fn=lambda m, b: masked_cross_entropy(m(b[0]), b[1], empty="refuse"),
    )
    ids = torch.randint(0, VOCABULARY, (4, 9))
    guard.train_step((ids, ids))
    before = [p.detach().clone() for p in model.parameters()]
    guard.train_step((ids, torch.full_like(ids, -100)))
    guard.close()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    [incident] = guard.incidents
    assert (incident.step, incident.kind, incident.diagnosis.cause) == (1, "nonfinite-loss", "no-supervised-targets")


# -- counting ------------------------------------------------------------------------------------------------------------------


def test_supervised_tokens_by_sample():
    labels = torch.tensor([[5, -100, 3, 4], [5, -100, -100, -100], [-100, 1, 2, -100]])
    assert supervised_tokens(labels).tolist() == [2, 0, 2]
    assert supervised_tokens(labels, shift=False).tolist() == [3, 1, 2]
    assert supervised_tokens(labels[0]).item() == 2
    assert supervised_tokens(labels, ignore_index=5).tolist() == [3, 3, 3]


def rows():
    import numpy

    return [
        {"labels": [-100, 1, 2, 3]},
        {"labels": torch.tensor([-100, -100, 7]), "input_ids": [1, 2, 3]},
        {"labels": numpy.array([4, 5])},
    ]


def test_a_supervised_dataset():
    """Lists, tensors and arrays; sequences, datasets of torch, datasets, and generators with a limit."""
    datasets = pytest.importorskip("datasets")
    wanted = Supervision(samples=3, tokens=5, least=1, most=3, share=5 / 6)
    assert check_supervised(rows()) == wanted
    assert str(wanted) == "3 samples, 5 supervised tokens (83%), 1 to 3 a sample"

    class Plain(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return rows()[i % 3]

    assert check_supervised(Plain()) == wanted
    columns = datasets.Dataset.from_list([{"labels": [int(t) for t in row["labels"]], "text": "x"} for row in rows()])
    assert check_supervised(columns) == wanted
    assert check_supervised((row for row in rows()), limit=2).samples == 2
    with pytest.raises(UsageError, match="it has no length; say how many samples to look at, limit="):
        check_supervised(row for row in rows())
    assert check_supervised([{"y": 3}], labels="y", shift=False) == Supervision(1, 1, 1, 1, 1.0)


def test_samples_without_a_supervised_token_are_named():
    """How many, the first ten, and why it matters; a first label that is never used does not count."""
    data = [{"labels": [5, -100, -100] if i % 2 else [-100, 3]} for i in range(30)]
    with pytest.raises(UsageError) as raised:
        check_supervised(data)
    said = str(raised.value)
    assert "15 of 30 samples have no supervised token: 1, 3, 5, 7, 9, 11, 13, 15, 17, 19 and 5 more." in said
    assert "0/0" in said and "max_length" in said
    assert check_supervised(data, shift=False).tokens == 30
    assert check_supervised(data, limit=1).samples == 1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "no sample in it"),
        ([{"labels": [1, 2]}, {"input_ids": [1]}], r"sample 1 has no 'labels', it has the keys \['input_ids'\]"),
        ([(1, 2)], "sample 0 has no 'labels', it has the type tuple"),
        ([{"labels": "text"}], "sample 0 are no list of numbers"),
        ([{"labels": 3}], "pass shift=False"),
    ],
)
def test_datasets_that_cannot_be_checked(data, says):
    with pytest.raises(UsageError, match=says):
        check_supervised(data)
