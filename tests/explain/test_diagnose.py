"""Diagnose: ranked, verified, honest about what it does not know, and never in the way of the run."""

from __future__ import annotations

import json
import logging
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forked
import nanproof
from nanproof import Diagnosis, Incident, read_incidents
from nanproof.explain._case import Case
from nanproof.explain._cause import Cause, Match
from nanproof.explain._diagnose import explain
from nanproof.explain.replay._replay import Replay
from toys import batches, mse, net, poison


def zero_over_zero(model, x):
    return (model(x).square().sum(1) / (x[:, :1] > -9).float().sum(1)).mean()


def bad_ratio(sample=2):
    x = torch.randn(6, 4)
    x[sample, 0] = -10
    return x


def test_one_batch_in_hand():
    """`nanproof.diagnose` without a guard: cause, place, sample, evidence with numbers, and the model untouched."""
    model = nn.Linear(4, 3)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    told = nanproof.diagnose(model, zero_over_zero, bad_ratio())
    assert told.cause == "zero-denominator" and told.verified and told.samples == (2,)
    assert told.op == "div" and told.where == "loss_fn" and "test_diagnose.py" in told.source
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.weight.grad is None


def test_a_healthy_batch_has_no_cause():
    told = nanproof.diagnose(nn.Linear(4, 3), zero_over_zero, torch.randn(6, 4))
    assert told.cause == "none" and not told.verified


@pytest.mark.parametrize("scale", [1e25, 1e22])
def test_a_sample_that_is_finite_and_far_too_large(scale):
    """Its square overflows: the batch is to blame, and the sample is named by its size, whatever the operation was."""
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    x[3, 1] = scale
    told = nanproof.diagnose(model, lambda m, x: m(x).square().mean(), x)
    assert (told.cause, told.samples, told.verified) == ("outlier-batch", (3,), True)
    assert f"holds numbers up to {scale:.4g} in sample 3" in told.evidence[0]


def test_samples_that_are_all_large_are_no_outliers():
    """The model cannot take numbers of this size, but none of them stands out."""
    told = nanproof.diagnose(nn.Linear(4, 3), lambda m, x: m(x).square().mean(), torch.randn(6, 4) * 1e25)
    assert told.cause != "outlier-batch"


def test_a_mask_that_is_added_is_no_outlier():
    """Where most samples have no padding, their masks are 0 and the others' far larger: another sample is the damaged one."""
    mask, x = torch.zeros(8, 1, 6), torch.randn(8, 6, 4)
    mask[2, :, 4:], x[5, 0, 1] = -1e9, 1e25

    def loss(model, batch):
        made = model(batch["x"])
        return (torch.softmax(made @ made.transpose(1, 2) + batch["mask"], -1) @ made).square().mean()

    told = nanproof.diagnose(nn.Linear(4, 3), loss, {"mask": mask, "x": x})
    assert (told.cause, told.where, told.samples, told.verified) == ("outlier-batch", "batch['x']", (5,), True)


def test_evidence_is_in_numbers():
    """The input of exp, where it was, and where exp overflows."""
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0), model.bias.zero_()
    x = torch.ones(6, 1)
    x[4] = 104.2
    told = nanproof.diagnose(model, lambda m, x: m(x).exp().mean(), x)
    assert told.cause == "exp-overflow"
    assert "input of exp was 104.2 at sample 4; exp overflows above 88.72" in told.evidence[0]


def test_what_fits_nothing_is_unknown_with_what_was_seen():
    """A hand-written backward that gives NaN has no entry in the catalogue."""

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return torch.full_like(g, float("nan"))

    told = nanproof.diagnose(nn.Linear(4, 1), lambda m, x: Odd.apply(m(x)).sum(), torch.randn(3, 4))
    assert told.cause == "unknown" and told.confidence == 0 and not told.verified
    assert any("gradient norm nan" in sentence for sentence in told.evidence)


