"""Logits from which nothing can be sampled, in loops of the test's own and in `generate` of transformers: what is healthy passes
bit for bit, what is bad only ends, and row, position and module are named. Oracles are loops over Python floats."""

from __future__ import annotations

import logging
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LogitsProcessorList,
)
from transformers.generation.logits_process import TemperatureLogitsWarper as Stock
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from nanproof import BadLogits, UsageError
from nanproof.numerics.generation import BadRow, NumericalStabilityLogitsProcessor, TemperatureLogitsWarper

NAN, INF = math.nan, math.inf
EOS, PAD = 2, 0
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
KINDS = {"nan": NAN, "inf": INF, "all-banned": -INF}


def drawn_logits(rows, vocabulary, dtype, seed, scale=8.0, ban=0.3):
    """Healthy logits: some tokens are banned, never all of a row."""
    generator = torch.Generator().manual_seed(seed)
    scores = scale * torch.randn(rows, vocabulary, generator=generator)
    banned = torch.rand(rows, vocabulary, generator=generator) < ban
    banned[torch.arange(rows), torch.randint(0, vocabulary, (rows,), generator=generator)] = False
    return scores.masked_fill(banned, -INF).to(dtype)


def kind_of(row):
    """The oracle: what is wrong with the logits of one row."""
    if any(x != x for x in row):
        return "nan"
    if any(x == INF for x in row):
        return "inf"
    return "all-banned" if all(x == -INF for x in row) else None


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def softmax(numbers, temperature=1.0):
    """The oracle, relative to the maximum."""
    top = max(numbers)
    weights = [1.0 if x == top else math.exp((x - top) / temperature) for x in numbers]
    total = sum(weights)
    return torch.tensor([weight / total for weight in weights])


def draw(scores, count=1, seed=3):
    return torch.multinomial(scores.float().softmax(-1), count, True, generator=torch.Generator().manual_seed(seed))


logits = st.tuples(st.integers(1, 5), st.sampled_from([3, 17, 200]), DTYPES, st.integers(0, 10**6))


@settings(max_examples=60)
@given(logits, st.lists(st.sampled_from([*KINDS, None]), min_size=5, max_size=5))
def test_healthy_rows_pass_bit_for_bit_and_bad_ones_only_end(shape, wanted):
    """Beside bad rows as well. The same random numbers draw the same tokens as without the processor, and no banned one."""
    scores = drawn_logits(*shape)
    rows, vocabulary = scores.shape
    for row, kind in zip(range(rows), wanted, strict=False):
        if kind == "all-banned":
            scores[row] = -INF
        elif kind is not None:
            scores[row, shape[3] % vocabulary] = KINDS[kind]
    before = scores.clone()
    processor = NumericalStabilityLogitsProcessor(on_bad="end", eos_token_id=[EOS, 1])
    out = processor(torch.ones(rows, 4, dtype=torch.long), scores)
    assert same_bits(scores, before)
    found = {bad.row: bad for bad in processor.read()}
    for row, numbers in enumerate(before.tolist()):
        kind = kind_of(numbers)
        if kind is None:
            assert same_bits(out[row], before[row]) and row not in found
            tokens = draw(out[row], 20)
            assert torch.equal(tokens, draw(before[row], 20))
            assert all(numbers[token] > -INF for token in tokens.tolist())
        else:
            assert found[row] == BadRow(row, 0, kind, 0)
            assert out[row].tolist() == [0.0 if token == EOS else -INF for token in range(vocabulary)]
    assert out.dtype == scores.dtype
    assert processor.bad_rows.tolist() == [row in found for row in range(rows)]
    if not found:
        assert out is scores


@settings(max_examples=40)
@given(logits)
def test_shift_changes_no_probability(shape):
    """To 1e-6, with the maximum at exactly 0 and banned tokens at exactly 0."""
    scores = drawn_logits(*shape)
    out = NumericalStabilityLogitsProcessor(shift=True)(torch.ones(len(scores), 1), scores)
    for row, numbers in zip(out, scores.tolist(), strict=True):
        torch.testing.assert_close(row.softmax(-1), softmax(numbers), atol=1e-6, rtol=0)
    assert out.dtype == torch.float32 and (out.amax(-1) == 0).all() and torch.equal(out == -INF, scores == -INF)


