"""Sampling of latent-dlm: what is given stays, nothing stays masked, the same seed draws the same, a model that knows the answer
is followed to it, and one whose numbers are not finite gives no sample."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from crosses import part_of
from latent_toys import batch, prepared, small

pytest.importorskip("diffusers")

from nanproof import UsageError
from nanproof_recipes.latent_dlm.data.corpus import MASK, OUT, PAD
from nanproof_recipes.latent_dlm.model.diffusion import FARTHEST, scheduler
from nanproof_recipes.latent_dlm.model.model import MMDiT
from nanproof_recipes.latent_dlm.model.sampling import NotFinite, agreement, draw

CONFIG = small(loss__diffusion_steps=100)
SCALE = prepared(CONFIG).scale


def model(seed=0) -> MMDiT:
    """Untaught, but not at zero."""
    torch.manual_seed(seed)
    made = MMDiT(CONFIG.model)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return made


class Knows(nn.Module):
    """Sees through all noise: it knows the text, and from the clean latent what there is to predict of a noisy one."""

    def __init__(self, ids, latent, prediction="epsilon", config=CONFIG):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.ids, self.latent, self.prediction = ids, latent, prediction
        self.levels, self.steps = scheduler("ddpm", config).alphas_cumprod, config.loss.diffusion_steps
        self.times = []

    def forward(self, ids, latent, text_time, latent_time, keep=None):
        self.times.append((float(text_time[0]), float(latent_time[0])))
        logits = nn.functional.one_hot(self.ids, OUT).float() * 50
        level = self.levels[(latent_time * self.steps).round().long().clamp(min=1) - 1].view(-1, 1, 1)
        noise = (latent - level.sqrt() * self.latent) / (1 - level).sqrt()
        v = level.sqrt() * noise - (1 - level).sqrt() * self.latent
        return logits, {"epsilon": noise, "v": v, "x0": self.latent.expand_as(latent)}[self.prediction]


# -- a model that knows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "how", "prediction"), part_of((1, 7, 30, 60, 100), ("ddpm", "ddim"), ("epsilon", "v", "x0"), every=2)
)
def test_who_knows_the_answer_is_followed_to_it(how, prediction, steps):
    config = small(loss__diffusion_steps=100, loss__prediction=prediction)
    data = prepared(config).train
    rows = {"ids": data.ids[:3], "latent": data.latents[:3]}
    knows = Knows(rows["ids"], rows["latent"], prediction, config)
    drawn = draw(knows, config, SCALE, count=3, steps=steps, how=how, seed=1)
    assert torch.equal(drawn.ids, rows["ids"])
    assert torch.allclose(drawn.latent, rows["latent"], atol=0.02 if how == "ddim" else 0.05)
    assert min(drawn.agreement) > 0.99


@pytest.mark.parametrize("steps", [10, 30, 51, 60, 99, 100])
def test_latents_start_where_there_is_hardly_anything_but_noise(steps):
    """A count that does not divide the schedule may not begin in its middle: the model would take noise for a signal."""
    rows = batch(CONFIG, 2)
    knows = Knows(rows["ids"], rows["latent"])
    draw(knows, CONFIG, SCALE, count=2, steps=steps)
    texts, latents = zip(*knows.times, strict=True)
    assert texts[0] == 1.0 and len(texts) >= steps
    assert latents[0] >= 1 - 100 // steps / 100 and latents[-1] == pytest.approx(0.01)
    assert all(a > b for a, b in pairwise(texts))
    assert len({round(a - b, 4) for a, b in pairwise(latents)}) == 1 and latents[0] > latents[-1]


class Ideal(nn.Module):
    """The best there can be for latents that are normal, with this mean and deviation: the noise that is to be expected."""

    def __init__(self, mean, std):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.mean, self.std, self.levels = mean, std, scheduler("ddpm", CONFIG).alphas_cumprod

    def forward(self, ids, latent, text_time, latent_time, keep=None):
        level = self.levels[(latent_time * 100).round().long() - 1].view(-1, 1, 1)
        variance = level * self.std**2 + 1 - level
        noise = (1 - level).sqrt() / variance * (latent - level.sqrt() * self.mean)
        return torch.zeros(1, 1, OUT), noise


@pytest.mark.parametrize("steps", [20, 60, 100])
@pytest.mark.parametrize("how", ["ddpm", "ddim"])
def test_latents_have_the_mean_and_spread_that_a_perfect_model_knows(how, steps):
    ids = batch(CONFIG, 800)["ids"]
    drawn = draw(Ideal(1.5, 0.5), CONFIG, SCALE, mode="text_to_latent", ids=ids, steps=steps, how=how, seed=3)
    assert drawn.latent.mean().item() == pytest.approx(1.5, abs=0.08)
    assert drawn.latent.std().item() == pytest.approx(0.5, abs=0.08)


class Nearly(Ideal):
    """What it predicts is too small by 5 %."""

    def forward(self, *given):
        logits, predicted = super().forward(*given)
        return logits, 0.95 * predicted


@pytest.mark.parametrize("steps", [20, 50, 100])
@pytest.mark.parametrize("how", ["ddpm", "ddim"])
def test_a_small_error_where_nearly_all_is_noise_does_not_explode(how, steps):
    """The clean latent is told from noise by dividing by the root of alpha-bar: at the start that multiplies an error by 2000."""
    ids = batch(CONFIG, 200)["ids"]
    drawn = draw(Nearly(0.0, 1.0), CONFIG, SCALE, mode="text_to_latent", ids=ids, steps=steps, how=how)
    assert drawn.latent.abs().amax() <= FARTHEST * 1.01 and 0.5 < drawn.latent.std() < 2


# -- what is given -------------------------------------------------------------------------------------------------------------


def test_nothing_stays_masked_and_padding_is_never_drawn():
    drawn = draw(model(), CONFIG, SCALE, count=6, steps=5)
    assert drawn.ids.shape == (6, 16) and (drawn.ids < OUT).all() and (drawn.ids >= 0).all()
    assert drawn.latent.shape == (6, 2, 4) and drawn.latent.isfinite().all() and len(drawn.agreement) == 6
    assert all(-1.0001 <= value <= 1.0001 for value in drawn.agreement)


@pytest.mark.parametrize("how", ["ddpm", "ddim"])
def test_a_given_text_stays_as_it_is(how):
    rows = batch(CONFIG, 3, padded=True)
    before = rows["ids"].clone()
    drawn = draw(model(), CONFIG, SCALE, mode="text_to_latent", steps=5, how=how, ids=rows["ids"])
    assert torch.equal(drawn.ids, before) and torch.equal(rows["ids"], before) and (drawn.ids == PAD).any()
    assert drawn.latent.shape == (3, 2, 4)


def test_a_given_latent_stays_as_it_is():
    rows = batch(CONFIG, 3)
    drawn = draw(model(), CONFIG, SCALE, mode="latent_to_text", steps=5, latent=rows["latent"])
    assert torch.equal(drawn.latent, rows["latent"]) and drawn.ids.shape == (3, 16) and not (drawn.ids == MASK).any()


def test_the_times_say_what_is_given():
    rows = batch(CONFIG, 2)
    for mode, column, more in (
        ("text_to_latent", 0, {"ids": rows["ids"]}),
        ("latent_to_text", 1, {"latent": rows["latent"]}),
    ):
        knows = Knows(rows["ids"], rows["latent"])
        drawn = draw(knows, CONFIG, SCALE, mode=mode, steps=10, **more)
        assert all(times[column] == 0 and times[1 - column] > 0 for times in knows.times)
        assert torch.equal(drawn.ids, rows["ids"]) and torch.allclose(drawn.latent, rows["latent"], atol=0.02)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"steps": 0}, "--steps 0"),
        ({"steps": 101}, "--steps 101"),
        ({"temperature": -0.1}, "--temperature"),
        ({"temperature": math.nan}, "--temperature"),
        ({"mode": "text_to_latent"}, "a text is needed"),
        ({"mode": "latent_to_text"}, "a latent is needed"),
        ({"mode": "text_to_latent", "ids": torch.zeros(1, 9, dtype=torch.long)}, "16"),
        ({"mode": "latent_to_text", "latent": torch.zeros(1, 3, 4)}, "2, 4"),
    ],
)
def test_what_cannot_be_drawn_is_said(wrong, word):
    with pytest.raises(UsageError, match=word):
        draw(model(), CONFIG, SCALE, **wrong)


# -- chance --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ddpm", "ddim"])
def test_the_same_seed_draws_the_same_and_leaves_torchs_generators_alone(how):
    before = torch.get_rng_state()
    first, second, other = (draw(model(), CONFIG, SCALE, steps=6, how=how, seed=seed) for seed in (4, 4, 5))
    torch.manual_seed(0)
    model()
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    draw(Knows(**batch(CONFIG, 4)), CONFIG, SCALE, steps=6, how=how)
    assert torch.equal(torch.get_rng_state(), before) and len(after)
    assert torch.equal(first.ids, second.ids) and torch.equal(first.latent, second.latent)
    assert not torch.equal(first.ids, other.ids) and not torch.equal(first.latent, other.latent)


class Even(nn.Module):
    """Two bytes, one of them likelier: chances of 3 to 1."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, ids, latent, text_time, latent_time, keep=None):
        logits = torch.full((*ids.shape, OUT), -1e4)
        logits[..., 65], logits[..., 66] = math.log(3), 0.0
        return logits, latent * 0


