"""A verified answer can be wrong: every trial rejects a neighbour, a case that looks like its cause and has another one.

Most neighbours are small steps written here. Each one matches the cause, so its trial runs, and has to
fail for the reason that is given. `tools.trials` runs all trials on all cases of the zoo.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanproof._records import StepRecord
from nanproof.explain._case import Case
from nanproof.explain.causes import Cause
from nanproof.explain.replay._recorder import Recorder
from nanproof.explain.replay._replay import Replay
from tools.trials import trials_of
from zoo.guarded import run
from zoo.plain import load
from zoo.registry import CASES, Training

load()

WITHOUT_A_TRIAL = {
    "nonfinite-weights-mid-run": "what wrote into the weights between steps is not part of the step",
}
ZOO = {
    "exp-overflow": ("kl_penalty_with_beta_zero", "the weight of its result is 0"),
    "exploding-gradient": ("pictures_in_bytes", "with inputs of size 1|made them large"),
    "fp16-optimizer-underflow": ("adam_without_an_eps", ""),
    "gradient-norm-overflow": ("siren_whose_norm_overflows", "its scale is not what makes"),
    "learning-rate-too-high": ("micro_batch_losses_summed", "as it is, to"),
    "log-of-zero": ("log_error_of_a_negative_forecast", "no 0 is to blame"),
    "no-gradient-path": ("one_giant_step_kills_the_hidden_layer", "^0 of 3 get a gradient"),
    "outlier-batch": ("leave_one_out_std_of_equal_rewards", "the batch is ordinary"),
    "sqrt-at-zero": ("srgb_curve_of_a_black_pixel", "where hides its result"),
    "transient-fault": ("adapters_in_half_under_a_scaler", "after forward and backward"),
}
"""Slug, case of another cause, and why its trial rejects it."""
NEIGHBOURS: dict[str, tuple[Callable[[], Case], str]] = {}
"""Slug, the case, and why its trial rejects it."""
RIGHT_TOO = {
    ("fp16-activation-overflow", "annealed_temperature_of_llama_rollouts"): "logits over a temperature do pass 65504",
    ("fp16-activation-overflow", "one_request_asks_for_temperature_zero"): "logits over a temperature do pass 65504",
    ("fp16-activation-overflow", "mask_plus_time_decay"): "a mask plus a decay does pass 65504",
    ("inputs-not-normalised", "map_coordinates_in_metres"): "coordinates in metres are why one gradient owns the norm",
    ("nonfinite-weights-at-start", "bert_with_new_special_tokens"): "rows that were never written are such weights",
    ("nonfinite-weights-at-start", "recommender_with_new_products"): "rows that were never written are such weights",
    ("optimizer-made-nonfinite", "half_precision_adapters_under_adamw"): "an underflow in fp16 is one way to do so",
    ("optimizer-made-nonfinite", "half_precision_lstm_under_adam"): "an underflow in fp16 is one way to do so",
}
"""Trials that hold on a case of another cause, where both answers are right; a more specific cause is named."""


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def trial_of(slug, case):
    cause = next(cause for cause in Cause.catalogue if cause.slug == slug)
    match = cause.match(case)
    assert match is not None, "the cause does not match: this neighbour exercises no trial"
    assert match.trial is not None
    return match.trial()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("slug", sorted(ZOO))
def test_the_trial_rejects_a_case_of_the_zoo(slug):
    name, reason = ZOO[slug]
    assert CASES[name].cause != slug
    _, trials = trials_of(name)
    assert not trials[slug].held
    assert re.search(reason, trials[slug].result), trials[slug].result


def test_an_exponent_that_the_learning_rate_made_large():
    """Clamping exp keeps the step finite. So do weights of the size they began with: the rate is the cause."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def loss(m, x):
        mean, log_precision = m(x).chunk(2, -1)
        return (log_precision.exp() * (x[:, :1] - mean).square() - log_precision).mean()

    optimizer = torch.optim.Adam(model.parameters(), 50.0)
    batches = [torch.randn(16, 4) for _ in range(4)]
    first = run(Training(model=model, optimizer=optimizer, loss_fn=loss, batches=batches)).first
    assert (first.diagnosis.cause, first.diagnosis.verified) == ("learning-rate-too-high", True)
    assert "exp-overflow" in first.diagnosis.alternatives