temperatures = st.sampled_from([1e-60, 1e-45, 1e-39, 1e-30, 1e-6, 3e-5, 1e-2, 0.7, 1.0, 1.3, 50.0])


@settings(max_examples=80)
@given(logits, temperatures, st.sampled_from([1e-3, 1.0, 300.0, 5e4]))
def test_every_temperature_gives_a_distribution(shape, temperature, scale):
    """That of the warper of transformers, bit for bit, where its row is finite; else that of a loop over Python floats."""
    rows, vocabulary, dtype, seed = shape
    scores = drawn_logits(rows, vocabulary, dtype, seed, 1.0).clamp(-1, 1) * scale
    scores = scores.masked_fill(drawn_logits(*shape) == -INF, -INF)
    out, stock = TemperatureLogitsWarper(temperature)(None, scores), Stock(temperature)(None, scores)
    assert out.dtype == dtype and not out.isnan().any()
    for row in range(rows):
        numbers = scores[row].tolist()
        if math.isfinite(stock[row].amax().item()):
            assert same_bits(out[row], stock[row])
            continue
        off = 1e-5 if dtype == torch.float32 else 2e-3
        torch.testing.assert_close(out[row].float().softmax(-1), softmax(numbers, temperature), atol=off, rtol=0)
        assert all(out[row, i] == out[row].amax() for i, x in enumerate(numbers) if x == max(numbers))
        assert all(out[row, i] == -INF for i, x in enumerate(numbers) if x == -INF)


def test_equal_logits_stay_equal_at_the_smallest_temperatures():
    """In the limit the largest ones share everything; the stock warper gives NaN there."""
    scores = torch.tensor([[60000.0, 60000.0, 59968.0, -INF]], dtype=torch.float16)
    for temperature in (1e-3, 1e-6, 1e-40):
        out = TemperatureLogitsWarper(temperature)(None, scores).float().softmax(-1)
        assert out.tolist() == [[0.5, 0.5, 0.0, 0.0]]
        assert Stock(temperature)(None, scores).float().softmax(-1).isnan().any()


def test_a_warper_hides_nothing():
    """NaN, +Inf and a row of bans come out as they went in, at ordinary and at very small temperatures."""
    scores = torch.tensor([[NAN, 1.0, -INF], [INF, 1.0, 2.0], [-INF, -INF, -INF], [1.0, 2.0, -INF]])
    for temperature in (2.0, 0.5, 1e-6, 1e-39):
        out = TemperatureLogitsWarper(temperature)(None, scores)
        assert [kind_of(row) for row in out.tolist()] == ["nan", "inf", "all-banned", None]


def test_the_documented_effect_of_the_options(caplog):
    """The figures of the docstrings: clip_value 30, min_prob 1e-8, min_temperature 0.1."""
    ids = torch.ones(1, 1)
    far = torch.tensor([[45.0, 40.0]])
    assert far.softmax(-1).tolist()[0] == pytest.approx([0.9933, 0.0067], abs=1e-4)
    clip = NumericalStabilityLogitsProcessor(30.0)
    assert clip(ids, far).softmax(-1).tolist() == [[0.5, 0.5]] and int(clip.counters()["clipped"]) == 2

    tail = torch.full((1, 152_000), -200.0)
    tail[0, 5] = 0.0
    floor = NumericalStabilityLogitsProcessor(min_prob=1e-8)(ids, tail).double().softmax(-1)
    assert 1 - float(floor[0, 5]) == pytest.approx(1.5e-3, abs=3e-5)
    assert tail.double().softmax(-1)[0, 5] == 1.0

    close = torch.tensor([[0.2, 0.0]])
    with caplog.at_level(logging.WARNING, "nanproof"):
        raised = TemperatureLogitsWarper(0.01, min_temperature=0.1)
    assert raised.temperature == 0.1 and "0.01 was raised to min_temperature 0.1" in caplog.text
    assert raised(None, close).softmax(-1)[0].tolist() == pytest.approx([0.881, 0.119], abs=1e-3)
    assert TemperatureLogitsWarper(0.01)(None, close).double().softmax(-1)[0, 1] == pytest.approx(2e-9, rel=0.1)
    assert TemperatureLogitsWarper(0.7, 0.1).temperature == 0.7


