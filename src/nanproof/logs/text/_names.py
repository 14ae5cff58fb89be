"""What other programs call a loss, a gradient norm, a learning rate: one table for all readers.

A name is cut into words ("train/CE loss" is train, ce, loss), words that only say "of training" or "of validation" are taken
off, and what is left is looked up. `rank` says how good a name is: a line that has `loss` and `aux_loss` has one loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from nanproof.logs._points import METRICS, SCORES, Point

COARSE = 10
"""Ranks of one ten may stand for each other from line to line. Once a better ten was seen, the others are left out: an epoch's
mean is not one more step, and W&B's own counter is not the trainer's."""

MEASURED = 3 * COARSE
"""Ranks from here on are of measures that stand in for a loss that is not logged: a perplexity, what boosting minimises."""

_BASE: dict[str, dict[str, int]] = {
    "loss": {
        **dict.fromkeys(("loss", "lm loss", "losses"), 0),
        **dict.fromkeys(
            ("total loss", "loss total", "all loss", "step loss", "loss step", "batch loss", "loss value", "lm loss value"), 1
        ),
        **dict.fromkeys(("ce loss", "cross entropy loss", "crossentropyloss", "cross entropy", "mlm loss", "closs", "xent"), 2),
        **dict.fromkeys(("mean loss", "avg loss", "average loss", "running loss", "loss mean", "loss avg", "cur loss"), 3),
        **dict.fromkeys(("nll loss", "loss ema", "ema loss", "smoothed loss", "smooth loss", "loss smooth"), 4),
        **dict.fromkeys(("loss epoch", "epoch loss"), COARSE),
        **dict.fromkeys(("ppl", "perplexity", "si snr"), MEASURED),
    },
    "grad_norm": {
        **dict.fromkeys(("grad norm", "gradnorm", "gnorm", "gradient norm", "gradients norm", "norm grad"), 0),
        **dict.fromkeys(("total grad norm", "global grad norm", "global gradient norm", "total gradient norm"), 0),
        **dict.fromkeys(("grad norm total", "grad norm l2", "l2 grad norm", "l2 norm grad global", "grad l2 norm"), 0),
        "norm": 5,
        **dict.fromkeys(("grad 2 0 norm total", "grad norm 2 total", "grad 2 norm total", "grad norm mean"), 0),
    },
    "lr": {
        **dict.fromkeys(("lr", "learning rate", "learningrate"), 0),
        **dict.fromkeys(("lr 0", "lr group 0", "lr group0", "lr pg0", "lr pg1", "learning rate group0"), 1),
    },
    "scale": {
        **dict.fromkeys(("loss scale", "lossscale", "loss scaling", "grad scale", "scaler scale", "grad scaler scale"), 0),
        **dict.fromkeys(("amp scale", "fp16 scale", "scale", "scaler"), 1),
    },
    "skipped": {
        **dict.fromkeys(("skipped", "skipped steps", "steps skipped", "num skipped", "skipped updates"), 0),
        **dict.fromkeys(("number of skipped iterations", "skipped iterations"), 0),
    },
    "nan_count": {"number of nan iterations": 0},
    "step": {
        **dict.fromkeys(("global step", "num updates", "globalstep"), 0),
        **dict.fromkeys(("iter", "iteration", "iters"), COARSE),
        **dict.fromkeys(("step", "steps", "train step", "optimizer step", "update step", "cur step"), COARSE + 1),
        **dict.fromkeys(("_step",), 2 * COARSE),
        **dict.fromkeys(("update", "batch", "batch idx"), 2 * COARSE + 1),
        **dict.fromkeys(("learning iteration", "total timesteps", "timesteps"), 3 * COARSE),
        **dict.fromkeys(("nupdates", "n updates"), 4 * COARSE),
    },
    "epoch": {"epoch": 0, "ep": 1, "itn": 2},
}
_TABLE = {name: (role, rank) for role, names in _BASE.items() for name, rank in names.items()}
_TRAINING = {"train", "trn", "training", "trainer", "tr", "optim", "optimizer", "metrics", "actor", "curr", "current"}
_EVALUATION = {"val", "valid", "validation", "eval", "evaluation", "dev", "test"}
_OTHER = frozenset(
    "best lowest min max clip clipped clipping init initial target threshold final last prev previous old delta diff change std"
    " per".split()
)
"""What a setting or a summary is called, not a step."""
_UNITS = frozenset("sample token word char frame".split())
"""What a loss is a mean over: "loss per token"."""
_AUXILIARY = set(
    "aux kl z balance balancing router reg penalty entropy d g value vf scale scaler py fn function weight weights coef ratio"
    " type mask at window tokens ppl perplexity".split()
)
"""With one of these a name that has "loss" in it is not the loss."""
_MEASURES = frozenset("logloss mlogloss rmse rmsle mse mae mape merror deviance".split())
"""What boosting minimises. Of `l1`, `l2` and `error` the name has to say on which data."""
_TERMS = frozenset("loss kl kld approxkl entropy logps logits advantage advantages elbo objf smoothl1 err nll bce div".split())
"""A name with one of these is a value of training that must be finite, whatever else it is."""
_SETTING = frozenset("coef coeff coefficient weight weights type fn py at window tokens target beta scale scaler ratio".split())
TERM = "term:"
"""Prefix of the roles of other values of training, which are checked only for NaN, Inf, 0 and explosions."""


_JOINED = re.compile(r"(?<=[a-z])(?=[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Between the words of "CTCLoss" and "valLoss"."""
_ENDS_IN_LOSS = re.compile(r"[a-z]{2,}loss")
_REWARD = re.compile(r"reward|advantage|ep_rew|episod|(?<![a-z])returns?(?![a-z])", re.I)


