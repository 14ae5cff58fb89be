"""What is read from the graph of a loss, compared with slow sums over its logits and targets."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanproof.explain._graph import applied_twice, broadcast_in, nodes_of, outputs_of, targets_of


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def logits_of(*shape):
    """Logits as a layer gives them: not a leaf of the graph."""
    return torch.randn(*shape, requires_grad=True) * 1.5


def found_twice(loss):
    return [(found.inner, found.outer) for found, _ in applied_twice(nodes_of(loss))]


CLASSES = torch.tensor([0, 2, 1, 2, 0, 1])
BITS = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
SOFTMAX_TWICE, SIGMOID_TWICE = ("softmax", "log_softmax"), ("sigmoid", "binary_cross_entropy_with_logits")


def in_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(nn.Linear(4, 3)(torch.randn(6, 4)).softmax(-1), CLASSES)


def of_modules():
    model = nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=-1))
    return nn.CrossEntropyLoss(label_smoothing=0.1)(model(torch.randn(6, 4)), CLASSES)


def of_binary_modules():
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid(), nn.Flatten(0))
    return nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0))(model(torch.randn(6, 4)), BITS)


def of_a_picture():
    scores = F.interpolate(logits_of(2, 3, 4, 4).softmax(1), scale_factor=2, mode="bilinear")
    return F.cross_entropy(scores, torch.randint(0, 3, (2, 8, 8)))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda: F.cross_entropy(logits_of(6, 3).softmax(-1), CLASSES), SOFTMAX_TWICE),
        (lambda: F.cross_entropy(logits_of(2, 3, 3).softmax(-1).reshape(-1, 3), CLASSES), SOFTMAX_TWICE),
        (lambda: F.cross_entropy(logits_of(2, 3, 3).softmax(1).transpose(1, 2).flatten(0, 1), CLASSES), SOFTMAX_TWICE),
        (lambda: F.cross_entropy(logits_of(7, 3).softmax(-1)[:-1].contiguous(), CLASSES), SOFTMAX_TWICE),
        (lambda: F.nll_loss(logits_of(6, 3).softmax(-1).log_softmax(-1), CLASSES), SOFTMAX_TWICE),
        (lambda: F.cross_entropy(logits_of(6, 3).softmax(-1), F.one_hot(CLASSES, 3).float()), SOFTMAX_TWICE),
        (lambda: F.cross_entropy(logits_of(6, 3).sigmoid(), CLASSES), ("sigmoid", "log_softmax")),
        (lambda: 0.5 * F.cross_entropy(logits_of(6, 3).softmax(-1), CLASSES) + logits_of(4).square().mean(), SOFTMAX_TWICE),
        (in_autocast, SOFTMAX_TWICE),
        (of_modules, SOFTMAX_TWICE),
        (of_a_picture, SOFTMAX_TWICE),
        (lambda: F.binary_cross_entropy_with_logits(logits_of(6, 1).sigmoid().squeeze(-1), BITS), SIGMOID_TWICE),
        (of_binary_modules, SIGMOID_TWICE),
    ],
)
def test_an_activation_that_the_loss_applies_again_is_found(loss, expected):
    assert found_twice(loss()) == [expected]


def distilled(teacher_learns):
    student, teacher = logits_of(6, 3), logits_of(6, 3)
    teacher = teacher if teacher_learns else teacher.detach()
    return F.kl_div((student / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="batchmean")


def attended():
    """Attention inside the model is a softmax too."""
    q, v = logits_of(6, 4), logits_of(6, 3)
    return F.cross_entropy((q @ q.T).softmax(-1) @ v, CLASSES)


def focal():
    logits = logits_of(6)
    weight = (BITS - logits.sigmoid()).abs() ** 2
    return (weight * F.binary_cross_entropy_with_logits(logits, BITS, reduction="none")).mean()


@pytest.mark.parametrize(
    "loss",
    [
        lambda: F.cross_entropy(logits_of(6, 3), CLASSES),
        lambda: F.cross_entropy(logits_of(6, 3).log_softmax(-1), CLASSES),
        lambda: F.cross_entropy(30 * (logits_of(6, 3) / 30).tanh(), CLASSES),
        lambda: F.nll_loss(logits_of(6, 3).softmax(-1).log(), CLASSES),
        lambda: F.nll_loss(logits_of(6, 3).log_softmax(-1), CLASSES),
        lambda: F.binary_cross_entropy(logits_of(6).sigmoid(), BITS),
        lambda: F.binary_cross_entropy_with_logits(logits_of(6), logits_of(6).sigmoid().detach()),
        lambda: F.binary_cross_entropy_with_logits(logits_of(6), logits_of(6).sigmoid()),
        lambda: F.mse_loss(logits_of(6).sigmoid(), BITS),
        lambda: F.cross_entropy(10 * logits_of(6, 3).softmax(-1), CLASSES),
        lambda: distilled(teacher_learns=False),
        lambda: distilled(teacher_learns=True),
        attended,
        focal,
    ],
)
def test_an_activation_that_is_meant_is_not_found(loss):
    """log_softmax twice is log_softmax, and a temperature makes probabilities into logits."""
    assert found_twice(loss()) == []


def broadcast(loss):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about some of them
        found = broadcast_in(nodes_of(loss()))
    return None if found is None else (found.prediction, found.result)


ONE, MANY = (8, 1), (8, 8)
Y = torch.linspace(-1, 1, 8)


@pytest.mark.parametrize(
    ("loss", "prediction", "result"),
    [
        (lambda: F.mse_loss(logits_of(8, 1), Y), ONE, MANY),
        (lambda: F.mse_loss(logits_of(8), Y[:, None]), (8,), MANY),
        (lambda: F.l1_loss(logits_of(8, 1), Y), ONE, MANY),
        (lambda: F.smooth_l1_loss(logits_of(8, 1), Y), ONE, MANY),
        (lambda: F.huber_loss(logits_of(8, 1), Y), ONE, MANY),
        (lambda: nn.MSELoss(reduction="none")(logits_of(8, 1), Y).mean(), ONE, MANY),
        (lambda: (logits_of(8, 1) - Y).square().mean(), ONE, MANY),
        (lambda: (Y - logits_of(8, 1)).abs().mean(), ONE, MANY),
        (lambda: -(logits_of(8, 1).exp() * Y).mean(), ONE, MANY),
        (lambda: -torch.min(logits_of(8, 1).exp() * Y, logits_of(8, 1).exp().clamp(0.8, 1.2) * Y).mean(), ONE, MANY),
        (lambda: F.mse_loss(logits_of(3, 1, 4, 5), torch.randn(3, 4, 5)), (3, 1, 4, 5), (3, 3, 4, 5)),
        (lambda: (logits_of(3, 1, 4, 5) - torch.randn(3, 4, 5)).abs().mean(), (3, 1, 4, 5), (3, 3, 4, 5)),
    ],
)
def test_predictions_that_meet_every_target_are_found(loss, prediction, result):
    assert broadcast(loss) == (prediction, result)


def contrastive():
    z = F.normalize(logits_of(8, 4), dim=-1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(8))


def masked_matrix():
    z = logits_of(8, 4)
    return ((z @ z.T) * (1 - torch.eye(8))).mean()


def chamfer():
    points, others = logits_of(8, 3), torch.randn(8, 3)
    return (points[:, None] - others[None]).square().sum(-1).amin(1).mean()


def expanded():
    x, y = logits_of(8, 3), torch.randn(8, 3)
    return (x.unsqueeze(1).expand(8, 8, 3) - y.unsqueeze(0).expand(8, 8, 3)).square().sum(-1).mean()


def ranked():
    scores = logits_of(8)
    return F.softplus(-(scores[:, None] - scores[None]) * (Y[:, None] - Y[None]).sign()).mean()


@pytest.mark.parametrize(
    "loss",
    [
        lambda: F.mse_loss(logits_of(8, 1), Y[:, None]),
        lambda: F.mse_loss(logits_of(8, 1).squeeze(-1), Y),
        lambda: (logits_of(8, 4) * torch.rand(8, 1)).mean(),
        lambda: (logits_of(8, 8) * Y).mean(),
        lambda: (logits_of(8, 8) - Y[:, None]).square().mean(),
        lambda: (logits_of(8, 1) - torch.tensor([0.5])).square().mean(),
        lambda: (logits_of(1, 1) - torch.randn(1)).square().mean(),
        lambda: (logits_of(8)[:, None] - Y[None]).abs().mean(),
        lambda: (logits_of(8).view(-1, 1) - Y.view(1, -1)).abs().mean(),
        lambda: (logits_of(8, 1) - logits_of(8)).square().mean(),
        contrastive,
        masked_matrix,
        chamfer,
        expanded,
        ranked,
    ],
)
def test_pairs_that_are_meant_are_not_found(loss):
    """Same shapes, weights of samples, matrices of similarities, and differences that the loss spreads over all pairs itself."""
    assert broadcast(loss) is None


def entropy(shares):
    return -sum(p * math.log(p) for p in shares if p > 0)


def spread_of(rows):
    """Over all pairs of rows and all columns, the largest difference."""
    rows = [[float(v) for v in row] for row in rows]
    return max(abs(a - b) for one in rows for other in rows for a, b in zip(one, other, strict=True))


def slow_classes(logits, targets, ignored=-100):
    """Four numbers, one sample at a time. `logits`: a list of rows."""
    rows = [[float(v) - float(torch.logsumexp(row, 0)) for v in row] for row in logits]
    pairs = [(row, int(t)) for row, t in zip(rows, targets, strict=True) if int(t) != ignored]
    counts = [sum(t == c for _, t in pairs) for c in range(len(rows[0]))]
    present = sum(count > 0 for count in counts)
    trivial = entropy([count / len(pairs) for count in counts]) + (present - 1) / (2 * len(pairs))
    loss = sum(-row[t] for row, t in pairs) / len(pairs)
    return [spread_of(rows), loss, trivial, len(pairs) / present]


def read(loss):
    found = outputs_of(nodes_of(loss))
    return None if found is None else found.tolist()


def test_the_outputs_of_cross_entropy_agree_with_a_slow_sum():
    logits, targets = logits_of(12, 4), torch.randint(0, 4, (12,))
    expected = slow_classes(logits.detach(), targets)
    assert read(F.cross_entropy(logits, targets)) == pytest.approx(expected, rel=1e-4)
    assert read(3 * F.cross_entropy(logits, targets, reduction="sum")) == pytest.approx(expected, rel=1e-4)


def test_ignored_targets_count_neither_in_the_loss_nor_in_that_of_a_constant():
    logits, targets = logits_of(12, 4), torch.randint(0, 4, (12,))
    targets[::3] = -100
    expected = slow_classes(logits.detach(), targets)
    assert read(F.cross_entropy(logits, targets)) == pytest.approx(expected, rel=1e-4)
    tokens = logits.view(2, 6, 4)
    assert read(F.cross_entropy(tokens.transpose(1, 2), targets.view(2, 6))) == pytest.approx(expected, rel=1e-4)


def test_an_ignored_index_that_is_a_class_does_not_count():
    """Padding is often token 0."""
    logits, targets = logits_of(12, 4), torch.randint(0, 4, (12,))
    targets[::2] = 0
    expected = slow_classes(logits.detach(), targets, ignored=0)
    assert read(F.cross_entropy(logits, targets, ignore_index=0)) == pytest.approx(expected, rel=1e-4)


def test_the_outputs_of_pictures_are_those_of_their_pixels():
    logits, targets = logits_of(3, 4, 2, 5), torch.randint(0, 4, (3, 2, 5))
    pixels = [logits[n, :, i, j].detach() for n in range(3) for i in range(2) for j in range(5)]
    assert read(F.cross_entropy(logits, targets)) == pytest.approx(slow_classes(pixels, targets.flatten()), rel=1e-4)


def test_the_outputs_of_binary_cross_entropy_agree_with_a_slow_sum():
    logits, targets = logits_of(10, 2), (torch.rand(10, 2) < 0.3).float()
    pairs = [(float(x), float(t)) for x, t in zip(logits.detach().flatten(), targets.flatten(), strict=True)]
    share = sum(t for _, t in pairs) / 20
    loss = sum(math.log1p(math.exp(x)) - t * x for x, t in pairs) / 20
    expected = [spread_of(logits.detach()), loss, entropy([share, 1 - share]), 10.0]
    assert read(F.binary_cross_entropy_with_logits(logits, targets)) == pytest.approx(expected, rel=1e-4)


def test_the_outputs_of_a_regression_are_in_deviations_of_its_targets():
    predictions, targets = logits_of(10, 3), torch.randn(10, 3) * 4 + 7
    columns = list(zip(*targets.tolist(), strict=True))
    variance = sum(sum((v - sum(c) / 10) ** 2 for v in c) / 10 for c in columns) / 3
    apart = spread_of(predictions.detach())
    loss = sum((float(p) - float(t)) ** 2 for p, t in zip(predictions.detach().flatten(), targets.flatten(), strict=True)) / 30
    expected = [apart / math.sqrt(variance), loss, variance, 5.0]
    assert read(F.mse_loss(predictions, targets)) == pytest.approx(expected, rel=1e-4)


def test_a_model_that_gives_every_sample_the_same_has_no_spread():
    same = logits_of(1, 4).expand(12, 4) * 1
    apart, *_ = read(F.cross_entropy(same, torch.randint(0, 4, (12,))))
    assert apart == 0


@pytest.mark.parametrize(
    "loss",
    [
        lambda: logits_of(4).square().mean(),
        lambda: F.cross_entropy(logits_of(1, 3), torch.tensor([1])),
        lambda: F.binary_cross_entropy_with_logits(logits_of(1), torch.ones(1)),
        lambda: -logits_of(4, 3).log_softmax(-1)[:, 0].mean(),
        lambda: F.cross_entropy(logits_of(4, 3), torch.full((4, 3), 1 / 3)),
    ],
)
def test_nothing_is_read_where_no_known_loss_compares_samples(loss):
    assert read(loss()) is None


def test_a_loss_without_a_graph_shows_nothing():
    loss = torch.randn(3).sum()
    assert (nodes_of(loss), targets_of(loss), found_twice(loss), read(loss)) == ([], [], [], None)


def test_behind_a_compiled_function_nothing_is_read_and_nothing_breaks():
    compiled = torch.compile(lambda x, w, y: F.cross_entropy((x @ w).softmax(-1), y), backend="aot_eager")
    w = torch.randn(4, 3, requires_grad=True)
    loss = compiled(torch.randn(6, 4), w, CLASSES) * 2
    assert (found_twice(loss), broadcast(lambda: loss), read(loss), targets_of(loss)) == ([], None, None, [])
    loss.backward()
    assert w.grad is not None


def test_reading_a_graph_leaves_its_gradients_as_they_were():
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    grads = []
    for look in (False, True):
        model.zero_grad()
        loss = F.cross_entropy(model(x), CLASSES)
        if look:
            read(loss), found_twice(loss), broadcast(lambda loss=loss: loss), targets_of(loss)
        loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_deep_graph_is_read_near_the_loss_only():
    x = logits_of(6, 3)
    for _ in range(600):
        x = x + 1
    loss = F.cross_entropy(x, CLASSES)
    assert len(nodes_of(loss)) == 256
    assert read(loss) is not None
