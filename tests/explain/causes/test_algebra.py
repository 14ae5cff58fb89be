"""Numerical causes: each in several forms, beside its healthy twin, and beside faults that are not it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import deterministic

import nanproof
from nanproof.explain._case import Case
from nanproof.explain._diagnose import explain
from nanproof.explain.replay._replay import Replay
from nanproof.numerics.losses import weighted_sum


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def column(value, other=1.0):
    """Six rows, of which row 2 differs."""
    out = torch.full((6, 1), other)
    out[2] = value
    return out


def positive(model, x):
    return model(x).abs() + 1


def diagnosed(loss, model=None, x=None):
    return nanproof.diagnose(nn.Linear(4, 3) if model is None else model, loss, torch.randn(6, 4) if x is None else x)


# -- power-of-negative -----------------------------------------------------------------------------------------------------------

POWERS = {
    "pow": lambda z: z**0.5,
    "pow of a tensor": lambda z: torch.pow(z, torch.full_like(z, 1.5)),
    "log": torch.log,
    "log2": torch.log2,
    "log1p": torch.log1p,
    "xlogy": lambda z: torch.xlogy(torch.ones_like(z), z),
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
}


@pytest.mark.parametrize("name", POWERS)
def test_a_power_or_logarithm_of_a_negative_number(name):
    found = diagnosed(lambda m, x: POWERS[name](positive(m, x) + column(-50.0)).mean())
    assert (found.cause, found.verified, found.samples) == ("power-of-negative", True, (2,))
    assert found.op == name.split()[0] and "was -4" in found.evidence[0]
    assert diagnosed(lambda m, x: POWERS[name](positive(m, x)).mean()).cause == "none"


def test_a_base_that_rounding_made_negative():
    """1 - p of a probability that rounds to more than 1, as in a focal loss."""
    found = diagnosed(lambda m, x: ((positive(m, x) * column(0.0) - 1e-7) ** 1.5).mean())
    assert (found.cause, found.verified, found.samples) == ("power-of-negative", True, (2,))


def test_log_of_zero_is_the_alternative_for_a_logarithm():
    found = diagnosed(lambda m, x: (positive(m, x) + column(-50.0)).log().mean())
    assert found.alternatives == ("log-of-zero",)


def test_a_learned_exponent_of_a_negative_base():
    """The square is finite; the gradient of its exponent is not."""

    class Power(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.p = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return super().forward(x) ** self.p

    found = diagnosed(lambda m, x: m(x).mean(), Power())
    assert (found.cause, found.verified, found.op, found.phase) == ("power-of-negative", True, "pow", "backward")


@pytest.mark.parametrize(
    ("cause", "loss"),
    [
        ("log-of-zero", lambda m, x: (positive(m, x) * column(0.0)).log().mean()),
        ("log-of-zero", lambda m, x: (positive(m, x) * column(0.0) - 1).log1p().mean()),
        ("sqrt-at-zero", lambda m, x: (positive(m, x) * column(0.0)).sqrt().mean()),
        ("sqrt-at-zero", lambda m, x: (positive(m, x) * column(0.0) - 1e-9).sqrt().mean()),
        ("zero-denominator", lambda m, x: ((positive(m, x) * column(0.0)) ** -1.5).mean()),
    ],
)
def test_zero_and_rounding_are_not_negative_numbers(cause, loss):
    found = diagnosed(loss)
    assert (found.cause, found.verified) == (cause, True)


def test_a_zero_beside_a_negative_number_is_not_mended():
    found = diagnosed(lambda m, x: ((positive(m, x) + column(-50.0)) * column(1.0, 0.0)).log().mean())
    assert found.cause == "log-of-zero" and "power-of-negative" in found.alternatives


# -- label-smoothing-over-masked-logits ------------------------------------------------------------------------------------------

LABELS = torch.tensor([0, 1, 2, 3, 1, 0])


def masked(model, x):
    """The last of five classes is masked."""
    mask = torch.zeros(6, 5, dtype=torch.bool)
    mask[:, 4] = True
    return model(x).masked_fill(mask, -math.inf)


def smoothed(labels=LABELS):
    return F.one_hot(labels, 5) * 0.9 + 0.02


def by_hand(logits, labels=LABELS):
    logs = logits.log_softmax(-1)
    return 0.9 * F.nll_loss(logs, labels) + 0.1 * -logs.mean(-1).mean()


SMOOTHINGS = {
    "cross_entropy": lambda z: F.cross_entropy(z, LABELS, label_smoothing=0.1),
    "cross_entropy of shares": lambda z: F.cross_entropy(z, smoothed()),
    "mean": by_hand,
    "sum": lambda z: -(smoothed() * z.log_softmax(-1)).sum(-1).mean(),
    "sum of a negation": lambda z: (-z.log_softmax(-1)).sum(-1, keepdim=True).mean() * 0.1,
    "kl_div": lambda z: F.kl_div(z.log_softmax(-1), smoothed(), reduction="batchmean"),
}


@pytest.mark.parametrize("name", SMOOTHINGS)
def test_smoothing_over_masked_classes(name):
    found = diagnosed(lambda m, x: SMOOTHINGS[name](masked(m, x)), nn.Linear(4, 5))
    assert (found.cause, found.verified) == ("label-smoothing-over-masked-logits", True)
    assert found.op == name.split()[0] and "6 of 30 logits are -inf" in found.evidence[0]
    assert diagnosed(lambda m, x: SMOOTHINGS[name](m(x)), nn.Linear(4, 5)).cause == "none"


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: F.cross_entropy(z, LABELS + (LABELS == 3), label_smoothing=0.1),
        lambda z: by_hand(z, LABELS + (LABELS == 3)),
        lambda z: F.cross_entropy(z, LABELS + (LABELS == 3)),
        lambda z: F.cross_entropy(z, smoothed(LABELS + (LABELS == 3))),
        lambda z: F.kl_div(z.log_softmax(-1), smoothed(LABELS + (LABELS == 3)), reduction="batchmean"),
        lambda z: -(smoothed(LABELS + (LABELS == 3)) * z.log_softmax(-1)).sum(-1).mean(),
        lambda z: -(F.one_hot(LABELS, 5) * z.log_softmax(-1)).sum(-1).mean(),
    ],
)
def test_a_masked_target_and_0_times_inf_are_not_smoothing(loss):
    """A target that is masked itself stays infinite without smoothing; 0 * -inf is log-of-zero."""
    found = diagnosed(lambda m, x: loss(masked(m, x)), nn.Linear(4, 5))
    assert not (found.cause == "label-smoothing-over-masked-logits" and found.verified)


# -- degenerate-decomposition ----------------------------------------------------------------------------------------------------


def square(values=None, column=None):
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        if values is not None:
            model.weight.copy_(torch.diag(torch.tensor(values)))
        if column is not None:
            model.weight[:, column] = 0
    return model


DECOMPOSITIONS = {
    "svd": (lambda w: (torch.linalg.svd(w)[0] * torch.arange(4.0)).sum(), {"values": [1.0, 1.0, 2.0, 3.0]}),
    "eigh": (lambda w: (torch.linalg.eigh(w @ w.T)[1] * torch.randn(4, 4)).sum(), {"values": [1.0, 1.0, 2.0, 3.0]}),
    "qr": (lambda w: torch.linalg.qr(w)[0].abs().sum(), {"column": 1}),
}


@pytest.mark.parametrize("op", DECOMPOSITIONS)
def test_equal_or_zero_values(op):
    """The ramp that sets them apart helps; doubling the matrix, which does not, must not."""
    loss, how = DECOMPOSITIONS[op]
    found = diagnosed(lambda m, x: loss(m.weight), square(**how))
    assert (found.cause, found.verified, found.op) == ("degenerate-decomposition", True, op)
    assert "doubled" in found.evidence[-1] and "of the largest" in found.evidence[0]
    assert diagnosed(lambda m, x: loss(m.weight), square([1.0, 4.0, 2.0, 3.0])).cause == "none"


def test_a_bad_gradient_beside_a_decomposition():
    """An SVD of distinct values is not to blame; one of equal values is not all that is wrong here."""

    def loss(model, x):
        return torch.linalg.svd(model.weight)[0].sum() + (model(x) * 0).sqrt().sum()

    assert diagnosed(loss, square([1.0, 4.0, 2.0, 3.0])).cause == "sqrt-at-zero"
    found = diagnosed(loss, square([1.0, 1.0, 2.0, 3.0]))
    assert not (found.cause == "degenerate-decomposition" and found.verified)


# -- infinite-term-with-weight-0 -------------------------------------------------------------------------------------------------


def infinite(model, x):
    return (positive(model, x) * column(0.0)).log().mean(1)


@pytest.mark.parametrize(
    "weighted",
    [
        lambda m, x: 0.0 * infinite(m, x).mean(),
        lambda m, x: -infinite(m, x).mean() * torch.tensor(0.0),
        lambda m, x: (0 * infinite(m, x)).mean(),
        lambda m, x: 0.0 * (m(x).abs() * 1e4 + 1e3).exp().mean(),
        lambda m, x: (torch.stack([m(x).mean(), infinite(m, x).mean()]) * torch.tensor([1.0, 0.0])).sum(),
    ],
)
def test_a_weight_of_0_on_an_infinite_term(weighted):
    found = diagnosed(lambda m, x: m(x).square().mean() + weighted(m, x))
    assert (found.cause, found.verified, found.op, found.phase) == ("infinite-term-with-weight-0", True, "mul", "loss")
    assert "the term is added to the rest" in found.evidence[-1]


def test_the_healthy_twin_skips_the_term():
    terms = {"fit": lambda m, x: m(x).square().mean(), "extra": lambda m, x: infinite(m, x).mean()}
    weights = {"extra": 0.0}
    found = diagnosed(lambda m, x: weighted_sum({k: f(m, x) for k, f in terms.items()}, weights))
    assert found.cause == "none"


@pytest.mark.parametrize(
    ("cause", "loss"),
    [
        ("log-of-zero", lambda m, x: m(x).mean() + 0.1 * infinite(m, x).mean()),
        ("log-of-zero", lambda m, x: (column(0.0) * (positive(m, x) * column(0.0)).log()).mean()),
        ("exp-overflow", lambda m, x: m(x).mean() / (1 + 0.0 * (m(x).abs() * 1e4 + 1e3).exp().mean())),
    ],
)
def test_other_products_with_an_infinite_number(cause, loss):
    """A weight that is not 0, a mask of many elements, and a product that is not a term of a sum."""
    found = diagnosed(loss)
    assert (found.cause, found.verified) == (cause, True)


# -- custom-kernel-uninitialised-output ------------------------------------------------------------------------------------------


class Leaves(torch.autograd.Function):
    """Doubles, and forgets the last row."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        out[:-1] = x[:-1] * 2
        return out

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class LeavesGradient(torch.autograd.Function):
    """The same in backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        out = gradient.new_empty(gradient.shape)
        out[1:] = gradient[1:] * 2
        return out


class Writes(torch.autograd.Function):
    """Writes all of it."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        out.copy_(x * 2)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Custom(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner, self.function = nn.Linear(4, 3), function

    def forward(self, x):
        return self.function.apply(Writes.apply(self.inner(x)))


