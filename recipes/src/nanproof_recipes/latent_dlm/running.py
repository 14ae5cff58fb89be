"""Studio: what every command of the recipe shares. The data is made once, and each arm has a folder of its own that is not worked
on twice. Of several processes the first alone touches folders; all of them train.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from nanproof import UsageError, scan
from nanproof.numerics.precision import choose
from nanproof_recipes.folders import begin, begun, doctors_word, locked
from nanproof_recipes.latent_dlm.arms import Setting, configured
from nanproof_recipes.latent_dlm.config import Config
from nanproof_recipes.latent_dlm.data.dataset import Prepared, make
from nanproof_recipes.latent_dlm.model.diffusion import Noiser
from nanproof_recipes.latent_dlm.results import Result
from nanproof_recipes.latent_dlm.showing import samples
from nanproof_recipes.latent_dlm.train import keeping
from nanproof_recipes.latent_dlm.train.evaluating import Measured, measure
from nanproof_recipes.latent_dlm.train.keeping import keep
from nanproof_recipes.latent_dlm.train.stepping import LOG
from nanproof_recipes.latent_dlm.train.team import Team
from nanproof_recipes.latent_dlm.train.training import CHECKPOINTS, Trained, enough, train
from nanproof_recipes.library import decode, reason
from nanproof_recipes.machine import ran_on, reproducible
from nanproof_recipes.progress import Progress
from nanproof_recipes.results import FILE

KEYS = ("arm", "size", "data")
"""What the settings of every arm name."""
TRAINED = ("loss", "text_loss", "latent_loss", "grad_norm")
VALIDATED = ("eval_text_loss", "eval_latent_loss", "eval_text_accuracy")
Found = TypeVar("Found")


class Studio:
    """One configuration, one set of data, one folder."""

    def __init__(
        self,
        out: Path,
        config: Config,
        *,
        chosen: Iterable[str] = (),
        team: Team | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`chosen`: keys of the configuration that were set by hand; no arm changes them."""
        self.out, self.config, self.chosen = out, config, frozenset(chosen)
        self.team = team if team is not None else Team()
        self.progress = progress if progress is not None and self.team.leads else Progress()
        self._data: Prepared | None = None

    @property
    def data(self) -> Prepared:
        """The same for every arm."""
        if self._data is None:
            self._data = make(self.config)
        return self._data

    def configured(self, setting: Setting) -> Config:
        return configured(self.config, setting, self.chosen)

    def run(self, setting: Setting, again: bool = False) -> Result:
        """Train an arm and measure it. One that is done is not done again; one that was stopped goes on, if it has a guard."""
        config = self.configured(setting)
        enough(self.data.train, config, self.team)  # where there are too few, nothing is begun
        if setting.weights == "fp32":
            choose(device=self.team.place, ask=config.training.dtype)  # nor where the device has no such numbers
        told = self._told(setting, config)
        folder = self.out / setting.name
        there = self._first(lambda: Result.done(folder, told, KEYS, again))
        if there is not None:
            self.progress.say(f"{setting.name}: done already, {folder / FILE}")
            return there
        result = self._made(setting, config, told, folder)
        gc.collect()  # a guard and its model refer to each other; the next arm needs the memory
        return result

    def _made(self, setting: Setting, config: Config, told: dict[str, Any], folder: Path) -> Result:
        with ExitStack() as held, reproducible():
            self._first(lambda: self._begin(folder, told, held))
            trained = self._trained(setting, config, folder)
            weights = self.team.weights(trained.model)
            return self._first(lambda: self._end(setting.name, told, trained, weights, folder))

    def _begin(self, folder: Path, told: Mapping[str, Any], held: ExitStack) -> None:
        begin(folder, told)
        held.enter_context(locked(folder))

    def _end(self, name: str, told: dict[str, Any], trained: Trained, weights: dict[str, Tensor], folder: Path) -> Result:
        keep(folder, weights, trained.config, self.data.scale)
        result = self._result(name, told, trained, folder)
        result.save(folder)  # last of all: what has a result is done
        return result

    def _trained(self, setting: Setting, config: Config, folder: Path) -> Trained:
        """All processes."""
        self.progress.say(f"{setting.name}: {setting.says}")
        with self.progress.of(f"train {setting.name}", config.training.steps) as advance:
            return train(config, setting, self.data, folder, self.team, tick=advance, say=self._noted)

    def _noted(self, line: str) -> None:
        self.progress.say(f"  {line}")

    def _result(self, name: str, told: dict[str, Any], trained: Trained, folder: Path) -> Result:
        found = curves(folder / LOG)
        norms = [x for x in found["grad_norm"] if x is not None]
        return Result(
            name=name,
            setting=told,
            ending=trained.ending,
            steps=trained.steps,
            seconds=trained.seconds,
            tokens_per_second=trained.tokens / trained.seconds if trained.tokens else None,
            **trained.measured.to_json(),
            grad_norm=norms[-1] if norms else None,
            skipped=trained.skipped,
            rolled_back=trained.rolled_back,
            infinite=trained.infinite,
            lost=trained.lost,
            nonfinite=trained.nonfinite,
            tensors=trained.tensors,
            memory=trained.memory,
            notes=[*trained.notes, *doctors_word(folder / LOG), *scans_word(folder / CHECKPOINTS), ran_on()],
            curves=found,
            samples=samples(keeping.load(folder, self.team.place), self.data.valid),
            incidents=[incident.to_json() for incident in trained.incidents],
        )

    def _told(self, setting: Setting, config: Config) -> dict[str, Any]:
        """All that decides an arm, one key each, so that what differs can be named."""
        made = config.to_json()
        keys = {f"{section}.{key}": value for section, part in made.items() if section != "size" for key, value in part.items()}
        told = {**setting.to_json(), "size": config.size, **keys, "data": self.data.checksum}
        return {**told, "processes": self.team.world}

    def _first(self, work: Callable[[], Found]) -> Found:
        """What the first process finds, or what is wrong there, on all of them: the others do not wait for one that has ended."""
        found: Any = None
        wrong: Exception | None = None
        if self.team.leads:
            try:
                found = work()
            except Exception as error:
                wrong = error
        found, said = self.team.share((found, None if wrong is None else reason(wrong)))
        if said is not None:
            raise wrong if wrong is not None else UsageError(said)
        return found  # type: ignore[no-any-return]


