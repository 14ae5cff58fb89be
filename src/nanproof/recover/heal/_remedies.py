"""Remedies: verified fixes as a living run can have them. Each can be applied, undone, and written down as plain data.

Some act once (a setting, a dtype), others are open around every forward and backward (`living`). None of them touches the data,
the labels or the loss, and none replaces a bad gradient: what is bad stays visible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nanproof._wording import listed
from nanproof.core.judge._parameters import clean_name, unwrap
from nanproof.core.support._casting import HALF, buffers_beside, cast
from nanproof.core.support._members import groups_of, optimizers_in
from nanproof.explain import causes as _causes  # noqa: F401  (fills the list of interventions)
from nanproof.explain.replay._interventions import Intervention
from nanproof.explain.replay._replay import eager


@dataclass(frozen=True, slots=True)
class Patient:
    """What a remedy may act on."""

    model: nn.Module
    optimizer: Any
    scheduler: Any = None
    follow: Callable[[], None] = lambda: None
    """Tells the guard that parameters or their dtypes changed."""

    def parameter(self, name: str) -> nn.Parameter:
        return {clean_name(n): p for n, p in unwrap(self.model).named_parameters()}[name]


class Remedy:
    """One fix. A subclass with a name is all it takes to add one."""

    name: ClassVar[str]
    once: ClassVar[bool] = False
    """It acts at one moment and is over: a resumed run does not need it again."""
    in_checkpoints: ClassVar[bool] = False
    """The checkpoints of model, optimizer and scheduler carry it, so a resumed run has it already."""
    in_evaluation: ClassVar[bool] = False
    """A forward that is not training needs it too, as it may not run at all without it."""
    without: ClassVar[str] = ""
    """What a run that resumes without it has to expect, where that is more than the old trouble."""
    known: ClassVar[dict[str, type[Remedy]]] = {}

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            Remedy.known[cls.name] = cls

    def __init__(self, patient: Patient, **settings: Any) -> None:
        self.patient, self.settings = patient, settings

    @property
    def description(self) -> str:
        """In one sentence, what is different from now on."""
        raise NotImplementedError

    def apply(self) -> None:
        """Make the change."""

    def undo(self) -> None:
        """Take it back."""

    def adopt(self) -> None:
        """A resumed run goes on with it."""
        if not self.in_checkpoints and not self.once:
            self.apply()

    def replaces(self, other: Remedy) -> bool:
        """The same again with other settings: the two are not to act together."""
        return self.name == other.name

    def living(self) -> AbstractContextManager[Any] | None:
        """What is open around every forward and backward; None where nothing is."""
        return None


class Again(Remedy):
    """Nothing is changed: the fault did not come back when the step was run again."""

    name = "again"
    once = True

    @property
    def description(self) -> str:
        return "the same step is run once more"


class Interventions(Remedy):
    """Interventions that held on the replay, open in the run. Where they look at operations they cost Python time for each, and
    compiled code runs eagerly under them."""

    name = "interventions"

    @property
    def description(self) -> str:
        return ", ".join(self._said(**change) for change in self.settings["changes"])

    def replaces(self, other: Remedy) -> bool:
        names = [[c["name"] for c in r.settings["changes"]] for r in (self, other) if isinstance(r, Interventions)]
        return len(names) == 2 and names[0] == names[1]

    def _said(self, name: str, **settings: Any) -> str:
        with_settings = ", ".join(f"{key} {value:g}" for key, value in settings.items())
        return Intervention.livable[name].lived + (f" ({with_settings})" if with_settings else "")

    @contextmanager
    def living(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(eager())
            for change in self.settings["changes"]:
                arguments = {k: v for k, v in change.items() if k != "name"}
                stack.enter_context(Intervention.livable[change["name"]](**arguments))
            yield


_AMP = "_step_supports_amp_scaling"


class Fp32Weights(Remedy):
    """Trainable half-precision weights in fp32, the optimizer's state too; the forward runs under autocast to the old dtype, or
    as it is (`autocast=False`): some layers have no autocast on a CPU."""

    name = "fp32-weights"
    in_evaluation = True
    without = (
        "fp32 weights and moments of the checkpoint are rounded to the dtype the model is built in: in fp16 small second moments "
        "become 0, and steps of any size follow. Resume with Policy(heal=True), or build the model in fp32"
    )

    def __init__(self, patient: Patient, **settings: Any) -> None:
        super().__init__(patient, **settings)
        self._dtypes: list[tuple[Tensor, torch.dtype]] = []
        self._flags: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._amp: list[tuple[Any, bool | None]] = []

    @property
    def description(self) -> str:
        return "trainable half-precision weights are fp32" + (", the forward runs under autocast" if self._autocast else "")

    @property
    def _autocast(self) -> bool:
        return bool(self.settings.get("autocast", True))

    def apply(self) -> None:
        optimizers, groups = optimizers_in(self.patient.optimizer), groups_of(self.patient.optimizer)
        members = [p for group in groups for p in group["params"] if p.requires_grad and p.dtype in HALF]
        members = list({id(p): p for p in members}.values())
        self._dtypes = [(t, t.dtype) for t in (*members, *buffers_beside(self.patient.model, members))]
        # The guard switches fp32 weights to the fused optimizer, and would not switch back by itself.
        settings = (*groups, *(getattr(each, "defaults", {}) for each in optimizers))
        self._flags = [(g, {k: g[k] for k in ("fused", "foreach") if k in g}) for g in settings]
        self._amp = [(each, getattr(each, _AMP, None)) for each in optimizers]
        for tensor, _ in self._dtypes:
            self._cast(tensor, torch.float32)
        self.patient.follow()

    def undo(self) -> None:
        for tensor, dtype in self._dtypes:
            self._cast(tensor, dtype)
        for group, flags in self._flags:
            group.update(flags)
        for each, supported in self._amp:
            if supported is not None:
                setattr(each, _AMP, supported)
            elif hasattr(each, _AMP):
                delattr(each, _AMP)
        self._dtypes, self._flags, self._amp = [], [], []
        self.patient.follow()

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> None:
        tensor.grad = None  # of the refused step
        cast(tensor, dtype, *optimizers_in(self.patient.optimizer))

    def living(self) -> AbstractContextManager[Any] | None:
        half = next((dtype for tensor, dtype in self._dtypes if tensor.requires_grad), None)
        if half is None or not self._autocast:
            return None
        kind = self._dtypes[0][0].device.type
        return None if torch.is_autocast_enabled(kind) else torch.autocast(kind, dtype=half)


class Settings(Remedy):
    """Settings of every parameter group, or of some (`groups`, their places): eps, or beta2 of Adam's betas."""

    name = "optimizer-settings"
    in_checkpoints = True

    def __init__(self, patient: Patient, **settings: Any) -> None:
        super().__init__(patient, **settings)
        self._before: list[tuple[dict[str, Any], str, Any]] = []

    @property
    def description(self) -> str:
        only = self.settings.get("groups")
        where = "" if only is None else f" in param_groups {', '.join(map(str, only))}"
        return "the optimizer has " + ", ".join(f"{k}={v:g}" for k, v in self._values.items()) + where

    @property
    def _values(self) -> dict[str, float]:
        return {key: value for key, value in self.settings.items() if key != "groups"}

    def apply(self) -> None:
        groups, only = groups_of(self.patient.optimizer), self.settings.get("groups")
        for group in groups if only is None else (groups[i] for i in only if i < len(groups)):
            for key, value in self._values.items():
                if key == "beta2" and "betas" in group:
                    self._before.append((group, "betas", group["betas"]))
                    group["betas"] = (group["betas"][0], value)
                elif key in group:
                    self._before.append((group, key, group[key]))
                    group[key] = value

    def undo(self) -> None:
        for group, key, value in reversed(self._before):
            group[key] = value
        self._before = []


