"""Put what a bundle holds into a model and an optimizer that were built anew, and say what does not fit."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from nanproof._errors import UsageError
from nanproof.core.judge._parameters import clean_name, unwrap
from nanproof.core.support._context import RandomState, change_settings
from nanproof.core.support._environment import device_name
from nanproof.explain.bundle._bundle import Bundle
from nanproof.explain.bundle._facts import OptimizerFacts, dtype_of, inside, kind_of, named_tensors, parameter_names
from nanproof.explain.bundle._pack import nearest


def notes_on(bundle: Bundle) -> list[str]:
    """Why a replay here may differ from the recorded step."""
    notes = [f"not in the bundle: {text}" for text in bundle.left_out]
    if torch.device(bundle.device).type != nearest(bundle.device).type:
        notes.append(
            f"recorded on {bundle.device} ({bundle.device_name}), which is not here: it runs on the CPU, and digits differ"
        )
    elif bundle.device_name != device_name(nearest(bundle.device)):
        notes.append(f"recorded on {bundle.device_name}, this is {device_name(nearest(bundle.device))}: last digits may differ")
    recorded = bundle.versions.get("torch", "?")
    if recorded != torch.__version__:
        notes.append(f"recorded with torch {recorded}, this is {torch.__version__}: last digits may differ")
    return notes


def load_model(bundle: Bundle, model: nn.Module) -> list[str]:
    """Weights and buffers by name, exactly: what is missing or does not fit is an error. Moves the model where it was."""
    device = nearest(bundle.device)
    if device.type != "cpu" and all(t.device.type == "cpu" for t in (*model.parameters(), *model.buffers())):
        model.to(device)
    if bundle.weights is None:
        place = f"; those of {bundle.checkpoint} are needed" if bundle.checkpoint else ""
        return [f"the bundle has no weights: the model is taken as the entry built it{place}"]
    own, saved, notes = named_tensors(model), bundle.weights, []
    for name in own:
        if name not in saved:
            raise UsageError(f"{bundle.path} has no {name}, which the model has. Build the model as it was in the run")
    for name, value in sorted(saved.items()):
        if name not in own:
            raise UsageError(f"{bundle.path} has {name}, which the model has not. Build the model as it was in the run")
        if is_lazy(own[name]):
            raise UsageError(f"{name} of the model is not initialised yet. Let the entry run a forward first")
        if own[name].shape != value.shape:
            raise UsageError(
                f"{name} is {list(value.shape)} in {bundle.path} and {list(own[name].shape)} in the model. "
                "Build the model as it was in the run"
            )
        if own[name].dtype != value.dtype:
            notes.append(f"{name} is {own[name].dtype} in the model built; it is made {value.dtype}, as recorded")
            own[name].data = value.to(own[name].device)
        else:
            own[name].data.copy_(value)
    return notes if len(notes) < 3 else [*notes[:2], f"and {len(notes) - 2} more tensors of another dtype"]


def load_optimizer(bundle: Bundle, model: nn.Module, optimizer: Any) -> list[str]:
    """Settings and state, by group and by parameter; of the optimizers that it contains, too."""
    facts = bundle.optimizer
    if optimizer is None or facts is None:
        return []
    own, contained = kind_of(optimizer), inside(optimizer)
    if own != facts.kind:
        return [f"the optimizer is {own}, recorded was {facts.kind}: it is taken as the entry built it"]
    pairs = [(optimizer, facts), *zip(contained, facts.inside, strict=False)]
    names = {id(p): clean_name(name) for name, p in unwrap(model).named_parameters()}
    same = len(contained) == len(facts.inside) and all(kind_of(each) == then.kind for each, then in pairs)
    if not same or any(parameter_names(each, names) != [g["params"] for g in then.groups] for each, then in pairs):
        return ["the optimizer's groups are not those recorded: it is taken as the entry built it"]
    for each, then in pairs:
        _load(each, then, names)
    return [] if facts.state is not None else ["the optimizer starts without the recorded moments"]


def _load(optimizer: Any, facts: OptimizerFacts, names: Mapping[int, str]) -> None:
    change_settings(optimizer, [{k: v for k, v in group.items() if k != "params"} for group in facts.groups])
    if facts.state is None:
        return
    optimizer.state.clear()
    for group, params in zip(optimizer.param_groups, parameter_names(optimizer, names), strict=True):
        for p, name in zip(group["params"], params, strict=True):
            if name in facts.state:
                optimizer.state[p] = {key: _beside(p, value) for key, value in facts.state[name].items()}


def _beside(p: Tensor, value: Any) -> Any:
    """Moments lie where their parameter does; step counts may stay on the CPU."""
    return value.to(p.device) if isinstance(value, Tensor) and value.dim() else value


def usable(random: RandomState) -> RandomState:
    """The generators that there are here; those of a device that is not here are dropped."""
    states: dict[str, Any] = {}
    for name, state in random.states.items():
        if name == "python" or (name == "numpy" and importlib.util.find_spec("numpy") is not None):
            states[name] = state
        elif name != "numpy" and (name == "cpu" or nearest(name).type != "cpu"):
            states[str(nearest(name))] = state
    return RandomState(states)


@contextmanager
def numerics(recorded: Mapping[str, Any]) -> Iterator[None]:
    """torch's settings that change last digits, as recorded, while open."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    strict, precision = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    try:
        torch.set_num_threads(recorded.get("threads", threads))
        torch.set_default_dtype(dtype_of(recorded["default_dtype"]) if "default_dtype" in recorded else dtype)
        torch.use_deterministic_algorithms(recorded.get("deterministic", strict))
        torch.set_float32_matmul_precision(recorded.get("float32_matmul_precision", precision))
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(strict)
        torch.set_float32_matmul_precision(precision)
