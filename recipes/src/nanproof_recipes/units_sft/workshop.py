"""Workshop: what every command of the recipe shares. The model is loaded once, the questions are made once, and each arm has a
folder of its own that is not worked on twice.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanproof import UsageError
from nanproof_recipes.folders import begin, begun, doctors_word, locked, refuse_another
from nanproof_recipes.library import write_whole
from nanproof_recipes.machine import device, nonfinite_tensors, ran_on, reproducible
from nanproof_recipes.progress import Progress
from nanproof_recipes.units_sft.arms import Setting
from nanproof_recipes.units_sft.asking import measured_loss, replies
from nanproof_recipes.units_sft.data import questions
from nanproof_recipes.units_sft.data.questions import Question
from nanproof_recipes.units_sft.data.samples import Example, examples, prompt
from nanproof_recipes.units_sft.data.units import written
from nanproof_recipes.units_sft.models import Language, load_language
from nanproof_recipes.units_sft.results import FILE, Result
from nanproof_recipes.units_sft.scoring import is_right, parse, score
from nanproof_recipes.units_sft.training import Trained, train

ADAPTER, STATE = "adapter", "trainer_state.json"
KEYS = ("arm", "model", "questions")
"""What the settings of every arm name."""
SHOWN = 8
"""Questions with replies that a result keeps for people to look at."""


class Workshop:
    """One model, one set of questions, one folder."""

    def __init__(
        self,
        out: Path,
        model: str,
        *,
        train: int = 1000,
        valid: int = 1000,
        data_seed: int = 0,
        batch: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.out, self.model_name = out, model
        self.progress = progress if progress is not None else Progress()
        self._counts = {"train": train, "valid": valid, "seed": data_seed}
        self._language: Language | None = None
        self._sets: dict[str, list[Question]] | None = None
        self.ask_at_once = batch or (256 if device().type == "cuda" else 32)

    # -- what is shared --------------------------------------------------------------------------------------------------------

    @property
    def language(self) -> Language:
        """As it was loaded; arms get copies."""
        if self._language is None:
            self.progress.say(f"loading {self.model_name}")
            self._language = load_language(self.model_name)
        return self._language

    def fresh(self) -> Language:
        """A copy that an arm may cast and train."""
        return replace(self.language, model=deepcopy(self.language.model))

    @property
    def sets(self) -> dict[str, list[Question]]:
        """Questions "train" and "valid": those in the folder, made now if there are none."""
        if self._sets is None:
            folder = self.out / "data"
            if not (folder / "train.jsonl").exists():
                self.make_data()
            found = {name: questions.load(folder / f"{name}.jsonl") for name in ("train", "valid")}
            wanted = self._counts["train"], self._counts["valid"]
            if len(found["train"]) < wanted[0] or len(found["valid"]) < wanted[1]:
                raise UsageError(
                    f"{folder} has {len(found['train'])} questions to train on and {len(found['valid'])} to ask, not {wanted[0]} "
                    f"and {wanted[1]}. `nanproof recipe units-sft data --out {self.out}` makes them anew, or choose another --out"
                )
            self._sets = {"train": found["train"][: wanted[0]], "valid": found["valid"][: wanted[1]]}
        return self._sets

    def make_data(self) -> dict[str, list[Question]]:
        """Make the questions and write them into the folder."""
        made = questions.make(self._counts["train"], self._counts["valid"], self._counts["seed"])
        questions.save_sets(self.out / "data", made)
        self._sets = None
        return made

    # -- one arm ---------------------------------------------------------------------------------------------------------------

    def done(self, setting: Setting, *, again: bool = False, **more: Any) -> Result | None:
        """The result of an arm that is there already, made with the same settings. `again` clears the arm's folder."""
        folder, told = self.out / setting.name, self._told(setting, **more)
        there = Result.done(folder, told, KEYS, again)
        if there is not None:
            self.progress.say(f"{setting.name}: done already, {folder / FILE}")
        return there

    def arm(
        self,
        setting: Setting,
        *,
        again: bool = False,
        rows: Sequence[Example] | None = None,
        notes: Sequence[str] = (),
        **more: Any,
    ) -> Result:
        """Train an arm and ask its model. One that is done is not done again; one that was stopped goes on."""
        there = self.done(setting, again=again, **more)
        if there is not None:
            return there
        language, sets = self.fresh(), self.sets  # where one of them is missing, nothing is begun
        folder, told = self.begin(setting, **more), self._told(setting, **more)
        with reproducible(), locked(folder):
            given = rows if rows is not None else examples(language, sets["train"], setting)
            trained = self._train(language, given, setting, folder)
            trained.notes[:0] = notes
            result = self._measure(language, trained, told, folder)
            trained.model.save_pretrained(folder / ADAPTER)
            result.save(folder)  # last of all: what has a result is done
            shutil.rmtree(folder / "trainer", ignore_errors=True)
        return result

    def begin(self, setting: Setting, **more: Any) -> Path:
        """The arm's folder, with its settings in it."""
        return begin(self.out / setting.name, self._told(setting, **more))

    def _train(self, language: Language, rows: Sequence[Example], setting: Setting, folder: Path) -> Trained:
        total = -(-len(rows) // setting.batch) * setting.epochs
        with self.progress.of(f"train {setting.name}", total) as advance:
            start = self.adapters(setting.start) if setting.start else None
            trained = train(language, rows, setting, folder, start=start, tick=advance)
        for note in trained.notes:
            self.progress.say(f"  {note}")
        return trained

    def _measure(self, language: Language, trained: Trained, told: dict[str, Any], folder: Path) -> Result:
        setting, model = trained.setting, trained.model.to(device())
        valid = self.sets["valid"]
        said = self.ask(replace(language, model=model), setting.prompt, setting.name)
        marks = score(said, [q.correct for q in valid])
        held_out = measured_loss(model, examples(language, valid, setting), language.tokenizer.pad_token_id)
        bad, tensors = nonfinite_tensors(model)
        write_whole(folder / STATE, json.dumps({"global_step": trained.steps, "log_history": trained.log}) + "\n")
        return Result(
            name=setting.name,
            setting=told,
            **trained.outcome(),
            loss=trained.last("loss"),
            valid_loss=held_out,
            grad_norm=trained.last("grad_norm"),
            accuracy=marks.accuracy,
            answer_rate=marks.answer_rate,
            questions=marks.questions,
            nonfinite=bad,
            tensors=tensors,
            notes=[*trained.notes, *doctors_word(folder / STATE), ran_on()],
            curves=_curves(trained.log),
            samples=_shown(valid, said),
        )

    # -- asking ----------------------------------------------------------------------------------------------------------------

    def ask(self, language: Language, style: Any = "plain", name: str = "", shots: Sequence[tuple[str, str]] = ()) -> list[str]:
        """The likeliest reply to every held-out question."""
        asked = [prompt(language, q.text, style, shots) for q in self.sets["valid"]]
        with self.progress.of(f"ask   {name}", len(asked)) as advance:
            found = replies(language.model, language, asked, batch=self.ask_at_once, tick=advance)
        return [each[0] for each in found]

    def unmodified(self, shots: int = 0) -> Result:
        """The score of the model as it was loaded, without or with some questions and answers before each."""
        name = f"unmodified-{shots}-shot" if shots else "unmodified"
        told = {"model": self.model_name, "questions": self._asked(), "shots": shots}
        folder = self.out / name
        if (folder / FILE).exists():
            done = Result.load(folder)
            refuse_another(folder, done.setting, told)
            return done
        language = self.fresh()
        language.model.to(device())
        given = [(q.text, q.answer("worked")) for q in self.sets["train"][:shots]]
        with reproducible():
            said = self.ask(language, name=name, shots=given)
        valid = self.sets["valid"]
        marks = score(said, [q.correct for q in valid])
        result = Result(
            name=name,
            setting=told,
            ending="not trained",
            accuracy=marks.accuracy,
            answer_rate=marks.answer_rate,
            questions=marks.questions,
            notes=[ran_on()],
            samples=_shown(valid, said),
        )
        folder.mkdir(parents=True, exist_ok=True)
        result.save(folder)
        return result

    def test(self, name: str) -> Result:
        """The model of an arm asked again; its result file stays as it is."""
        folder = self.out / name
        language = self.load(name)
        there = Result.load(folder)
        with reproducible():
            said = self.ask(language, there.setting.get("prompt", "plain"), name)
        marks = score(said, [q.correct for q in self.sets["valid"]])
        shown = _shown(self.sets["valid"], said)
        return replace(there, accuracy=marks.accuracy, answer_rate=marks.answer_rate, questions=marks.questions, samples=shown)

    def load(self, name: str) -> Language:
        """The model of an arm that was trained in this folder, with its adapters, ready to be asked."""
        from peft import PeftModel

        folder = self.adapters(name)
        language = self.fresh()
        if (begun(self.out / name, KEYS) or {}).get("weights") == "fp16":
            language.model.half()  # what the adapters were trained on
        return replace(language, model=PeftModel.from_pretrained(language.model, folder, is_trainable=True).to(device()))

    def adapters(self, name: str) -> Path:
        """The folder of an arm's adapters, or an error with the command that trains them."""
        folder = self.out / name / ADAPTER
        if not (folder / "adapter_config.json").exists():
            raise UsageError(
                f"{folder} has no adapters. `nanproof recipe units-sft {_command(name)} --out {self.out}` trains them"
            )
        return folder

    def _told(self, setting: Setting, **more: Any) -> dict[str, Any]:
        return {**setting.to_json(), "model": self.model_name, "questions": self._asked(), **more}

    def _asked(self) -> dict[str, Any]:
        """Which questions they are: results of other ones are other results."""
        told = "\n".join(q.text for name in ("train", "valid") for q in self.sets[name])
        checksum = hashlib.sha256(told.encode()).hexdigest()[:16]
        return {"train": self._counts["train"], "valid": self._counts["valid"], "checksum": checksum}


def _command(name: str) -> str:
    """What trains the arm of that name."""
    arm, _, variant = name.partition("-")
    return arm if arm == "rft" else f"train --arm {arm}" + (f" --variant {variant}" if variant else "")


def _curves(log: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    names = ("step", "loss", "grad_norm", "learning_rate")
    return {name: [float(line[name]) if name in line else None for line in log] for name in names}


def _shown(valid: Sequence[Question], said: Sequence[str]) -> list[dict[str, str]]:
    return [
        {
            "question": q.text,
            "correct": written(q.exact, 5),
            "said": reply,
            "verdict": "right" if is_right(answer := parse(reply), q.correct) else "no answer" if answer is None else "wrong",
        }
        for q, reply in list(zip(valid, said, strict=True))[:SHOWN]
    ]