def test_every_cause_has_a_neighbour():
    """A new cause needs one, or a reason why it has no trial."""
    slugs = [cause.slug for cause in Cause.catalogue]
    assert sorted([*ZOO, *NEIGHBOURS, *WITHOUT_A_TRIAL]) == sorted(slugs)


def test_trials_hold_on_no_other_cause():
    """In the saved matrix, but where both answers are right."""
    table = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "trials.json").read_text())
    assert set(table) == {cause.slug for cause in Cause.catalogue}
    assert {(slug, name) for slug, row in table.items() for name in row["held_on_others"]} == set(RIGHT_TOO)


# -- how to make a case ----------------------------------------------------------------------------------------------------------


def neighbour(slug: str, reason: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    def register(build: Callable[[], Case]) -> Callable[[], Case]:
        assert slug not in NEIGHBOURS
        NEIGHBOURS[slug] = build, reason
        return build

    return register


def bad_step(loss: Any, batch: Any, model: nn.Module | None = None, writes: bool = False, **facts: Any) -> Case:
    """A step that is not finite, or raises."""
    replay = Replay(model or nn.Linear(4, 3), loss, [batch], writes=writes)
    case = Case("nonfinite-loss", replay=replay, **facts)
    assert case.control is not None and not case.control.finite
    if case.control.error is not None:
        case.kind, case.error = "exception", case.control.error
    elif math.isfinite(case.control.loss):
        case.kind = "nonfinite-gradient"
    return case


def nan_decides(loss: Any, model: nn.Module | None = None, rows: int = 6) -> Case:
    """A NaN of the batch marks row 1 as one that does not count. Nothing else is wrong: with a number there the step is fine."""
    x = torch.randn(rows, 5)
    x[1, 0] = math.nan
    return bad_step(lambda m, x: loss(m, x[:, 1:], x[:, 0] < 9), x, model)


def silent(
    signal: str, loss: Any, batch: Any, model: nn.Module, kind: str = "no-learning", rate: float = 0.1, **facts: Any
) -> Case:
    """A step at which something was suspected, with three more batches like it."""
    facts.setdefault("optimizer", torch.optim.SGD(model.parameters(), rate))
    replay = Replay(model, loss, [batch])
    recorder = Recorder()
    for step in range(4):
        recorder.keep(step, (batch,), replay.random, replay.mode)
    facts.setdefault("record", recorded(replay, facts.pop("grad_norm", None), rate))
    return Case(kind, signal=signal, replay=replay, moments=list(recorder), **facts)


def recorded(replay: Replay, grad_norm: float | None, rate: float) -> StepRecord:
    outcome = replay.run()
    norm = outcome.total if grad_norm is None else grad_norm
    return StepRecord(
        step=3,
        loss=outcome.loss,
        grad_norm=norm,
        action="clipped",
        clip=100.0,
        lr=(rate,),
        scale=None,
        spike=True,
        typical=(0.0, 0.0),
        spread=(0.0, 0.0),
        loss_size=1.0,
        weights_checked=False,
        names=tuple(outcome.norms),
        norms=array("d", outcome.norms.values()),
    )


def only_row(number: int, rows: int = 6) -> torch.Tensor:
    out = torch.zeros(rows, 1)
    out[number] = 1
    return out


# -- data ------------------------------------------------------------------------------------------------------------------------


@neighbour("nonfinite-batch", "nan")
def _a_nan_that_nobody_reads():
    """The logarithm of 0 is the cause."""
    batch = {"x": torch.randn(6, 4), "price": torch.tensor([1.0, math.nan])}
    return bad_step(lambda m, b: (m(b["x"]).abs() * (1 - only_row(2))).log().mean(), batch)


@neighbour("changed-in-place", "does not make it non-finite")
def _a_batch_that_was_nan_before():
    """The step writes into a batch that holds a NaN already."""

    def loss(m, b):
        b["x"][2].div_(0 * b["x"][2].sum())
        return m(b["x"] * b["weight"]).mean()

    batch = {"x": torch.randn(6, 4), "weight": torch.tensor([1.0, 1.0, 1.0, math.nan])}
    return bad_step(loss, batch, writes=True)


@neighbour("no-supervised-targets", "with every label supervised")
def _labels_of_another_task():
    """All of them are ignored, but the 0 that is divided by is the spread of equal numbers."""

    def loss(m, b):
        spread = (b["x"] - b["x"]).abs().sum()
        return (m(b["x"]).sum() / spread).mean()

    return bad_step(loss, {"x": torch.randn(6, 4), "labels": torch.full((6,), -100)})


@neighbour("ctc-infeasible", "the input is long enough")
def _a_symbol_that_is_banned():
    """The target needs a symbol twice whose log-probability is the least that fp32 holds."""

    def loss(m, x):
        banned = m(x).log_softmax(-1).masked_fill(torch.tensor([False, False, True]), torch.finfo(torch.float32).min)
        return F.ctc_loss(banned[:, None], torch.tensor([[2, 2]]), [6], [2])

    return bad_step(loss, torch.randn(6, 4))


# -- weights ---------------------------------------------------------------------------------------------------------------------


@neighbour("nonfinite-weights-at-start", "was finite when the run began")
def _weights_that_the_optimizer_broke():
    """A step outside the guard's sight made them NaN; no step was recorded since the run began."""
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    details = {"largest_at_start": {"weight": 0.5, "bias": 0.5}}
    return bad_step(lambda m, x: m(x).square().mean(), torch.randn(6, 4), model, details=details)


@neighbour("uninitialized-rows", "nan")
def _rows_that_nobody_reads():
    """New rows are NaN, but the batch has none of their ids; a logarithm of 0 is the cause."""
    model = nn.Embedding(10, 4)
    with torch.no_grad():
        model.weight[8:] = math.nan
    return bad_step(lambda m, ids: (m(ids).abs() * 0).log().mean(), torch.randint(8, (6, 3)), model)


@neighbour("uninitialized-buffer", "instead of")
def _a_buffer_that_nobody_reads():
    model = nn.Linear(4, 3)
    model.register_buffer("running_var", torch.tensor([1.0, -3.0]))
    return bad_step(lambda m, x: (m(x).abs() * 0).log().mean(), torch.randn(6, 4), model)


class _Counter(nn.Linear):
    """Keeps a statistic that divides by the number of steps, which is 0."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.steps = 0

    def forward(self, x):
        out = super().forward(x)
        self.mean.copy_(out.detach().abs().sum(0) / self.steps)
        return out


@neighbour("poisoned-buffer", "where mean was not")
def _a_statistic_that_divides_by_0():
    """No batch keeps it finite."""
    replay = Replay(_Counter(), lambda m, x: m(x).square().mean(), [torch.randn(6, 4)])
    return Case("nonfinite-weight", replay=replay, bad_buffer="mean")


# -- the forward -----------------------------------------------------------------------------------------------------------------


@neighbour("attention-row-fully-masked", "NaN of the batch")
def _a_row_that_a_nan_masks():
    return nan_decides(lambda m, x, ok: m(x).masked_fill(~ok[:, None], -math.inf).softmax(-1).square().mean())


@neighbour("mask-overflow", "it is not a mask")
def _a_large_offset():
    """Prices in cents over a negative baseline: every element counts."""
    baseline = torch.full((6, 3), -60000.0, dtype=torch.float16)
    return bad_step(lambda m, x: (baseline + (m(x) * 0.1 - 20000).half()).float().mean(), torch.randn(6, 4))


@neighbour("fp16-activation-overflow", "it is not an overflow")
def _an_epsilon_that_underflows():
    """1e-8 is 0 in fp16, so the division is by 0: nothing passes 65504."""

    def loss(m, x):
        y = m(x).half()
        return (y / ((y - y).abs() + 1e-8)).float().mean()

    return bad_step(loss, torch.randn(6, 4))


@neighbour("zero-denominator", "NaN of the batch")
def _a_count_that_a_nan_empties():
    return nan_decides(lambda m, x, ok: (m(x).square().sum(1) / ok.float()).mean())


@neighbour("std-of-one-sample", "nan")
def _the_spread_of_nothing():
    """No element is selected, so there is not one either."""
    return bad_step(lambda m, x: m(x)[x[:, 0] > 99].std(), torch.randn(6, 4))


@neighbour("nonpositive-std", "NaN of the batch")
def _a_scale_that_a_nan_zeroes():
    def loss(m, x, ok):
        scale = F.softplus(m(x)) * ok[:, None]
        return -torch.distributions.Normal(x[:, :3], scale, validate_args=True).log_prob(x[:, :3] + 0.1).mean()

    return nan_decides(loss)


# -- the backward ----------------------------------------------------------------------------------------------------------------


@neighbour("masked-branch-gradient", "the same")
def _a_root_of_0_that_counts():
    """torch.where hides row 4; the 0 is in row 2, where it counts."""

    def loss(m, x):
        squares = m(x).square() * (1 - only_row(2))
        return torch.where(only_row(4) > 0, 0.0, squares.sqrt()).sum()

    return bad_step(loss, torch.randn(6, 4))


@neighbour("inverse-trig-boundary", "where hides its result")
def _an_angle_that_is_hidden():
    def loss(m, x):
        cosine = 0.9 * m(x).tanh() * (1 - only_row(2)) + only_row(2)
        return torch.where(only_row(2) > 0, 0.0, cosine.acos()).sum()

    return bad_step(loss, torch.randn(6, 4))


@neighbour("normalize-zero-vector", "instead of")
def _a_zero_vector_without_a_gradient():
    """The padding of the batch is normalised as well; the spike comes from a target of 1e6."""

    def loss(m, x):
        return (m(F.normalize(x)) - 1e6).square().mean()

    x = torch.randn(6, 4)
    x[2] = 0
    return silent("", loss, x, nn.Linear(4, 3), kind="spike")


@neighbour("fp16-gradient-overflow", "it is not an overflow")
def _a_gradient_over_an_underflow():
    """A divisor of 1e-8 is 0 in fp16; the quotient is hidden, its gradient is not."""

    def loss(m, x):
        y = m(x).half()
        small = (y - y).abs() + 1e-8
        return torch.where(small > 1e-3, y / small, y).float().square().mean()

    return bad_step(loss, torch.randn(6, 4))


# -- an exception ----------------------------------------------------------------------------------------------------------------


@neighbour("ids-out-of-range", "NaN of the batch")
def _an_id_that_is_made_of_nan():
    x = torch.rand(6, 4)
    x[1, 0] = math.nan
    return bad_step(lambda m, x: m((3 * x).long()).square().mean(), x, nn.Embedding(8, 4))


@neighbour("batch-of-one", "NaN of the batch")
def _a_nan_leaves_one_row_over():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return nan_decides(lambda m, x, ok: m(x[ok]).square().mean(), model, rows=2)


@neighbour("not-positive-definite", "NaN of the batch")
def _a_matrix_that_a_nan_makes_singular():
    def loss(m, x, ok):
        y = m(x) * ok[:, None]
        return torch.linalg.cholesky(torch.diag(y.square().sum(1) + 0.1 * ok)).sum()

    return nan_decides(loss)


# -- what is computed ------------------------------------------------------------------------------------------------------------


@neighbour("power-of-negative", "inf")
def _a_zero_beside_a_negative_number():
    """In their domain, the negative numbers leave a logarithm of 0."""
    change = torch.ones(6, 1)
    change[1], change[4] = -1, 0
    return bad_step(lambda m, x: (m(x).abs() * change).log().mean(), torch.randn(6, 4))


@neighbour("label-smoothing-over-masked-logits", "inf")
def _a_target_that_is_masked_itself():
    def loss(m, x):
        logits = m(x).masked_fill(torch.tensor([True, False, False]), -math.inf)
        return F.cross_entropy(logits, torch.tensor([0, 1, 2, 1, 2, 1]), label_smoothing=0.1)

    return bad_step(loss, torch.randn(6, 4))


@neighbour("degenerate-decomposition", "NaN of the batch")
def _values_that_a_nan_makes_equal():
    def loss(m, x, ok):
        sizes = torch.arange(1.0, 7.0) if bool(ok.all()) else torch.ones(6)
        u, s, v = torch.linalg.svd(torch.diag(sizes) + 0 * m(x).sum())
        return (u[:, 0] * v[0]).sum() + s[0]

    return nan_decides(loss)


@neighbour("infinite-term-with-weight-0", "it is not a term that is added")
def _an_infinite_exponent():
    """0 * Inf is an exponent here, not a term of the loss: leaving it out is another objective."""

    def loss(m, x):
        y = m(x)
        return y.square().mean() * (0.0 * (1 / (y - y).abs().sum())).exp()

    return bad_step(loss, torch.randn(6, 4))


@neighbour("custom-kernel-uninitialised-output", "filled with NaN: not finite")
def _a_constant_that_is_nan():
    """Memory that is not written reaches the loss, but the NaN is a constant of the loss function."""
    constant = torch.tensor([1.0, math.nan, 1.0])
    return bad_step(lambda m, x: (m(x) * constant).mean() + 1e-30 * torch.empty(2).fill_(0).new_empty(2).sum(), torch.randn(6, 4))


# -- the objective ---------------------------------------------------------------------------------------------------------------


@neighbour("activation-applied-twice", "as it is, from")
def _a_rate_of_0():
    """With or without the activation, nothing is learned."""
    target = (torch.rand(6, 3) > 0.5).float()
    details = {"inner": "sigmoid", "outer": "binary_cross_entropy_with_logits"}
    loss = lambda m, x: F.binary_cross_entropy_with_logits(m(x).sigmoid(), target)  # noqa: E731
    return silent("activation-twice", loss, torch.randn(6, 4), nn.Linear(4, 3), rate=0.0, details=details)


@neighbour("loss-broadcast", "as it is, it stays")
def _all_pairs_on_purpose():
    """Each pair has a weight of its own: in another order the targets give another loss."""
    weights, target = torch.rand(6, 6), torch.randn(6)
    details = {"prediction": [6, 1], "result": [6, 6]}
    loss = lambda m, x: ((m(x) - target).square() * weights).mean()  # noqa: E731
    return silent("broadcast", loss, torch.randn(6, 4), nn.Linear(4, 1), details=details)


@neighbour("identical-pair", "with both changed alike")
def _an_autoencoder():
    """Input and target are the same, as they should be; a dead layer is why the loss is constant."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].bias.fill_(-100)
    x = torch.randn(6, 4)
    return silent("constant-loss", lambda m, b: F.mse_loss(m(b["x"]), b["target"]), {"x": x, "target": x.clone()}, model)


@neighbour("inputs-not-normalised", "as it is, to")
def _large_inputs_and_labels_without_a_pattern():
    """Inputs of mean 0 and deviation 1 are not learned either: the same row has every label."""
    x, labels = 100 * torch.randn(1, 4).repeat(6, 1), torch.arange(6) % 3
    model, details = nn.Linear(4, 3), {"moved": 0.1, "usual": 1.1, "trivial": 1.1}
    return silent("stuck", lambda m, x: F.cross_entropy(m(x), labels), x, model, rate=1e-3, details=details)


@neighbour("accumulation-not-averaged", "as it is, to")
def _a_sum_under_adam():
    """Adam takes the same steps for the mean and for the sum."""
    model = nn.Linear(4, 3)
    x, target = torch.randn(6, 4), torch.randn(6, 3)
    loss = lambda m, x: sum(F.mse_loss(m(part), t) for part, t in zip(x.chunk(2), target.chunk(2), strict=True))  # noqa: E731
    return silent("", loss, x, model, kind="divergence", optimizer=torch.optim.Adam(model.parameters(), 0.05))


# -- the optimizer ---------------------------------------------------------------------------------------------------------------


@neighbour("optimizer-made-nonfinite", "finite at a tiny rate")
def _a_step_that_is_too_large():
    model = nn.Linear(4, 3)
    replay = Replay(model, lambda m, x: 1e3 * m(x).square().mean(), [torch.randn(6, 4)])
    optimizer = torch.optim.SGD(model.parameters(), 1e38)
    return Case("nonfinite-weight", replay=replay, optimizer=optimizer, weights_broke=True)


@neighbour("fp16-weights-with-grad-scaler", "none of the fp16 parameters gets a gradient")
def _fp16_weights_that_are_not_used():
    """What GradScaler refused is not in the model: the fp16 weights of it get no gradient."""
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(4, 3).half()})
    replay = Replay(model, lambda m, x: m["used"](x).mean(), [torch.randn(6, 4)])
    error = ValueError("Attempting to unscale FP16 gradients.")
    return Case("exception", replay=replay, optimizer=torch.optim.SGD(model.parameters(), 0.1), error=error)