def mean(model, x):
    return model(x).mean()


def unwritten(function, loss=mean, kind="nonfinite-loss"):
    return explain(Case(kind, replay=Replay(Custom(function), loss, [torch.randn(6, 4)])))


@pytest.mark.parametrize(("function", "phase"), [(Leaves, "forward"), (LeavesGradient, "backward")])
def test_memory_that_nobody_wrote(function, phase):
    """The replay happens to be finite, so it looks like a transient fault; NaN in that memory shows that it is not."""
    found = unwritten(function)
    assert (found.cause, found.verified) == ("custom-kernel-uninitialised-output", True)
    assert (found.op, found.phase) == (function.__name__, phase) and "test_algebra.py" in found.source
    assert "3 of 18 elements are never written" in found.evidence[0]


@pytest.mark.parametrize(("function", "kind"), [(Leaves, "nonfinite-loss"), (LeavesGradient, "nonfinite-gradient")])
def test_memory_that_is_nan_each_time(function, kind):
    """torch fills uninitialised memory with NaN in deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    try:
        found = unwritten(function, kind=kind)
    finally:
        torch.use_deterministic_algorithms(before[0])
        deterministic.fill_uninitialized_memory = before[1]
    assert (found.cause, found.verified, found.op) == ("custom-kernel-uninitialised-output", True, function.__name__)


def test_memory_that_is_written_is_not_blamed():
    assert unwritten(Writes).cause == "transient-fault"
    assert unwritten(Writes, lambda m, x: (m(x) * 0 - 1).log().mean()).cause == "power-of-negative"


def test_zeros_do_not_mend_another_fault():
    found = unwritten(Leaves, lambda m, x: m(x).mean() + (m(x)[:2] * 0 - 1).log().mean())
    assert found.cause != "custom-kernel-uninitialised-output"


# -- what older causes missed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("both", [False, True])
def test_kl_div_of_impossible_classes(both):
    target = torch.full((6, 3), 0.5).log()
    target[:, 2] = -math.inf

    def loss(model, x):
        z = model(x).masked_fill(target == -math.inf, -math.inf) if both else model(x)
        return F.kl_div(z.log_softmax(1), target, log_target=True, reduction="batchmean")

    found = diagnosed(loss)
    assert (found.cause, found.verified) == ("log-of-zero", True)


@pytest.mark.parametrize("loss", [lambda z: z.var(0).sqrt().sum(), lambda z: (z - z.mean(0)).square().mean(0).pow(0.5).sum()])
def test_the_deviation_of_equal_values(loss):
    found = diagnosed(lambda m, x: loss(m(x)), x=torch.ones(6, 4))
    assert (found.cause, found.verified) == ("sqrt-at-zero", True)


@pytest.mark.parametrize("loss", [lambda z: (z * z.std(0)).sum(), lambda z: torch.std_mean(z, 0)[0].sum() + z.sum()])
def test_the_deviation_of_one_sample_has_a_gradient_too(loss):
    found = diagnosed(lambda m, x: loss(m(x)), x=torch.randn(1, 4))
    assert (found.cause, found.verified) == ("std-of-one-sample", True)


DIVISIONS = {
    "reciprocal": lambda z: z.reciprocal(),
    "reciprocal of a number": lambda z: 1 / z,
    "pow": lambda z: z**-1,
    "rsqrt": lambda z: z.abs().rsqrt(),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_divisions_by_another_name(name):
    found = diagnosed(lambda m, x: DIVISIONS[name](m(x) * column(0.0)).sum())
    assert (found.cause, found.verified, found.samples) == ("zero-denominator", True, (2,))
    assert found.op == name.split()[0]


def test_weight_norm_of_a_zero_vector():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    assert diagnosed(mean, model).cause == "none"
    with torch.no_grad():
        model.parametrizations.weight.original1[1] = 0
    found = diagnosed(mean, model)
    assert (found.cause, found.verified, found.op) == ("zero-denominator", True, "weight_norm_interface")
    assert "1 of 3 vectors" in found.evidence[0]


@pytest.mark.parametrize("zero", [True, False])
def test_the_cosine_of_a_zero_vector(zero):
    """Its gradient is 1e8, and finite."""

    class Prototypes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.anchors = nn.Linear(4, 8), nn.Parameter(torch.randn(5, 8))
            if zero:
                self.anchors.data[2] = 0

        def forward(self, x):
            return F.cosine_similarity(self.inner(x)[:, None], self.anchors[None], dim=-1)

    model, batch = Prototypes(), (torch.randn(8, 4), torch.randint(0, 5, (8,)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    found = nanproof.preflight(model, optimizer, batch, lambda m, b: F.cross_entropy(10 * m(b[0]), b[1]))
    assert [(d.cause, d.verified) for d in found] == [("normalize-zero-vector", True)] * zero
