"""A short session before a long one. It ends in one of three words: healthy, handled or failed.

In the document's own script NaN that was "handled" passed for a success. A NaN that was met and kept out of the weights is good
news about the guard and bad news about the training, so `handled` is not `healthy`: it says what was met and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from nanproof import Incident
from nanproof_recipes.folders import RECORDS, begin, clear, locked
from nanproof_recipes.machine import nonfinite_tensors, reproducible
from nanproof_recipes.progress import Progress
from nanproof_recipes.results import FILE, few, plain
from nanproof_recipes.vlm_grpo.arms import WARM, Setting
from nanproof_recipes.vlm_grpo.data.scenes import load
from nanproof_recipes.vlm_grpo.faults import NONE, Session, known
from nanproof_recipes.vlm_grpo.results import Result
from nanproof_recipes.vlm_grpo.running import KEYS, Workshop
from nanproof_recipes.vlm_grpo.train import grpo_loop
from nanproof_recipes.vlm_grpo.train.training import Trained
from nanproof_recipes.vlm_grpo.train.warm import Schooling, schooling_for

HEALTHY, HANDLED, FAILED = "healthy", "handled", "failed"
EXIT = {HEALTHY: 0, HANDLED: 1, FAILED: 3}
"""2 is of every command: it could not run."""
OWN, LAST = "smoke", "session"
"""Folders: of what smoke makes, and of its last session in it."""
TRAIN, VALID = 300, 64
"""Scenes of a warm start that smoke makes for itself."""


@dataclass(frozen=True, slots=True)
class Smoked:
    """What a short session met."""

    arm: str
    trainer: str
    fault: str
    fired: bool
    """Whether the session lived to meet the fault."""
    guarded: bool
    ending: str
    wanted: int
    """Steps that were asked for."""
    steps: int
    taken: int
    """Steps that moved the weights."""
    seconds: float
    first_reward: float | None
    last_reward: float | None
    bad_losses: int
    """Steps whose logged loss was NaN or Inf; the same of gradients is next."""
    bad_gradients: int
    rows: int
    bad_rows: int
    """Rows of logits with a NaN or +Inf, of `rows` that were sampled from; the same of rewards is next."""
    first_bad_row: str | None
    """Where the first of them was."""
    rewards: int
    bad_rewards: int
    tensors: int
    nonfinite: int
    refused: int
    skipped: int
    rolled_back: int
    records: str | None
    """Folder of the guard's records."""
    incidents: Sequence[Mapping[str, Any]] = field(default=())

    @property
    def bad(self) -> bool:
        """Whether anything bad was met."""
        counts = (
            self.bad_losses,
            self.bad_gradients,
            self.bad_rows,
            self.bad_rewards,
            self.nonfinite,
            self.refused,
            self.skipped,
        )
        return any(counts) or bool(self.incidents)

    @property
    def outcome(self) -> str:
        """Without a guard nothing that is bad is handled: it was learned from, or will be."""
        if self.ending != "finished" or self.nonfinite or not self.taken:
            return FAILED
        if not self.bad:
            return HEALTHY
        return HANDLED if self.guarded else FAILED

    @property
    def advice(self) -> list[str]:
        """What to do, in sentences."""
        if self.outcome == HEALTHY:
            return ["Nothing bad was met. That is said of these steps and of no others: keep the guard on."]
        fixes = [f for i in self.incidents if (f := (i.get("diagnosis") or {}).get("fix"))]
        told = list(dict.fromkeys(fixes))
        if self.bad_rows and not fixes:
            told.append("Logits were NaN or Inf: look for the module they were born in, not for a way to sample from them.")
        if self.bad_rewards:
            told.append("A reward was NaN or Inf: repair the reward function, for example where it divides by a length of 0.")
        if self.records is not None and self.incidents:
            told.append(f"`nanproof report {self.records}` shows every incident.")
        if self.outcome == HANDLED:
            return ["The weights are finite and training went on, but this is not fine: find the cause before a long run.", *told]
        if not self.guarded:
            told.append("The same under a guard, `--arm guarded`, names the cause.")
        return ["Do not start a long run.", *told]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = plain(asdict(self))
        return {"outcome": self.outcome, "exit": EXIT[self.outcome], **found, "advice": self.advice}

    def lines(self) -> list[str]:
        """For a person."""
        fault = "" if self.fault == NONE else f", fault {self.fault}{'' if self.fired else ', which was not reached'}"
        where = f"; first {self.first_bad_row}" if self.first_bad_row else ""
        hidden = "; TRL logs a NaN as 0: gradients tell" if self.trainer == "trl" else ""
        return [
            f"{self.outcome}: {self.arm}, {self.trainer}{fault}",
            f"  steps      {self.steps} of {self.wanted} in {self.seconds:.1f} s: {self.ending}",
            f"             {self.taken} taken, {self.refused} attempts refused, {self.skipped} skipped",
            f"  reward     {few(self.first_reward)} at first, {few(self.last_reward)} at last",
            f"  rewards    {_of(self.bad_rewards, self.rewards)}",
            f"  logits     {_of(self.bad_rows, self.rows)} rows that were sampled from{where}",
            f"  losses     {_of(self.bad_losses, self.steps)} steps{hidden}",
            f"  gradients  {_of(self.bad_gradients, self.steps)} steps",
            f"  weights    {_of(self.nonfinite, self.tensors)} adapters",
            *(line for incident in self.incidents for line in _incident(incident)),
            *self.advice,
        ]


