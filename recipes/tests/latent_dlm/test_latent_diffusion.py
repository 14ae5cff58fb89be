"""Noise and losses of latent-dlm: masks come at the rate of their time, latents follow the cosine schedule, and each loss is what
a loop over its elements says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from latent_toys import batch, small

pytest.importorskip("diffusers")

from nanproof_recipes.latent_dlm.data.corpus import MASK, OUT, PAD
from nanproof_recipes.latent_dlm.model.diffusion import IGNORED, Noised, Noiser, document, exact, original

STEPS = 50
MODES = ("unconditional", "text_to_latent", "latent_to_text")


def alpha_bar(steps: int) -> list[float]:
    """Of the cosine schedule (Nichol and Dhariwal), from its definition, with betas of 0.999 at the most."""

    def level(x: float) -> float:
        return math.cos((x + 0.008) / 1.008 * math.pi / 2) ** 2

    found, product = [], 1.0
    for i in range(steps):
        product *= 1 - min(1 - level((i + 1) / steps) / level(i / steps), 0.999)
        found.append(product)
    return found


def noiser(**changes) -> Noiser:
    return Noiser(small(loss__diffusion_steps=STEPS, **changes))


MIXED = {"modes__unconditional": 0.2, "modes__text_to_latent": 0.3, "modes__latent_to_text": 0.5}
"""Some of each in a small batch."""


def drawn(own: Noiser, rows: dict, seed: int = 0, mode: str | None = None) -> Noised:
    return own.draw(rows, torch.Generator().manual_seed(seed), mode)


def step_of(noised: Noised) -> torch.Tensor:
    return (noised.latent_time * STEPS).round().long() - 1


# -- text ----------------------------------------------------------------------------------------------------------------------


def test_bytes_are_masked_at_the_rate_of_their_time():
    """Of each sample, the share that is masked is its time, within 4.5 standard errors; padding never is."""
    rows = batch(small(model__text_length=4096), 16)
    rows["ids"][:, 3000:] = PAD
    noised = drawn(noiser(), rows, mode="unconditional")
    masked = noised.ids == MASK
    assert not masked[:, 3000:].any() and (noised.ids[:, 3000:] == PAD).all()
    for time, share in zip(noised.text_time.tolist(), masked[:, :3000].double().mean(1).tolist(), strict=True):
        assert abs(share - time) <= 4.5 * math.sqrt(time * (1 - time) / 3000) + 1e-9


def test_labels_stand_at_masked_positions_alone():
    rows = batch(small(), 32, padded=True)
    noised = drawn(noiser(), rows)
    before = rows["ids"].clone()
    for i in range(32):
        for j in range(before.shape[1]):
            was, now, label = (int(x[i, j]) for x in (before, noised.ids, noised.labels))
            if now == MASK:
                assert label == was != PAD
            else:
                assert label == IGNORED and now == was
            assert bool(noised.keep[i, j]) == (was != PAD)
    assert torch.equal(rows["ids"], before)  # what was given is not written to


def test_times_are_spread_evenly_over_a_batch():
    """Sorted, they are 1 / size apart, those of latents in another order than those of text; over many draws every time comes."""
    rows = batch(small(), 10)
    own = noiser()
    noised = drawn(own, rows, mode="unconditional")
    times = noised.text_time.sort().values
    assert torch.allclose(times.diff(), torch.full((9,), 0.1), atol=1e-5)
    assert torch.equal(step_of(noised).sort().values.diff(), torch.full((9,), STEPS // 10))
    assert noised.text_time.argsort().tolist() != noised.latent_time.argsort().tolist()
    generator = torch.Generator().manual_seed(0)
    many = torch.cat([step_of(own.draw(rows, generator, "unconditional")) for _ in range(200)])
    counts = many.bincount(minlength=STEPS)
    assert len(counts) == STEPS and int(counts.min()) > 0 and 15 < int(counts.min()) <= int(counts.max()) < 70
    firsts = torch.cat([own.draw(rows, generator, "unconditional").text_time for _ in range(200)])
    assert firsts.mean() == pytest.approx(0.5, abs=0.02) and 0 <= firsts.min() < 0.01 and 0.99 < firsts.max() < 1


# -- modes ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [(0.6, 0.2, 0.2), (0.0, 0.3, 0.7), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_samples_fall_into_the_modes_by_their_shares(shares):
    """Which it was is seen from what is noisy."""
    rows = batch(small(), 4000)
    noised = drawn(noiser(**{f"modes__{mode}": share for mode, share in zip(MODES, shares, strict=True)}), rows)
    text_given = noised.text_time == 0
    found = {
        "unconditional": (~text_given & noised.counts),
        "text_to_latent": text_given & noised.counts,
        "latent_to_text": ~noised.counts,
    }
    for mode, share in zip(MODES, shares, strict=True):
        part = float(found[mode].double().mean())
        assert abs(part - share) <= 4.5 * math.sqrt(share * (1 - share) / 4000) + (1e-3 if 0 < share < 1 else 3e-4)


def test_a_given_text_is_untouched():
    rows = batch(small(), 16, padded=True)
    noised = drawn(noiser(), rows, mode="text_to_latent")
    assert torch.equal(noised.ids, rows["ids"]) and (noised.text_time == 0).all() and (noised.labels == IGNORED).all()
    assert noised.counts.all() and (noised.latent_time > 0).all() and not torch.equal(noised.latent, rows["latent"])


def test_a_given_latent_is_untouched():
    rows = batch(small(), 16)
    noised = drawn(noiser(), rows, mode="latent_to_text")
    assert torch.equal(noised.latent, rows["latent"]) and (noised.latent_time == 0).all() and not noised.counts.any()
    assert (noised.ids == MASK).any()


def test_a_given_latent_stays_the_same_even_where_it_is_not_finite():
    """0 times Inf would be NaN."""
    rows = batch(small(), 4)
    rows["latent"][1, 0, 0] = math.inf
    noised = drawn(noiser(), rows, mode="latent_to_text")
    assert torch.equal(noised.latent, rows["latent"])


# -- latents -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", ["epsilon", "v", "x0"])
def test_latents_get_the_noise_of_the_cosine_schedule(prediction):
    """The noise is drawn again as it was; then every element is what the formula says, and the clean latent can be told from the
    noisy one and the target."""
    rows = batch(small(), 12)
    noised = drawn(noiser(loss__prediction=prediction), rows, mode="unconditional")
    # the same draw of an epsilon-predicting noiser has the noise as its target
    noise = drawn(noiser(), rows, mode="unconditional").target.double()
    levels, clean = alpha_bar(STEPS), rows["latent"].double()
    for i, step in enumerate(step_of(noised).tolist()):
        signal, rest = math.sqrt(levels[step]), math.sqrt(1 - levels[step])
        mixed = signal * clean[i] + rest * noise[i]
        assert torch.allclose(noised.latent[i].double(), mixed, atol=1e-5)
        wanted = {"epsilon": noise[i], "v": signal * noise[i] - rest * clean[i], "x0": clean[i]}[prediction]
        assert torch.allclose(noised.target[i].double(), wanted, atol=1e-5)
        target = noised.target[i].double()
        back = {"epsilon": (mixed - rest * target) / signal, "v": signal * mixed - rest * target, "x0": target}[prediction]
        assert torch.allclose(back, clean[i], atol=1e-5 / signal)
    assert noise.mean().abs() < 0.3 and 0.7 < noise.std() < 1.3


def test_noise_of_many_latents_is_normal():
    noise = drawn(noiser(), batch(small(), 4000), mode="unconditional").target
    assert noise.mean().abs() < 0.02 and noise.std() == pytest.approx(1, abs=0.02)
    assert (noise**4).mean() == pytest.approx(3, abs=0.2)


@pytest.mark.parametrize("steps", [1, 2, 7, 1000, 2048, 3001])
def test_no_step_lies_outside_the_schedule(steps):
    own = Noiser(small(loss__diffusion_steps=steps))
    rows, generator = batch(small(), 33), torch.Generator().manual_seed(0)
    for _ in range(20):
        time = own.draw(rows, generator, "unconditional").latent_time
        assert (time >= 1 / steps - 1e-7).all() and (time <= 1).all()


# -- randomness ----------------------------------------------------------------------------------------------------------------


def fields(noised):
    return [getattr(noised, name) for name in ("ids", "latent", "text_time", "latent_time", "labels", "target", "counts")]


def test_a_generator_repeats_a_draw_and_leaves_torchs_own_alone():
    rows, own = batch(small(), 8), noiser()
    before = torch.get_rng_state()
    first, second, other = (drawn(own, rows, seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(fields(first), fields(second), strict=True))
    assert not torch.equal(first.target, other.target) and not torch.equal(first.ids, other.ids)


def test_without_a_generator_torchs_own_repeats_a_draw():
    rows, own = batch(small(), 8), noiser()
    state = torch.get_rng_state()
    first = own.draw(rows)
    torch.set_rng_state(state)
    assert all(torch.equal(a, b) for a, b in zip(fields(first), fields(own.draw(rows)), strict=True))
    assert not torch.equal(first.target, own.draw(rows).target)


def test_drawing_needs_no_gradient_and_no_padding_needs_no_mask():
    rows = batch(small(), 8)
    with torch.no_grad():
        quiet = drawn(noiser(), rows, 5)
    loud = drawn(noiser(), rows, 5)
    assert all(torch.equal(a, b) and not b.requires_grad for a, b in zip(fields(quiet), fields(loud), strict=True))
    assert loud.keep is not None and Noiser(small(), padded=False).draw(rows).keep is None


# -- losses --------------------------------------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """Says what it is told to."""

    def __init__(self, size=6, tokens=16, seed=0, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.logits = nn.Parameter(torch.randn(size, tokens, OUT, generator=generator).to(dtype))
        self.predicted = nn.Parameter(torch.randn(size, 2, 4, generator=generator).to(dtype))

    def forward(self, ids, latent, text_time, latent_time, keep=None):
        return self.logits, self.predicted


def slow(model, noised, normalized=False):
    """Both terms in float64, element by element, over what counts."""
    text, tokens, square, numbers = 0.0, 0, 0.0, 0
    for i, row in enumerate(noised.labels.tolist()):
        for j, label in enumerate(row):
            if label != IGNORED:
                logits = model.logits[i, j].double().tolist()
                most = max(logits)
                text += most + math.log(sum(math.exp(x - most) for x in logits)) - logits[label]
                tokens += 1
        if bool(noised.counts[i]):
            for ours, theirs in zip(model.predicted[i].double().tolist(), noised.target[i].double().tolist(), strict=True):
                if normalized:
                    ours, theirs = ([x / max(math.hypot(*v), 1e-12) for x in v] for v in (ours, theirs))
                square += sum((a - b) ** 2 for a, b in zip(ours, theirs, strict=True))
                numbers += len(ours)
    return text / max(tokens, 1), square / max(numbers, 1)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_exact_losses_are_those_of_a_loop(normalized, dtype):
    """Over the masked bytes and the noisy latents, in fp32 whatever the model gives."""
    model = Fixed(dtype=dtype)
    noised = drawn(noiser(**MIXED), batch(small(), 6, padded=True), 3)
    assert 0 < int(noised.counts.sum()) < 6
    terms = exact(model, noised, normalized)
    wanted = slow(model, noised, normalized)
    assert terms["text_loss"].item() == pytest.approx(wanted[0], rel=1e-5)
    assert terms["latent_loss"].item() == pytest.approx(wanted[1], rel=1e-5 if not normalized else 1e-4)
    assert {t.dtype for t in terms.values()} == {torch.float32}


def test_what_does_not_count_gets_no_gradient_and_may_be_anything():
    model = Fixed()
    noised = drawn(noiser(**MIXED), batch(small(), 6, padded=True), 3)
    with torch.no_grad():
        model.predicted[~noised.counts] = math.nan
        model.logits[noised.labels == IGNORED] = math.inf
    terms = exact(model, noised)
    sum(terms.values()).backward()
    assert all(bool(t.isfinite()) for t in terms.values())
    assert (model.predicted.grad[~noised.counts] == 0).all() and (model.logits.grad[noised.labels == IGNORED] == 0).all()
    assert (model.predicted.grad[noised.counts] != 0).any() and (model.logits.grad[noised.labels != IGNORED] != 0).any()


@pytest.mark.parametrize(
    ("mode", "empty", "other"), [("text_to_latent", "text_loss", "latent_loss"), ("latent_to_text", "latent_loss", "text_loss")]
)
@pytest.mark.parametrize("losses", [exact, original, document])
def test_a_batch_in_which_nothing_counts_is_zero_and_teaches_nothing(losses, mode, empty, other):
    model = Fixed()
    terms = losses(model, drawn(noiser(), batch(small(), 6), 1, mode))
    sum(terms.values()).backward()
    silent, loud = (model.logits, model.predicted) if empty == "text_loss" else (model.predicted, model.logits)
    assert terms[empty].item() == 0 and terms[other].item() > 0
    assert silent.grad is None or not silent.grad.any()
    assert loud.grad.any()


def test_the_original_losses_are_the_exact_ones_but_for_dtype_and_what_they_divide_by():
    """Text: the same mean. Latents: the mean over all of them, where those that were given count as right. In the
    model's dtype."""
    model = Fixed()
    noised = drawn(noiser(**MIXED), batch(small(), 6), 3)
    text, latent = slow(model, noised)
    terms = original(model, noised)
    share = float(noised.counts.double().mean())
    assert share < 1
    assert terms["text_loss"].item() == pytest.approx(text, rel=1e-5)
    assert terms["latent_loss"].item() == pytest.approx(latent * share, rel=1e-5)
    half = original(Fixed(dtype=torch.bfloat16), noised)
    assert {t.dtype for t in half.values()} == {torch.bfloat16}


