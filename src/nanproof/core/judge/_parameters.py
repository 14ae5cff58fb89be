"""The trainable parameters of an optimizer: their names, their gradients, and the norm of each gradient.

The norms are the pass over the gradients that clipping does anyway. `clip_grad_norm_` throws them away; here they are
kept, because they are what names the culprit.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from itertools import chain, compress, count, repeat
from operator import attrgetter, is_, itemgetter, not_
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_grad, _dtype, _sharding = attrgetter("grad"), attrgetter("dtype"), attrgetter("_spec")
_stride = Tensor.stride
_numbers = count()
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module under DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if "_orig_mod" in model._modules:
            model = model._modules["_orig_mod"]  # type: ignore[assignment]
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        else:
            return model


def is_compiled(module: nn.Module) -> bool:
    """Whether this very module was compiled: hooks on it become part of what is compiled."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def has_compiled(model: nn.Module) -> bool:
    """Whether any module of a model was compiled."""
    return any(is_compiled(module) for module in model.modules())


def clean_name(name: str) -> str:
    """A parameter's name as the user's own module spells it, without the prefixes that wrappers add."""
    return _WRAPPERS.sub("", name)


def is_dtensor(tensor: Tensor) -> bool:
    """Whether the tensor is sharded over ranks; does not import the DTensor machinery to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def is_plain(tensor: Tensor) -> bool:
    """Whether it is one dense block of numbers, neither sharded nor made of others."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on another device. Waits on the way to the CPU only, where it would be read before it has arrived."""
    return tensor.to(device, tensor.dtype if dtype is None else dtype, non_blocking=device.type != "cpu")


class NormKernels(Protocol):
    """What `nanproof.core.fast._kernels` offers; None means that it does not apply."""

    def norms(self, gradients: list[Tensor]) -> Tensor | None: ...


class Present:
    """Which parameters have a gradient, and what the gradients are like.

    `Parameters.present_gradients` returns the same object until any of that changes, so what follows from it is computed once and
    compared by identity.
    """

    def __init__(self, parameters: Sequence[Tensor], absent: list[bool], gradients: list[Tensor]) -> None:
        self.absent = absent
        self.mask = list(map(not_, absent))
        self.indices = [i for i, has_one in enumerate(self.mask) if has_one]
        """Positions of the parameters that have a gradient."""
        self.parameters = list(compress(parameters, self.mask))
        self.dtypes = frozenset(map(_dtype, self.parameters))
        self.number = next(_numbers)
        self._types = list(map(type, gradients))
        self._dtypes = list(map(_dtype, gradients))
        self._specs = _specs(gradients)
        self.groups = Groups(gradients)

    def holds_for(self, gradients: list[Tensor]) -> bool:
        """Whether gradients are of the kinds that these were."""
        if list(map(type, gradients)) != self._types or list(map(_dtype, gradients)) != self._dtypes:
            return False
        if self._specs is None:
            return True
        return bool(self._specs) and all(map(is_, map(_sharding, gradients), self._specs))


def _specs(gradients: list[Tensor]) -> list[Any] | None:
    """How gradients are sharded; None where none is, empty where only some are: then they are grouped anew at every step."""
    sharded = sum(map(is_dtensor, gradients))
    if not sharded:
        return None
    return list(map(_sharding, gradients)) if sharded == len(gradients) else []