@settings(max_examples=40)
@given(logits, st.sampled_from([{"clip_value": 5.0}, {"min_prob": 1e-3}, {"clip_value": 5.0, "min_prob": 1e-3, "shift": True}]))
def test_options_unban_nothing_and_leave_bad_rows_bad(shape, options):
    """A banned token keeps probability 0, what is clipped is counted, and NaN is not clipped to a number."""
    scores = torch.cat([drawn_logits(*shape), torch.full((1, shape[1]), 1.0, dtype=shape[2])])
    scores[-1, 0] = NAN
    processor = NumericalStabilityLogitsProcessor(on_bad="end", eos_token_id=EOS, **options)
    out = processor(torch.ones(len(scores), 1), scores)
    assert torch.equal(out[:-1] == -INF, scores[:-1] == -INF)
    assert out[-1].tolist() == [0.0 if token == EOS else -INF for token in range(shape[1])]
    healthy = [x for row in scores[:-1].tolist() for x in row if x > -INF]
    if "clip_value" in options:
        assert int(processor.counters()["clipped"]) == sum(abs(x) > 5.0 for x in healthy)
    if "min_prob" in options:
        probabilities = out[:-1].float().softmax(-1)[scores[:-1] > -INF]
        assert float(probabilities.min()) >= 1e-3 / (1 + 1e-3 * shape[1]) * 0.95


# -- a loop of one's own ---------------------------------------------------------------------------------------------------------


def loop(processor, steps, rows=3, vocabulary=5, bad=(), prompt=4):
    """A sampling loop that knows nothing of EOS. `bad`: (step, row, number) to put into the logits."""
    ids = torch.ones(rows, prompt, dtype=torch.long)
    for step in range(steps):
        scores = torch.zeros(rows, vocabulary)
        scores[:, EOS] = -INF
        for at, row, number in bad:
            if at == step:
                scores[row] = number
        ids = torch.cat([ids, draw(processor(ids, scores), seed=step)], 1)
    return ids[:, prompt:]


def test_a_row_that_ended_stays_ended():
    """Also where the loop goes on with it and its logits are fine again. Position and kind are those of the first time."""
    processor = NumericalStabilityLogitsProcessor(on_bad="end", eos_token_id=EOS)
    out = loop(processor, 6, bad=[(2, 1, NAN), (3, 1, INF), (4, 0, -INF)])
    assert out[1, 2:].tolist() == [EOS] * 4 and out[0, 4:].tolist() == [EOS] * 2
    assert EOS not in out[2].tolist() + out[1, :2].tolist() + out[0, :4].tolist()
    assert processor.read() == [BadRow(1, 2, "nan", 0), BadRow(0, 4, "all-banned", 0)]
    mask = torch.ones(3, 6, dtype=torch.int32)
    assert processor.mask(mask).tolist() == [[0] * 6, [0] * 6, [1] * 6] and processor.mask(mask).dtype == torch.int32
    assert processor.mask(mask.bool()).dtype == torch.bool
    with pytest.raises(UsageError, match="3 rows were generated"):
        processor.mask(torch.ones(4, 6))


def test_generations_are_told_apart():
    """By the width of the tokens, the number of rows, or by hand; counters go on over all of them until `reset`."""
    processor = NumericalStabilityLogitsProcessor(on_bad="end", eos_token_id=EOS)
    assert processor.bad_rows is None and processor.mask(torch.ones(2, 2)).tolist() == [[1, 1], [1, 1]]
    loop(processor, 3, bad=[(1, 2, NAN)])
    loop(processor, 3, bad=[(0, 0, INF)])
    assert processor.bad_rows.tolist() == [True, False, False]
    loop(processor, 2, rows=5, prompt=6)  # six tokens are what a third step of the last one would have had
    assert processor.bad_rows.tolist() == [False] * 5
    processor.start()
    loop(processor, 3, rows=5, prompt=8, bad=[(2, 4, -INF)])
    found = processor.read()
    assert [(b.generation, b.row, b.position, b.kind) for b in found] == [
        (0, 2, 1, "nan"),
        (1, 0, 0, "inf"),
        (3, 4, 2, "all-banned"),
    ]
    counted = {name: int(number) for name, number in processor.counters().items()}
    kinds = {"bad_rows": 3, "nan_rows": 1, "inf_rows": 1, "banned_rows": 1}
    assert counted == {**kinds, "generations": 4, "tokens": 9 + 9 + 10 + 15, "clipped": 0}
    processor.reset()
    assert processor.read() == [] and int(processor.counters()["bad_rows"]) == int(processor.counters()["tokens"]) == 0