@neighbour("gradients-not-cleared", "the optimizer was given the sum")
def _gradients_of_this_step_alone():
    """They were there before backward, as zeros."""
    model = nn.Linear(4, 3)
    case = silent("uncleared-gradients", lambda m, x: m(x).square().mean(), torch.randn(6, 4), model, uncleared=True)
    for name, gradient in case.replay.gradients().items():
        case.replay.parameters[name].grad = gradient
    return case


@neighbour("clipping-starves", "a step moves the other weights")
def _a_clipped_norm_under_adam():
    """Adam divides by the size of each gradient: nobody starves."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loss = lambda m, x: m(x).square().mean() + 1e6 * m[0].bias.sum()  # noqa: E731
    return silent("heavy-clipping", loss, torch.randn(6, 4), model, optimizer=optimizer, max_norm=1.0)


@neighbour("stale-second-moment", "the update is .* instead of")
def _one_large_gradient():
    """The second moment knows gradients of this size: one batch moved the first moment."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loss = lambda m, x: m(x).square().mean()  # noqa: E731
    case = silent("", loss, torch.randn(6, 4), model, kind="divergence", optimizer=optimizer, details={"update": 3.0})
    for p in model.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(1000.0),
            "exp_avg": torch.full_like(p, 300),
            "exp_avg_sq": torch.full_like(p, 1e4),
        }
    return case


