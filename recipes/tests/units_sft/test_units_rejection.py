"""Rejection sampling keeps what is right and different, of questions that are in neither set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanproof import UsageError
from nanproof_recipes.units_sft.arms import FIXED, RFT, setting
from nanproof_recipes.units_sft.asking import replies
from nanproof_recipes.units_sft.comparing import rft
from nanproof_recipes.units_sft.data.questions import make
from nanproof_recipes.units_sft.data.samples import Collator, examples, prompt
from nanproof_recipes.units_sft.models import tiny, with_adapters
from nanproof_recipes.units_sft.rejection import Kept, Sampling, new_questions, rows_of, sample
from nanproof_recipes.units_sft.scoring import is_right, parse
from nanproof_recipes.units_sft.workshop import Workshop

KNOWN, UNKNOWN = make(6, 6)["train"], make(6, 6)["valid"]


def adapted(language):
    """With adapters, as an arm leaves its model. They are new: the model says what it said without them."""
    return replace(language, model=with_adapters(language.model, 2, 4, own_dtype=False, seed=0))


@pytest.fixture(scope="module")
def overfit(language):
    """All weights of a tiny model trained on the answers to six questions, in two forms, until it knows them by heart."""
    torch.manual_seed(0)
    found = tiny()
    forms = [examples(found, KNOWN, replace(FIXED, form=form)) for form in ("bare", "factor")]
    batch = Collator(found.tokenizer.pad_token_id)([row for rows in forms for row in rows])
    optimizer = torch.optim.AdamW(found.model.parameters(), lr=5e-3)
    found.model.train()
    for _ in range(60):
        optimizer.zero_grad()
        found.model(**batch).loss.backward()
        optimizer.step()
    return found.model.state_dict()


@pytest.fixture
def knowing(overfit):
    found = tiny()
    found.model.load_state_dict(overfit)
    return adapted(found)


def test_only_right_and_different_answers_are_kept_and_no_more_than_asked_for(knowing):
    """Six questions that the model knows in two forms and six that it does not know."""
    asked, many = [*KNOWN, *UNKNOWN], Sampling(samples=12, temperature=1.0, keep=12)
    found = sample(knowing, asked, many, seed=0, batch=5)
    assert found.asked == 12 and 4 <= found.solved < 12
    assert all(is_right(parse(reply), q.correct) for q, reply in found.pairs)
    assert len(set(found.pairs)) == len(found.pairs)
    of = {q: [reply for other, reply in found.pairs if other == q] for q, _ in found.pairs}
    assert len(of) == found.solved and max(map(len, of.values())) >= 2
    assert str(found) == f"sampling: {found.solved} of 12 questions have a right answer; {len(found.pairs)} answers are kept"


def test_keep_is_a_limit_and_takes_the_first_of_the_same_answers(overfit):
    def kept(keep):
        language = tiny()
        language.model.load_state_dict(overfit)
        return sample(adapted(language), KNOWN, Sampling(samples=12, temperature=1.0, keep=keep), seed=3, batch=6)

    one, all_of_them = kept(1), kept(12)
    assert one.solved == all_of_them.solved == len(one.pairs) < len(all_of_them.pairs)
    first = {}
    for q, reply in all_of_them.pairs:
        first.setdefault(q, reply)
    assert one.pairs == list(first.items())


def test_sampled_replies_belong_to_their_prompts(knowing):
    """Prompts are sorted by length and batched; what comes back is in the order that was asked. Against one at a time."""
    prompts = [prompt(knowing, q.text) for q in [*KNOWN, *UNKNOWN]]
    together = replies(knowing.model, knowing, prompts, batch=5)
    alone = [replies(knowing.model, knowing, [one])[0] for one in prompts]
    assert together == alone and len(set(map(tuple, together))) > 6
    several = replies(knowing.model, knowing, prompts, batch=5, samples=3, temperature=1e-4)
    assert several == [one * 3 for one in together]


def test_the_model_is_left_in_the_mode_it_was_in(language):
    for mode in (True, False):
        language.model.train(mode)
        replies(language.model, language, ["x"], longest=2)
        assert language.model.training is mode


def test_new_questions_are_in_neither_set():
    sets = make(300, 300)
    known = {q.key for found in sets.values() for q in found}
    found = new_questions(500, [*sets["train"], *sets["valid"]], seed=0)
    assert len(found) == len({q.key for q in found}) == 500
    assert not known & {q.key for q in found}
    assert found == new_questions(500, [*sets["train"], *sets["valid"]], seed=0)
    assert found != new_questions(500, [*sets["train"], *sets["valid"]], seed=1)


def test_a_model_with_nan_weights_is_refused():
    language = adapted(tiny())
    with torch.no_grad():
        next(p for p in language.model.parameters() if p.requires_grad).view(-1)[0] = float("nan")
    with pytest.raises(UsageError, match=r"1 of 28 trainable tensors of this model are not finite: nothing can be sampled"):
        sample(language, KNOWN, Sampling(), seed=0, batch=6)


def test_kept_answers_come_back_and_a_damaged_file_is_named(tmp_path):
    kept = Kept(3, 2, [(KNOWN[0], "<answer>1</answer>\n\u2028"), (KNOWN[1], "")])
    kept.save(tmp_path / "kept.jsonl")
    assert Kept.load(tmp_path / "kept.jsonl") == kept
    for text in ("", "{", '{"asked": 3}\n', '{"asked": 3, "solved": 1}\n{"text": "x"}\n', "[]\n"):
        (tmp_path / "kept.jsonl").write_text(text)
        with pytest.raises(UsageError, match=r"kept\.jsonl does not hold the answers that were kept .*--again draws them anew"):
            Kept.load(tmp_path / "kept.jsonl")


def test_the_rows_are_the_old_answers_and_the_own_ones(language):
    kept = Kept(2, 1, [(UNKNOWN[0], "about <answer>3</answer>")])
    rows = rows_of(language, KNOWN, kept, FIXED)
    assert rows[:-1] == examples(language, KNOWN, FIXED)
    text = language.tokenizer.decode(rows[-1]["input_ids"])
    assert text == prompt(language, UNKNOWN[0].text) + "about <answer>3</answer>" + language.tokenizer.eos_token


def test_where_nothing_is_right_nothing_is_trained(language, tmp_path):
    """The tiny model says no tag after a few steps."""
    shop = Workshop(tmp_path, "tiny", train=8, valid=4)
    shop.arm(setting("fixed", epochs=1))
    found = rft(shop, replace(RFT, epochs=1), Sampling(more=3, samples=2))
    assert found.ending == "not trained: sampling: 0 of 3 questions have a right answer; 0 answers are kept"
    assert found.tensors is None and found.valid_loss is None
    assert not (tmp_path / "rft" / "result.json").exists()
    assert Kept.load(tmp_path / "rft" / "kept.jsonl") == Kept(3, 0, [])


def test_what_was_right_is_trained_on_and_the_result_tells_of_it(overfit, tmp_path, monkeypatch):
    """`rft` end to end, with the new questions being those that the model knows; done once, it is not done again."""
    shop = Workshop(tmp_path, "tiny", train=8, valid=4)
    language = shop.language
    language.model.load_state_dict(overfit)
    shop.arm(setting("fixed", epochs=1, lr=1e-6))
    monkeypatch.setattr("nanproof_recipes.units_sft.comparing.new_questions", lambda count, known, seed: KNOWN[:count])
    sampling = Sampling(more=6, samples=6)
    found = rft(shop, replace(RFT, epochs=1, batch=4), sampling)
    assert found.name == "rft" and found.ending == "finished" and found.setting["sampling"]["more"] == 6
    solved = int(found.notes[0].split()[1])
    assert found.notes[0].startswith(f"sampling: {solved} of 6 questions have a right answer; {solved} answers are kept")
    assert solved >= 4 and found.notes[1].startswith(f"data: {8 + solved} samples")
    assert rft(shop, replace(RFT, epochs=1, batch=4), sampling).to_json() == found.to_json()
    kept = Kept.load(tmp_path / "rft" / "kept.jsonl")
    assert (kept.asked, kept.solved, len(kept.pairs)) == (6, solved, solved) and {q for q, _ in kept.pairs} <= set(KNOWN)
    with pytest.raises(UsageError, match=r"other settings \(sampling\)"):
        rft(shop, replace(RFT, epochs=1, batch=4), replace(sampling, keep=2))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"more": 0}, "--more 0: a number of at least 1"),
        ({"samples": 0}, "--samples 0: a number of at least 1"),
        ({"keep": 0}, "--keep 0: a number of at least 1"),
        ({"temperature": 0.0}, "--temperature 0.0: a number above 0"),
        ({"temperature": float("nan")}, "--temperature nan: a number above 0"),
    ],
)
def test_sampling_that_cannot_be(wrong, said):
    with pytest.raises(UsageError) as caught:
        Sampling(**wrong)
    assert said in str(caught.value)