_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
_BASES = ("base_lrs", "max_lrs", "_last_lr")


class LearningRate(Remedy):
    """The learning rate of every group times a factor; the schedule's own base rates too, so that it stays there."""

    name = "learning-rate"
    in_checkpoints = True

    def __init__(self, patient: Patient, **settings: Any) -> None:
        super().__init__(patient, **settings)
        self._changed: list[tuple[Any, Any, Any, Any]] = []

    @property
    def description(self) -> str:
        return f"the learning rate is multiplied by {self.settings['factor']:g}"

    def apply(self) -> None:
        factor = self.settings["factor"]
        self._changed = []
        for owner, key in self._places():
            before = owner[key].clone() if isinstance(owner[key], Tensor) else owner[key]
            _set(owner, key, before * factor)
            self._changed.append((owner, key, before, before * factor))

    def undo(self) -> None:
        """Exactly what it was, where the schedule has not moved on; else divided again."""
        exact = {(id(owner), key): (before, after) for owner, key, before, after in self._changed}
        for owner, key in self._places():
            before, after = exact.get((id(owner), key), (None, None))
            _set(owner, key, before if after is not None and owner[key] == after else owner[key] / self.settings["factor"])
        self._changed = []

    def _places(self) -> list[tuple[Any, Any]]:
        found: list[tuple[Any, Any]] = [(g, k) for g in groups_of(self.patient.optimizer) for k in _RATES if k in g]
        waiting, seen = [self.patient.scheduler], set()
        while waiting:
            scheduler = waiting.pop()
            if isinstance(scheduler, (list, tuple)):
                waiting += scheduler
                continue
            if scheduler is None or id(scheduler) in seen:
                continue
            seen.add(id(scheduler))
            lists = {id(x): x for k in _BASES if isinstance(x := getattr(scheduler, k, None), list)}
            found += [(rates, i) for rates in lists.values() for i, x in enumerate(rates) if isinstance(x, (float, int, Tensor))]
            waiting += [*getattr(scheduler, "_schedulers", ()), getattr(scheduler, "scheduler", None)]
        return found


