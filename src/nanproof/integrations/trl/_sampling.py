"""The sampling of TRL's GRPOTrainer, guarded: a model that gives NaN does not end the run while it samples, nor is it trained on.

A row of logits from which nothing can be sampled only ends (see `nanproof.numerics.generation`). What was sampled in it is masked
from the loss, and its reward is taken away, which TRL takes for "not scored": the row is left out of its group's mean and
deviation, and its advantage is 0. It is an incident every time. Too many of them, or a generation without a healthy row, is the
guard's business: the run goes back to a good state, or it halts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanproof._sampling import ENDED, UNTRAINED, incident_of, reached
from nanproof.core._caps import SkipCaps
from nanproof.integrations._patches import Patches
from nanproof.integrations._protected import ProtectedRun
from nanproof.numerics.generation import BadRow, NumericalStabilityLogitsProcessor

log = logging.getLogger("nanproof")

SAMPLING = {
    "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields"),
    "_generate_and_score_completions": ("inputs",),
}
"""Private methods of GRPOTrainer that are wrapped for this, and the parameters they must begin with."""


class Sampling:
    """Stands between one GRPOTrainer and what it samples."""

    def __init__(self, trainer: Any, patches: Patches, guard: ProtectedRun) -> None:
        self._trainer, self._guard = trainer, guard
        self._caps = SkipCaps(guard.policy)
        self._bad: list[bool] | None = None
        """Of the generation under way: which of this rank's rows were bad. None where it was not looked at."""
        self._everyone: list[bool] = []
        """Which rows of all ranks were bad."""
        self._births: list[BadRow] = []
        self._told = -1
        """The last generation of the processor whose bad rows are known."""
        self._begun: list[list[int]] = []
        """Prompt and completion of every row after the first turn, where tools take turns with the model."""
        self._reached = self._looked = self._said = False
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        eos = getattr(getattr(trainer, "generation_config", None), "eos_token_id", None)
        self.processor = NumericalStabilityLogitsProcessor(on_bad="end", eos_token_id=eos, model=model)
        patches.later(self.processor.close)
        patches.wrap(trainer, "_generate_single_turn", self._turn)
        patches.wrap(trainer, "_generate_and_score_completions", self._scored)
        guard.counters.append(self.counters)
        patches.later(lambda: guard.counters.remove(self.counters) if self.counters in guard.counters else None)

    def counters(self) -> dict[str, Tensor]:
        """What was sampled so far in this run, on the device; nothing where it was not looked at."""
        if not self._looked:
            return {}
        return {f"generation/{name}": value for name, value in self.processor.counters().items() if name != "clipped"}

    @property
    def _another_engine(self) -> bool:
        """On all ranks or on none."""
        trainer = self._trainer
        return bool(getattr(trainer, "use_vllm", False) or getattr(trainer, "use_transformers_continuous_batching", False))

    # -- one generation --------------------------------------------------------------------------------------------------------

    def _turn(self, original: Callable[..., Any], prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """The model samples a completion for every prompt: once, and again for those whose tools have answered."""
        trainer = self._trainer
        if self._another_engine:
            self._say("another engine samples (vLLM, continuous batching): its logits are out of reach, and not looked at")
            return original(prompt_ids, *args, **kwargs)
        self._reached = False
        self.processor.start()
        during = Patches()
        during.wrap(trainer.accelerator.unwrap_model(trainer.model_wrapped), "generate", self._generate)
        try:
            sampled = original(prompt_ids, *args, **kwargs)
        finally:
            during.undo()
        found = self.processor.bad_rows
        if not self._reached or found is None or len(found) != len(prompt_ids):
            self._say("this trainer samples in a way of its own: its logits are not looked at")
            return sampled
        self._looked = True
        # TRL has just read the completions, and waited for them: this small copy finds the device idle.
        flags: list[bool] = found.tolist()
        if any(flags):
            births = [birth for birth in self.processor.read() if birth.generation > self._told]
            self._told = max((birth.generation for birth in births), default=self._told)
            self._births += births
        self._note(flags, prompt_ids, sampled[0])
        return sampled

    def _generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._reached = True
        kwargs["logits_processor"] = [*(kwargs.get("logits_processor") or ()), self.processor]
        return original(*args, **kwargs)

    def _note(self, flags: list[bool], prompt_ids: Any, completion_ids: Any) -> None:
        if self._bad is None:
            self._bad = flags
            if getattr(self._trainer, "tools", None) or getattr(self._trainer, "rollout_func", None):
                self._begun = [[*prompt, *said] for prompt, said in zip(prompt_ids, completion_ids, strict=True)]
            return
        # A later turn has some of the rows only, and does not say which: those that begin as this one does. Rows that are equal
        # up to here cannot be told apart, and are all left out; so are all, where it begins as none of them does.
        for prompt, bad in zip(prompt_ids, flags, strict=True):
            if bad:
                same = [list(prompt[: len(begun)]) == begun for begun in self._begun]
                self._bad = [was or now or not any(same) for was, now in zip(self._bad, same, strict=True)]

    def unscored(self, rewards: Tensor) -> tuple[Tensor, Tensor | None]:
        """The rewards of all ranks, NaN in the rows that were bad; and which rows are valid, None where all of them are."""
        if self._another_engine:
            return rewards, None
        accelerator = self._trainer.accelerator
        rows, found = len(rewards) // accelerator.num_processes, self._bad or []
        # A rollout of the user's own may have sampled other rows than these: then nobody knows which ones were bad.
        self._bad = found if len(found) == rows else [any(found)] * rows
        self._everyone = self._bad
        if accelerator.num_processes > 1:
            self._everyone = accelerator.gather(torch.tensor(self._bad, device=accelerator.device)).tolist()
        if not any(self._everyone):
            return rewards, None
        bad = torch.tensor(self._everyone, device=rewards.device)
        return rewards.masked_fill(bad.unsqueeze(1), torch.nan), ~bad

    def _scored(self, original: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Completions with their rewards. Where the run went back because of them, they are sampled once more."""
        while True:
            self._bad, self._everyone, self._births, self._begun = None, [], [], []
            batch = original(inputs, *args, **kwargs)
            if not any(self._everyone):
                if self._trainer.model.training:
                    self._caps.accepted()
                return batch
            if not self._went_back():
                return self._masked(batch)

    def _masked(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The bad rows count for nothing, and the mean over tokens is one over those that are left."""
        mask: Tensor = batch["completion_mask"]
        bad = torch.tensor(self._bad, device=mask.device)
        counted = mask if batch.get("tool_mask") is None else mask * batch["tool_mask"]
        left_out = self._trainer.accelerator.gather((counted * bad.unsqueeze(1)).sum()).sum()
        advantages: Tensor = batch["advantages"]
        changed = {
            "completion_mask": mask.masked_fill(bad.unsqueeze(1), 0),
            "advantages": advantages.masked_fill(bad.view(-1, *[1] * (advantages.dim() - 1)), 0.0),
            "num_items_in_batch": batch["num_items_in_batch"] - left_out,
        }
        return {**batch, **changed}

    # -- what becomes of it ----------------------------------------------------------------------------------------------------

    def _went_back(self) -> bool:
        """Report bad rows. Says whether the run is at an earlier state because of them; where it cannot be, and there are too
        many, it halts."""
        guard, training = self._guard, bool(self._trainer.model.training)
        births = self._from_all_ranks()
        step, where = guard.next_step - guard.open, "" if training else " in an evaluation"
        cap, count = reached(self._caps, self._everyone) if training else (None, 0)
        ended = "" if cap else f"{ENDED}{UNTRAINED if training else ''}"
        incident = incident_of(guard, step, self._everyone, births, where, ended)
        went_back = guard.engine.sampled(replace(incident, cap_count=count), cap)
        if went_back:
            self._caps = SkipCaps(guard.policy)
        return went_back

    def _from_all_ranks(self) -> list[BadRow]:
        """With their rows counted over all ranks. All ranks know that there are bad rows, so all of them come here."""
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1:
            return self._births
        from accelerate.utils import gather_object  # type: ignore[import-untyped]

        before = accelerator.process_index * len(self._bad or ())
        gathered: list[BadRow] = gather_object([replace(birth, row=before + birth.row) for birth in self._births])
        return gathered

    def _say(self, what: str) -> None:
        if not self._said:
            self._said = True
            log.warning("nanproof: %s", what)
