"""What is noted of the rows of logits of one generation: on the device, in a few small operations a step, and read on failure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanproof.numerics.birthplace import Prompt

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


@dataclass(eq=False)
class Generation:
    """What is known of one generation, on the device."""

    number: int
    width: int
    """Of the prompt."""
    ids: Tensor
    """The tokens at the latest step."""
    ended: Tensor
    """0 for a row that may be sampled from, NaN for one that only ends."""
    prompt: Prompt | None
    steps: int = 0
    tops: list[Tensor] = field(default_factory=list)
    """The maximum of each row, of the steps that are not folded yet."""
    others: list[Tensor] = field(default_factory=list)
    """Whether each row's tokens are others than at the step before, of the steps that are not folded yet."""
    moved: Tensor | None = None
    """Rows that held other tokens once: beams. What was sampled there is not known any more."""
    first: Tensor | None = None
    """The position at which each row turned bad; -1 for a healthy one."""
    evidence: Tensor | None = None
    """The maximum of each row there; 0 for a healthy one."""
    known: dict[int, BadRow] = field(default_factory=dict)

    def look(self, input_ids: Tensor, top: Tensor) -> Tensor:
        """Take note of a step; returns which rows only end."""
        if self.steps and input_ids.device == self.ended.device == self.ids.device:
            # Beam search moves rows about: what was noted of a row holds for the tokens that were there.
            others = (input_ids[:, :-1] != self.ids).any(1)
            self.others.append(others)
            self.ended.masked_fill_(others, 0)
        self.ended.add_(top, alpha=0)  # 0 times a number is 0, 0 times anything else is NaN; and NaN stays
        self.ids = input_ids
        if self.tops and self.tops[0].dtype != top.dtype:
            self.fold()
        self.tops.append(top)
        self.steps += 1
        if len(self.tops) == _FOLDED:
            self.fold()
        return self.ended != 0

    def fold(self) -> tuple[Tensor, Tensor]:
        """(first, evidence), up to date."""
        if self.tops:
            tops = torch.stack(self.tops)
            bad = (tops - tops) != 0
            some, index = bad.any(0), bad.to(torch.uint8).argmax(0)
            first = torch.where(some, index + (self.steps - len(self.tops)), -1)
            evidence = torch.where(some, tops.gather(0, index[None])[0], 0.0)
            self.tops.clear()
            if self.others:
                moved = torch.stack(self.others).any(0)
                self.moved = moved if self.moved is None else self.moved | moved
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
        self._sent: deque[tuple[Tensor, Any, Generation, bool]] = deque()
        self._free: list[tuple[Tensor, Any]] = []

    def send(self, number: Tensor, of: Generation, last: bool) -> None:
        if self._free:
            host, event = self._free.pop()
        else:
            host, event = torch.empty((), dtype=torch.int64, pin_memory=True), torch.cuda.Event()
        host.copy_(number, non_blocking=True)
        event.record(torch.cuda.current_stream(number.device))
        self._sent.append((host, event, of, last))

    def arrived(self) -> list[tuple[int, Generation, bool]]:
        found = []
        while self._sent and self._sent[0][1].query():
            host, event, of, last = self._sent.popleft()
            found.append((int(host), of, last))
            self._free.append((host, event))
        return found

    def clear(self) -> None:
        self._sent.clear()
