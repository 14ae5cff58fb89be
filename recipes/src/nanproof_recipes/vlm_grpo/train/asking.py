"""Scenes as the model takes them, and its replies: the one way in which it is asked, for training and for testing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nanproof import UsageError
from nanproof_recipes.progress import Advance as Tick
from nanproof_recipes.vlm_grpo.data.scenes import COLOURS, FORMS, GRID, SIZES, Scene
from nanproof_recipes.vlm_grpo.models import IMAGE, VERDICT, Seeing
from nanproof_recipes.vlm_grpo.train.rewards import caption_reward, place_reward

MORE = 3
"""Tokens that a reply may have beyond the longest right one."""
MOST = 2**28
"""Bytes of pictures that are kept prepared: those of the tiny model are a tenth of it, those of a real one would be gigabytes."""


@dataclass(frozen=True, slots=True)
class Replies:
    """What was sampled: one row a reply."""

    prompt: dict[str, Tensor]
    """What the model was given; padded on the left."""
    ids: Tensor
    """Tokens of the replies, with their end; padding behind it."""
    mask: Tensor
    """1 up to the end of each reply and at it."""
    texts: list[str]


@dataclass(frozen=True, slots=True)
class Marks:
    """How good replies were: means over scenes."""

    caption: float
    place: float
    scenes: int

    @property
    def reward(self) -> float:
        return self.caption + self.place


def messages(scene: Scene) -> list[dict[str, Any]]:
    """The question, behind its image."""
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": scene.question}]}]


def prompts(seeing: Seeing, scenes: Sequence[Scene], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Tensors for the model: ids, their mask, and the pixels."""
    texts = [seeing.processor.apply_chat_template(messages(scene), add_generation_prompt=True) for scene in scenes]
    pictures = [[scene.picture()] for scene in scenes]
    made = seeing.processor(images=pictures, text=texts, padding=True, padding_side="left", return_tensors="pt")
    return {name: value.to(device) for name, value in made.items()}


class Prepared:
    """Scenes as tensors. Pictures are slow to prepare, so it is done once, where a scene is one row of every tensor and all of
    them are small; models whose pictures are rows of patches, or large, get them anew."""

    def __init__(
        self, make: Callable[[Sequence[Scene]], dict[str, Tensor]], scenes: Sequence[Scene], device: torch.device
    ) -> None:
        self._make, self._scenes, self._device = make, scenes, device
        first = make(scenes[:2])
        one_row_each = all(len(t) == len(scenes[:2]) for t in first.values())
        small = sum(t.nbytes for t in first.values()) * len(scenes) <= MOST * len(scenes[:2])
        self._every = {name: t.to(device) for name, t in make(scenes).items()} if one_row_each and small else None

    def rows(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Those of these scenes, on the device."""
        if self._every is None:
            made = self._make([self._scenes[index] for index in indices])
            return {name: t.to(self._device) for name, t in made.items()}
        chosen = torch.tensor(indices, device=self._device)
        return {name: t[chosen] for name, t in self._every.items()}


def never(seeing: Seeing) -> list[int]:
    """Tokens that no reply may have: the place of an image, and the judge's."""
    there = seeing.tokenizer.get_vocab()
    return sorted({t for t in (seeing.image_token, there.get(IMAGE), there.get(VERDICT)) if t is not None})


def longest(seeing: Seeing) -> int:
    """Tokens of a reply, at the most: what the longest right one has in this tokenizer with its end, and some more. Twelve where
    a word is a token."""
    return _longest(seeing.tokenizer)


@lru_cache(maxsize=4)
def _longest(tokenizer: Any) -> int:
    last = GRID - 1
    answers = [
        f"{size} {colour} {form} box {last} {last} {last} {last}" for size in SIZES for colour in COLOURS for form in FORMS
    ]
    return max(map(len, tokenizer(answers, add_special_tokens=False)["input_ids"])) + 1 + MORE


def reply(
    seeing: Seeing,
    prompt: dict[str, Tensor],
    *,
    temperature: float = 1.0,
    processors: Sequence[Any] = (),
    banned: Sequence[int] = (),
    most: int | None = None,
) -> Replies:
    """Sample a reply to each prompt; temperature 0 takes the likeliest token. `most`: tokens of one; None: `longest`."""
    model, end = seeing.model, seeing.tokenizer.eos_token_id
    was = model.training
    model.eval()
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    try:
        with torch.no_grad():
            given = model.generate(
                **prompt,
                max_new_tokens=longest(seeing) if most is None else most,
                logits_processor=list(processors),
                suppress_tokens=list(banned) or None,
                pad_token_id=seeing.tokenizer.pad_token_id,
                eos_token_id=end,
                **how,
            )
    finally:
        model.train(was)
    ids = given[:, prompt["input_ids"].shape[1] :]
    ended = (ids == end).cumsum(1)
    mask = ((ended == 0) | ((ended == 1) & (ids == end))).long()
    texts = seeing.tokenizer.batch_decode(
        [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)], skip_special_tokens=True
    )
    return Replies(prompt, ids, mask, texts)


def examine(
    seeing: Seeing,
    scenes: Sequence[Scene],
    *,
    temperature: float = 1.0,
    processors: Sequence[Any] = (),
    at_once: int = 256,
    tick: Tick = lambda done, said: None,
) -> tuple[Marks, list[str]]:
    """Ask about every scene and mark the replies."""
    device = next(seeing.model.parameters()).device
    texts: list[str] = []
    for start in range(0, len(scenes), at_once):
        asked = prompts(seeing, scenes[start : start + at_once], device)
        texts += reply(seeing, asked, temperature=temperature, processors=processors, banned=never(seeing)).texts
        tick(len(texts), "")
    return marked(texts, scenes), texts


class Chance:
    """Draws every token that is not banned as often as any other: what a reply is worth that knows nothing."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.where(scores == -torch.inf, scores, 0.0)


def marked(texts: Sequence[str], scenes: Sequence[Scene]) -> Marks:
    """Means of both rewards."""
    pairs = list(zip(texts, scenes, strict=True))
    if not pairs:
        raise UsageError("there is no scene to ask about: --valid 1 or more is needed")
    captions = [caption_reward(text, scene) for text, scene in pairs]
    places = [place_reward(text, scene) for text, scene in pairs]
    return Marks(sum(captions) / len(pairs), sum(places) / len(pairs), len(pairs))
