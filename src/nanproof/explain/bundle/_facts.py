"""What a step depended on besides its batch, as a bundle holds it, and back: mode, random numbers, weights, optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.core.judge._parameters import clean_name, is_dtensor, unwrap
from nanproof.core.support._context import Mode, NumpyState, RandomState
from nanproof.explain.bundle._pack import Node, Packer, dtype_name


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


def parameter_names(optimizer: Any, names: Mapping[int, str]) -> list[list[str]]:
    """The names of every group's parameters; `names` is by id."""
    return [
        [names.get(id(p), f"param_groups[{i}].params[{j}]") for j, p in enumerate(group["params"])]
        for i, group in enumerate(optimizer.param_groups)
    ]


def groups_out(optimizer: Any, names: Mapping[int, str], packer: Packer) -> list[Node]:
    each = parameter_names(optimizer, names)
    return [
        packer.pack({**group, "params": params}, f"groups[{i}]")
        for i, (group, params) in enumerate(zip(optimizer.param_groups, each, strict=True))
    ]


def state_out(optimizer: Any, names: Mapping[int, str], left_out: list[str]) -> tuple[Packer | None, Node]:
    if optimizer is None:
        return None, None
    packer = Packer()
    known = dict(names)
    for group, params in zip(optimizer.param_groups, parameter_names(optimizer, names), strict=True):
        known.update({id(p): name for p, name in zip(group["params"], params, strict=True)})
    try:
        by_name = {known[id(p)]: values for p, values in optimizer.state.items()}
        return packer, {name: packer.pack(values, name) for name, values in by_name.items()}
    except Exception as error:
        left_out.append(f"optimizer state: it could not be read ({type(error).__name__}: {error})")
        return None, None


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
