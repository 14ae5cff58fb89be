"""The trainable parameters of an optimizer: their names, their gradients, and the norm of each gradient.

The norms are the pass over the gradients that clipping does anyway. `clip_grad_norm_` throws them away; here they are
kept, because they are what names the culprit.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

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


class NormKernels(Protocol):
    """What `nanproof.core.judge._kernels` offers; None means that it does not apply."""

    def norms(self, gradients: list[Tensor]) -> Tensor | None: ...


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

    def by_parameter(self, of_groups: Sequence[float]) -> list[float]:
        """Something that each parameter group has one of, for each parameter."""
        return [of_groups[i] for i in self._groups]

    def present(self) -> list[int]:
        """Indices of the parameters that have a gradient now."""
        return [i for i, p in enumerate(self.tensors) if p.grad is not None]

    def gradients(self, present: Iterable[int]) -> list[Tensor]:
        """Their gradients. A gradient laid out unlike its parameter is laid out like it first: the fused kernels read
        both with one index and would be silently wrong."""
        return [self._gradient(self.tensors[i]) for i in present]

    def present_gradients(self) -> tuple[list[int], list[Tensor]]:
        """Both at once: asking a parameter for its gradient takes longer than all else here."""
        found = [(i, g) for i, p in enumerate(self.tensors) if (g := p.grad) is not None]
        return [i for i, _ in found], [self._gradient(self.tensors[i], g) for i, g in found]

    @staticmethod
    def _gradient(p: Tensor, gradient: Tensor | None = None) -> Tensor:
        g = p.grad if gradient is None else gradient
        assert g is not None
        if g.layout is torch.strided and g.stride() != p.stride():
            g = torch.empty_like(p).copy_(g)
            p.grad = g
        return g

    def norms(self, gradients: list[Tensor], kernels: NormKernels | None = None) -> Tensor:
        """The 2-norm of each gradient, whole across shards, as one vector on `self.device`.

        Sharded gradients cost the one all_reduce that `clip_grad_norm_` does; plain ones none.
        """
        if not gradients:
            return torch.zeros(0, device=self.device, dtype=self.dtype)
        groups: dict[Any, list[int]] = {}
        for i, g in enumerate(gradients):
            groups.setdefault(_group_key(g), []).append(i)
        if len(groups) == 1:
            return self._group_norms(gradients, kernels)
        found: list[Tensor] = [None] * len(gradients)  # type: ignore[list-item]
        for indices in groups.values():
            norms = self._group_norms([gradients[i] for i in indices], kernels)
            for i, norm in zip(indices, norms.unbind(), strict=True):
                found[i] = norm
        return torch.stack(found)

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
        return norms.to(self.device, non_blocking=True)


def fills_its_memory(p: Tensor) -> bool:
    """Whether the elements, in whatever order, are one block of memory: then a norm can read it straight through."""
    strides = sorted((stride, size) for stride, size in zip(p.stride(), p.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in strides:
        if stride != expected:
            return False
        expected *= size
    return True


def _group_key(gradient: Tensor) -> Any:
    if type(gradient) is not Tensor and is_dtensor(gradient):
        return gradient.device_mesh, gradient.placements, gradient.dtype  # type: ignore[attr-defined]
    return gradient.device, gradient.dtype, gradient.layout