def test_long_generations_are_folded():
    """Positions are right beyond the number of steps that is kept, and the first one counts."""
    processor = NumericalStabilityLogitsProcessor(on_bad="end", eos_token_id=EOS)
    loop(processor, 560, rows=2, vocabulary=3, bad=[(300, 0, NAN), (530, 0, INF), (531, 1, INF)])
    assert [(b.row, b.position, b.kind) for b in processor.read()] == [(0, 300, "nan"), (1, 531, "inf")]


def test_a_moved_beam_is_not_the_one_that_was_bad():
    """Beam search puts other tokens into a row: what was noted of the row is not held against them."""
    processor = NumericalStabilityLogitsProcessor(on_bad="end", eos_token_id=EOS)
    scores = torch.zeros(2, 4)
    bad = scores.clone()
    bad[0] = NAN
    processor(torch.tensor([[5], [5]]), scores)
    processor(torch.tensor([[5, 6], [5, 7]]), bad)
    out = processor(torch.tensor([[5, 7, 1], [5, 7, 3]]), scores)
    assert torch.equal(out, scores) and processor.bad_rows.tolist() == [True, False]


def test_raising_names_the_rows_once():
    """The error has every row that is bad at that step, and says what to do; `check` does not say it again."""
    processor = NumericalStabilityLogitsProcessor()
    with pytest.raises(BadLogits) as caught:
        loop(processor, 6, bad=[(3, 2, INF), (3, 1, NAN)])
    assert caught.value.rows == [BadRow(1, 3, "nan", 0), BadRow(2, 3, "inf", 0)]
    text = str(caught.value)
    assert "row 1 of generation 0, position 3: NaN. 1 more row" in text and "do not train" in text and 'on_bad="end"' in text
    processor.check()
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.rows == caught.value.rows and str(again) == text
    loop(processor, 2)
    assert len(processor.read()) == 2


def test_verbose_says_each_row_once(caplog):
    with caplog.at_level(logging.WARNING, "nanproof"):
        loop(
            NumericalStabilityLogitsProcessor(None, None, True, on_bad="end", eos_token_id=EOS),
            5,
            bad=[(1, 0, NAN), (3, 2, -INF)],
        )
    assert [record.getMessage() for record in caplog.records] == [
        "nanproof: row 0 of generation 0, position 1: NaN",
        "nanproof: row 2 of generation 0, position 3: every token banned (-inf)",
    ]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: NumericalStabilityLogitsProcessor(on_bad="end"), "give eos_token_id, or model"),
        (lambda: NumericalStabilityLogitsProcessor(on_bad="skip"), '"raise" or "end"'),
        (lambda: NumericalStabilityLogitsProcessor(clip_value=0), "above 0"),
        (lambda: NumericalStabilityLogitsProcessor(min_prob=1.0), "between 0 and 1"),
        (lambda: NumericalStabilityLogitsProcessor(eos_token_id=[]), "a token's number"),
        (lambda: NumericalStabilityLogitsProcessor(eos_score=-INF), "finite"),
        (lambda: NumericalStabilityLogitsProcessor(model="gpt2"), "torch.nn.Module"),
        (lambda: NumericalStabilityLogitsProcessor()(torch.ones(2, 1), torch.ones(2, 3, 4)), r"\[rows, vocabulary\]"),
        (lambda: NumericalStabilityLogitsProcessor()(torch.ones(3, 1), torch.ones(2, 4)), "do not fit"),
        (
            lambda: NumericalStabilityLogitsProcessor(on_bad="end", eos_token_id=9)(torch.ones(1, 1), torch.zeros(1, 4)),
            "not in a vocabulary of 4",
        ),
        (
            lambda: NumericalStabilityLogitsProcessor(on_bad="end", model=nn.Linear(1, 1))(
                torch.ones(1, 1), torch.full((1, 4), NAN)
            ),
            "neither eos_token_id nor the model",
        ),
        (lambda: TemperatureLogitsWarper(0.0), "do_sample=False"),
        (lambda: TemperatureLogitsWarper(INF), "finite"),
        (lambda: TemperatureLogitsWarper(1.0, NAN), "min_temperature"),
        (lambda: TemperatureLogitsWarper(1.0)(None, torch.ones(2, 2, dtype=torch.long)), "floating-point"),
    ],
)
def test_what_cannot_be_right_is_said(make, said):
    with pytest.raises(UsageError, match=said):
        make()