class Found(NamedTuple):
    """What a name means."""

    role: str
    """One of METRICS, "step", "epoch", "nan_count", or `TERM` and the name."""
    rank: int
    name: str = ""
    """As the log writes it."""


def meaning(name: str) -> Found | None:
    """Return what a name means, None if it is not known."""
    return _meaning(name) if len(name) <= 80 else None


@lru_cache(maxsize=4096)
def _meaning(name: str) -> Found | None:
    if name == "_step":
        return Found("step", 2 * COARSE, name)
    words = re.sub(r"\([^()]*\)|[\W_]+", " ", _JOINED.sub(" ", name)).lower().split()
    if "dataloader" in words:
        words = words[: words.index("dataloader")]
    evaluation = any(word in _EVALUATION for word in words)
    placed = evaluation or any(word in _TRAINING for word in words)
    twice = words.count("train") > 1  # transformers' mean over the run is train/train_loss
    words = [word for word in words if word not in _TRAINING and word not in _EVALUATION]
    words = words[1:] if len(words) > 1 and (words[0] == "losses" or words[0] == words[-1] == "loss") else words
    words = words[:-2] if len(words) > 2 and words[-2] == "per" and words[-1] in _UNITS else words
    if not (words and ("".join(words) in _TABLE or words[-1] in _MEASURES)):  # "aeloss_step"
        words = [part for word in words for part in ((word[:-4], "loss") if _ENDS_IN_LOSS.fullmatch(word) else (word,))]
        words = words[:-1] if words[-1:] == ["step"] and "loss" in words[:-1] else words
    if not words or any(word in _OTHER for word in words):
        return None
    role, rank = _TABLE.get(" ".join(words)) or _TABLE.get("".join(words)) or _similar(words, placed) or ("", 0)
    if evaluation and role == "loss":
        return Found("eval_loss", rank if rank >= MEASURED else rank % COARSE, name)
    if evaluation:
        return None if SCORES.keys().isdisjoint(words) else Found(TERM + name, 0, name)
    if role:
        return Found(role, rank + COARSE * twice, name)
    return Found(TERM + name, 0, name) if _is_term(words) or not SCORES.keys().isdisjoint(words) else None


