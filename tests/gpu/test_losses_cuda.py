"""Losses, precision and the look at a Trainer's losses on a CUDA device: nothing waits, nothing asserts, and the numbers are the
host's. `pytest -m gpu`."""

from __future__ import annotations

import math
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from transformers import TrainerCallback

import nanproof
from integrations import tiny
from nanproof import UsageError
from nanproof.integrations.huggingface._loss_checks import LossCheck
from nanproof.integrations.transformers import safe_compute_loss
from nanproof.numerics.losses import masked_cross_entropy
from nanproof.numerics.precision import cast_trainable, choose, problems

pytestmark = pytest.mark.gpu
BAD = range(12, 16)


@contextmanager
def no_waits():
    """Every wait of the host raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def batch(samples=4, length=9, vocabulary=11):
    logits, labels = 3 * torch.randn(samples, length, vocabulary), torch.randint(0, vocabulary, (samples, length))
    labels[torch.rand(samples, length) < 0.4] = -100
    return logits, labels


@pytest.mark.parametrize("empty", ["refuse", "neutral"])
@pytest.mark.parametrize("items", ["none", "int", "host", "device"])
def test_the_loss_waits_for_nothing(empty, items):
    """sync_debug_mode raises at every wait. Positions that do not count hold NaN; value and gradient are the host's."""
    logits, labels = batch()
    number = {"none": None, "int": 17, "host": torch.tensor(17), "device": torch.tensor(17).cuda()}[items]
    wanted_logits = logits.clone().requires_grad_()
    wanted = masked_cross_entropy(wanted_logits, labels, num_items=None if items == "none" else 17)
    wanted.backward()
    counts = torch.zeros_like(labels, dtype=torch.bool)
    counts[:, :-1] = labels[:, 1:] != -100
    logits[~counts] = math.nan
    there, labels = logits.cuda().requires_grad_(), labels.cuda()
    with no_waits():
        loss = masked_cross_entropy(there, labels, num_items=number, empty=empty)
        loss.backward()
    torch.testing.assert_close(loss.detach().cpu(), wanted.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(there.grad.cpu(), wanted_logits.grad, rtol=1e-4, atol=1e-6)


def test_a_mean_over_nothing_and_a_label_out_of_range():
    """Without a wait: NaN, or 0; no assertion of the device ends the process. With `empty="raise"`: an error that says which."""
    logits, labels = (t.cuda() for t in batch())
    logits.requires_grad_()
    nothing, outside = torch.full_like(labels, -100), labels.clone()
    outside[2, 4] = 99
    with no_waits():
        refused = masked_cross_entropy(logits, nothing, empty="refuse")
        neutral = masked_cross_entropy(logits, nothing, empty="neutral")
        strange = masked_cross_entropy(logits, outside, empty="refuse")
        strange.backward()
    assert refused.isnan().item() and neutral.item() == 0 and strange.isnan().item()
    assert logits.grad.isnan().all(-1).nonzero().tolist() == [[2, 3]]
    with pytest.raises(UsageError, match="99 in sample 2"):
        masked_cross_entropy(logits, outside)
    with pytest.raises(UsageError, match="none of 4 samples"):
        masked_cross_entropy(logits, nothing)
    assert masked_cross_entropy(logits, labels).isfinite().item(), "the device still works"


def test_memory():
    """Between forward and backward next to nothing is kept besides the logits; the peak is less than half of the usual way's."""
    labels = torch.randint(0, 32000, (4096,), device="cuda")

    def run(loss_of):
        same = torch.Generator("cuda").manual_seed(0)  # of the two runs, which are compared
        logits = torch.randn(4096, 32000, device="cuda", dtype=torch.bfloat16, generator=same).requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = loss_of(logits)
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        torch.cuda.synchronize()
        return loss.item(), kept, torch.cuda.max_memory_allocated() - before

    usual, _, usual_peak = run(lambda x: F.cross_entropy(x.float(), labels))
    torch.cuda.empty_cache()
    loss, kept, peak = run(lambda x: masked_cross_entropy(x, labels, shift=False, empty="refuse"))
    assert loss == pytest.approx(usual, rel=1e-3) and kept < 2**20 and peak < usual_peak / 2, (kept, peak, usual_peak)


def test_precision_on_a_device():
    """What is chosen works; fp16 weights fail as on a CPU: 0/0 in Adam, refused by the scaler, fine in the fused kernel."""
    native = torch.cuda.get_device_capability()[0] >= 8
    chosen = choose(device="cuda")
    assert chosen.name == ("bf16" if native else "fp16") and torch.cuda.get_device_name() in chosen.reason
    scaled = choose(device="cuda", ask="fp16")
    assert scaled.grad_scaler().is_enabled()
    model = nn.Linear(4, 4).cuda()
    with scaled.autocast():
        assert model(torch.ones(2, 4, device="cuda")).dtype == torch.float16
    half = nn.Linear(4, 4).cuda().half()
    assert "cast_trainable" in choose(half).reason and choose(half).device == "cuda"
    for settings, survives in (({"foreach": True}, False), ({"foreach": False}, False), ({"fused": True}, True)):
        weight = nn.Parameter(torch.ones(4, device="cuda", dtype=torch.float16))
        optimizer = optim.AdamW([weight], 2e-4, **settings)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        assert weight.isfinite().all().item() == survives, settings
        found = [p.slug for p in problems(half, optim.AdamW(half.parameters(), **settings))]
        assert ("fp16-optimizer-underflow" in found) == (not survives)
    scaler, optimizer = torch.amp.GradScaler("cuda"), optim.SGD(half.parameters(), 0.1)
    scaler.scale(half(torch.ones(1, 4, device="cuda").half()).sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
    assert cast_trainable(half) == ("weight", "bias") and problems(half, fp16=True) == []
    assert half.weight.is_cuda and half.weight.grad.dtype == torch.float32


def test_the_look_at_a_loss_waits_for_nothing():
    logits, labels = (t.cuda() for t in batch())
    logits[1, 0, 2] = math.nan
    labels[1, 1], labels[2, 3] = 3, 50
    loss, aux = torch.ones((), device="cuda"), torch.full((), math.inf, device="cuda")
    with no_waits():
        check = LossCheck.of(0, loss, {"aux_loss": aux, "logits": logits}, labels, None, shift=True)
    facts = check.read()
    assert facts.terms == {"loss": 1.0, "aux_loss": math.inf} and facts.outside == (0, 0, 1, 0)
    assert [i for i, n in enumerate(facts.wild) if n] == [1]


def test_no_wait_is_added_to_a_protected_trainer(tmp_path):
    """Steps without a log: as many host waits with the look at the losses as without it."""

    class Count(TrainerCallback):
        waits = 0

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 10:
                self.caught = warnings.catch_warnings(record=True)
                self.seen = self.caught.__enter__()
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
            if state.global_step == 30:
                torch.cuda.set_sync_debug_mode("default")
                self.caught.__exit__(None, None, None)
                self.waits = sum("synchroniz" in str(w.message) for w in self.seen)

    counts = {}
    for protected in (False, True):
        for safe in (False, True):
            count = Count()
            trainer = tiny.make_trainer(
                tmp_path / f"{protected}-{safe}", tiny.llama(), tiny.token_rows(160), use_cpu=False, bf16=True,
                logging_steps=1000, logging_nan_inf_filter=False, callbacks=[count],
            )  # fmt: skip
            if safe:
                safe_compute_loss(trainer)
            if protected:
                nanproof.protect(trainer)
            trainer.train()
            counts[protected, safe] = count.waits
    assert counts[False, True] <= counts[False, False] and counts[True, True] <= counts[True, False], counts


def test_the_guard_says_it_two_steps_later(tmp_path):
    """Verdicts come late, and the step behind a bad one is held: each incident says what was seen of its own step."""
    trainer = tiny.make_trainer(tmp_path, tiny.llama(), tiny.token_rows(40, range(12, 20)), use_cpu=False)
    safe_compute_loss(trainer)
    guard = nanproof.protect(trainer)
    trainer.train()
    assert [i.step for i in guard.incidents] == [3, 4] and guard.path.startswith("device")
    assert all(i.message.endswith("; no sample has a supervised token (0, 1, 2, 3)") for i in guard.incidents)


def test_without_a_guard_it_is_said_with_the_log(tmp_path, caplog):
    trainer = tiny.make_trainer(tmp_path, tiny.llama(), tiny.token_rows(40, BAD), use_cpu=False, logging_steps=5)
    safe_compute_loss(trainer)
    trainer.train()
    said = [r.getMessage() for r in caplog.records if r.name == "nanproof"]
    assert said and said[0].startswith("nanproof: step 3: the loss is nan, no sample has a supervised token (0, 1, 2, 3)")


@pytest.mark.parametrize(("row", "check"), [(2, "log"), (10, "step")])
def test_a_label_out_of_range_raises_before_the_device_asserts(tmp_path, row, check):
    """In the first batch always, later where every step is looked at; the device works on."""
    rows = tiny.token_rows(16)
    rows[row]["labels"][4] = tiny.VOCABULARY
    trainer = tiny.make_trainer(tmp_path, tiny.llama(), rows, use_cpu=False)
    safe_compute_loss(trainer, check=check)
    with pytest.raises(UsageError, match="64 in sample 2"):
        trainer.train()
    assert torch.ones(2, device="cuda").sum().item() == 2