# -- generate of transformers ----------------------------------------------------------------------------------------------------

NEW = 6


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 48, "eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens, max_position_embeddings=32)).eval()


PROMPT = torch.tensor([[PAD, PAD, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]])


def generate(model, *processors, seed=5, **kwargs):
    """New tokens only. The prompt of the first row is padded."""
    torch.manual_seed(seed)
    kwargs = {"do_sample": True, "max_new_tokens": NEW, **kwargs}
    mask = (PROMPT != PAD).long()
    return model.generate(PROMPT, attention_mask=mask, logits_processor=LogitsProcessorList(processors), **kwargs)[:, 4:]


def break_token(model, row, position):
    """A NaN in the embedding of the token that this row draws at a position, before which no row draws it. Returns the token."""
    tokens = generate(model)
    token = int(tokens[row, position])
    assert token not in [*tokens[:, :position].flatten().tolist(), EOS, PAD]
    with torch.no_grad():
        model.model.embed_tokens.weight[token, 3] = NAN
    return token


STRATEGIES = {
    "sampling": {},
    "top": {"top_k": 5, "top_p": 0.9, "temperature": 0.7},
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"num_beams": 2},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "no cache": {"use_cache": False},
    "several": {"num_return_sequences": 2},
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_healthy_generation_is_the_same(model, name):
    """Token for token, with a hook on the model as well."""
    with NumericalStabilityLogitsProcessor(model=model) as processor:
        assert torch.equal(generate(model, processor, **STRATEGIES[name]), generate(model, **STRATEGIES[name]))
        processor.check()
    assert not model._forward_pre_hooks and int(processor.counters()["generations"]) == 1


def test_where_transformers_puts_it(model):
    """After the processors that are not warpers, before temperature, top-k and top-p: it sees the model's own logits."""
    config = model.generation_config
    config.update(do_sample=True, temperature=0.5, top_k=4, top_p=0.8, repetition_penalty=1.2)
    model._prepare_special_tokens(config)
    mine = NumericalStabilityLogitsProcessor()
    order = model._get_logits_processor(config, input_ids_seq_length=4, logits_processor=[mine], device="cpu")
    kinds = [type(p) for p in order]
    assert kinds.index(NumericalStabilityLogitsProcessor) < kinds.index(Stock) < kinds.index(TopKLogitsWarper)
    assert kinds.index(TopKLogitsWarper) < kinds.index(TopPLogitsWarper)
    assert kinds[0].__name__ == "RepetitionPenaltyLogitsProcessor"


@pytest.mark.parametrize("name", ["sampling", "static cache", "no cache", "own temperature"])
def test_a_bad_row_ends_and_is_masked(model, name):
    """Row 1 draws a token whose embedding holds NaN: EOS follows, then padding. The other rows draw what they drew before."""
    kwargs = STRATEGIES.get(name, {})
    healthy = generate(model, **kwargs)
    token = break_token(model, 1, 2)
    assert token not in healthy[[0, 2]].flatten().tolist()
    with pytest.raises(RuntimeError, match="probability tensor"):
        generate(model, **kwargs)
    verbose = name == "sampling"  # the row is located at once then, while the others go on
    with NumericalStabilityLogitsProcessor(verbose=verbose, on_bad="end", model=model) as processor:
        others = [TemperatureLogitsWarper(1.0)] if name == "own temperature" else []
        tokens = generate(model, processor, *others, **kwargs)
        [bad] = processor.read()
    assert torch.equal(tokens[[0, 2]], healthy[[0, 2]])
    assert tokens[1].tolist() == [*healthy[1, :3].tolist(), EOS, *[PAD] * (NEW - 4)]
    assert processor.mask(torch.ones_like(tokens)).tolist() == [[1] * NEW, [0] * NEW, [1] * NEW]
    assert (bad.row, bad.position, bad.kind, bad.where, bad.op) == (1, 3, "nan", "model.embed_tokens", "embedding")
    assert bad.because == f"weight model.embed_tokens.weight has 1 NaN in row {token}"


