"""MMDiT of latent-dlm: joint attention is what a loop over heads and tokens says, padding is invisible, logits stay bounded, and
it starts from a prediction of zero."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from latent_toys import batch, small
from nanproof import UsageError
from nanproof_recipes.latent_dlm.config import Config
from nanproof_recipes.latent_dlm.data.corpus import IDS, MASK, OUT, PAD
from nanproof_recipes.latent_dlm.model import model as module
from nanproof_recipes.latent_dlm.model.model import MMDiT, Rms, count, rotated, turned

SHAPE = small().model


def made(shape=SHAPE, seed=0) -> MMDiT:
    """With weights everywhere: what starts at zero hides the rest."""
    torch.manual_seed(seed)
    model = MMDiT(shape)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def inputs(size=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 257, (size, SHAPE.text_length), generator=generator)
    ids[:, 3] = MASK
    latent = torch.randn(size, SHAPE.latent_length, SHAPE.latent_width, generator=generator)
    return ids, latent, torch.rand(size, generator=generator), torch.rand(size, generator=generator)


# -- one attention, by hand ----------------------------------------------------------------------------------------------------


def normal(x, weight):
    """RMS norm of one vector."""
    return x / math.sqrt(float((x**2).mean()) + 1e-6) * weight


def turn(x, place):
    """RoPE of one vector: pairs (i, i + half) turn by place over 10000 to the power of i / half."""
    half, out = len(x) // 2, torch.empty_like(x)
    for i in range(half):
        angle = place / 10_000 ** (i / half)
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def slow_block(block, text, latent, condition, keep):
    """One sample, token by token and head by head, in float64."""
    heads, width = SHAPE.heads, SHAPE.width // SHAPE.heads
    stretch = SHAPE.text_length / SHAPE.latent_length
    tokens = [(block.text, x, place, bool(keep[place])) for place, x in enumerate(text)]
    tokens += [(block.latent, x, stretch * (i + 0.5) - 0.5, True) for i, x in enumerate(latent)]
    plain = nn.LayerNorm(SHAPE.width, elementwise_affine=False).double()
    by = {stream: stream.modulation(condition).chunk(6) for stream in (block.text, block.latent)}
    q, k, v = [], [], []
    for stream, x, place, _ in tokens:
        shift, scale = by[stream][:2]
        three = stream.qkv(plain(x) * (1 + scale) + shift).view(3, heads, width)
        q.append([turn(normal(three[0, h], stream.q_norm.weight), place) for h in range(heads)])
        k.append([turn(normal(three[1, h], stream.k_norm.weight), place) for h in range(heads)])
        v.append(three[2])
    out = []
    for i, (stream, x, _, _) in enumerate(tokens):
        attended = []
        for h in range(heads):
            logits = [float(q[i][h] @ k[j][h]) / math.sqrt(width) if tokens[j][3] else -math.inf for j in range(len(tokens))]
            powers = [math.exp(value - max(logits)) for value in logits]
            attended.append(sum(p / sum(powers) * v[j][h] for j, p in enumerate(powers)))
        b = by[stream]
        x = x + b[2] * stream.out(torch.cat(attended))
        out.append(x + b[5] * stream.mlp(plain(x) * (1 + b[4]) + b[3]))
    return torch.stack(out[: len(text)]), torch.stack(out[len(text) :])


@pytest.mark.parametrize("padding", [0, 5])
def test_a_block_is_what_a_loop_over_heads_and_tokens_says(padding):
    block = made().double().blocks[0]
    model = made().double()
    text = torch.randn(2, SHAPE.text_length, SHAPE.width, dtype=torch.float64)
    latent = torch.randn(2, SHAPE.latent_length, SHAPE.width, dtype=torch.float64)
    condition = torch.randn(2, SHAPE.width, dtype=torch.float64)
    keep = torch.ones(2, SHAPE.text_length, dtype=torch.bool)
    keep[1, SHAPE.text_length - padding :] = False
    mask = torch.cat((keep, keep.new_ones(2, SHAPE.latent_length)), 1)[:, None, None] if padding else None
    turns = (
        turned(torch.arange(SHAPE.text_length).double(), SHAPE.width // SHAPE.heads),
        turned(SHAPE.text_length / SHAPE.latent_length * (torch.arange(SHAPE.latent_length).double() + 0.5) - 0.5, 8),
    )
    assert torch.allclose(model.text_turn, turns[0].to(model.text_turn)) and torch.allclose(
        model.latent_turn, turns[1].to(model.latent_turn)
    )
    with torch.no_grad():
        found = block(text, latent, condition, turns, mask)
        for i in range(2):
            wanted = slow_block(block, text[i], latent[i], condition[i], keep[i])
            # Rms computes in fp32
            assert torch.allclose(found[0][i], wanted[0], atol=1e-4) and torch.allclose(found[1][i], wanted[1], atol=1e-4)


def test_rms_norm_is_computed_in_fp32_whatever_comes_in():
    x = torch.tensor([[1e25, 2e25, -3e25, 0.0], [1e-3, 0, 0, 0]])
    norm = Rms(4, eps=1e-6)
    for dtype in (torch.float32, torch.bfloat16):
        found = norm(x.to(dtype))
        assert found.dtype == dtype and found.isfinite().all()
    wanted = x[1] / math.sqrt(1e-6 / 4 + 1e-6)
    assert torch.allclose(norm(x)[1], wanted, rtol=1e-5)


def test_rotary_attention_sees_distances_only():
    """The product of a turned query and a turned key depends on how far apart they are; a shift of both changes nothing."""
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)

    def product(a, b):
        turns = turned(torch.tensor([a, b], dtype=torch.float64), 8)
        return float(rotated(q, turns[:, 0]) @ rotated(k, turns[:, 1]))

    assert product(2, 7) == pytest.approx(product(12, 17), rel=1e-9)
    assert product(0, 0) == pytest.approx(float(q @ k))
    assert abs(product(2, 7) - product(2, 8)) > 1e-3
    assert torch.allclose(rotated(q, turned(torch.tensor([3.0]).double(), 8)[:, 0]), turn(q, 3.0))


def test_position_matters():
    model = made().eval()
    ids, latent, t, s = inputs(1)
    swapped = ids.clone()
    swapped[0, [0, 9]] = ids[0, [9, 0]]
    assert ids[0, 0] != ids[0, 9]
    there, here = model(swapped, latent, t, s)[0], model(ids, latent, t, s)[0]
    assert not torch.allclose(there[0, 9], here[0, 0], atol=1e-3)


def test_heads_of_odd_width_cannot_be_turned():
    """Pairs of numbers are turned; with an odd width one would be left over, and queries would be wider than values."""
    with pytest.raises(UsageError, match=r"model.heads=2.*model.width=6"):
        small(model__width=6, model__heads=2)


# -- what comes out ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_shapes(layers, size):
    model = made(small(model__layers=layers, model__mlp_ratio=2.0).model)
    logits, predicted = model(*inputs(size))
    assert logits.shape == (size, SHAPE.text_length, OUT) and predicted.shape == (size, SHAPE.latent_length, SHAPE.latent_width)
    assert len(model.blocks) == layers and model.blocks[0].text.mlp[0].out_features == 32
    assert model.bytes.num_embeddings == IDS and logits.isfinite().all()


def test_the_first_prediction_is_exactly_zero():
    model = MMDiT(SHAPE)
    logits, predicted = model(*inputs())
    assert torch.equal(logits, torch.zeros_like(logits)) and torch.equal(predicted, torch.zeros_like(predicted))


def test_padding_is_invisible():
    """Whatever ids stand under padding, no other output changes by a bit; all of the text may be padding."""
    model = made()
    ids, latent, t, s = inputs()
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[0, 10:] = False
    keep[1, :] = False
    first = model(ids.masked_fill(~keep, PAD), latent, t, s, keep)
    other = model(ids.masked_fill(~keep, 7), latent, t, s, keep)
    assert torch.equal(first[0][keep], other[0][keep]) and torch.equal(first[1], other[1])
    assert first[0].isfinite().all() and first[1].isfinite().all()
    assert not torch.equal(first[0][~keep], other[0][~keep])
    # and where nothing is padding, a mask is the same as none
    without = model(ids, latent, t, s)
    masked = model(ids, latent, t, s, torch.ones_like(keep))
    assert torch.allclose(without[0], masked[0], atol=1e-5) and torch.allclose(without[1], masked[1], atol=1e-5)


def test_a_sample_does_not_see_the_others():
    model = made()
    ids, latent, t, s = inputs()
    whole = model(ids, latent, t, s)
    alone = model(ids[1:2], latent[1:2], t[1:2], s[1:2])
    assert torch.allclose(whole[0][1:2], alone[0], atol=1e-5) and torch.allclose(whole[1][1:2], alone[1], atol=1e-5)


@pytest.mark.parametrize("which", ["text_time", "latent_time", "latent", "ids"])
def test_each_input_matters_to_both_streams(which):
    model = made()
    ids, latent, t, s = inputs()
    before = model(ids, latent, t, s)
    if which == "ids":
        ids = ids.roll(1, 0)
    elif which == "latent":
        latent = latent + 1
    elif which == "text_time":
        t = (t + 0.3) % 1
    else:
        s = (s + 0.3) % 1
    after = model(ids, latent, t, s)
    for a, b in zip(before, after, strict=True):
        assert (a - b).abs().amax() > 1e-3


def test_times_near_each_other_are_told_apart():
    """1/1000 and 2/1000: one step of noise."""
    time = made().text_time
    near = time(torch.tensor([0.001, 0.002, 0.0]))
    assert (near[0] - near[1]).abs().amax() > 1e-2 and (near[0] - near[2]).abs().amax() > 1e-2


def test_attention_logits_stay_bounded_when_weights_grow(monkeypatch):
    """With queries and keys normalised a logit is at most the root of a head's width; without it, it would grow with the square
    of the weights."""
    seen = []

    def spied(q, k, v, attn_mask=None):
        seen.append(float((q @ k.transpose(-1, -2)).abs().amax()) / math.sqrt(q.shape[-1]))
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)

    monkeypatch.setattr(module, "scaled_dot_product_attention", spied)
    model = MMDiT(SHAPE)
    with torch.no_grad():
        model(*inputs())
        for stream in (model.blocks[0].text, model.blocks[0].latent):
            stream.qkv.weight.mul_(100)
        model(*inputs())
    bound = 1.001 * math.sqrt(SHAPE.width // SHAPE.heads)
    assert len(seen) == 2 and 0 < seen[0] <= bound and 0 < seen[1] <= bound


# -- numbers -------------------------------------------------------------------------------------------------------------------


def test_bf16_agrees_with_fp32_within_two_digits():
    """Weights in bf16, and bf16 autocast over fp32 weights: both within 3 % of the size of the fp32 outputs."""
    model = made()
    with torch.no_grad():
        wanted = model(*inputs())
        with torch.autocast("cpu", torch.bfloat16):
            cast = model(*inputs())
        model.to(torch.bfloat16)
        half = model(*inputs())
    for found in (cast, half):
        for a, b in zip(found, wanted, strict=True):
            assert (a.float() - b).abs().amax() < 0.03 * b.abs().amax()
    assert half[0].dtype == half[1].dtype == torch.bfloat16


def test_autocast_multiplies_in_bf16_and_keeps_the_streams_in_fp32():
    model, dtypes = made(), {}
    model.blocks[0].text.qkv.register_forward_hook(lambda m, i, o: dtypes.update(qkv=o.dtype))
    model.blocks[0].register_forward_hook(lambda m, i, o: dtypes.update(text=o[0].dtype, latent=o[1].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(*inputs())
    assert dtypes == {"qkv": torch.bfloat16, "text": torch.float32, "latent": torch.float32}


def test_the_base_size_has_the_parameters_of_the_run_that_failed():
    with torch.device("meta"):
        model = MMDiT(Config.load("base").model)
    assert 0.85e9 <= count(model) <= 1.0e9
    assert count(model) == sum(math.prod(p.shape) for p in model.parameters())


def test_weights_come_back_from_a_state_dict():
    """Positions are no weights: they are not saved."""
    first, second = made(seed=0), made(seed=1)
    assert not torch.equal(first(*inputs())[0], second(*inputs())[0])
    state = first.state_dict()
    assert not any("turn" in name for name in state)
    second.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(first(*inputs()), second(*inputs()), strict=True))


def test_the_gradient_reaches_every_parameter_after_a_few_steps():
    """At zero many have a gradient of zero; none may stay there."""
    model = MMDiT(SHAPE)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(4):
        optimizer.zero_grad()
        logits, predicted = model(*inputs())
        loss = (
            nn.functional.cross_entropy(logits.flatten(0, 1), batch(small(), 3)["ids"].flatten())
            + (predicted - 1).square().mean()
        )
        loss.backward()
        optimizer.step()
    dead = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().amax() > 0]
    assert dead == []
