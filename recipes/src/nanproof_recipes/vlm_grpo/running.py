"""Workshop: what every command of the recipe shares. Scenes and warm start are made once; each arm has a folder of its own, which
is not worked on twice.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from nanproof import UsageError
from nanproof_recipes.folders import RECORDS, begin, begun, clear, doctors_word, locked
from nanproof_recipes.library import printable
from nanproof_recipes.machine import device, nonfinite_tensors, ran_on, reproducible
from nanproof_recipes.progress import Progress
from nanproof_recipes.results import FILE
from nanproof_recipes.vlm_grpo.arms import WARM, Setting
from nanproof_recipes.vlm_grpo.data import scenes
from nanproof_recipes.vlm_grpo.data.scenes import Scene
from nanproof_recipes.vlm_grpo.models import Seeing, load
from nanproof_recipes.vlm_grpo.patches import DocumentProcessor
from nanproof_recipes.vlm_grpo.results import Result
from nanproof_recipes.vlm_grpo.train import grpo_loop
from nanproof_recipes.vlm_grpo.train.asking import Chance, Marks, examine
from nanproof_recipes.vlm_grpo.train.rewards import caption_reward, place_reward
from nanproof_recipes.vlm_grpo.train.training import (
    LOGGED,
    Trained,
    chosen_precision,
    died_of_sampling,
    write_log,
)
from nanproof_recipes.vlm_grpo.train.warm import Schooling, school, schooling_for

MODEL, ADAPTER = "model", "adapter"
KEYS = ("arm", "model", "scenes")
"""What the settings of every arm name."""
SHOWN = 8
"""Scenes with replies that a result keeps for people to look at."""
LAST = 20
"""Steps that a logged mean is taken over."""


class Workshop:
    """One model, one set of scenes, one folder."""

    def __init__(
        self,
        out: Path,
        model: str = "tiny",
        *,
        train: int = 3000,
        valid: int = 500,
        data_seed: int = 0,
        schooling: Schooling | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.out, self.model_name = out, model
        self.progress = progress if progress is not None else Progress()
        self.schooling = schooling if schooling is not None else schooling_for(model)
        self._counts = {"train": train, "valid": valid, "seed": data_seed}
        self._sets: dict[str, list[Scene]] | None = None
        self._warm: Seeing | None = None

    @classmethod
    def found(cls, out: Path, progress: Progress | None = None) -> Workshop:
        """That of a folder in which a warm start was made: with its model, its scenes and its schooling."""
        there = begun(out / WARM, (*KEYS, "train", "valid"))
        if there is None:
            raise UsageError(
                f"{printable(str(out))} has no warm start. `nanproof recipe vlm-grpo sft --out {printable(str(out))}` makes it"
            )
        how = Schooling(**{f.name: there[f"sft_{f.name}"] for f in fields(Schooling)})
        return cls(out, there["model"], train=there["train"], valid=there["valid"], schooling=how, progress=progress)

    # -- what is shared --------------------------------------------------------------------------------------------------------

    @property
    def sets(self) -> dict[str, list[Scene]]:
        """Scenes "train" and "valid": those in the folder, made now if there are none."""
        if self._sets is None:
            folder, wanted = self.out / "data", (self._counts["train"], self._counts["valid"])
            if not (folder / "train.jsonl").exists():
                self.make_data()
            found = {name: scenes.load(folder / f"{name}.jsonl") for name in ("train", "valid")}
            if len(found["train"]) < wanted[0] or len(found["valid"]) < wanted[1]:
                raise UsageError(
                    f"{folder} has {len(found['train'])} scenes to train on and {len(found['valid'])} to ask about, not "
                    f"{wanted[0]} and {wanted[1]}. Give --train and --valid as they are there, or choose another --out; "
                    f"`nanproof recipe vlm-grpo data --out {self.out}` makes them anew"
                )
            self._sets = {"train": found["train"][: wanted[0]], "valid": found["valid"][: wanted[1]]}
        return self._sets

    def make_data(self) -> dict[str, list[Scene]]:
        """Make the scenes and write them into the folder."""
        made = scenes.make(self._counts["train"], self._counts["valid"], self._counts["seed"])
        scenes.keep(self.out, made)
        self._sets = None
        return made

    def warm(self, again: bool = False) -> Result:
        """The warm start, made once: every arm begins with it."""
        told = {
            "arm": WARM,
            "model": self.model_name,
            "scenes": scenes.checksum(self.sets),
            **{name: len(self.sets[name]) for name in ("train", "valid")},
            **{f"sft_{key}": value for key, value in asdict(self.schooling).items()},
        }
        folder = self.out / WARM
        there = self._there(folder, told, again)
        if there is not None:
            return there
        seeing = load(self.model_name, self.schooling.seed)  # where it cannot be loaded, nothing is begun
        clear(folder, KEYS)
        begin(folder, told)
        with reproducible(), locked(folder):
            seeing.model.to(device())
            chosen = chosen_precision(seeing.model, "auto")
            with self.progress.of("warm start", self.schooling.steps) as advance:
                made = school(
                    seeing, self.sets["train"], self.schooling, folder / RECORDS, autocast=chosen.autocast, tick=advance
                )
            marks, texts = self._asked(seeing, "warm start")
            assert marks is not None
            greedy, _ = examine(seeing, self.sets["valid"], temperature=0)
            chance, _ = examine(seeing, self.sets["valid"], processors=[Chance()])
            seeing.model.save_pretrained(folder / MODEL)
            seeing.processor.save_pretrained(folder / MODEL)
            result = Result(
                name=WARM,
                setting=told,
                ending="finished",
                steps=self.schooling.steps,
                seconds=made.seconds,
                reward=marks.reward,
                caption=marks.caption,
                place=marks.place,
                greedy=greedy.reward,
                chance=chance.reward,
                scenes=marks.scenes,
                loss=made.losses[-1],
                notes=[f"precision: {chosen.name}. {chosen.reason}", ran_on()],
                curves={"step": [float(i) for i in range(len(made.losses))], "loss": list(made.losses)},
                samples=_shown(self.sets["valid"], texts),
                incidents=[incident.to_json() for incident in made.incidents],
            )
            result.save(folder)  # last of all: what has a result is done
        self._warm = None
        return result

    def fresh(self) -> Seeing:
        """A copy of the warm start that an arm may train."""
        if self._warm is None:
            self.warm()
            self._warm = load(str(self.out / WARM / MODEL))
        return replace(self._warm, model=deepcopy(self._warm.model))

    # -- one arm ---------------------------------------------------------------------------------------------------------------

    def arm(self, setting: Setting, again: bool = False) -> Result:
        """Train an arm and ask its model. One that is done is not done again; one that was stopped is begun anew."""
        if setting.trainer == "trl":
            from nanproof_recipes.vlm_grpo.train import grpo_trl

            grpo_trl.usable()  # else nothing is begun
        told, folder = self._told(setting), self.out / setting.name
        seeing = self.fresh() if again else None  # a warm start that is refused costs no result
        there = self._there(folder, told, again)
        if there is not None:
            return there
        seeing = seeing if seeing is not None else self.fresh()
        clear(folder, KEYS)
        begin(folder, told)
        with reproducible(), locked(folder):
            trained = self._trained(seeing, setting, folder)
            result = self._measured(seeing, trained, told, folder)
            if not trained.device_lost:
                trained.model.save_pretrained(folder / ADAPTER)
            result.save(folder)
        del seeing, trained
        gc.collect()  # a guard and its model refer to each other
        return result

    def _trained(self, seeing: Seeing, setting: Setting, folder: Path) -> Trained:
        self.progress.say(f"{setting.name}: {setting.says}")
        with self.progress.of(f"train {setting.name}", setting.steps) as advance:
            if setting.trainer == "trl":
                from nanproof_recipes.vlm_grpo.train import grpo_trl

                trained = grpo_trl.train(seeing, self.sets["train"], setting, folder, advance)
            else:
                trained = grpo_loop.train(seeing, self.sets["train"], setting, folder, advance)
        for note in trained.notes:
            self.progress.say(f"  {note}")
        return trained

    def _measured(self, seeing: Seeing, trained: Trained, told: dict[str, Any], folder: Path) -> Result:
        setting, own = trained.setting, replace(seeing, model=trained.model)
        bad, tensors = trained.nonfinite, sum(p.requires_grad for p in trained.model.parameters())
        if not trained.device_lost:
            bad, tensors = nonfinite_tensors(trained.model)
        asked = not trained.device_lost and (not bad or setting.patched)  # on CUDA, drawing from NaN ends the use of the device
        marks, texts = self._asked(own, setting.name, setting) if asked else (None, [])
        greedy = self._asked(own, "", setting, temperature=0)[0] if marks is not None else None
        log = write_log(folder, trained.log)
        means: dict[str, Any] = {name: trained.last(name, LAST) for name in ("reward_std", "kl", "entropy")}
        return Result(
            name=setting.name,
            setting=told,
            **trained.outcome(),
            reward=None if marks is None else marks.reward,
            caption=None if marks is None else marks.caption,
            place=None if marks is None else marks.place,
            greedy=None if greedy is None else greedy.reward,
            scenes=0 if marks is None else marks.scenes,
            loss=trained.last("loss"),
            train_reward=trained.last("reward", LAST),
            **means,
            grad_norm=trained.last("grad_norm"),
            nonfinite=bad,
            tensors=tensors,
            nonfinite_steps=trained.nonfinite_steps,
            bad_rows=trained.bad_rows,
            memory=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            notes=[*trained.notes, *doctors_word(log), ran_on()],
            curves=_curves(trained.log),
            samples=_shown(self.sets["valid"], texts),
        )

    def _there(self, folder: Path, told: Mapping[str, Any], again: bool) -> Result | None:
        """The result of an arm that is done, with the same settings. `again` clears its folder."""
        there = Result.done(folder, told, KEYS, again, "sft --again" if folder.name == WARM else "train --again")
        if there is not None:
            self.progress.say(f"{there.name}: done already, {folder / FILE}")
        return there

    # -- asking ----------------------------------------------------------------------------------------------------------------

    def _asked(
        self, seeing: Seeing, name: str, setting: Setting | None = None, temperature: float = 1.0
    ) -> tuple[Marks | None, list[str]]:
        """Replies to the held-out scenes; None where the model cannot be sampled from. A patched model is asked as it was
        sampled from, with the document's processor."""
        processors = [DocumentProcessor()] if setting is not None and setting.patched else []
        with torch.random.fork_rng(devices=[device()] if device().type == "cuda" else []):
            torch.manual_seed(0)
            try:
                progress = self.progress if name else Progress()  # without a name there is nothing to say
                with progress.of(f"ask   {name}", len(self.sets["valid"])) as advance:
                    return examine(seeing, self.sets["valid"], temperature=temperature, processors=processors, tick=advance)
            except RuntimeError as error:
                if not died_of_sampling(error):
                    raise
                return None, []

    def test(self, name: str) -> Result:
        """The model of an arm asked again; its result file stays as it is."""
        folder = self.out / name
        there = Result.load(folder)
        own = self.load(name)
        patched = bool((begun(folder, KEYS) or {}).get("patched"))
        marks, texts = self._asked(own, name, replace(_ANY, patched=patched))
        if marks is None:
            return replace(there, reward=None, caption=None, place=None, greedy=None, scenes=0, samples=())
        shown = _shown(self.sets["valid"], texts)
        return replace(there, reward=marks.reward, caption=marks.caption, place=marks.place, scenes=marks.scenes, samples=shown)

    def load(self, name: str) -> Seeing:
        """The model of an arm that was trained in this folder, or of the warm start."""
        seeing = self.fresh()
        if name != WARM:
            from peft import PeftModel

            folder = self.out / name / ADAPTER
            if not (folder / "adapter_config.json").exists():
                raise UsageError(f"{folder} has no adapters. Train {name} first, in --out {self.out}")
            seeing = replace(seeing, model=PeftModel.from_pretrained(seeing.model, folder))
        seeing.model.to(device())
        return seeing

    def _told(self, setting: Setting) -> dict[str, Any]:
        warm = {f"sft_{key}": value for key, value in asdict(self.schooling).items()}
        return {**setting.to_json(), "model": self.model_name, "scenes": scenes.checksum(self.sets), **warm}


_ANY = Setting(arm="any", says="")


def _curves(log: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    return {name: [line.get(name) for line in log] for name in ("step", *LOGGED)}


def _shown(asked: Sequence[Scene], said: Sequence[str]) -> list[dict[str, str]]:
    return [
        {
            "question": scene.question,
            "right": scene.answer,
            "said": text,
            "caption": f"{caption_reward(text, scene):.2f}",
            "place": f"{place_reward(text, scene):.2f}",
        }
        for scene, text in list(zip(asked, said, strict=False))[:SHOWN]
    ]
