"""Causes that raise: each in several forms, beside its healthy twin, and beside faults that are not it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanproof
from nanproof.explain.locate._indices import ClampedIds
from toys import batches, mse, net


class Reader(nn.Module):
    """Ten tokens, eight positions, ten classes."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions, self.out = nn.Embedding(10, 6), nn.Embedding(8, 6), nn.Linear(6, 10)
        self.table = nn.Parameter(torch.randn(8, 6))

    def forward(self, ids, plain=False):
        places = torch.arange(ids.shape[1])
        return self.out(self.tokens(ids) + (self.table[places] if plain else self.positions(places)))


def next_token(model, batch):
    return F.cross_entropy(model(batch["ids"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def text(length=6, **changes):
    torch.manual_seed(0)
    ids = torch.randint(0, 10, (4, length))
    batch = {"ids": ids.clone(), "labels": ids.clone()}
    for name, (row, column, value) in changes.items():
        batch[name][row, column] = value
    return batch


# -- ids-out-of-range ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "where", "op", "sample", "token", "said"),
    [
        ({"ids": (2, 3, 10)}, "tokens", "embedding", 2, 3, "the index 10 at [2, 3] of batch['ids'], for a table of 10 rows"),
        ({"labels": (1, 4, 12)}, "loss_fn", "cross_entropy", 1, 4, "the index 12 at [1, 4] of batch['labels'], for 10 classes"),
        ({"labels": (3, 2, -1)}, "loss_fn", "cross_entropy", 3, 2, "the index -1 at [3, 2] of batch['labels'], for 10 classes"),
    ],
)
def test_an_id_in_the_batch_is_found(changes, where, op, sample, token, said):
    """Table, sample and token are named, and only the id outside is changed to try the fix."""
    found = nanproof.diagnose(Reader(), next_token, text(**changes))
    assert (found.cause, found.verified, found.where, found.op) == ("ids-out-of-range", True, where, op)
    assert (found.samples, found.tokens) == ((sample,), (token,))
    assert said in found.evidence[0] and "1 id changed" in found.evidence[-1]
    assert "test_raised.py" in found.source


@pytest.mark.parametrize("plain", [False, True])
def test_a_position_that_is_computed(plain):
    """Sequences longer than the position table: the token is named, and no tensor of the batch is blamed."""

    def loss(model, batch):
        return F.cross_entropy(model(batch["ids"], plain).flatten(0, 1), batch["labels"].flatten())

    found = nanproof.diagnose(Reader(), loss, text(length=9))
    assert (found.cause, found.verified, found.tokens, found.samples) == ("ids-out-of-range", True, (8,), ())
    assert found.where == ("Reader" if plain else "positions") and "computed" in found.evidence[0]


LOOKUPS = {
    "gather": lambda z, y: -z.log_softmax(1).gather(1, y[:, None]).mean(),
    "index_select": lambda z, y: z.T.index_select(0, y).mean(),
    "one_hot": lambda z, y: (z * F.one_hot(y, 3)).mean(),
    "index": lambda z, y: z[torch.arange(len(y)), y].mean(),
    "scatter": lambda z, y: (z * torch.zeros(5, 3).scatter_(1, y[:, None], 1.0)).mean(),
    "nll_loss": lambda z, y: F.nll_loss(z.log_softmax(1), y),
}


@pytest.mark.parametrize("op", LOOKUPS)
def test_every_kind_of_lookup(op):
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 5, 1])
    found = nanproof.diagnose(nn.Linear(4, 3), lambda m, b: LOOKUPS[op](m(b[0]), b[1]), (x, y))
    assert (found.cause, found.verified, found.op, found.samples) == ("ids-out-of-range", True, op, (3,))
    healthy = nanproof.diagnose(nn.Linear(4, 3), lambda m, b: LOOKUPS[op](m(b[0]), b[1]), (x, y.clamp(max=2)))
    assert healthy.cause == "none"


def test_ids_inside_are_never_changed():
    """An ignored label and an index from the end are inside."""
    x, y = torch.randn(5, 4), torch.tensor([0, -100, 2, 1, 1])
    with ClampedIds() as clamp:
        F.cross_entropy(x, y)
        x[torch.tensor([-1, 4])]
    assert clamp.acted == clamp.changed == 0


