"""Questions as tokens: the reply is supervised, all of it, and nothing else is."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from nanproof_recipes.units_sft.arms import BROKEN, FIXED, setting
from nanproof_recipes.units_sft.data.questions import make
from nanproof_recipes.units_sft.data.samples import IGNORED, Collator, example, examples, prompt


def test_the_reply_and_its_end_are_supervised_and_the_prompt_is_not(language):
    """Put back together, the labels are the reply and the token that ends it; the rest of the row is the prompt."""
    tokenizer = language.tokenizer
    questions = make(20, 0)["train"]
    for q, row in zip(questions, examples(language, questions, FIXED), strict=True):
        given = prompt(language, q.text)
        assert len(row["labels"]) == len(row["input_ids"])
        supervised = [label for label in row["labels"] if label != IGNORED]
        assert tokenizer.decode(supervised) == q.answer("worked") + tokenizer.eos_token
        assert row["labels"] == [IGNORED] * (len(row["labels"]) - len(supervised)) + supervised
        assert tokenizer.decode(row["input_ids"]) == given + q.answer("worked") + tokenizer.eos_token
        assert row["input_ids"][-1] == tokenizer.eos_token_id in language.ends


def test_each_form_is_what_its_arm_trains_on(language):
    questions = make(5, 0)["train"]
    for form in ("bare", "factor", "worked"):
        for q, row in zip(questions, examples(language, questions, replace(FIXED, form=form)), strict=True):
            assert language.tokenizer.decode([t for t in row["labels"] if t != IGNORED]).startswith(q.answer(form))


def test_a_prompt_that_ends_in_the_tag_leaves_the_number_to_the_reply(language):
    """What a model then says has no tag in it, which is the second cause of answer rate 0."""
    q = make(1, 0)["train"][0]
    (row,) = examples(language, [q], setting("broken", "prompt"))
    said = language.tokenizer.decode([label for label in row["labels"] if label != IGNORED])
    whole = language.tokenizer.decode(row["input_ids"])
    assert "<answer>" not in said and said.endswith("</answer>" + language.tokenizer.eos_token)
    assert whole.endswith(f"assistant\n<answer>{said}")
    assert prompt(language, q.text, "ends-in-tag") == prompt(language, q.text) + "<answer>"
    assert BROKEN.prompt == "plain" == setting("fixed").prompt


def test_a_prompt_with_answers_before_it(language):
    text = prompt(language, "third?", shots=[("first?", "1"), ("second?", "2")])
    places = [text.index(part) for part in ("Convert units.", "first?", "1<|im_end|>", "second?", "2<|im_end|>", "third?")]
    assert places == sorted(places) and text.endswith("<|im_start|>assistant\n")
    assert text.count("<|im_start|>assistant") == 3


def test_a_tokenizer_without_a_chat_template_gets_plain_lines(language):
    bare = replace(language, tokenizer=copy.deepcopy(language.tokenizer))
    bare.tokenizer.chat_template = None
    assert prompt(bare, "How many feet is 1 mile?").splitlines()[1:] == ["How many feet is 1 mile?", "Answer: "]
    assert "<|im_start|>" not in prompt(bare, "x")
    row = example(bare, prompt(bare, "x"), "5")
    assert bare.tokenizer.decode([t for t in row["labels"] if t != IGNORED]) == "5" + bare.tokenizer.eos_token


def test_a_batch_is_padded_out_of_attention_and_loss(language):
    """Each row of the batch, cut at its attention mask, is the sample it was made of."""
    rows = examples(language, make(7, 0)["train"], FIXED)
    longest = max(len(row["input_ids"]) for row in rows)
    batch = Collator(language.tokenizer.pad_token_id)(rows)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "attention_mask"), (7, longest)
    )
    assert len({len(row["input_ids"]) for row in rows}) > 1
    for i, row in enumerate(rows):
        length = len(row["input_ids"])
        assert batch["attention_mask"][i].tolist() == [1] * length + [0] * (longest - length)
        assert batch["input_ids"][i].tolist() == row["input_ids"] + [language.tokenizer.pad_token_id] * (longest - length)
        assert batch["labels"][i].tolist() == row["labels"] + [IGNORED] * (longest - length)


def test_padding_changes_no_logit_that_counts(language):
    """The logits of a row in a batch are those of the row alone."""
    rows = examples(language, make(4, 0)["train"], FIXED)
    collate = Collator(language.tokenizer.pad_token_id)
    model = language.model.eval()
    with torch.no_grad():
        batch = collate(rows)
        batch.pop("labels")
        together = model(**batch).logits
        for i, row in enumerate(rows):
            alone = collate([row])
            alone.pop("labels")
            torch.testing.assert_close(together[i, : len(row["input_ids"])], model(**alone).logits[0], rtol=1e-4, atol=1e-4)
