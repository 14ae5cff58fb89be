"""Logits from which nothing can be sampled, on a CUDA device: the processor never waits while rows are healthy, a bad row does
not end the use of the device, and an error comes at a later call or at `check`. `pytest -m gpu`."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import TemperatureLogitsWarper as Stock

from nanproof import BadLogits
from nanproof.numerics._logit_rows import FLAGGED
from nanproof.numerics.generation import NumericalStabilityLogitsProcessor, TemperatureLogitsWarper
from toys import syncs_raise

pytestmark = pytest.mark.gpu

EOS, PAD, NAN, INF = 2, 0, math.nan, math.inf
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def logits(step, rows=6, vocabulary=1000, dtype=torch.float32):
    """On the host. Some tokens are banned."""
    generator = torch.Generator().manual_seed(step)
    scores = 8 * torch.randn(rows, vocabulary, generator=generator)
    return scores.masked_fill(torch.rand(rows, vocabulary, generator=generator) < 0.3, -INF).to(dtype)


def steps_of(count, dtype=torch.float32, bad=()):
    """(tokens, logits) of each step, on the device. `bad`: (step, row, number)."""
    made = []
    for step in range(count):
        scores = logits(step, dtype=dtype)
        for at, row, number in bad:
            if at == step:
                scores[row] = number
        made.append((torch.ones(6, 4 + step, dtype=torch.long).cuda(), scores.cuda()))
    return made


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def the_device_still_works():
    assert torch.multinomial(torch.ones(4, 5, device="cuda"), 1).shape == (4, 1)
    torch.cuda.synchronize()
    return True


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("on_bad", ["raise", "end"])
def test_healthy_rows_pass_and_nothing_waits(on_bad, dtype):
    """Every wait of the host raises: over two generations, with counters, mask and a safe temperature."""
    processor = NumericalStabilityLogitsProcessor(on_bad=on_bad, eos_token_id=EOS)
    made = steps_of(300, dtype)
    mask = torch.ones(6, 5, dtype=torch.long, device="cuda")
    out = []
    with syncs_raise():
        for _ in range(2):
            for ids, scores in made:
                out.append(processor(ids, scores))
                TemperatureLogitsWarper(0.3)(ids, out[-1])
            kept, counted = processor.mask(mask), processor.counters()
    assert all(same_bits(o, scores) for o, (_, scores) in zip(out, made * 2, strict=True))
    assert torch.equal(kept, mask) and int(counted["bad_rows"]) == 0 and int(counted["generations"]) == 2
    processor.check()
    assert processor.read() == []


@pytest.mark.parametrize("options", [{}, {"shift": True}, {"clip_value": 5.0, "min_prob": 1e-6}])
def test_bad_rows_end_without_a_wait(options):
    """The same rows as on the host, at the same positions, with the same logits for all rows."""
    bad = [(3, 1, NAN), (5, 4, INF), (5, 0, -INF)]
    processor, wanted = (NumericalStabilityLogitsProcessor(on_bad="end", eos_token_id=EOS, **options) for _ in range(2))
    made = steps_of(8, bad=bad)
    host = [wanted(ids.cpu(), scores.cpu()) for ids, scores in made]
    mask = torch.ones(6, 8, device="cuda")
    with syncs_raise():
        out = [processor(ids, scores) for ids, scores in made]
        kept, counted = processor.mask(mask), processor.counters()
    for ours, theirs in zip(out, host, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=0 if not options else 1e-5, rtol=0 if not options else 1e-5)
        assert (torch.multinomial(ours.float().softmax(-1), 1) >= 0).all()
    assert processor.read() == wanted.read() and len(processor.read()) == 3
    assert kept.sum(1).tolist() == [0, 0, 8, 8, 0, 8]
    assert {name: int(n) for name, n in counted.items()} == {name: int(n) for name, n in wanted.counters().items()}
    assert the_device_still_works()


def test_an_error_comes_at_a_later_call():
    """The call that meets the bad row returns something to sample from; one after the next flag has come raises."""
    processor = NumericalStabilityLogitsProcessor()
    made = steps_of(FLAGGED + 3, bad=[(2, 3, NAN)])
    for ids, scores in made[:2]:
        processor(ids, scores)
    torch.cuda.synchronize()
    with syncs_raise():
        out = processor(*made[2])
    assert not out.float().softmax(-1).isnan().any()
    for ids, scores in made[3 : FLAGGED + 1]:
        assert not processor(ids, scores).float().softmax(-1).isnan().any()
    torch.cuda.synchronize()
    with pytest.raises(BadLogits) as caught:
        processor(*made[FLAGGED + 1])
    assert [(b.row, b.position, b.kind) for b in caught.value.rows] == [(3, 2, "nan")]
    assert the_device_still_works()
    processor.check()  # it was said


def test_an_error_comes_at_check_at_the_latest():
    processor = NumericalStabilityLogitsProcessor()
    for ids, scores in steps_of(3, bad=[(2, 5, -INF)]):
        processor(ids, scores)
    with pytest.raises(BadLogits, match=r"row 5 of generation 0, position 2: every token banned"):
        processor.check()
    processor.check()
    assert the_device_still_works()


def test_an_error_comes_in_the_next_generation():
    """The last step of a generation was bad, and nobody asked."""
    processor = NumericalStabilityLogitsProcessor()
    made = steps_of(3, bad=[(2, 5, INF)])
    for ids, scores in made:
        processor(ids, scores)
    processor(*made[0])
    torch.cuda.synchronize()
    with pytest.raises(BadLogits, match="row 5 of generation 0, position 2"):
        processor(*made[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 1e-3, 0.7, 1.3])
def test_the_warper_is_the_stock_one_where_that_is_finite(dtype, temperature):
    """Bit for bit; elsewhere it is a distribution with the largest logit in front."""
    scores = logits(1, dtype=dtype).cuda()
    with syncs_raise():
        out = TemperatureLogitsWarper(temperature)(None, scores)
    stock = Stock(temperature)(None, scores)
    for row in range(len(scores)):
        if temperature > 1e-38 and stock[row].amax().isfinite():
            assert same_bits(out[row], stock[row])
        else:
            probabilities = out[row].float().softmax(-1)
            assert not probabilities.isnan().any() and probabilities.argmax() == scores[row].argmax()


class Watched:
    """The processor, with every wait of the host inside it an error."""

    def __init__(self, processor):
        self.processor = processor

    def __call__(self, input_ids, scores):
        with syncs_raise():
            return self.processor(input_ids, scores)


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 500, "eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens)).to("cuda", torch.bfloat16).eval()


def generate(model, *processors, seed=0):
    torch.manual_seed(seed)
    ids = torch.arange(3, 15, device="cuda").view(3, 4)
    kwargs = {"attention_mask": torch.ones_like(ids), "do_sample": True, "max_new_tokens": 8}
    return model.generate(ids, logits_processor=list(processors), **kwargs)[:, 4:]


def drawn_once(model):
    """(seed, its tokens) such that no row ends, and what row 1 draws at position 2 is drawn nowhere else."""
    for seed in range(50):
        tokens = generate(model, seed=seed)
        flat = tokens.flatten().tolist()
        if tokens.shape[1] == 8 and EOS not in flat and PAD not in flat and flat.count(int(tokens[1, 2])) == 1:
            return seed, tokens
    raise AssertionError("no such seed")


def test_generate_ends_the_bad_row_and_names_it(model):
    """Row 1 draws a token whose embedding is NaN. Without the processor this would be an assertion on the device."""
    seed, healthy = drawn_once(model)
    with NumericalStabilityLogitsProcessor(on_bad="end", model=model) as processor:
        assert torch.equal(generate(model, Watched(processor), seed=seed), healthy)
        token = int(healthy[1, 2])
        with torch.no_grad():
            model.model.embed_tokens.weight[token] = NAN
        tokens = generate(model, Watched(processor), seed=seed)
        [bad] = processor.read()
    assert torch.equal(tokens[[0, 2]], healthy[[0, 2]])
    assert tokens[1].tolist() == [*healthy[1, :3].tolist(), EOS, *[PAD] * 4]
    assert (bad.row, bad.position, bad.kind, bad.generation) == (1, 3, "nan", 1)
    assert bad.where == "model.embed_tokens" and bad.because == f"weight model.embed_tokens.weight has 64 NaN in row {token}"
    assert processor.mask(torch.ones_like(tokens)).sum(1).tolist() == [8, 0, 8]
    assert the_device_still_works()


def test_generate_raises_and_the_device_survives(model):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = NAN
    with NumericalStabilityLogitsProcessor(model=model) as processor, pytest.raises(BadLogits) as caught:
        generate(model, processor)
        processor.check()
    assert caught.value.rows[0].position == 0 and "up_proj.weight has 1 NaN in row 3" in str(caught.value)
    assert the_device_still_works()