def _set(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner[key], Tensor):
        owner[key].copy_(torch.as_tensor(value))
    else:
        owner[key] = value


class RateFloor(Remedy):
    """A learning rate below which no step is taken, whatever the schedule says: one for all groups, or one for each."""

    name = "learning-rate-floor"

    def __init__(self, patient: Patient, **settings: Any) -> None:
        super().__init__(patient, **settings)
        self._before: list[Any] | None = None

    @property
    def description(self) -> str:
        floors = dict.fromkeys(f"{floor:g}" for floor in self._floors())
        return f"the learning rate is at least {' and '.join(floors)}, whatever the schedule says"

    def _floors(self) -> list[float]:
        floor, count = self.settings["floor"], len(self.patient.optimizer.param_groups)
        return list(floor) if isinstance(floor, (list, tuple)) else [floor] * count

    def undo(self) -> None:
        """The rates of the moment; the schedule sets the next ones."""
        for group, value in zip(self.patient.optimizer.param_groups, self._before or (), strict=False):
            _set(group, "lr", value)
        self._before = None

    @contextmanager
    def living(self) -> Iterator[None]:
        groups = self.patient.optimizer.param_groups
        pairs = list(zip(groups, self._floors(), strict=False))
        if any(float(group["lr"]) < floor for group, floor in pairs):
            self._before = [g["lr"].clone() if isinstance(g["lr"], Tensor) else g["lr"] for g in groups]
        for group, floor in pairs:
            if float(group["lr"]) < floor:
                _set(group, "lr", floor)
        yield


class FiniteSettings(Remedy):
    """A setting that a schedule makes NaN or Inf stays at its last finite value, as long as it would be so."""

    name = "finite-settings"

    def __init__(self, patient: Patient, **settings: Any) -> None:
        super().__init__(patient, **settings)
        self._before: list[tuple[dict[str, Any], str, Any]] = []

    @property
    def description(self) -> str:
        shown = [f"{key}={_shown(value)}" for _, key, value in self.settings["values"]]
        return f"a setting that is not finite is {listed(list(dict.fromkeys(shown)))}, whatever the schedule says"

    def undo(self) -> None:
        """What was there before; the schedule sets the next ones."""
        for group, key, value in reversed(self._before):
            _set(group, key, value)
        self._before = []

    @contextmanager
    def living(self) -> Iterator[None]:
        groups = groups_of(self.patient.optimizer)
        found = []
        for place, key, value in self.settings["values"]:
            group = groups[place] if place < len(groups) else {}
            if key in group and not _is_finite(group[key]):
                kept = group[key].clone() if isinstance(group[key], Tensor) else group[key]
                found.append((group, key, kept))
                _set(group, key, tuple(value) if isinstance(value, (list, tuple)) else value)
        self._before = found or self._before
        yield


def _is_finite(setting: Any) -> bool:
    numbers = setting if isinstance(setting, (tuple, list)) else (setting,)
    return all(math.isfinite(float(x)) for x in numbers)


def _shown(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, (tuple, list)) else f"{value:g}"