@neighbour("optimizer-state-reset", "the loss reaches")
def _a_fresh_state_that_does_no_harm():
    """The state is new, and at this rate the next steps are the same with it and without."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-6)
    loss = lambda m, x: m(x).square().mean()  # noqa: E731
    for p in model.parameters():
        optimizer.state[p] = {"step": torch.tensor(3.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.ones_like(p)}
    scheduler = type("Schedule", (), {"last_epoch": 5000})()
    return silent("early-jump", loss, torch.randn(6, 4), model, kind="spike", optimizer=optimizer, scheduler=scheduler)


# -- learning --------------------------------------------------------------------------------------------------------------------


@neighbour("optimizer-foreign-parameters", "have no gradient")
def _a_head_that_is_not_used():
    """The optimizer does not hold it, and the loss does not depend on it."""
    model = nn.ModuleDict({"body": nn.Linear(4, 3), "head": nn.Linear(3, 2)})
    optimizer = torch.optim.SGD(model["body"].parameters(), 0.1)
    details = {"message": "head is not in the optimizer", "left_out": ["head.weight", "head.bias"]}
    loss = lambda m, x: m["body"](x).mean()  # noqa: E731
    return silent("foreign-parameters", loss, torch.randn(6, 4), model, optimizer=optimizer, details=details)


@neighbour("dead-units", "instead of 0")
def _rewards_that_are_all_equal():
    """A layer is off, and its gradient would be 0 anyway: so is every advantage."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].bias.fill_(-100)
    reward = torch.ones(6, 1)
    return silent("zero-gradients", lambda m, x: (m(x) * (reward - reward.mean())).mean(), torch.randn(6, 4), model)