def evaluated(folder: Path, team: Team) -> Measured:
    """The model of an arm, measured again on the held-out windows; its result stays as it is."""
    kept = keeping.load(folder, team.place)
    data = make(kept.config)
    if (begun(folder, KEYS) or {}).get("data", data.checksum) != data.checksum:
        raise UsageError(
            f"{folder} was trained with other text than data.text holds now: what is held out is not the same. Bring the text "
            "back, or train it again, with --again"
        )
    noiser = Noiser(kept.config, padded=data.train.padded or data.valid.padded)
    with reproducible():
        return measure(kept.model, data.valid, noiser, kept.config, kept.precision, team)


def curves(log: Path) -> dict[str, list[float | None]]:
    """The log as lists of one length, by step; None where it was not measured. Where a run went back, what came of the way on
    replaces what was there."""
    rows: dict[int, dict[str, float]] = {}
    newest = -1
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        found = json.loads(line)
        step, names = found["step"], VALIDATED if VALIDATED[0] in found else TRAINED
        for later in [at for at in rows if at >= step] if step <= newest else ():
            rows[later] = {name: value for name, value in rows[later].items() if name not in names}
        newest = max(newest, step)
        rows.setdefault(step, {}).update({name: decode(found[name]) for name in names if name in found})
    steps = sorted(step for step, row in rows.items() if row)
    made: dict[str, list[float | None]] = {"step": [float(step) for step in steps]}
    return made | {name: [rows[step].get(name) for step in steps] for name in (*TRAINED, *VALIDATED)}


def scans_word(folder: Path) -> list[str]:
    """What `nanproof scan` says of the checkpoints of an arm, in a line."""
    if not folder.is_dir() or not any(folder.glob("step-*")):
        return []
    found = scan([folder]).checkpoints
    bad = [one for one in found if one.status == "bad"]
    holds = "hold" if len(bad) > 1 else "holds"
    said = f"scan: {len(bad) or 'none'} of {len(found)} checkpoints {holds} a weight that is not finite"
    proven = sum((one.path / "good.json").is_file() for one in found)
    return [f"{said}; {proven} are proven good" if proven else said]
