"""Sampling that survives a broken model, and says that it is broken.

`torch.multinomial` on NaN is an error on a CPU; on CUDA it is an assertion that ends the process' use of the device. So rows from
which nothing can be sampled are found and replaced on the device, before the draw. A row is bad when its logits hold NaN or +Inf,
or when every token is banned (-inf throughout); -inf beside finite numbers is a ban, and healthy. What is bad is never made a
number and sampled from: the row only ends, and is masked from the loss, or the run is stopped with an error.

One reduction tells all three: the maximum of a row is NaN, +Inf or -inf exactly if the row is bad.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nanproof._errors import BadLogits, UsageError
from nanproof.explain.locate._logit_origin import Birthplace, PromptKeeper
from nanproof.numerics._logit_rows import FLAGGED, BadRow, Flags, Generation
from nanproof.numerics._temperature import TemperatureLogitsWarper

__all__ = ["BadLogits", "BadRow", "NumericalStabilityLogitsProcessor", "TemperatureLogitsWarper"]

log = logging.getLogger("nanproof")

_REMEMBERED = 1000
"""Bad rows that `read` has, at the most: the latest."""
_LOCATED = 4
"""Rows of one generation whose birthplace is looked for."""


class NumericalStabilityLogitsProcessor:
    """Finds rows of logits from which nothing can be sampled, before they are sampled from. For
    `model.generate(logits_processor=[...])` of transformers, or a sampling loop of your own: `scores = processor(ids, scores)`.

    Healthy rows pass bit-identical, unless an option says otherwise. Nothing waits for a CUDA device while rows are healthy.

    Args:
        clip_value: logits of healthy rows are held between -clip_value and clip_value. None, the default, leaves them alone. It
            is not needed (a softmax subtracts the maximum) and changes the distribution: at 30, logits of 45 and 40 go from
            0.993/0.007 to 0.5/0.5. How many were changed is counted. Banned tokens stay banned.
        min_prob: no token that is not banned has a smaller probability (before the probabilities are made to sum to 1 again).
            None, the default, leaves them alone. At 1e-8 and a vocabulary of 152 k, 1.5e-3 of the mass goes to the tail.
            Banned tokens stay banned.
        verbose: one line in the log "nanproof" for each bad row, when the host knows of it.
        on_bad: "raise" raises `BadLogits`: on a CPU at once, on CUDA some tokens later, and at `check()` at the latest. Until
            then, and with "end" throughout, nothing but EOS can be drawn in a bad row, at this step and all later ones.
        eos_token_id: what ends a row; of several the first. None: that of the model.
        shift: subtract each healthy row's maximum, in fp32 at least: the same softmax to 1e-6. Half-precision logits come back as
            fp32.
        model: with it, the module in which a bad row was born is named. References to what its forward was called with are kept
            (under `no_grad`, as `generate` is); on failure the forward of the row is run again. Call `close()` afterwards, or use
            the processor as a context manager.
        eos_score: what EOS has in a bad row; every other token has -inf, so sampling does not depend on it. In beam search -1e9
            makes a bad beam lose against every healthy one.
    """

    def __init__(
        self,
        clip_value: float | None = None,
        min_prob: float | None = None,
        verbose: bool = False,
        *,
        on_bad: Literal["raise", "end"] = "raise",
        eos_token_id: int | Sequence[int] | None = None,
        shift: bool = False,
        model: nn.Module | None = None,
        eos_score: float = 0.0,
    ) -> None:
        self._check_arguments(clip_value, min_prob, on_bad, eos_token_id, model, eos_score)
        self.clip_value, self.min_prob, self.verbose = clip_value, min_prob, verbose
        self.on_bad, self.shift, self.eos_score = on_bad, shift, float(eos_score)
        self._changes = shift or clip_value is not None or min_prob is not None
        self._tells = on_bad == "raise" or verbose
        self._eos_token_id = eos_token_id
        self._keeper = None if model is None else PromptKeeper(model)
        self._flags = Flags()
        self._now: Generation | None = None
        self._past: list[Generation] = []
        """Generations of which it is not known yet whether they were healthy."""
        self._begun = self._tokens = 0
        self._totals: Tensor | None = None
        """Bad rows of past generations, by kind."""
        self._clipped: Tensor | None = None
        self._found: deque[BadRow] = deque(maxlen=_REMEMBERED)
        self._unsaid: list[BadRow] = []
        """Bad rows that no error has named yet, where they are to be errors."""
        self._ending_row: tuple[Any, Tensor] | None = None
        self.reset()

    @staticmethod
    def _check_arguments(clip_value: Any, min_prob: Any, on_bad: Any, eos_token_id: Any, model: Any, eos_score: Any) -> None:
        this = "NumericalStabilityLogitsProcessor"
        if clip_value is not None and not 0 < clip_value < math.inf:
            raise UsageError(
                f"{this}(clip_value={clip_value!r}): a finite number above 0 is needed; None leaves the logits alone"
            )
        if min_prob is not None and not 0 < min_prob < 1:
            raise UsageError(f"{this}(min_prob={min_prob!r}): a number between 0 and 1 is needed; None leaves them alone")
        if on_bad not in ("raise", "end"):
            raise UsageError(f'{this}(on_bad={on_bad!r}): "raise" or "end" is needed')
        if model is not None and not isinstance(model, nn.Module):
            raise UsageError(f"{this}(model=...): a torch.nn.Module is needed, not {type(model).__name__}")
        if not math.isfinite(eos_score):
            raise UsageError(f"{this}(eos_score={eos_score!r}): a finite number is needed, such as 0.0")
        if on_bad == "end" and eos_token_id is None and model is None:
            raise UsageError(f'{this}(on_bad="end"): it takes an EOS to end a row: give eos_token_id, or model')
        if eos_token_id is not None and _first(eos_token_id) is None:
            raise UsageError(f"{this}(eos_token_id={eos_token_id!r}): a token's number is needed, or several")

    # -- generating ------------------------------------------------------------------------------------------------------------

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self(input_ids, scores)
        if self._flags.sent:
            self._poll()
        now = self._now
        again = self._fresh or (self._keeper is not None and self._keeper.saw_prompt)
        if now is None or again or not now.goes_on(input_ids, scores):
            now = self._begin(input_ids, scores)
        ends = now.look(input_ids, scores.amax(-1, keepdim=True))
        self._tokens += len(scores)
        if now.device.type == "cuda":
            if self._tells and now.steps % FLAGGED == 1:
                self._flags.send(ends.sum(), now, last=False)
        elif count := int(ends.sum()):
            if self._tells:
                self._learn(now, count, last=False)
                self._raise_unsaid()
        elif not self._changes:
            return scores
        shaped = self._shaped(scores, ends) if self._changes else scores
        return torch.where(ends, self._ending(shaped), shaped)

    def _begin(self, input_ids: Tensor, scores: Tensor) -> Generation:
        this = "NumericalStabilityLogitsProcessor"
        if not isinstance(scores, Tensor) or scores.dim() != 2 or not scores.is_floating_point() or not scores.shape[1]:
            raise UsageError(f"{this}: scores must be logits of shape [rows, vocabulary]")
        if input_ids.dim() != 2 or len(input_ids) != len(scores):
            raise UsageError(
                f"{this}: input_ids of shape {list(input_ids.shape)} do not fit scores of shape {list(scores.shape)}: one row of "
                "tokens so far for each row of logits is needed"
            )
        if self._eos() >= scores.shape[1]:
            raise UsageError(
                f"{this}: eos_token_id {self._eos()} is not in a vocabulary of {scores.shape[1]}: it could end no row"
            )
        self._close_generation()
        prompt = None if self._keeper is None else self._keeper.prompt()
        self._now = Generation.of(self._begun, input_ids, scores, prompt, follows=self.on_bad == "end")
        self._begun, self._fresh = self._begun + 1, False
        return self._now

    def _shaped(self, scores: Tensor, ends: Tensor) -> Tensor:
        """What the options make of healthy rows. Banned tokens stay banned."""
        banned = scores == -math.inf
        wide = torch.promote_types(scores.dtype, torch.float32)
        if self.clip_value is not None:
            clipped = torch.where(banned, scores, scores.clamp(-self.clip_value, self.clip_value))
            changed = ((clipped != scores) & ~ends).sum()
            self._clipped = changed if self._clipped is None else changed + self._clipped
            scores = clipped
        if self.min_prob is not None:
            floor = scores.to(wide).logsumexp(-1, keepdim=True) + math.log(self.min_prob)
            scores = torch.where(banned, scores, torch.maximum(scores, floor.to(scores.dtype)))
        if self.shift:
            scores = scores.to(wide) - scores.amax(-1, keepdim=True).to(wide)
        return scores

    def _ending(self, scores: Tensor) -> Tensor:
        """A row from which only EOS can be drawn."""
        key = scores.shape[1], scores.dtype, scores.device
        if self._ending_row is None or self._ending_row[0] != key:
            row = torch.full((1, scores.shape[1]), -math.inf, dtype=scores.dtype, device=scores.device)
            row[:, self._eos()] = max(self.eos_score, torch.finfo(scores.dtype).min)
            self._ending_row = key, row
        return self._ending_row[1]

    def _eos(self) -> int:
        given = self._eos_token_id
        if given is None and self._keeper is not None:
            given = _eos_of(self._keeper.model)
        first = None if given is None else _first(given)
        if first is None and self.on_bad == "end":
            raise UsageError(
                'NumericalStabilityLogitsProcessor(on_bad="end"): neither eos_token_id nor the model says what ends a row: '
                "give eos_token_id"
            )
        return 0 if first is None else first  # with "raise" the row is not used

    # -- what was found --------------------------------------------------------------------------------------------------------

    @property
    def bad_rows(self) -> Tensor | None:
        """Which rows of the current or last generation were bad: bool, on the device. None before the first."""
        return None if self._now is None else self._now.fold()[0] >= 0

    @property
    def generations(self) -> int:
        """How many were begun, since creation or `reset`."""
        return self._begun

    def mask(self, completion_mask: Tensor) -> Tensor:
        """The mask of the completions, 0 throughout in each row that was bad in the current or last generation. Does not wait."""
        bad = self.bad_rows
        if bad is None:
            return completion_mask
        if completion_mask.dim() < 1 or len(completion_mask) != len(bad):
            raise UsageError(
                f"mask(completion_mask of shape {list(completion_mask.shape)}): {len(bad)} rows were generated. Mask them before "
                "they are shuffled or split"
            )
        shape = (len(bad),) + (1,) * (completion_mask.dim() - 1)
        return completion_mask.masked_fill(bad.to(completion_mask.device).view(shape), 0)

    def counters(self) -> dict[str, Tensor]:
        """0-d tensors on the device, since creation or `reset`: rows that were bad, by kind, logits that `clip_value` changed,
        tokens (rows times steps) and generations. Does not wait."""
        kinds = torch.zeros(3, dtype=torch.int64) if self._now is None else self._now.kinds()
        if self._totals is not None:
            kinds = kinds + self._totals.to(kinds.device)
        numbers = {"generations": self._begun, "tokens": self._tokens} | ({} if self._clipped is not None else {"clipped": 0})
        return {
            "bad_rows": kinds.sum(),
            "nan_rows": kinds[0],
            "inf_rows": kinds[1],
            "banned_rows": kinds[2],
            **({} if self._clipped is None else {"clipped": self._clipped}),
            **{name: torch.full((), number, device=kinds.device) for name, number in numbers.items()},
        }

    def read(self) -> list[BadRow]:
        """The bad rows since creation or `reset`, oldest first. Waits for the device. With a model, read before its weights
        change: afterwards it cannot be found out any more where a row went bad."""
        self._gather()
        return list(self._found)

    def check(self) -> None:
        """Raises `BadLogits` if a row was bad and `on_bad="raise"`, and no error said so yet. Waits for the device."""
        self._gather()
        self._raise_unsaid()

    def start(self) -> None:
        """A new generation begins with the next call. It is noticed by itself where the tokens did not grow by one column, or
        there are more or fewer rows."""
        self._fresh = True

    def reset(self) -> None:
        """Forget everything that was found and counted."""
        self._flags.clear()
        self._now, self._totals, self._clipped = None, None, None
        self._past, self._unsaid = [], []
        self._found.clear()
        self._fresh, self._begun, self._tokens = True, 0, 0

    def close(self) -> None:
        """Take the hook off the model."""
        if self._keeper is not None:
            self._keeper.close()

    def __enter__(self) -> NumericalStabilityLogitsProcessor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- finding out -----------------------------------------------------------------------------------------------------------

    def _close_generation(self) -> None:
        """Another one begins. Whether this one was healthy comes later."""
        past = self._now
        if past is None:
            return
        kinds = past.kinds()
        self._totals = kinds if self._totals is None else kinds + self._totals.to(kinds.device)
        self._past.append(past)
        if kinds.device.type == "cuda":
            self._flags.send(kinds.sum(), past, last=True)
        else:
            self._learn(past, int(kinds.sum()), last=True)

    def _poll(self) -> None:
        """What has come from the device meanwhile."""
        for count, of, last in self._flags.arrived():
            self._learn(of, count, last)
        self._raise_unsaid()

    def _learn(self, of: Generation, count: int, last: bool) -> None:
        if last and of in self._past:
            self._past.remove(of)
        if count > len(of.known):
            self._resolve(of)

    def _gather(self) -> None:
        """Everything that the device knows."""
        for of in (*self._past, *([] if self._now is None else [self._now])):
            self._resolve(of)
        self._past.clear()
        self._flags.clear()

    def _resolve(self, of: Generation) -> None:
        """Add what is bad in a generation to what was found. Waits for the device."""
        first, evidence = (t.tolist() for t in of.fold())
        moved = [False] * len(first) if of.moved is None else of.moved.tolist()
        place: Birthplace | None = None
        rows = sorted((position, row) for row, position in enumerate(first) if position >= 0 and row not in of.known)
        for position, row in rows:
            if place is None or not place.everywhere:
                elsewhere = moved[row] or of.forgot(position)
                place = self._birthplace(of, row, position, elsewhere) if len(of.known) < _LOCATED else Birthplace()
            kind = "nan" if evidence[row] != evidence[row] else "inf" if evidence[row] > 0 else "all-banned"
            bad = BadRow(row, position, kind, of.number, place.where, place.op, place.because)
            of.known[row] = bad
            self._found.append(bad)
            self._unsaid += [bad] if self.on_bad == "raise" else []
            if self.verbose:
                log.warning("nanproof: %s", bad)

    def _birthplace(self, of: Generation, row: int, position: int, moved: bool) -> Birthplace:
        if self._keeper is None or of.prompt is None:
            return Birthplace()
        try:
            tokens = None if moved else of.ids[:, : of.width + position]
            return self._keeper.find(of.prompt, tokens, row, position)
        except Exception:
            log.debug("nanproof: where the row went bad was not found", exc_info=True)
            return Birthplace()

    def _raise_unsaid(self) -> None:
        if not self._unsaid:
            return
        rows, self._unsaid = self._unsaid, []
        self._fresh = True
        more = f" {len(rows) - 1} more rows are bad." if len(rows) > 1 else ""
        raise BadLogits(
            f"nothing can be sampled: {rows[0]}.{more} The model is broken, or was given something broken: do not train on "
            'what it samples; go back to weights from before. on_bad="end" ends such rows instead',
            rows,
        )


def _first(eos_token_id: Any) -> int | None:
    """The first of one or several ids; None where there is none."""
    ids = eos_token_id.tolist() if isinstance(eos_token_id, Tensor) else eos_token_id
    ids = [ids] if isinstance(ids, int) else list(ids) if isinstance(ids, Sequence) and not isinstance(ids, str) else []
    first = ids[0] if ids else None
    return first if isinstance(first, int) and not isinstance(first, bool) and first >= 0 else None


def _eos_of(model: nn.Module) -> Any:
    for holder in ("generation_config", "config"):
        config = getattr(model, holder, None)
        text = getattr(config, "get_text_config", None)
        for each in (config, text() if callable(text) else None):
            if getattr(each, "eos_token_id", None) is not None:
                return each.eos_token_id  # type: ignore[union-attr]
    return None