def _similar(words: list[str], placed: bool) -> tuple[str, int] | None:
    if words[0] == "lr" and len(words) <= 3 and re.fullmatch(r"[a-z]*(adam|sgd|lion|muon|adafactor|opt)[a-z]*", words[1]):
        return "lr", 2 + words.count("pg2")
    if "loss" in (words[0], words[-1]) and not _AUXILIARY.intersection(words) and not any(word.isdigit() for word in words):
        return "loss", 2 * COARSE
    if words[-2:] == ["cross", "entropy"]:
        return "loss", 2 * COARSE
    if words[-1] in _MEASURES or (placed and words[-1] in ("l1", "l2", "error")):
        return "loss", MEASURED + 1
    return None


def _is_term(words: list[str]) -> bool:
    if _SETTING.intersection(words) or any(word.isdigit() for word in words):
        return False  # one loss for each of many groups is NaN where a group is empty
    return "loss" in (words[0], words[-1]) or words[-2:] == ["grad", "norm"] or not _TERMS.isdisjoint(words)


_WHY = (
    (1, "the plainest name"),
    (2, "the total"),
    (3, "the cross-entropy"),
    (4, "the mean"),
    (COARSE, "the smoothed loss"),
    (2 * COARSE, "the mean of an epoch"),
    (MEASURED, "the first of several parts; none is called the total"),
)


def why(name: str) -> str:
    """Return why a name was taken for the loss where there are several."""
    found = meaning(name)
    rank = MEASURED if found is None else found.rank
    return next((reason for below, reason in _WHY if rank < below), "it stands in for the loss, which is not logged")


def number(value: Any) -> float | None:
    """A value as a log may hold it: a number, its text, or a list that starts with it (a learning rate for each group)."""
    if type(value) is float:
        return value
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, (int, float, str, bytes)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def finite(place: float | None) -> float | None:
    """A step or an epoch; NaN is none."""
    return place if place is None or math.isfinite(place) else None