def test_other_errors_are_not_ids():
    """A list that is too short; an id outside with a NaN behind it, which clamping does not mend."""
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 5, 1])
    found = nanproof.diagnose(nn.Linear(4, 3), lambda m, b: m(b[0]).mean() * [1][len(b[1])], (x, y))
    assert found.cause == "unknown"
    found = nanproof.diagnose(
        nn.Linear(4, 3), lambda m, b: F.cross_entropy(m(b[0]), b[1]) + (m(b[0]) * 0 - 1).log().sum(), (x, y)
    )
    assert not (found.cause == "ids-out-of-range" and found.verified)


def test_the_guard_explains_an_index_error():
    """The error is raised all the same."""
    model = Reader()
    with nanproof.Guard(model, torch.optim.SGD(model.parameters(), 1e-3), loss_fn=next_token) as guard:
        guard.train_step(text())
        with pytest.raises(IndexError):
            guard.train_step(text(ids=(2, 3, 10)))
    (incident,) = guard.incidents
    assert (incident.step, incident.kind, incident.diagnosis.cause) == (1, "exception", "ids-out-of-range")
    assert incident.diagnosis.verified and incident.diagnosis.samples == (2,)


@pytest.mark.parametrize("changes", [{"ids": (2, 3, 10)}, {}])
def test_a_device_side_assert(changes):
    """The CUDA context is gone: nothing is run again, and what shapes and the CPU's tensors show is reported."""
    calls = []

    def loss(model, batch):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported")
        return next_token(model, batch)

    model = Reader()
    with nanproof.Guard(model, torch.optim.SGD(model.parameters(), 1e-3), loss_fn=loss) as guard:
        guard.train_step(text())
        with pytest.raises(RuntimeError, match="device-side assert"):
            guard.train_step(text(**changes))
    assert len(calls) == 2
    found = guard.incidents[0].diagnosis
    assert found.cause == "ids-out-of-range" and not found.verified
    assert "CUDA_LAUNCH_BLOCKING=1" in found.fix and "nanproof.diagnose" in found.fix
    if changes:
        assert found.where == "tokens" and found.samples == (2,) and found.confidence >= 0.8
        assert "batch['ids'] holds ids up to 10, and tokens has 10 rows" in found.evidence
    else:
        assert found.confidence < 0.6


def test_a_label_beyond_the_outputs_of_a_lost_device():
    """Without an embedding, one label a sample is compared with the last linear layer."""

    def loss(model, batch):
        raise RuntimeError("CUDA error: device-side assert triggered")

    model, batch = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), (torch.randn(5, 4), torch.tensor([0, 1, 3, 2, 1]))
    with nanproof.Guard(model, torch.optim.SGD(model.parameters(), 1e-3), loss_fn=loss) as guard, pytest.raises(RuntimeError):
        guard.train_step(batch)
    found = guard.incidents[0].diagnosis
    assert (found.cause, found.where, found.samples) == ("ids-out-of-range", "1", (2,))


# -- batch-of-one ----------------------------------------------------------------------------------------------------------------


def mean(model, batch):
    return model(batch).square().mean()


NORMS = {
    "batch_norm": (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3)), (1, 4)),
    "batch_norm of a pixel": (nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)), (1, 2, 1, 1)),
    "instance_norm": (nn.Sequential(nn.Conv1d(2, 3, 1), nn.InstanceNorm1d(3), nn.Conv1d(3, 1, 1)), (4, 2, 1)),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_over_one_value(name):
    model, shape = NORMS[name]
    found = nanproof.diagnose(model, mean, torch.randn(*shape))
    assert (found.cause, found.verified, found.where) == ("batch-of-one", True, "1")
    assert f"batch of {shape[0]} sample" in found.evidence[0] and found.op == name.split()[0]
    assert found.fix
    larger = (2, *shape[1:]) if "batch" in name else (*shape[:-1], 5)
    assert nanproof.diagnose(model, mean, torch.randn(*larger)).cause == "none"