def test_the_documents_losses_have_no_gradient_above_100_and_let_nan_pass():
    noised = drawn(noiser(), batch(small(), 6), 1)
    model = Fixed()
    with torch.no_grad():
        model.logits.mul_(1e4)
    terms = document(model, noised)
    terms["text_loss"].backward()
    assert original(model, noised)["text_loss"].item() > 100 and terms["text_loss"].item() == 100
    assert not model.logits.grad.any()  # nothing is learned from what is worst
    broken = Fixed()
    with torch.no_grad():
        broken.logits[noised.labels != IGNORED] = math.nan
        broken.predicted.fill_(math.nan)
    assert all(math.isnan(t.item()) for t in document(broken, noised).values())


def test_the_documents_latent_loss_is_blind_to_scale():
    noised = drawn(noiser(), batch(small(), 6), 1, "unconditional")
    model = Fixed()
    before = document(model, noised)["latent_loss"].item()
    assert before == pytest.approx(slow(model, noised, normalized=True)[1], rel=1e-4)
    with torch.no_grad():
        model.predicted.mul_(1000)
    assert document(model, noised)["latent_loss"].item() == pytest.approx(before, rel=1e-4)
    assert exact(model, noised)["latent_loss"].item() > 1e4 * before
    assert exact(model, noised, normalized=True)["latent_loss"].item() == pytest.approx(before, rel=1e-4)


def test_the_documents_small_number_changes_nothing():
    """1e-8 on a sum that is 1 or more is lost in fp32."""
    noised, model = drawn(noiser(), batch(small(), 6), 1), Fixed()
    assert document(model, noised)["text_loss"].item() == original(model, noised)["text_loss"].item()


def test_a_damaged_latent_makes_its_own_term_infinite_or_vast():
    """Not the other one: the term is how it is found."""
    noised = drawn(noiser(), batch(small(), 6), 1, "unconditional")
    model = Fixed()
    with torch.no_grad():
        model.predicted[2, 0] = 1e25
    terms = exact(model, noised)
    assert math.isinf(terms["latent_loss"].item()) and math.isfinite(terms["text_loss"].item())