class GradientFactor(Remedy):
    """Every gradient times a power of two, after the backward: nothing but the size changes."""

    name = "gradient-factor"

    @property
    def description(self) -> str:
        return f"every gradient is multiplied by {_power(self.settings['factor'])}"

    @contextmanager
    def living(self) -> Iterator[None]:
        yield
        _multiply(self.patient, self.settings["factor"])


class SmallerBackward(Remedy):
    """The backward runs at a smaller scale, and the gradients are multiplied back: what passed 65504 on the way does not."""

    name = "smaller-backward"

    @property
    def description(self) -> str:
        factor = self.settings["factor"]
        return f"the backward runs at {_power(factor)} of its scale, and the gradients are multiplied back"

    @contextmanager
    def living(self) -> Iterator[None]:
        factor = self.settings["factor"]
        original = Tensor.backward

        def backward(loss: Tensor, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
            seed = torch.full_like(loss, factor) if gradient is None else gradient * factor
            original(loss, seed, *args, **kwargs)

        Tensor.backward = backward  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Tensor.backward = original  # type: ignore[method-assign]
        _multiply(self.patient, 1 / factor)


def _power(factor: float) -> str:
    return f"2^{round(torch.tensor(factor).double().log2().item())}"


def _multiply(patient: Patient, factor: float) -> None:
    with torch.no_grad():
        for p in patient.model.parameters():
            if p.grad is not None:
                p.grad.mul_(factor)


class OwnParameters(Remedy):
    """The model's parameters that the optimizer lacks join a group that holds tensors the model does not have."""

    name = "own-parameters"

    def __init__(self, patient: Patient, **settings: Any) -> None:
        super().__init__(patient, **settings)
        self._added: list[tuple[dict[str, Any], Tensor]] = []

    @property
    def description(self) -> str:
        return f"the optimizer also holds {listed(self.settings['names'])}"

    def apply(self) -> None:
        groups = groups_of(self.patient.optimizer)
        own = {id(p) for p in self.patient.model.parameters()}
        group = next((g for g in groups if any(id(p) not in own for p in g["params"])), groups[0])
        held = {id(p) for g in groups for p in g["params"]}
        for name in self.settings["names"]:
            p = self.patient.parameter(name)
            if id(p) not in held:
                group["params"].append(p)
                self._added.append((group, p))
        self.patient.follow()

    def undo(self) -> None:
        for group, p in self._added:
            group["params"] = [other for other in group["params"] if other is not p]
            for each in optimizers_in(self.patient.optimizer):
                each.state.pop(p, None)
        self._added = []
        self.patient.follow()


class _Values(Remedy):
    """Numbers put in the place of non-finite ones, kept for taking them out again."""

    once = True

    def __init__(self, patient: Patient, **settings: Any) -> None:
        super().__init__(patient, **settings)
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []

    def _put(self, tensor: Tensor, where: Tensor, values: Tensor) -> None:
        self._before.append((tensor, where, tensor.detach()[where].clone()))
        with torch.no_grad():
            tensor.copy_(torch.where(where, values.to(tensor.dtype), tensor))

    def undo(self) -> None:
        with torch.no_grad():
            for tensor, where, values in reversed(self._before):
                tensor[where] = values
        self._before = []
        self.patient.follow()


class ResetBuffers(_Values):
    """Non-finite running statistics start again: a variance at 1, everything else at 0."""

    name = "reset-buffers"

    @property
    def description(self) -> str:
        return f"non-finite values of {', '.join(self.settings['names'][:3])} start again"

    def apply(self) -> None:
        named = {clean_name(n): b for n, b in unwrap(self.patient.model).named_buffers()}
        for name in self.settings["names"]:
            buffer = named[name]
            self._put(buffer, ~torch.isfinite(buffer), torch.full_like(buffer, 1.0 if "var" in name else 0.0))
        self.patient.follow()


class FilledRows(_Values):
    """Rows of a table that were never initialised become the mean of the others."""

    name = "filled-rows"

    @property
    def description(self) -> str:
        return f"rows of {', '.join(self.settings['rows'])} that were never initialised are the mean of the others"

    def apply(self) -> None:
        for name, rows in self.settings["rows"].items():
            table = self.patient.parameter(name)
            bad = ~torch.isfinite(table.detach()).flatten(1).all(1)
            bad[rows] = True
            mean = table.detach()[~bad].mean(0)
            where = bad.reshape(-1, *[1] * (table.dim() - 1)).expand(table.shape)
            self._put(table, where, mean.expand(table.shape))
        self.patient.follow()