@neighbour("learning-rate-zero", "of the elements change")
def _updates_that_round_away():
    """A rate of 1e-3 would change nothing either: the weights are in bf16."""
    model = nn.Linear(4, 3).bfloat16()
    with torch.no_grad():
        model.weight.fill_(100)
    details = {"steps": 20, "largest": 1e-3}
    loss = lambda m, x: m(x).float().mean()  # noqa: E731
    batch = torch.randn(6, 4).bfloat16()
    return silent("zero-learning-rate", loss, batch, model, rate=1e-9, details=details)


@neighbour("bf16-update-rounding", "a step changes 0% of the elements")
def _a_rate_of_0_in_bf16():
    model = nn.Linear(4, 3).bfloat16()
    loss = lambda m, x: m(x).float().mean()  # noqa: E731
    batch = torch.randn(6, 4).bfloat16()
    return silent("unchanged-weights", loss, batch, model, rate=0.0, details={"share": 0.0})


@neighbour("gradient-scale-mismatch", "takes the loss from")
def _small_updates_on_purpose():
    """The plain step is far too large: something limits it for a reason."""
    loss = lambda m, x: m(x).square().mean()  # noqa: E731
    return silent("small-updates", loss, torch.randn(6, 4), nn.Linear(4, 3), rate=1e4, details={"kept": 2.0**-16})