def test_temperature_sharpens_and_0_takes_the_likeliest():
    """Of two bytes at 3 to 1: 3/4 at temperature 1, 9/10 at 1/2, all at 0 and at any number just above it."""
    for temperature, share in ((1.0, 0.75), (0.5, 0.9), (0.0, 1.0), (1e-40, 1.0)):
        drawn = draw(Even(), CONFIG, SCALE, count=200, steps=4, temperature=temperature)
        found = (drawn.ids == 65).double().mean().item()
        assert set(drawn.ids.unique().tolist()) <= {65, 66}
        assert found == pytest.approx(share, abs=0.03 if 0 < share < 1 else 0)


def test_text_is_unmasked_bit_by_bit():
    """With 4 steps, about a quarter is left to each."""
    shares = []

    class Watching(Even):
        def forward(self, ids, *more):
            shares.append((ids == MASK).double().mean().item())
            return super().forward(ids, *more)

    draw(Watching(), CONFIG, SCALE, count=300, steps=4)
    assert shares == pytest.approx([1.0, 0.75, 0.5, 0.25], abs=0.04)


# -- numbers that are none -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("mode", ["unconditional", "text_to_latent", "latent_to_text"])
def test_weights_that_are_not_finite_give_no_sample(bad, mode, capsys):
    broken, rows = model(), batch(CONFIG, 2)
    with torch.no_grad():
        broken.bytes.weight.fill_(bad)
    with pytest.raises(NotFinite, match="not finite"):
        draw(broken, CONFIG, SCALE, mode=mode, steps=3, ids=rows["ids"], latent=rows["latent"])
    assert broken.training and capsys.readouterr().out == ""