def test_without_an_eos_criterion_nothing_but_eos_follows(model):
    """Where generate does not stop at EOS and pads nothing."""
    model.generation_config.eos_token_id = None
    break_token(model, 1, 2)
    tokens = generate(model, NumericalStabilityLogitsProcessor(on_bad="end", eos_token_id=3))
    assert tokens[1, 3:].tolist() == [3] * (NEW - 3)


def test_under_inference_mode(model):
    """What was found can be used outside of it, for training."""
    break_token(model, 1, 2)
    with NumericalStabilityLogitsProcessor(on_bad="end", model=nn.DataParallel(model)) as processor:
        with torch.inference_mode():
            tokens = generate(model, processor)
        mask = processor.mask(torch.ones(3, NEW))
        assert tokens[1, 3] == EOS and mask.mul_(1).sum(1).tolist() == [NEW, 0, NEW]
        assert int(processor.counters()["nan_rows"]) == 1 and processor.read()[0].where == "model.embed_tokens"


def test_raising_names_the_module(model):
    """A weight in the middle: row 0 is bad at once, so are all, and the error names the weight."""
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[4, :3] = NAN
    with NumericalStabilityLogitsProcessor(model=model) as processor, pytest.raises(BadLogits) as caught:
        generate(model, processor)
    assert [b.row for b in caught.value.rows] == [0, 1, 2] and {b.position for b in caught.value.rows} == {0}
    assert (
        "position 0: NaN, born in mm of model.layers.1.mlp.up_proj; weight model.layers.1.mlp.up_proj.weight has 3 NaN in row 4"
        in str(caught.value)
    )


class Overflows(nn.Module):
    """Takes the logarithm of what is 0 for one token."""

    def __init__(self, inner, token):
        super().__init__()
        self.inner, self.token = inner, token

    def forward(self, ids):
        return self.inner(ids) + torch.log((ids != self.token).float().clamp(max=1)).cumsum(1).unsqueeze(-1) * 0


def test_a_model_of_ones_own_is_looked_into(model):
    """Called with its tokens and nothing else: the operation is named where all weights are finite."""
    bare = Overflows(nn.Sequential(nn.Embedding(8, 8)), token=6)
    ids = torch.tensor([[1, 3], [4, 5]])
    with NumericalStabilityLogitsProcessor(on_bad="end", eos_token_id=EOS, model=bare) as processor, torch.no_grad():
        for step in range(4):
            scores = processor(ids, bare(ids)[:, -1])
            ids = torch.cat([ids, torch.tensor([[1], [6 if step == 1 else 1]])], 1)
        [bad] = processor.read()
    assert (bad.row, bad.position, bad.kind, bad.op) == (1, 2, "nan", "log") and scores[1].argmax() == EOS
    assert bad.because.startswith("at ") and "test_generation.py" in bad.because


def test_positions_go_on_when_it_is_run_again():
    """The embedding of the sixth position is bad, which the prompt does not reach; the padded row gets there two tokens later."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=48, n_embd=16, n_layer=1, n_head=2, eos_token_id=EOS, bos_token_id=1, pad_token_id=PAD)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.wpe.weight[5, 0] = INF
    with NumericalStabilityLogitsProcessor(on_bad="end", model=model) as processor:
        generate(model, processor, min_new_tokens=NEW)
        found = processor.read()
    assert [(b.row, b.position) for b in found] == [(1, 2), (2, 2), (0, 4)]
    assert {(b.where, b.because) for b in found} == {("transformer.wpe", "weight transformer.wpe.weight has 1 Inf in row 5")}


def test_what_is_not_bad_a_second_time_is_said_to_be_transient(model):
    """A hook makes one NaN, once. After an optimizer's step nothing is claimed at all."""
    calls = []

    def once(_module, _args, out):
        calls.append(1)
        return out * NAN if len(calls) == 2 else out

    handle = model.model.norm.register_forward_hook(once)
    with NumericalStabilityLogitsProcessor(on_bad="end", model=model) as processor:
        generate(model, processor)
        handle.remove()
        assert {(b.position, b.where) for b in processor.read()} == {(1, None)}
        assert "finite logits when it is run again" in processor.read()[0].because
        calls.clear()
        processor.reset()
        handle = model.model.norm.register_forward_hook(once)
        generate(model, processor)
        handle.remove()
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        assert "weights were changed since" in processor.read()[0].because