class _Shifts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids):
        return self.head(self.table(ids))


@neighbour("labels-shifted-twice", "position t is trained on token")
def _labels_of_another_sequence():
    """The loss moves the labels, as it should: they are tags, not the inputs moved by one."""
    batch = {"ids": torch.randint(16, (4, 8)), "labels": torch.randint(16, (4, 8))}
    details = {"inputs": "batch['ids']", "labels": "batch['labels']"}

    def loss(m, b):
        return F.cross_entropy(m(b["ids"])[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten())

    return silent("shifted-labels", loss, batch, _Shifts(), details=details)


# -- reinforcement learning ------------------------------------------------------------------------------------------------------


@neighbour("zero-advantage", "instead of 0|other inputs")
def _a_dead_layer_beside_equal_rewards():
    """Rewards are equal and only logged; the gradient is 0 because a layer is off, which other inputs would change."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.fill_(-1.0)
        model[2].bias.requires_grad_(False)

    def loss(m, b):
        advantage = b["reward"] - b["reward"].mean()
        return m(b["x"]).sum() + 0.0 * advantage.sum()

    return silent("zero-gradients", loss, {"x": torch.zeros(6, 4), "reward": torch.ones(6, 1)}, model)


@neighbour("tiny-std-amplification", "instead of")
def _a_tiny_deviation_that_does_no_harm():
    """Features that hardly vary are standardised; the spike comes from a target of 1e6."""

    def loss(m, x):
        level = x[:, :1] * 1e-4 + 1
        scaled = (level - level.mean()) / (level.std() + 1e-8)
        return (m(x) + scaled - 1e6).square().mean()

    return silent("", loss, torch.randn(6, 4), nn.Linear(4, 3), kind="spike")


@neighbour("temperature-overflow", "at a temperature of 0.1 or more")
def _logits_that_are_huge():
    """They overflow at a temperature of a half, which is an ordinary one."""

    def loss(m, x):
        logits = m(x).tanh() * 3e38
        drawn = torch.multinomial((logits / 0.5).softmax(-1), 1)
        return m(x).gather(1, drawn).mean()

    return bad_step(loss, torch.randn(6, 4))


@neighbour("all-tokens-banned", "NaN of the batch")
def _tokens_that_a_nan_bans():
    def loss(m, x, ok):
        logits = m(x).masked_fill(~ok[:, None], -math.inf)
        return m(x).gather(1, torch.multinomial(logits.softmax(-1), 1)).mean()

    return nan_decides(loss)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("slug", sorted(NEIGHBOURS))
def test_the_trial_rejects_a_neighbour(slug):
    build, reason = NEIGHBOURS[slug]
    trial = trial_of(slug, build())
    assert not trial.held, trial.result
    assert re.search(reason, trial.result), trial.result