class Parameters:
    """The tensors an optimizer updates, in the optimizer's order, each once."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        inner = unwrap(model)
        known = {id(p): clean_name(name) for name, p in inner.named_parameters()}
        self.tensors: list[Tensor] = []
        names: list[str] = []
        self.foreign: list[str] = []
        """Names of optimizer tensors that the model does not have."""
        seen: set[int] = set()
        self._groups: list[int] = []
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                if id(p) in seen:
                    continue
                seen.add(id(p))
                self._groups.append(i)
                name = known.get(id(p))
                if name is None:
                    name = f"param_groups[{i}].params[{j}]"
                    self.foreign.append(name)
                self.tensors.append(p)
                names.append(name)
        self.names = tuple(names)
        self.left_out = [known[id(p)] for p in inner.parameters() if p.requires_grad and id(p) not in seen]
        """Trainable parameters of the model that the optimizer does not have."""
        self.device = next((local(p).device for p in self.tensors), torch.device("cpu"))
        """Where verdicts are made: the device of the first parameter."""
        wide = any(p.dtype in (torch.float64, torch.complex128) for p in self.tensors)
        self.dtype = torch.float64 if wide else torch.float32
        """What norms accumulate in."""
        self._dense = all(fills_its_memory(local(p)) for p in self.tensors)
        self._present: Present | None = None

    def by_parameter(self, of_groups: Sequence[float]) -> list[float]:
        """Something that each parameter group has one of, for each parameter."""
        return [of_groups[i] for i in self._groups]

    def present(self) -> list[int]:
        """Indices of the parameters that have a gradient now."""
        return [i for i, p in enumerate(self.tensors) if p.grad is not None]

    def gradients(self, present: Iterable[int]) -> list[Tensor]:
        """Their gradients. A gradient laid out unlike its parameter is laid out like it first: the fused kernels read
        both with one index and would be silently wrong."""
        return [_like_its_parameter(self.tensors[i]) for i in present]

    def present_gradients(self) -> tuple[Present, list[Tensor]]:
        """Return the gradients that exist, laid out as `gradients` does it, and what they are like.

        Called at every step, so it runs no loop in Python.
        """
        gradients: list[Any] = list(map(_grad, self.tensors))
        absent = list(map(is_, gradients, repeat(None)))
        known = self._present if self._present is not None and self._present.absent == absent else None
        mask = list(map(not_, absent)) if known is None else known.mask
        tensors = list(compress(self.tensors, mask)) if known is None else known.parameters
        if len(tensors) != len(gradients):
            gradients = list(compress(gradients, mask))
        try:
            laid_out = list(map(_stride, gradients)) == list(map(_stride, tensors))
        except RuntimeError:  # a sparse gradient has no strides
            laid_out = False
        strided = True
        if not laid_out:
            gradients = list(map(_like_its_parameter, tensors))
            strided = all(g.layout is torch.strided for g in gradients)
        if known is None or not strided or not known.holds_for(gradients):
            known = Present(self.tensors, absent, gradients)
            self._present = known if strided else None  # a gradient may be sparse in some steps only
        return known, gradients

    def norms(self, gradients: list[Tensor], kernels: NormKernels | None = None, present: Present | None = None) -> Tensor:
        """The 2-norm of each gradient, whole across shards, as one vector on `self.device`. `present`: what is known of them.

        Sharded gradients cost the one all_reduce that `clip_grad_norm_` does; plain ones none.
        """
        if not gradients:
            return torch.zeros(0, device=self.device, dtype=self.dtype)
        groups = Groups(gradients) if present is None else present.groups
        if len(groups.places) == 1:
            return self._group_norms(gradients, kernels)
        found = [self._group_norms(picked(gradients, places), kernels).unbind() for places in groups.places]
        return torch.stack(picked(list(chain.from_iterable(found)), groups.order))

    def _group_norms(self, gradients: list[Tensor], kernels: NormKernels | None) -> Tensor:
        first = gradients[0]
        if kernels is not None and self._dense and first.layout is torch.strided and not is_dtensor(first):
            norms = kernels.norms(gradients)
            if norms is not None:
                return norms
        if first.is_sparse:
            gradients = [g.coalesce().values() for g in gradients]
        if first.is_complex():
            gradients = [torch.view_as_real(g) for g in gradients]
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=self.dtype))
        if is_dtensor(norms):
            norms = norms.full_tensor()  # type: ignore[attr-defined]
        return moved(norms, self.device)


def fills_its_memory(p: Tensor) -> bool:
    """Whether the elements, in whatever order, are one block of memory: then a norm can read it straight through."""
    strides = sorted((stride, size) for stride, size in zip(p.stride(), p.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in strides:
        if stride != expected:
            return False
        expected *= size
    return True


def _like_its_parameter(p: Tensor) -> Tensor:
    """The gradient of a parameter, laid out like it."""
    g = p.grad
    assert g is not None
    if g.layout is torch.strided and g.stride() != p.stride():
        g = torch.empty_like(p).copy_(g)
        p.grad = g
    return g


def picked(values: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """The values at these places."""
    return list(itemgetter(*places)(values)) if len(places) > 1 else [values[i] for i in places]


class Groups:
    """Gradients whose norms can be read together."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        groups: dict[Any, list[int]] = {}
        for i, g in enumerate(gradients):
            groups.setdefault(_group_key(g), []).append(i)
        self.places = list(groups.values())
        """Of the members of each group."""
        self.order = sorted(range(len(gradients)), key=list(chain.from_iterable(self.places)).__getitem__)
        """Where each gradient is, once the groups stand one behind the other."""


def _group_key(gradient: Tensor) -> Any:
    if type(gradient) is not Tensor and is_dtensor(gradient):
        return gradient.device_mesh, gradient.placements, gradient.dtype  # type: ignore[attr-defined]
    return gradient.device, gradient.dtype, gradient.layout
