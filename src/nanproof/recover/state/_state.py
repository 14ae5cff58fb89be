"""RunState: everything a run consists of, by name. Snapshots copy it, checkpoints write it, a rollback puts it back.

It comes in two parts. Tensors: weights, buffers, optimizer state, loss scale, running statistics; large, on the device, sharded
or not. The host's part: schedule, settings, random numbers, counters, data positions; small, plain values that
`torch.load(weights_only=True)` reads back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from nanproof._errors import UsageError
from nanproof._wording import listed
from nanproof.core.judge._copies import attributes_of, set_attributes
from nanproof.core.judge._optimizers import holders_of, name_of
from nanproof.core.judge._parameters import clean_name, is_dtensor, local, unwrap
from nanproof.core.judge._stepper import Stepper
from nanproof.core.support._context import NumpyState, RandomState, change_settings
from nanproof.core.support._inner import is_opaque, is_shell, nonfinite, plain, rebuilt, rewrapped, shell_of
from nanproof.core.support._tree import map_tensors
from nanproof.recover.state._plainly import Plainly

VERSION = 1
_PLAIN = (Tensor, torch.nn.Parameter)
_NOT_OF_THE_RUN = ("fused", "foreach", "capturable", "differentiable", "maximize")
"""Settings that say how this process computes, or what the code means: a checkpoint does not change them."""


class Part(Protocol):
    """What has a state of its own that belongs to the run."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RunState:
    """Names the parts of a living run."""

    def __init__(self, stepper: Stepper, scheduler: Any, parts: Mapping[str, Part]) -> None:
        self._stepper, self._scheduler, self._parts = stepper, scheduler, parts

    # -- tensors ---------------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors: "model.…", "optimizer.PARAMETER.…", "foreign.…", "scaler.…", "guard.stats"."""
        return dict(self._live())

    def _live(self) -> Iterator[tuple[str, Tensor]]:
        inner = unwrap(self._stepper.model)
        for name, tensor in (*inner.named_parameters(), *inner.named_buffers()):
            yield from self._inside(f"model.{clean_name(name)}", tensor)
        parameters = self._stepper.parameters
        for name, p in zip(parameters.names, parameters.tensors, strict=True):
            if name in parameters.foreign:
                yield from self._inside(f"foreign.{name}", p)
        for name, tensor in self._moments():
            if type(tensor) in _PLAIN and not tensor.requires_grad:
                yield name, tensor  # hundreds of them, while training waits
            else:
                yield from self._inside(name, tensor)
        if self._stepper.scale is not None:
            for key, value in self._stepper.scale.tensors().items():
                yield f"scaler.{key}", value
        yield "guard.stats", self._stepper.stats.state

    def _inside(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A tensor, or the plain ones that it is made of. Of one that is sharded as well, each rank has its own."""
        if type(tensor) in _PLAIN or not is_shell(tensor):
            yield name, tensor.detach() if tensor.requires_grad else tensor
            return
        rank = f"@{self._stepper.ranks.rank}" if is_dtensor(tensor) else ""
        for part, plain_one in plain(tensor):
            yield f"{name}:{part}{rank}", plain_one

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that optimizers keep of parameters, by name; those of the second optimizer have its number in theirs."""
        for name, _, state, mark in self._states():
            for key, value in state.items():
                if type(value) in _PLAIN or (isinstance(value, Tensor) and not is_opaque(value)):
                    yield f"optimizer.{name}.{mark}{key}", value

    def _states(self) -> Iterator[tuple[str, Tensor, dict[Any, Any], str]]:
        """Of every parameter and every optimizer that keeps something of it: its name, the parameter, what is kept, and what
        marks the optimizer."""
        parameters = self._stepper.parameters
        for i, holder in enumerate(holders_of(self._stepper.optimizer)):
            for name, p in zip(parameters.names, parameters.tensors, strict=True):
                yield name, p, holder.state.get(p, {}), f"{i}/" if i else ""

    def written_by_the_forward(self) -> set[str]:
        """Names of tensors that a forward may change: buffers, and parameters the optimizer does not have."""
        inner = unwrap(self._stepper.model)
        own = {id(p) for p in self._stepper.parameters.tensors}
        names = {f"model.{clean_name(name)}" for name, _ in inner.named_buffers()}
        return names | {f"model.{clean_name(name)}" for name, p in inner.named_parameters() if id(p) not in own}

    def buffer_names(self) -> set[str]:
        return {f"model.{clean_name(name)}" for name, _ in unwrap(self._stepper.model).named_buffers()}

    def bad_buffers(self) -> Tensor | None:
        """Whether a buffer is non-finite that is not so on purpose, on the device."""
        return self._stepper.buffers.bad_now()

    def frozen(self) -> dict[str, Tensor]:
        """Parameters that nothing trains."""
        inner = unwrap(self._stepper.model)
        named = {f"model.{clean_name(name)}": p for name, p in inner.named_parameters()}
        return {name: p for name, p in named.items() if not p.requires_grad and not p.is_inference() and not is_shell(p)}

    def check(self, saved: Mapping[str, tuple[int, ...]], where: str) -> None:
        """Names and shapes of what is to be put back; raises before anything is touched."""
        inner = unwrap(self._stepper.model)
        optional = {f"model.{clean_name(name)}" for name in _not_persistent(inner)}
        live = {name: tuple(t.shape) for name, t in self._live() if not name.startswith(("optimizer.", "scaler.", "guard."))}
        missing = [name for name in live if name not in saved and name not in optional]
        empty = {f"model.{clean_name(name)}" for name in _without_value(inner)}
        known = live.keys() | empty
        unknown = [name for name in saved if name.startswith(("model.", "foreign.")) and name not in known]
        other = [name for name, shape in live.items() if name not in optional and saved.get(name, shape) != shape]
        if missing or unknown or other:
            raise UsageError(f"{where} is of another model: {_difference(missing, unknown, other, live, saved)}")

    def targets(self, metadata: Any) -> dict[str, Tensor]:
        """Tensors in host memory to load a checkpoint into: as large as it says, sharded as the run is now."""
        live = self.tensors()
        own = dict(zip(self._stepper.parameters.names, self._stepper.parameters.tensors, strict=True))
        found: dict[str, Tensor] = {}
        for name, facts in metadata.state_dict_metadata.items():
            rank = name.rpartition("@")[2] if ":" in name else ""
            if rank.isdigit() and int(rank) != self._stepper.ranks.rank:
                continue
            owner = name.removeprefix("optimizer.").rpartition(".")[0] if name.startswith("optimizer.") else ""
            like = live.get(name, own.get(owner))
            shape, dtype = getattr(facts, "size", None), getattr(getattr(facts, "properties", None), "dtype", None)
            if shape is None or dtype is None:
                raise UsageError(f"the checkpoint's entry {name} is no tensor: it was not written by nanproof")
            if like is not None and is_dtensor(like) and like.shape == shape:
                found[name] = rewrapped(torch.empty(local(like).shape, dtype=dtype), like)
            else:
                found[name] = torch.empty(shape, dtype=dtype)
        return found

    def put(self, saved: Mapping[str, Tensor], host: Mapping[str, Any]) -> None:
        """Copy tensors back, in place wherever there is a place. What `check` looks at has been looked at."""
        self._put_buffers(saved)
        live = self.tensors()
        with torch.no_grad():
            for name, tensor in live.items():
                value = saved.get(name)
                if value is not None and not name.startswith(("optimizer.", "scaler.")) and tensor.shape == value.shape:
                    _copy(tensor, value)
        self._put_optimizer(saved, host.get("shells", {}))
        scale = {name.removeprefix("scaler."): t for name, t in saved.items() if name.startswith("scaler.")}
        if self._stepper.scale is not None:
            if scale:
                self._stepper.scale.put(scale)
            else:
                self._stepper.scale.start_over()
        self._stepper.buffers.refresh()

    def _put_buffers(self, saved: Mapping[str, Tensor]) -> None:
        """Buffers that were made, or made anew in another shape, since or before."""
        for path, owner in unwrap(self._stepper.model).named_modules():
            for leaf, buffer in owner._buffers.items():
                value = saved.get(f"model.{clean_name(f'{path}.{leaf}' if path else leaf)}")
                if value is not None and (buffer is None or (buffer.shape != value.shape and not is_dtensor(buffer))):
                    device = buffer.device if buffer is not None else self._stepper.parameters.device
                    owner._buffers[leaf] = value.to(device, copy=True)

    def _put_optimizer(self, saved: Mapping[str, Tensor], shells: Mapping[str, Any]) -> None:
        optimizer = self._stepper.optimizer
        kept: dict[str, dict[str, dict[str, Tensor]]] = {}
        for name, value in saved.items():
            if name.startswith("optimizer."):
                whole, _, part = name.removeprefix("optimizer.").partition(":")
                owner, _, key = whole.rpartition(".")
                kept.setdefault(owner, {}).setdefault(key, {})[part.partition("@")[0]] = value
        fused = {id(p): g.get("fused") or g.get("capturable") for g in optimizer.param_groups for p in g["params"]}
        holders = holders_of(optimizer)
        for name, p, state, mark in self._states():
            values = _of_holder(kept.get(name, {}), mark)
            for key in [key for key, value in state.items() if isinstance(value, Tensor) and key not in values]:
                del state[key]
            for key, parts in values.items():
                place = state.get(key)
                if isinstance(place, Tensor) and _fills(place, parts):
                    with torch.no_grad():
                        _fill(place, parts)
                    continue
                on_host = key == "step" and not fused[id(p)]
                device = torch.device("cpu") if on_host else local(p).device
                shell = shells.get(f"optimizer.{name}.{mark}{key}")
                if shell is not None:
                    made = rebuilt(shell, {part: t.to(device, copy=True) for part, t in parts.items()})
                    made = rewrapped(made, p) if is_dtensor(p) else made
                else:
                    made = placed(parts[""], p, device)
                holders[int(mark[:-1] or 0)].state[p][key] = made

    # -- the host's part -------------------------------------------------------------------------------------------------------

    def host(self, step: int, devices: list[torch.device]) -> dict[str, Any]:
        """The rest of the state, at the moment `step` is the next to be taken."""
        values: dict[str, Any] = {}
        plainly = self._plainly()
        for name, _, state, mark in self._states():
            rest = {f"{mark}{k}": plainly.out(v) for k, v in state.items() if not isinstance(v, Tensor) or is_opaque(v)}
            if rest:
                values.setdefault(name, {}).update(rest)
        holders = holders_of(self._stepper.optimizer)
        more = [(f"{i}/" if i else "", key, value) for i, h in enumerate(holders) for key, value in h.state.items()]
        odd = [(name, tensor) for name, tensor in self._moments() if type(tensor) not in _PLAIN]
        shells = {name: shell for name, tensor in odd if (shell := shell_of(tensor)) is not None}
        return {
            "version": VERSION,
            "step": step,
            "kinds": self._kinds(),
            "random": encode_random(RandomState.now(devices)),
            "schedule": self.schedule(),
            "optimizer": values,
            "optimizer_more": {f"{mark}{key}": plainly.out(value) for mark, key, value in more if isinstance(key, str)},
            "attributes": [plainly.out(attributes_of(holder)) for holder in holders],
            "shells": shells,
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }

    def schedule(self) -> dict[str, Any]:
        """Settings, and the scheduler that sets them."""
        plainly = self._plainly()
        groups = [
            {k: plainly.out(v) for k, v in group.items() if k not in ("params", *_NOT_OF_THE_RUN)}
            for group in self._stepper.optimizer.param_groups
        ]
        state = None if self._scheduler is None else copy.deepcopy(self._scheduler.state_dict())
        return {"groups": groups, "scheduler": state}

    def nonfinite(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names of weights and moments in a loaded state that hold NaN or Inf. Only finite ones are ever saved."""
        not_asked = self.buffer_names() | {"guard.stats"}
        return nonfinite((name, t) for name, t in tensors.items() if name not in not_asked)

    def check_host(self, host: Mapping[str, Any], where: str) -> None:
        """The same kind of optimizer and scheduler; raises before anything is touched."""
        for what, now in self._kinds().items():
            then = host["kinds"].get(what)
            if then != now:
                raise UsageError(
                    f"{where} was saved with {'no ' + what if then is None else f'the {what} {then}'}, and the guard has "
                    f"{'none' if now is None else now}. Build them as they were, or choose another folder"
                )

    def _kinds(self) -> dict[str, str | None]:
        scheduler, scaler = self._scheduler, self._stepper.scale
        return {
            "optimizer": name_of(self._stepper.optimizer),
            "scheduler": None if scheduler is None else type(scheduler).__name__,
            "scaler": None if scaler is None else "GradScaler",
        }

    def put_host(self, host: Mapping[str, Any], random: bool) -> None:
        """All of it but what the healer knows: in a run that goes back, that is not forgotten."""
        holders, plainly = holders_of(self._stepper.optimizer), self._plainly()
        for name, p, state, mark in self._states():
            own = _of_holder(host["optimizer"].get(name, {}), mark)
            values = {k: _beside(p, plainly.back(v)) for k, v in own.items()}
            for key in [k for k, v in state.items() if (not isinstance(v, Tensor) or is_opaque(v)) and k not in values]:
                del state[key]
            holder = holders[int(mark[:-1] or 0)]
            if values:
                holder.state[p].update(values)
            elif p in holder.state and not state:
                del holder.state[p]
        for i, holder in enumerate(holders):
            mark = f"{i}/" if i else ""
            for key in [key for key in holder.state if isinstance(key, str)]:
                del holder.state[key]
            holder.state.update(plainly.back(_of_holder(host.get("optimizer_more", {}), mark)))
        for holder, attributes in zip(holders, host.get("attributes", ()), strict=False):
            set_attributes(holder, plainly.back(attributes))
        self.put_schedule(host["schedule"])
        for name, part in self._parts.items():
            if name in host["parts"] and name != "heal":
                part.load_state_dict(copy.deepcopy(host["parts"][name]))
        if random:
            decode_random(host["random"]).restore()

    def put_remedies(self, host: Mapping[str, Any]) -> None:
        """In a new process, before anything else: a remedy may decide what the tensors are."""
        if "heal" in self._parts and "heal" in host["parts"]:
            self._parts["heal"].load_state_dict(copy.deepcopy(host["parts"]["heal"]))

    def put_schedule(self, schedule: Mapping[str, Any]) -> None:
        if self._scheduler is not None and schedule["scheduler"] is not None:
            self._scheduler.load_state_dict(copy.deepcopy(schedule["scheduler"]))
        change_settings(self._stepper.optimizer, self._plainly().back(schedule["groups"]))

    def _plainly(self) -> Plainly:
        parameters = self._stepper.parameters
        return Plainly(dict(zip(parameters.names, parameters.tensors, strict=True)), holders_of(self._stepper.optimizer))


def placed(value: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """A tensor of an optimizer's state on its device; sharded like its parameter if it was."""
    if is_dtensor(value):
        return rewrapped(local(value).to(device).clone(), value)
    return value.to(device, copy=True)


def _of_holder(values: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """What belongs to the optimizer with this mark, without it."""
    return {k.removeprefix(mark): v for k, v in values.items() if k.startswith(mark) and (mark or "/" not in k)}


def _fills(place: Tensor, parts: Mapping[str, Tensor]) -> bool:
    if not is_shell(place):
        return parts.keys() == {""} and place.shape == parts[""].shape
    return {name: t.shape for name, t in plain(place)} == {name: t.shape for name, t in parts.items()}


def _fill(place: Tensor, parts: Mapping[str, Tensor]) -> None:
    if not is_shell(place):
        _copy(place, parts[""])
        return
    for name, live in plain(place):
        live.copy_(parts[name])


def _beside(p: Tensor, value: Any) -> Any:
    """What an optimizer keeps of a parameter in lists lies where the parameter does; single numbers stay where they are."""
    device = local(p).device
    return map_tensors(value, lambda t: t.to(device) if t.dim() else t) if isinstance(value, (list, tuple, dict)) else value


def _copy(place: Tensor, value: Tensor) -> None:
    local(place).copy_(local(value))


def _without_value(module: torch.nn.Module) -> Iterator[str]:
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is None:
                yield f"{path}.{name}" if path else name


def _not_persistent(module: torch.nn.Module) -> Iterator[str]:
    for path, owner in module.named_modules():
        for name in owner._non_persistent_buffers_set:
            yield f"{path}.{name}" if path else name


def _difference(
    missing: list[str], unknown: list[str], other: list[str], live: Mapping[str, Any], saved: Mapping[str, Any]
) -> str:
    parts = []
    if missing:
        parts.append(f"it lacks {_few(missing)}")
    if unknown:
        parts.append(f"the model has no {_few(unknown)}")
    if other:
        parts.append(f"{other[0]} is {live[other[0]]} in the model and {saved[other[0]]} there")
    return "; ".join(parts) + ". Build the model as it was, or choose another folder"


def _few(names: list[str]) -> str:
    return listed([name.split(".", 1)[1] for name in names])


def encode_random(state: RandomState) -> dict[str, Any]:
    """Random states as tensors and numbers."""
    return {name: _encoded[type(value)](value) if type(value) in _encoded else value for name, value in state.states.items()}


def decode_random(states: Mapping[str, Any]) -> RandomState:
    """The inverse; generators of devices that are not there are left out."""
    found: dict[str, Any] = {}
    for name, value in states.items():
        if name == "numpy":
            found[name] = NumpyState(value["kind"], value["key"].numpy().tobytes(), *value["rest"])
        elif name == "python":
            found[name] = (value[0], tuple(value[1]), value[2])
        elif name == "cpu" or torch.device(name).index < torch.get_device_module(torch.device(name)).device_count():
            found[name] = value
    return RandomState(found)


_encoded: dict[type, Callable[[Any], Any]] = {
    NumpyState: lambda s: {
        "kind": s.kind,
        "key": torch.frombuffer(bytearray(s.key), dtype=torch.uint8),
        "rest": (s.position, s.has_gauss, s.gauss),
    },
}
