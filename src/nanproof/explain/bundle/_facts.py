"""What a step depended on besides its batch, as a bundle holds it, and back: mode, random numbers, weights, optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.core.judge._optimizers import members_of
from nanproof.core.judge._parameters import clean_name, is_dtensor, unwrap
from nanproof.core.support._context import Mode, NumpyState, RandomState
from nanproof.core.support._members import optimizers_in
from nanproof.explain.bundle._pack import Node, Packer, dtype_name, type_name


@dataclass(frozen=True, slots=True)
class ModeFacts:
    """How the step was called."""

    training: dict[str, bool]
    """By module path; "" is the model itself."""
    autocast: bool
    autocast_dtype: torch.dtype
    numerics: dict[str, Any]
    """Settings of torch that change last digits: threads, default dtype, matmul precision, determinism."""

    def on(self, model: nn.Module) -> Mode:
        """The same for a model built anew. Modules that the bundle does not know stay as they are."""
        known = {id(module): self.training.get(path) for path, module in module_paths(model)}
        flags = ((known.get(id(module)), module.training) for module in model.modules())
        return Mode([now if then is None else then for then, now in flags], self.autocast, self.autocast_dtype)


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """The optimizer before the step."""

    kind: str
    groups: tuple[dict[str, Any], ...]
    """Settings of each parameter group; its "params" are names."""
    state: dict[str, dict[str, Any]] | None
    """By parameter; None where it was left out."""
    inside: tuple[OptimizerFacts, ...] = ()
    """The optimizers that it contains."""


def module_paths(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module with its path in the user's own model, without what wrappers add."""
    return [(clean_name(f"{path}.").strip("."), module) for path, module in unwrap(model).named_modules()]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, tied ones under every name they have."""
    inner = unwrap(model)
    pairs = [*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False)]
    return {clean_name(name): tensor for name, tensor in pairs}


def weights_out(model: nn.Module, left_out: list[str]) -> tuple[Packer, dict[str, Node] | None]:
    """The weights, and those whose name alone does not say how to read them: tied ones, and unusual dtypes."""
    packer = Packer()
    named = named_tensors(model)
    if any(is_dtensor(tensor) for tensor in named.values()):
        left_out.append("weights: sharded over ranks")
        return packer, None
    nodes = {name: packer.tensor(tensor, name) for name, tensor in named.items()}
    kept = {k: {f: node[f] for f in ("tensor", "dtype", "shape") if f in node} for k, node in nodes.items() if "tensor" in node}
    return packer, {name: node for name, node in kept.items() if node != {"tensor": name}}


def kind_of(optimizer: Any) -> str:
    """Class of an optimizer; of several, all of them in order."""
    return ", ".join(type_name(member) for member in members_of(optimizer))


def inside(optimizer: Any) -> list[Any]:
    """The optimizers that others contain, without those that stand side by side."""
    members = members_of(optimizer)
    return [each for each in optimizers_in(optimizer) if not any(each is member for member in members)]


def parameter_names(optimizer: Any, names: Mapping[int, str]) -> list[list[str]]:
    """The names of every group's parameters; `names` is by id."""
    return [
        [names.get(id(p), f"param_groups[{i}].params[{j}]") for j, p in enumerate(group["params"])]
        for i, group in enumerate(optimizer.param_groups)
    ]


def groups_out(optimizer: Any, names: Mapping[int, str], packer: Packer, prefix: str = "") -> list[Node]:
    each = parameter_names(optimizer, names)
    return [
        packer.pack({**group, "params": params}, f"{prefix}groups[{i}]")
        for i, (group, params) in enumerate(zip(optimizer.param_groups, each, strict=True))
    ]


def state_out(optimizer: Any, names: Mapping[int, str], left_out: list[str]) -> tuple[Packer | None, list[Node]]:
    """The state of the optimizer and of those it contains, by parameter; a Packer of None where it cannot be stored."""
    if optimizer is None:
        return None, []
    packer = Packer()
    try:
        return packer, [_states(each, names, packer, place) for place, each in _placed(optimizer)]
    except Exception as error:
        left_out.append(f"optimizer state: it could not be read ({type(error).__name__}: {error})")
        return None, []


def _placed(optimizer: Any) -> list[tuple[str, Any]]:
    return [("", optimizer), *((f"inside[{i}].", each) for i, each in enumerate(inside(optimizer)))]


def _states(optimizer: Any, names: Mapping[int, str], packer: Packer, prefix: str) -> Node:
    known = dict(names)
    for group, params in zip(optimizer.param_groups, parameter_names(optimizer, names), strict=True):
        known.update({id(p): name for p, name in zip(group["params"], params, strict=True)})
    by_name = {known[id(p)]: values for p, values in optimizer.state.items()}
    return {name: packer.pack(values, f"{prefix}{name}") for name, values in by_name.items()}


def optimizer_out(optimizer: Any, groups: list[list[Node]], states: list[Node]) -> Node:
    """The optimizer as the manifest has it. `groups`, `states`: of itself, then of those it contains."""
    parts = [
        {"class": kind_of(each), "groups": groups[i], "state": states[i] if states else None}
        for i, (_, each) in enumerate(_placed(optimizer))
    ]
    return {**parts[0], "inside": parts[1:]} if len(parts) > 1 else parts[0]


def all_groups_out(optimizer: Any, names: Mapping[int, str], packer: Packer) -> list[list[Node]]:
    """The settings of the optimizer's groups, then of those it contains."""
    return [groups_out(each, names, packer, prefix) for prefix, each in _placed(optimizer)]


def random_out(random: RandomState) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, state in random.states.items():
        if name == "python":
            version, words, gauss = state
            plain[name] = {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}
        elif isinstance(state, NumpyState):
            plain[name] = {**asdict(state), "key": torch.frombuffer(bytearray(state.key), dtype=torch.uint8)}
        else:
            plain[name] = state
    return plain


def random_in(plain: Mapping[str, Any]) -> RandomState:
    states: dict[str, Any] = {}
    for name, state in plain.items():
        if name == "python":
            states[name] = (state["version"], tuple(state["words"].tolist()), state["gauss"])
        elif name == "numpy":
            states[name] = NumpyState(**{**state, "key": bytes(state["key"].tolist())})
        else:
            states[name] = state
    return RandomState(states)


def mode_out(mode: Mode, model: nn.Module) -> dict[str, Any]:
    flags = {id(module): training for module, training in zip(model.modules(), mode.training, strict=False)}
    numerics: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "default_dtype": dtype_name(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    with suppress(RuntimeError):  # torch refuses to say where its two ways to set it were mixed
        numerics["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    return {
        "training": {path: flags[id(module)] for path, module in module_paths(model) if id(module) in flags},
        "autocast": mode.autocast,
        "autocast_dtype": dtype_name(mode.autocast_dtype),
        "numerics": numerics,
    }


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return found
