"""Three ways to take a step: the mistakes of the reported loop and of the document's are really there, and what the guarded one
logs are means over the steps that counted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import nanproof
from latent_toys import small
from nanproof.numerics.losses import weighted_sum
from nanproof_recipes.latent_dlm.train.loops import DocumentLoop, GuardedLoop, OriginalLoop, Window

LR = 1e-2


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.b(self.a(x).tanh())


def losses(model, batch):
    out = model(batch["x"]).mean() * batch.get("factor", 1.0)
    return out, {"text_loss": out, "latent_loss": 2 * out}


def rows(seed=0, **more):
    return {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)), **more}


def loop_of(kind, **changes):
    """With a learning rate that falls with every step of its schedule."""
    torch.manual_seed(0)
    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    return kind(model, optimizer, LambdaLR(optimizer, lambda n: 1 / (n + 1)), losses, small(**changes))


def spoil(parameter, value):
    """The next gradient of one weight is this number; later ones are left alone."""
    left = [1]

    def hook(grad):
        if left:
            left.pop()
            grad = grad.clone()
            grad.view(-1)[0] = value
        return grad

    parameter.register_hook(hook)


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


# -- as reported ---------------------------------------------------------------------------------------------------------------


def test_the_original_loop_lets_inf_pass_and_never_comes_back():
    """An infinite norm is not NaN, so nothing is zeroed; clipping has made the infinite gradient NaN and all others 0."""
    loop = loop_of(OriginalLoop)
    loop.step([rows()])
    before = flat(loop.model)
    spoil(loop.model.a.weight, math.inf)
    loop.step([rows()])
    assert torch.isnan(loop.model.a.weight).sum() == 1 and torch.isfinite(before).all()
    for i in range(5):
        loop.step([rows(i)])
        assert torch.isnan(loop.model.a.weight).any()
    assert math.isnan(loop.window().values["loss"]) and (loop.skipped, loop.back, loop.next_step) == (0, 0, 7)


def test_the_original_loop_moves_on_gradients_that_it_zeroed():
    """A NaN is found and all gradients are zeroed, and Adam moves every weight by its moments all the same."""
    loop = loop_of(OriginalLoop)
    for i in range(3):
        loop.step([rows(i)])
    before, rate = flat(loop.model), loop.optimizer.param_groups[0]["lr"]
    spoil(loop.model.b.weight, math.nan)
    loop.step([rows(3)])
    moved = (flat(loop.model) - before).abs()
    assert torch.isfinite(moved).all() and moved.amax() > rate / 10 and (moved > 0).double().mean() > 0.9
    assert loop.optimizer.param_groups[0]["lr"] < rate  # and the schedule goes on
    assert loop.skipped == 0


def test_the_original_loop_adds_up_micro_batches_and_never_divides():
    one, two = loop_of(OriginalLoop, optimizer__grad_clip_norm=0), loop_of(OriginalLoop, optimizer__grad_clip_norm=0)
    one.step([rows()])
    two.step([rows(), rows()])
    assert two.window().values["grad_norm"] == pytest.approx(2 * one.window().values["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("off", [None, 0, 0.0])
def test_off_is_a_million_in_the_original_loop_and_one_in_the_documents(off):
    """Seen from the first moment, which is a tenth of what Adam got."""
    factor = torch.tensor(1e4)
    for kind, limit in ((OriginalLoop, 1e6), (DocumentLoop, 1.0)):
        loop = loop_of(kind, optimizer__grad_clip_norm=off)
        loop.step([rows(factor=factor)])
        norm = loop.window().values["grad_norm"]
        got = torch.cat([state["exp_avg"].reshape(-1) for state in loop.optimizer.state.values()]).norm().item() * 10
        assert 1e3 < norm < 1e6 and got == pytest.approx(min(norm, limit), rel=1e-4)


@pytest.mark.parametrize("kind", [OriginalLoop, DocumentLoop])
def test_the_loss_scale_stays_in_the_gradients_of_the_plain_loops(kind):
    plain, scaled = loop_of(kind), loop_of(kind, loss__loss_scale=64.0)
    plain.step([rows()])
    scaled.step([rows()])
    assert scaled.window().values["grad_norm"] == pytest.approx(64 * plain.window().values["grad_norm"], rel=1e-5)


# -- as the document has it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_documents_loop_skips_a_bad_loss_and_counts_it(bad):
    loop = loop_of(DocumentLoop)
    loop.step([rows()])
    before, rate = flat(loop.model), loop.optimizer.param_groups[0]["lr"]
    loop.step([rows(factor=torch.tensor(bad))])
    assert torch.equal(flat(loop.model), before) and loop.optimizer.param_groups[0]["lr"] == rate
    assert (loop.skipped, loop.next_step) == (1, 2) and all(p.grad is None for p in loop.model.parameters())
    loop.step([rows()])
    assert not torch.equal(flat(loop.model), before) and loop.skipped == 1 and loop.optimizer.param_groups[0]["lr"] < rate


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_documents_loop_skips_a_bad_norm_and_counts_it(bad):
    loop = loop_of(DocumentLoop)
    loop.step([rows()])
    before, rate = flat(loop.model), loop.optimizer.param_groups[0]["lr"]
    spoil(loop.model.a.bias, bad)
    loop.step([rows()])
    assert torch.equal(flat(loop.model), before) and loop.optimizer.param_groups[0]["lr"] == rate and loop.skipped == 1


def test_a_bad_micro_batch_takes_the_good_one_before_it_along():
    loop = loop_of(DocumentLoop)
    before = flat(loop.model)
    loop.step([rows(), rows(factor=torch.tensor(math.nan))])
    assert torch.equal(flat(loop.model), before) and loop.skipped == 1
    fresh = loop_of(DocumentLoop)
    fresh.step([rows(5)])
    loop.step([rows(5)])
    assert torch.equal(flat(loop.model), flat(fresh.model))  # and leaves nothing behind


def test_the_documents_loop_divides_by_the_micro_batches():
    one, two = loop_of(DocumentLoop), loop_of(DocumentLoop)
    one.step([rows()])
    two.step([rows(), rows()])
    assert two.window().values["grad_norm"] == pytest.approx(one.window().values["grad_norm"], rel=1e-5)


def test_once_weights_are_nan_the_documents_loop_skips_for_ever():
    loop = loop_of(DocumentLoop)
    with torch.no_grad():
        loop.model.b.bias.fill_(math.nan)
    for i in range(20):
        loop.step([rows(i)])
    assert loop.skipped == 20 and torch.isnan(loop.model.b.bias).all()


def test_a_window_of_a_plain_loop_is_a_mean_and_begins_anew():
    loop = loop_of(DocumentLoop)
    assert loop.window() is None
    seen = []
    for i in range(3):
        seen.append(float(losses(loop.model, rows(i))[0].detach()))
        loop.step([rows(i)])
    window = loop.window()
    assert isinstance(window, Window) and window.step == 2
    assert window.values["loss"] == pytest.approx(sum(seen) / 3, rel=1e-5)
    assert window.values["latent_loss"] == pytest.approx(2 * sum(seen) / 3, rel=1e-5)
    assert list(window.values) == ["loss", "text_loss", "latent_loss", "grad_norm", "learning_rate"]
    assert window.values["learning_rate"] == pytest.approx(LR / 3), "the rate that the last of these steps was taken with"
    assert loop.window() is None


# -- guarded -------------------------------------------------------------------------------------------------------------------


def guarded(**policy):
    torch.manual_seed(0)
    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def loss(model, batch):
        return weighted_sum(losses(model, batch)[1])

    policy = nanproof.Policy(diagnose="never", **policy)
    return GuardedLoop(nanproof.Guard(model, optimizer, loss_fn=loss, policy=policy))


def test_a_window_of_the_guarded_loop_is_a_mean_over_the_steps_that_were_taken():
    loop = guarded()
    assert loop.window() is None
    for i in range(4):
        loop.step([rows(i, factor=torch.tensor(math.nan if i == 2 else 1.0))])
    window, records = loop.window(), loop.guard.history
    taken = [record for record in records if record.step != 2]
    assert window.step == 3 and loop.skipped == 1 and loop.next_step == 4
    assert window.values["loss"] == pytest.approx(sum(record.loss for record in taken) / 3)
    assert window.values["text_loss"] == pytest.approx(sum(dict(record.terms)["text_loss"] for record in taken) / 3)
    assert window.values["latent_loss"] == pytest.approx(2 * window.values["text_loss"], rel=1e-5)
    assert window.values["learning_rate"] == LR and loop.window() is None


def test_a_window_in_which_no_step_was_taken_shows_what_was_refused():
    loop = guarded()
    loop.step([rows(0)])
    loop.window()
    loop.step([rows(1, factor=torch.tensor(math.inf))])
    window = loop.window()
    assert window.step == 1 and not math.isfinite(window.values["loss"]) and loop.window() is None


@pytest.mark.parametrize("every", [1, 2, 4, 7, 12])
def test_after_going_back_the_steps_that_are_run_again_are_told_again(every):
    """Weights break in step 13: the run goes back by itself, in memory. However seldom it is asked, the last word about each
    step is about the step as it was taken in the end."""
    loop = guarded(snapshot_every=5)
    data = loop.guard.wrap([rows(i) for i in range(40)])
    told, harmed, fell = {}, False, []
    for batch in data:
        before = loop.next_step
        if before == 13 and not harmed:
            harmed = True
            with torch.no_grad():
                loop.guard.model.a.weight[0, 0] = math.inf
        loop.step([batch])
        if loop.next_step <= before:
            fell.append(loop.next_step)
        if loop.next_step % every == 0 or loop.next_step == 40:
            window = loop.window()
            if window is not None:
                told[window.step] = window.values["loss"]
    assert loop.back == 1 and loop.skipped == 0 and len(fell) == 1 and fell[0] in (5, 10)
    records = {record.step: record.loss for record in loop.guard.history}
    assert sorted(records) == list(range(40))
    assert sorted(told) == sorted({*range(every - 1, 40, every), 39} | ({fell[0] - 1} & told.keys()))
    first = 0
    for last in sorted(told):
        wanted = [records[step] for step in range(first, last + 1)]
        assert told[last] == pytest.approx(sum(wanted) / len(wanted), rel=1e-6), (first, last)
        first = last + 1
