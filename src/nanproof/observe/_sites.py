"""Which modules are looked at: those the user names, or the places where trouble in a network shows first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from nanproof._errors import UsageError
from nanproof.core.judge._parameters import clean_name, unwrap
from nanproof.observe._settings import AUTO

MOST = 512
"""Sites that "auto" takes at the most."""
_PARTS = re.compile(r"attn|attention|mlp|ffn|feed_?forward|moe|mixer|^ff\d?$", re.IGNORECASE)
_ENDS = re.compile(r"^(o|wo|o_proj|out|out_proj|c_proj|proj|proj_out|dense|down|down_proj|w2|w_down|fc2|lin2|linear2)$")
_NO_SITES = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, torch.jit.ScriptModule)
"""Never called; or called where no hook is run."""
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")


def choose(model: nn.Module, wanted: str | Sequence[str] | Callable[[str, Any], bool]) -> dict[str, nn.Module]:
    """The modules to look at, by name, in the order of the model."""
    modules = named(model)
    if wanted == AUTO:
        found = _by_structure(modules)
        return dict(list(found.items())[:MOST])
    if callable(wanted):
        found = {name: module for name, module in modules.items() if wanted(name, module)}
    else:
        patterns = [wanted] if isinstance(wanted, str) else list(wanted)
        found = {name: m for name, m in modules.items() if any(fnmatchcase(name, p) for p in patterns)}
    if not found:
        some = f"the model has {', '.join(list(modules)[:5])}, ..." if modules else "the model has none inside"
        raise UsageError(f"Observe(modules={wanted!r}) matches no module; {some}")
    return found


def named(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that can be looked at, by the name the user gave them; under a wrapper, the one inside it."""
    found = {}
    for name, module in unwrap(model).named_modules():
        inner = any(key in module._modules for key in _WRAPPED)
        if name and not inner and not isinstance(module, _NO_SITES):
            found[clean_name(f"{name}.").removesuffix(".")] = module
    return found


def _by_structure(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    chosen: dict[str, nn.Module] = {}
    for name, block in _blocks(modules):
        chosen.update(_parts(name, block, modules))
        chosen[name] = block
    if not chosen:
        chosen = {name: m for name, m in modules.items() if _has_matrix(m)}
    return {name: m for name, m in modules.items() if name in chosen}


def _blocks(modules: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """What is repeated: two or more of one class, numbered, each with parts of its own."""
    families: dict[tuple[str, type], list[str]] = {}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if last.isdigit() and "expert" not in parent and any(True for _ in module.children()):
            families.setdefault((parent, type(module)), []).append(name)
    for names in families.values():
        if len(names) >= 2:
            yield from ((name, modules[name]) for name in names)


def _parts(name: str, block: nn.Module, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Attention and MLP of a block; where one of them is not a module of its own, the projection it ends with."""
    inside = {n: m for n, m in modules.items() if n.startswith(f"{name}.") and "." not in n[len(name) + 1 :]}

    def last(n: str) -> str:
        return n.rpartition(".")[2]

    def whole(n: str, m: nn.Module) -> bool:
        return bool(_PARTS.search(last(n))) and "norm" not in last(n).lower() and not isinstance(m, nn.Dropout)

    return {n: m for n, m in inside.items() if whole(n, m) or _ENDS.match(last(n))}


def _has_matrix(module: nn.Module) -> bool:
    """A layer with a weight of its own; with weight or spectral norm that is one level down, as a parametrization."""
    leaf = all(name == "parametrizations" for name, _ in module.named_children())
    return leaf and any(p.dim() >= 2 for p in module.parameters())