def _incident(told: Mapping[str, Any]) -> list[str]:
    incident = Incident.from_json(dict(told))
    found = incident.diagnosis
    missing = "not found" if incident.same_as is None else f"as at step {incident.same_as}"
    cause = missing if found is None else f"{found.cause}{', its fix verified on the replay' if found.verified else ''}"
    return [f"  incident   {incident}", f"  cause      {cause}"]


def _of(bad: int, of: int) -> str:
    return f"NaN or Inf in {bad} of {of}"


def smoke(
    out: Path, setting: Setting, model: str = "tiny", *, fault: str = NONE, sft_steps: int = 30, progress: Progress | None = None
) -> Smoked:
    """Train a few steps from the warm start in `out`, or from a small one that is made in `out`/smoke, and look at everything."""
    known(fault, setting.steps)
    if setting.trainer == "trl":
        from nanproof_recipes.vlm_grpo.train import grpo_trl

        grpo_trl.usable()  # else nothing is begun
    workshop = _workshop(out, model, sft_steps, progress if progress is not None else Progress())
    seeing, scenes = workshop.fresh(), workshop.sets["train"]
    folder = out / OWN / LAST
    told = {**setting.to_json(), "model": model, "scenes": len(scenes), "fault": fault}
    clear(folder, KEYS)
    begin(folder, told)
    session = Session(seeing.model, batch=setting.batch, trainer=setting.trainer, fault=fault)
    try:
        with reproducible(), locked(folder), workshop.progress.of(f"smoke {setting.name}", setting.steps) as advance:
            if setting.trainer == "trl":
                trained = grpo_trl.train(seeing, scenes, setting, folder, advance)
            else:
                trained = grpo_loop.train(seeing, scenes, setting, folder, advance)
    finally:
        session.undo()
    return _met(trained, session, folder)


def _workshop(out: Path, model: str, sft_steps: int, progress: Progress) -> Workshop:
    """With the warm start that is there, as it is. One of a few steps is kept apart: an arm should not begin with it."""
    for root in (out, out / OWN):
        if (root / WARM / FILE).exists():
            found = Result.load(root / WARM).setting
            how = {f.name: found[f"sft_{f.name}"] for f in fields(Schooling) if f"sft_{f.name}" in found}
            counts = [len(load(root / "data" / f"{name}.jsonl")) for name in ("train", "valid")]
            return Workshop(root, model, train=counts[0], valid=counts[1], schooling=Schooling(**how), progress=progress)
    return Workshop(out / OWN, model, train=TRAIN, valid=VALID, schooling=schooling_for(model, sft_steps), progress=progress)


def _met(trained: Trained, session: Session, folder: Path) -> Smoked:
    rewards = [x for line in trained.log if (x := line.get("reward")) is not None]
    bad = {name: sum(not math.isfinite(line.get(name, 0.0)) for line in trained.log) for name in ("loss", "grad_norm")}
    nonfinite, tensors = trained.nonfinite or 0, sum(p.requires_grad for p in trained.model.parameters())
    if not trained.device_lost:  # else nothing can be read of it any more
        nonfinite, tensors = nonfinite_tensors(trained.model)
    return Smoked(
        arm=trained.setting.name,
        trainer=trained.setting.trainer,
        fault=session.fault,
        fired=session.fired,
        guarded=trained.setting.protect,
        **trained.outcome(),
        wanted=trained.setting.steps,
        taken=trained.steps - trained.skipped,
        first_reward=rewards[0] if rewards else None,
        last_reward=rewards[-1] if rewards else None,
        bad_losses=bad["loss"],
        bad_gradients=bad["grad_norm"],
        rows=session.rows,
        bad_rows=session.bad_rows,
        first_bad_row=session.first_bad_row,
        rewards=session.rewards,
        bad_rewards=session.bad_rewards,
        tensors=tensors,
        nonfinite=nonfinite,
        records=str(folder / RECORDS) if trained.setting.protect else None,
    )