class Vast(Even):
    """Finite at every step, and too large to be added up."""

    def forward(self, ids, latent, *more):
        return super().forward(ids, latent, *more)[0], torch.full_like(latent, 3e38)


def test_a_latent_that_overflows_on_the_way_is_no_sample():
    with pytest.raises(NotFinite, match="not finite"):
        draw(Vast(), small(loss__diffusion_steps=100, loss__prediction="v"), SCALE, count=1, steps=100, how="ddim")


def test_the_mode_of_the_model_is_put_back():
    for training in (True, False):
        made = model().train(training)
        draw(made, CONFIG, SCALE, steps=2)
        assert made.training is training


def test_bf16_weights_can_be_drawn_from():
    drawn = draw(model().to(torch.bfloat16), CONFIG, SCALE, steps=5)
    assert drawn.latent.dtype == torch.float32 and drawn.latent.isfinite().all()


# -- agreement -----------------------------------------------------------------------------------------------------------------


def test_a_text_agrees_with_its_own_latent_and_not_with_anothers():
    config = small(model__text_length=64, model__latent_length=8, model__latent_width=16)
    data = prepared(config, 300)
    own = agreement(data.train.ids, data.train.latents, data.scale)
    others = agreement(data.train.ids, data.train.latents.roll(1, 0), data.scale)
    assert min(own) > 0.9999 and abs(sum(others) / 300) < 0.05 and max(others) < 0.6
    masked = data.train.ids.masked_fill(torch.rand(300, 64) < 0.5, MASK)
    partly = agreement(masked, data.train.latents, data.scale)
    assert 0.3 < sum(partly) / 300 < 0.95