def test_the_guard_explains_a_last_batch_of_one():
    model = net()
    with nanproof.Guard(model, torch.optim.SGD(model.parameters(), 1e-3), loss_fn=mse) as guard:
        for batch in batches(2):
            guard.train_step(batch)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            guard.train_step(batches(1, size=1)[0])
    (incident,) = guard.incidents
    assert incident.diagnosis.cause == "batch-of-one" and incident.diagnosis.verified and incident.diagnosis.where == "1"


def test_what_is_not_a_batch_of_one():
    """GroupNorm does not depend on the batch; a NaN behind the norm stays where it is."""
    grouped = nn.Sequential(nn.Linear(4, 3), nn.GroupNorm(3, 3))
    assert nanproof.diagnose(grouped, mean, torch.randn(1, 4)).cause != "batch-of-one"
    model = NORMS["batch_norm"][0]
    found = nanproof.diagnose(model, lambda m, b: (m(b) * 0 - 1).log().mean(), torch.randn(1, 4))
    assert found.cause == "batch-of-one" and not found.verified


# -- not-positive-definite -------------------------------------------------------------------------------------------------------


def lowered(z):
    return z.T @ z - 2 * torch.eye(3)


MATRICES = {
    "cholesky": lambda z: torch.linalg.cholesky(z @ z.T).diagonal().log().sum(),
    "cholesky_ex": lambda z: torch.linalg.cholesky_ex(lowered(z))[0].diagonal().log().sum(),
    "inverse": lambda z: torch.inverse(z.T @ z * 0 + torch.ones(3, 3)).sum(),
    "solve": lambda z: torch.linalg.solve(torch.zeros(3, 3) * z.mean(), z[0]).sum(),
    "logdet": lambda z: torch.logdet(z.T @ z - 100 * torch.eye(3)),
}


@pytest.mark.parametrize("op", MATRICES)
def test_a_matrix_that_cannot_be_factored(op):
    torch.manual_seed(0)
    found = nanproof.diagnose(nn.Linear(4, 3), lambda m, x: MATRICES[op](m(x)), torch.randn(5, 4))
    assert (found.cause, found.verified, found.op) == ("not-positive-definite", True, op)
    assert "smallest eigenvalue is" in found.evidence[0] and "test_raised.py" in found.source


def test_the_covariance_of_a_distribution():
    torch.manual_seed(0)

    def loss(model, x, shift=2.0):
        z = model(x)
        spread = z.T @ z + (0.1 - shift) * torch.eye(3)
        return -torch.distributions.MultivariateNormal(z.mean(0), spread).log_prob(torch.zeros(3))

    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    found = nanproof.diagnose(model, loss, x)
    assert (found.cause, found.verified) == ("not-positive-definite", True)
    assert nanproof.diagnose(model, lambda m, x: loss(m, x, 0.0), x).cause == "none"


def test_the_sample_whose_matrix_it_is():
    torch.manual_seed(0)
    lower = torch.tensor([0.0, 0, 1.5, 0, 0])[:, None, None] * torch.eye(3)

    def loss(model, x):
        z = model(x).reshape(-1, 3, 3)
        return torch.linalg.cholesky(z @ z.mT * 1e-3 + torch.eye(3) - lower).sum()

    found = nanproof.diagnose(nn.Linear(4, 9), loss, torch.randn(5, 4))
    assert (found.cause, found.verified, found.samples) == ("not-positive-definite", True, (2,))
    assert "batch element 2" in found.evidence[0]


def test_a_matrix_that_is_nan_already_has_its_cause_elsewhere():
    torch.manual_seed(0)

    def loss(model, x):
        z = model(x)
        return torch.linalg.cholesky(z.T @ z + (z.sum() * 0 - 1).log()).sum()

    found = nanproof.diagnose(nn.Linear(4, 3), loss, torch.randn(5, 4))
    assert (found.cause, found.op) == ("power-of-negative", "log")


def test_jitter_does_not_mend_what_comes_after():
    torch.manual_seed(0)

    def loss(model, x):
        return torch.linalg.cholesky(lowered(model(x))).sum() + (model(x) * 0 - 1).log().sum()

    found = nanproof.diagnose(nn.Linear(4, 3), loss, torch.randn(5, 4))
    assert found.cause == "not-positive-definite" and not found.verified