def test_a_fix_that_does_not_hold_is_not_verified(monkeypatch):
    """A cause that always matches and never cures loses against one that cures."""

    class Boaster(Cause):
        def match(self, case):
            return Match(confidence=0.99, evidence=("me!",), phase="forward", trial=lambda: case.cured_by(), tried="nothing")

    boaster = Boaster()
    monkeypatch.setattr(Boaster, "slug", "boaster", raising=False)
    monkeypatch.setattr(Boaster, "fix", "", raising=False)
    monkeypatch.setattr(Cause, "catalogue", [boaster, *Cause.catalogue])
    told = nanproof.diagnose(nn.Linear(4, 3), zero_over_zero, bad_ratio())
    assert told.cause == "zero-denominator" and told.verified and "boaster" in told.alternatives


def test_a_cause_that_fails_is_said_and_the_others_go_on(monkeypatch):
    class Broken(Cause):
        def match(self, case):
            raise KeyError("oops")

    broken = Broken()
    monkeypatch.setattr(Broken, "slug", "broken", raising=False)
    monkeypatch.setattr(Cause, "catalogue", [broken, *Cause.catalogue])
    told = nanproof.diagnose(nn.Linear(4, 3), zero_over_zero, bad_ratio())
    assert told.cause == "zero-denominator"
    assert any("looking for broken failed" in sentence for sentence in told.evidence)


def test_a_diagnosis_that_fails_altogether_does_not_end_the_run(monkeypatch):
    """It becomes a sentence in the incident; the batch is refused all the same."""
    import nanproof.explain._diagnose as module

    def explode(case):
        raise RuntimeError("diagnosis on fire")

    monkeypatch.setattr(module, "explain", explode)
    model = net()
    guard = nanproof.Guard(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=mse)
    for i, batch in enumerate(batches(5)):
        guard.train_step(poison(batch) if i == 2 else batch)
    guard.close()
    assert [i.step for i in guard.incidents] == [2]
    assert "diagnosis on fire" in guard.incidents[0].diagnosis.evidence[0]


def test_the_time_is_limited():
    """A step of a tenth of a second and half a second to think: it comes to an end, and says so."""
    model = nn.Linear(4, 3)

    def slow(model, x):
        time.sleep(0.1)
        return zero_over_zero(model, x)

    start = time.perf_counter()
    told = nanproof.diagnose(model, slow, bad_ratio(), seconds=0.15)
    assert time.perf_counter() - start < 2
    assert any("time" in sentence for sentence in told.evidence)


@pytest.mark.parametrize(
    ("when", "diagnosed", "same_as"),
    [("new", [2], [None, 2, 2]), ("always", [2, 4, 6], [None] * 3), ("never", [], [None] * 3)],
)
def test_which_incidents_are_diagnosed(when, diagnosed, same_as):
    model = net(batch_norm=False)
    guard = nanproof.Guard(
        model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=mse, policy=nanproof.Policy(diagnose=when, max_skip_rate=1)
    )
    for i, batch in enumerate(batches(8)):
        guard.train_step(poison(batch) if i in (2, 4, 6) else batch)
    guard.close()
    assert [i.step for i in guard.incidents] == [2, 4, 6]
    assert [i.step for i in guard.incidents if i.diagnosis is not None] == diagnosed
    assert [i.same_as for i in guard.incidents] == same_as


def test_the_result_of_the_run_is_the_same_with_and_without_a_diagnosis():
    """Replays leave no trace: weights, moments, buffers and random numbers bit for bit."""
    from toys import Run, whole_state

    def run(when):
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        guard = nanproof.Guard(model, optimizer, loss_fn=mse, policy=nanproof.Policy(diagnose=when))
        for i, batch in enumerate(batches(12)):
            guard.train_step(poison(batch) if i in (3, 7) else batch)
        return Run(guard, whole_state(model, optimizer, guard=guard))

    assert run("always").same_as(run("never")) == []


