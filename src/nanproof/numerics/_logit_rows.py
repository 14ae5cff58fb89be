"""What is noted of the rows of logits of one generation: on the device, in a few small operations a step, and read on failure."""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanproof.explain.locate._logit_origin import Prompt

FLAGGED = 8
"""Steps from one flag to the next on CUDA: sending it costs as much as finding it."""
_FOLDED = 256
"""Steps whose row maxima are kept before they are folded into one number a row."""
_SAID = {"nan": "NaN", "inf": "+Inf", "all-banned": "every token banned (-inf)"}


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row of logits from which nothing could be sampled."""

    row: int
    """In the batch that was generated; of beam search, the beam at that time."""
    position: int
    """How many tokens had been generated before it."""
    kind: str
    """ "nan", "inf" or "all-banned"."""
    generation: int
    """Which one, counted from 0."""
    where: str | None = None
    """Path of the module in which it was born, where a model was given and it could be found."""
    op: str | None = None
    """The operation."""
    because: str | None = None
    """What else is known: "weight model.layers.1.mlp.up_proj.weight has 3 NaN"."""

    def __str__(self) -> str:
        born = f", born in {f'{self.op} of ' if self.op else ''}{self.where}" if self.where else ""
        because = f"; {self.because}" if self.because else ""
        return f"row {self.row} of generation {self.generation}, position {self.position}: {_SAID[self.kind]}{born}{because}"


@dataclass(eq=False, slots=True)
class Generation:
    """What is known of one generation, on the device. Columns [rows, 1] where one number a row is kept."""

    number: int
    width: int
    """Of the prompt."""
    shape: torch.Size
    """Of the logits."""
    device: torch.device
    ids: Tensor
    """The tokens at the latest step."""
    ended: Tensor
    """0 for a row that may be sampled from, NaN for one that only ends."""
    prompt: Prompt | None
    steps: int = 0
    tops: list[Tensor] = field(default_factory=list)
    """The maximum of each row, of the steps that are not folded yet."""
    others: list[Tensor] = field(default_factory=list)
    """Whether each row's tokens are others than at the step before, of the same steps."""
    moved: Tensor | None = None
    """Rows that held other tokens once: beams. What was sampled there is not known any more."""
    follows: bool = True
    """Whether a row that a beam has moved into may be sampled from again. Where a bad row is an error there is no need."""
    latest: deque[Tensor] = field(default_factory=lambda: deque(maxlen=FLAGGED + 1))
    """Tokens of the latest steps, where rows are not followed: enough to tell on failure whether they moved since."""
    first: Tensor | None = None
    """The position at which each row turned bad; -1 for a healthy one."""
    evidence: Tensor | None = None
    """The maximum of each row there; 0 for a healthy one."""
    known: dict[int, BadRow] = field(default_factory=dict)

    @classmethod
    def of(cls, number: int, input_ids: Tensor, scores: Tensor, prompt: Prompt | None, follows: bool) -> Generation:
        ended = torch.zeros(len(scores), 1, device=scores.device)
        return cls(number, input_ids.shape[1], scores.shape, scores.device, input_ids, ended, prompt, follows=follows)

    def goes_on(self, input_ids: Tensor, scores: Tensor) -> bool:
        """Whether these may be its next step: one more column of tokens."""
        rows, width = self.ids.shape
        return input_ids.shape == (rows, width + 1) and scores.shape == self.shape and scores.device == self.device

    def look(self, input_ids: Tensor, top: Tensor) -> Tensor:
        """Take note of a step; returns which rows only end."""
        if not self.follows:
            self.latest.append(input_ids)
        elif self.steps and input_ids.device == self.device:
            # Beam search moves rows about: what was noted of a row holds for the tokens that were there.
            others = (input_ids[:, :-1] != self.ids).any(1, keepdim=True)
            self.others.append(others)
            self.ended.masked_fill_(others, 0)
        self.ended.add_(top, alpha=0)  # 0 times a number is 0, 0 times anything else is NaN; and NaN stays
        self.ids = input_ids
        self.tops.append(top)
        self.steps += 1
        if len(self.tops) == _FOLDED:
            self.fold()
        return self.ended != 0

    def forgot(self, position: int) -> bool:
        """Whether it cannot be told any more if a row has moved since then."""
        return not self.follows and self.steps - position > len(self.latest)

    def fold(self) -> tuple[Tensor, Tensor]:
        """(first, evidence), one number a row, up to date."""
        if self.tops:
            wide = torch.float64 if any(top.dtype == torch.float64 for top in self.tops) else torch.float32
            tops = torch.cat([top.to(wide) for top in self.tops], 1)
            bad = (tops - tops) != 0
            some, index = bad.any(1), bad.to(torch.uint8).argmax(1)
            first = torch.where(some, index + (self.steps - len(self.tops)), -1)
            evidence = torch.where(some, tops.gather(1, index[:, None])[:, 0], 0.0)
            if not self.follows:
                steps = itertools.pairwise(self.latest)
                self.others = [(now[:, :-1] != before).any(1, keepdim=True) for before, now in steps]
            if self.others:
                moved = torch.cat(self.others, 1).any(1).to(self.device)
                self.moved = moved if self.moved is None else self.moved | moved
            self.tops.clear()
            self.others.clear()
            if self.first is None or self.evidence is None:
                self.first, self.evidence = first, evidence
            else:
                earlier = self.first >= 0
                self.first = torch.where(earlier, self.first, first)
                self.evidence = torch.where(earlier, self.evidence, evidence)
        assert self.first is not None and self.evidence is not None
        return self.first, self.evidence

    def kinds(self) -> Tensor:
        """How many rows are NaN, +Inf, all banned."""
        evidence = self.fold()[1]
        return torch.stack([evidence.isnan(), evidence == math.inf, evidence == -math.inf]).sum(1)


class Flags:
    """Numbers on their way from a CUDA device to the host, through pinned memory. Nothing here waits."""

    def __init__(self) -> None:
        self.sent: deque[tuple[Tensor, Any, Generation, bool]] = deque()
        """Under way, or arrived and not looked at."""
        self._free: list[tuple[Tensor, Any]] = []

    def send(self, number: Tensor, of: Generation, last: bool) -> None:
        if self._free:
            host, event = self._free.pop()
        else:
            host, event = torch.empty((), dtype=torch.int64, pin_memory=True), torch.cuda.Event()
        host.copy_(number, non_blocking=True)
        event.record(torch.cuda.current_stream(number.device))
        self.sent.append((host, event, of, last))

    def arrived(self) -> list[tuple[int, Generation, bool]]:
        found = []
        while self.sent and self.sent[0][1].query():
            host, event, of, last = self.sent.popleft()
            found.append((int(host), of, last))
            self._free.append((host, event))
        return found

    def clear(self) -> None:
        self.sent.clear()