class Collector:
    """Makes points of (name, value) pairs, and remembers which names this log uses."""

    def __init__(self) -> None:
        self.best: dict[str, int] = {}
        """The best rank seen, by role."""
        self._chosen: dict[tuple[Found, ...], dict[str, int]] = {}
        self._plans: dict[tuple[str, ...], list[tuple[str, Found]]] = {}
        self._part: tuple[int, str] | None = None
        """Rank and name of the part that is taken for the loss, where no name says that it is."""
        self._rewarded: dict[tuple[str, ...], bool] = {}
        self._names: dict[tuple[Found, ...], dict[str, str]] = {}

    def chosen(self, names: tuple[Found, ...]) -> dict[str, int]:
        """By role, the index of the name that counts."""
        known = self._chosen.get(names)
        if known is not None:
            return known
        found: dict[str, int] = {}
        for index, (role, rank, _) in enumerate(names):
            if role not in found or rank < names[found[role]].rank:
                found[role] = index
        for role, index in list(found.items()):
            if role.startswith(TERM):
                continue
            rank, best = names[index].rank, self.best.get(role)
            if best is None or rank < best:
                self.best[role] = rank
                self._chosen.clear()
                self._names.clear()
            elif rank // COARSE > best // COARSE:
                del found[role]
        if "loss" in found and names[found["loss"]].rank >= 2 * COARSE:  # lines of several parts: the first is the loss
            name = names[found["loss"]].name
            if self._part is None or names[found["loss"]].rank < self._part[0]:
                self._part = names[found["loss"]].rank, name
                self._chosen.clear()
                self._names.clear()
            elif name != self._part[1]:
                part = found[TERM + name] = found.pop("loss")
                others = (i for i, other in enumerate(names) if other.role == "loss" and other.rank < MEASURED and i != part)
                found |= {TERM + names[i].name: i for i in others}
        if "loss" in found:  # of a line that has several, the others must be finite too
            others = (i for i, name in enumerate(names) if name.role == "loss" and name.rank < MEASURED and i != found["loss"])
            found |= {TERM + names[i].name: i for i in others if names[i].name != names[found["loss"]].name}
        if len(self._chosen) > 1024:
            self._chosen.clear()
        if len(names) <= 1000:
            self._chosen[names] = found
        return found

    def point(self, pairs: Sequence[tuple[Found, float]], line: int) -> Point | None:
        """None if nothing in it is a metric."""
        found = tuple([found for found, _ in pairs])
        values: dict[str, float] = {}
        terms: dict[str, float] = {}
        for role, index in self.chosen(found).items():
            if role.startswith(TERM):
                terms[role[len(TERM) :]] = pairs[index][1]
            else:
                values[role] = pairs[index][1]
        step, epoch = values.pop("step", None), values.pop("epoch", None)
        values.pop("nan_count", None)
        if not values and not terms:
            return None
        return Point(values, finite(step), finite(epoch), line, terms=terms, names=self._named(found))

    def _named(self, found: tuple[Found, ...]) -> dict[str, str]:
        """By metric, the name that counts."""
        known = self._names.get(found)
        if known is None:
            self._names = {} if len(self._names) > 64 else self._names
            chosen = self.chosen(found)
            known = {role: found[i].name for role, i in chosen.items() if role in METRICS}
            if len(found) <= 1000:
                self._names[found] = known
        return known

    def of_mapping(self, data: Mapping[str, Any], line: int) -> Point | None:
        """A point from a dictionary, one level of nesting deep. The closing summary of a transformers run is no step."""
        if dict in map(type, data.values()):
            data = _flat(data)
        keys = tuple(data)
        plan = self._plans.get(keys)
        if plan is None:
            plan = [] if is_summary(keys) else [(key, found) for key in keys if (found := meaning(str(key))) is not None]
            if len(self._plans) > 64:
                self._plans.clear()
            if len(keys) <= 1000:
                self._plans[keys] = plan
        pairs = [(found, worth) for key, found in plan if (worth := number(data[key])) is not None]
        point = self.point(pairs, line) if pairs else None
        if point is None or not is_step(point):
            return None
        if lacks_loss(point) and any(found.role == "loss" and number(data[key]) is None for key, found in plan):
            point = replace(point, loss_missing=True)  # JSON has no NaN: null is written for it
        if keys not in self._rewarded:
            self._rewarded = {} if len(self._rewarded) > 64 else self._rewarded
            self._rewarded[keys] = any(is_reward(str(key)) for key in keys[:1000])
        return replace(point, settings={"rewards": 1.0}) if self._rewarded[keys] else point

    def keys_of(self, data: Mapping[str, Any]) -> dict[str, str]:
        """By role, the key of a flat dictionary whose value counts."""
        plan = [(key, found) for key, found in self._plans.get(tuple(data), []) if number(data[key]) is not None]
        return {role: plan[index][0] for role, index in self.chosen(tuple(found for _, found in plan)).items()}


def lacks_loss(point: Point) -> bool:
    """Whether a point is of a training step, and has no loss."""
    values = point.values.keys()
    return not {"loss", "eval_loss"} & values and bool({"lr", "grad_norm", "scale"} & values)


def _flat(data: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat.update({f"{key}/{inner}": inside for inner, inside in value.items()})
        else:
            flat[key] = value
    return flat


def is_summary(names: Iterable[str]) -> bool:
    """Whether these are the names of what transformers logs when a run has ended. Some log its times at each step, too."""
    names = list(names)
    if "grad_norm" in names or "learning_rate" in names:
        return False
    return any(name in ("train_runtime", "train/train_runtime", "train_samples_per_second") for name in names)


def is_reward(name: str) -> bool:
    """Whether only reinforcement learning logs a value of this name."""
    return _REWARD.search(name) is not None


def is_step(point: Point) -> bool:
    """Whether a point tells of the course of training. A learning rate alone may be a setting that was printed."""
    values = point.values
    return bool(point.terms) or "loss" in values or "eval_loss" in values or "grad_norm" in values or point.step is not None
