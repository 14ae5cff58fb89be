"""Questions as tokens: the prompt is given, the answer is supervised, padding is neither."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from nanproof_recipes.units_sft.data.questions import Question
from nanproof_recipes.units_sft.models import SYSTEM, Language

IGNORED = -100
TAG = "<answer>"
Example = dict[str, list[int]]


def prompt(
    language: Language, question: str, style: Literal["plain", "ends-in-tag"] = "plain", shots: Sequence[tuple[str, str]] = ()
) -> str:
    """The text that the model goes on from, as its chat template has it. `shots`: questions with answers that come before."""
    messages = [{"role": "system", "content": SYSTEM}]
    for asked, answered in shots:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    messages.append({"role": "user", "content": question})
    tokenizer = language.tokenizer
    if tokenizer.chat_template:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    else:
        text = "".join(f"{m['content']}\n" for m in messages) + "Answer: "
    return text + TAG if style == "ends-in-tag" else text


def example(language: Language, given: str, reply: str) -> Example:
    """A prompt and its reply. The reply ends in the token that ends replies, so that the model learns to stop."""
    tokenizer = language.tokenizer
    before = tokenizer(given, add_special_tokens=False)["input_ids"]
    after = [*tokenizer(reply, add_special_tokens=False)["input_ids"], language.end]
    return {"input_ids": [*before, *after], "labels": [IGNORED] * len(before) + after}


def examples(language: Language, questions: Iterable[Question], setting: Any) -> list[Example]:
    """What an arm trains on. The reply goes on from where the prompt ends."""
    found = []
    for question in questions:
        reply = question.answer(setting.form)
        if setting.prompt == "ends-in-tag":
            reply = reply[reply.index(TAG) + len(TAG) :]
        found.append(example(language, prompt(language, question.text, setting.prompt), reply))
    return found


class Collator:
    """A batch: padded on the right, padding out of attention and loss."""

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(self, rows: Sequence[Example]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)

        def padded(name: str, value: int) -> Tensor:
            return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

        lengths = torch.tensor([[len(row["input_ids"])] for row in rows])
        return {
            "input_ids": padded("input_ids", self.padding),
            "labels": padded("labels", IGNORED),
            "attention_mask": (torch.arange(longest) < lengths).long(),
        }