def test_an_image_encoder_is_looked_into():
    """`generate` runs it outside the model's forward. A pixel that is Inf makes its row bad, and the encoder is named."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=28, patch_size=14),
        text_config=LlamaConfig(**sizes, vocab_size=40, eos_token_id=EOS, pad_token_id=PAD),
        image_token_index=39,
        image_seq_length=4,
    )
    model = LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor([[39] * 4 + [row, 5] for row in (6, 7, 8)])
    images = torch.randn(3, 3, 28, 28)
    images[1, 0, 0, 0] = INF
    with NumericalStabilityLogitsProcessor(on_bad="end", model=model) as processor:
        kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": images, "do_sample": True}
        tokens = model.generate(**kwargs, max_new_tokens=3, logits_processor=[processor])[:, 6:]
        [bad] = processor.read()
    assert tokens[1].tolist() == [EOS, PAD, PAD] and (bad.row, bad.position) == (1, 0)
    assert bad.where.startswith("model.vision_tower") and bad.because == "the input pixel_values has 1 that are NaN or Inf"
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_bad_beam_loses(model):
    """With a low score at EOS; a beam that was never bad is returned, finished or not."""
    token = int(generate(model, do_sample=False, num_beams=3)[1, 1])
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = NAN
    processor = NumericalStabilityLogitsProcessor(on_bad="end", model=model, eos_score=-1e9)
    tokens = generate(model, processor, do_sample=False, num_beams=3)
    found = processor.read()
    assert found and token not in tokens[1, :-1].tolist()
    assert {b.because for b in found} == {f"weight model.embed_tokens.weight has 32 NaN in row {token}"}
    processor.close()


@pytest.mark.parametrize("do_sample", [False, True])
def test_beams_that_are_all_bad_end(model, do_sample):
    """Nothing is left but EOS, in every beam."""
    with torch.no_grad():
        model.lm_head.weight[0, 0] = NAN
    tokens = generate(model, NumericalStabilityLogitsProcessor(on_bad="end", eos_token_id=EOS), num_beams=2, do_sample=do_sample)
    assert set(tokens.flatten().tolist()) <= {EOS, PAD} and (tokens[:, 0] == EOS).all()


def test_locating_never_fails_the_run(model):
    """Of a forward that cannot be run again the weights are looked at; if they are fine, nothing is known."""
    handle = model.model.norm.register_forward_hook(lambda _module, _args, out: out * NAN)
    with NumericalStabilityLogitsProcessor(on_bad="end", model=model) as processor:
        assert (generate(model, processor) == EOS).all()
        handle.remove()
        model.register_forward_pre_hook(lambda *_: 1 / 0)
        assert {(bad.row, bad.where, bad.because) for bad in processor.read()} == {(row, None, None) for row in range(3)}
        processor.reset()
        model._forward_pre_hooks.popitem()
        break_token(model, 1, 2)
        generate(model, processor)
        model.register_forward_pre_hook(lambda *_: 1 / 0)
        assert [bad.where for bad in processor.read()] == ["model.embed_tokens"]


def test_a_prompt_as_long_as_the_last_generation_is_a_new_one(model):
    """With the model at hand its forward tells, where the width of the tokens does not."""
    with NumericalStabilityLogitsProcessor(model=model) as processor:
        generate(model, processor, max_new_tokens=3)  # the widths of the tokens are 4, 5, 6
        prompt = torch.full((3, 7), 9)
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, logits_processor=[processor])
        assert int(processor.counters()["generations"]) == 2
