"""Which module the parameters of optimizers belong to. A script does not say; the garbage collector knows every module there is.

The model is the module that the script calls, with DistributedDataParallel or torch.compile around it. A module that only holds
it, such as an average of its weights, is not. Where no single call reaches all parameters, the model is the smallest module that
holds all of them. Parameters of several models, or of none, are held together by a module made for that.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer


class Together(nn.Module):
    """Several models under the same optimizers, and tensors that no module holds. It is never called."""


def model_of(optimizers: Iterable[Optimizer], was_called: Sequence[nn.Module] = ()) -> nn.Module:
    """The module to guard. Looks at every object of the process: once a run.

    Args:
        was_called: the modules that the script has called so far, if that is known.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    tensors = [p for group in groups for p in group["params"]]
    roots = _roots(tensors)
    wanted = {id(p) for p in tensors}
    held = {id(root): wanted & {id(p) for p in root.parameters()} for root in roots}
    whole = [root for root in roots if held[id(root)] == wanted]
    reached = [m for m in was_called if wanted <= {id(p) for p in m.parameters()}]
    if reached:
        return min(reached, key=_size)
    if whole:
        root = min(whole, key=_size)
        return root if not was_called else _smallest(root, wanted)
    together, missing = Together(), set(wanted)
    for root in sorted(roots, key=lambda root: -len(held[id(root)])):
        if held[id(root)] & missing:
            together.add_module(_free_name(together, type(root).__name__), root)
            missing -= held[id(root)]
    for i, group in enumerate(groups):
        for j, p in enumerate(group["params"]):
            if id(p) in missing:
                together._parameters[f"group{i}_{j}"] = p  # tensors that are no nn.Parameter too
    return together


def _size(module: nn.Module) -> int:
    return sum(1 for _ in module.modules())


def _smallest(module: nn.Module, wanted: set[int]) -> nn.Module:
    """The smallest module below that holds all of them."""
    while True:
        inside = [child for child in module.children() if wanted <= {id(p) for p in child.parameters()}]
        if len(inside) != 1:
            return module
        module = inside[0]


def owning(modules: Iterable[nn.Module], model: nn.Module, tensors: Iterable[Tensor]) -> list[nn.Module]:
    """Of these modules, the parts of a model that hold some of the tensors."""
    wanted, parts = {id(p) for p in tensors}, {id(m) for m in model.modules()}
    return [m for m in modules if id(m) in parts and any(id(p) in wanted for p in m.parameters())]


def called(model: nn.Module) -> list[nn.Module]:
    """The modules whose calls begin a forward."""
    return list(model.children()) if isinstance(model, Together) else [model]


def _roots(tensors: Iterable[Tensor]) -> list[nn.Module]:
    """The modules that hold any of the tensors, somewhere beneath them, and are in no other module."""
    wanted = {id(p) for p in tensors}
    modules = [x for x in gc.get_objects() if issubclass(type(x), nn.Module) and "_modules" in x.__dict__]
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module._modules.values():
            if child is not None and not isinstance(module, Together):
                parents.setdefault(id(child), []).append(module)
    reached: dict[int, nn.Module] = {}
    todo = [m for m in modules if any(id(p) in wanted for p in m._parameters.values()) and not isinstance(m, Together)]
    while todo:
        module = todo.pop()
        if id(module) not in reached:
            reached[id(module)] = module
            todo += parents.get(id(module), [])
    return [module for key, module in reached.items() if key not in parents]


def _free_name(module: nn.Module, wanted: str) -> str:
    name, count = wanted, 1
    while name in module._modules:
        count += 1
        name = f"{wanted}{count}"
    return name