def test_an_exception_inside_a_step_is_diagnosed_and_goes_on():
    """multinomial on bad probabilities: an incident with its cause, and a note on the exception."""
    model = nn.Linear(4, 6)

    def sampled(model, batch):
        logits = model(batch[0]).masked_fill(batch[1], -torch.inf)
        torch.multinomial(logits.detach().softmax(-1), 1)
        return logits[:, 0].mean()

    guard = nanproof.Guard(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=sampled)
    banned = torch.zeros(5, 6, dtype=torch.bool)
    guard.train_step((torch.randn(5, 4), banned))
    banned = banned.clone()
    banned[3] = True
    with pytest.raises(RuntimeError, match="probability tensor") as raised:
        guard.train_step((torch.randn(5, 4), banned))
    guard.close()
    incident = guard.incidents[0]
    assert incident.kind == "exception" and incident.diagnosis.cause == "all-tokens-banned" and incident.diagnosis.verified
    if sys.version_info >= (3, 11):
        assert "all-tokens-banned" in raised.value.__notes__[0]


def test_fp16_weights_under_a_scaler():
    """What GradScaler raises, the guard raises, with the cause."""
    model = nn.Linear(4, 1).half()
    guard = nanproof.Guard(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss_fn=lambda m, x: m(x.half()).float().square().mean(),
        scaler=torch.amp.GradScaler("cpu"),
    )
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        guard.train_step(torch.randn(4, 4))
    assert guard.incidents[0].diagnosis.cause == "fp16-weights-with-grad-scaler"
    guard.close()


def test_running_out_of_memory_is_not_run_again():
    model, calls = nn.Linear(4, 1), []

    def hungry(model, x):
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    guard = nanproof.Guard(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=hungry)
    with pytest.raises(torch.OutOfMemoryError):
        guard.train_step(torch.randn(4, 4))
    assert len(calls) == 1 and guard.incidents[0].diagnosis is None
    guard.close()


def test_incidents_with_a_diagnosis_are_written_and_read(tmp_path):
    """The journal has the diagnosis, the bundle is named and there, and `nanproof replay` finds the same cause."""
    model = net()
    guard = nanproof.Guard(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=mse, run_dir=tmp_path)
    for i, batch in enumerate(batches(5)):
        guard.train_step(poison(batch) if i == 2 else batch)
    guard.close()
    (read,) = read_incidents(tmp_path)
    assert read.diagnosis == guard.incidents[0].diagnosis and read.diagnosis.samples == (2,)
    (tmp_path / "mine.py").write_text("from toys import net, mse\n\ndef build():\n    return {'model': net(), 'loss_fn': mse}\n")
    done = forked.python("-m", "nanproof", "replay", read.bundle, "--entry", "mine:build", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert answer["verdict"] == "persistent" and answer["same_as_recorded"]
    assert answer["diagnosis"]["cause"] == "nonfinite-batch"


def test_a_diagnosis_is_a_sentence_and_json():
    told = Diagnosis(cause="exp-overflow", confidence=0.9, op="exp", where="head", samples=(3,), fix="Clamp.", verified=True)
    assert str(told) == "cause: exp-overflow (fix verified on the replay), op exp, in head, sample 3. Clamp."
    assert Diagnosis.from_json(json.loads(json.dumps(told.to_json()))) == told
    incident = Incident(step=1, kind="nonfinite-loss", action="skipped", diagnosis=told)
    assert Incident.from_json(json.loads(json.dumps(incident.to_json()))) == incident


def test_the_log_line_says_the_cause(caplog):
    model = net()
    with caplog.at_level(logging.WARNING, "nanproof"):
        guard = nanproof.Guard(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=mse)
        guard.train_step(poison(batches(1)[0]))
        guard.close()
    assert "nonfinite-batch" in caplog.text and "sample 2" in caplog.text


def test_a_finite_case_is_transient():
    """Bad once, fine twice on the replay: it is not in the code or the data."""
    replay = Replay(nn.Linear(4, 1), lambda m, x: m(x).square().mean(), [torch.randn(3, 4)])
    told = explain(Case("nonfinite-loss", replay=replay))
    assert told.cause == "transient-fault" and told.verified


def test_a_frozen_encoder_is_diagnosed_without_gradients():
    """Parameters that need no gradient do not disturb the replay."""
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    told = nanproof.diagnose(model, lambda m, x: F.softplus(m(x)).log().sub(m(x) / 0).mean(), torch.randn(3, 4))
    assert told.cause == "zero-denominator"
