"""What a tensor is made of. A sharded or quantised tensor is a shell around plain ones, and only those can be looked at,
copied and put back bit for bit: most operations are not defined on the shell."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nanproof.core.judge._parameters import is_dtensor, local
from nanproof.core.support._tree import map_tensors


def plain(tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The plain tensors that one is made of on this rank, each with its name inside: [("", tensor)] for one that is plain."""
    tensor = local(tensor.detach())
    if not is_traceable_wrapper_subclass(tensor):
        return [("", tensor)]
    names, _ = tensor.__tensor_flatten__()
    return [(":".join(filter(None, (name, rest))), part) for name in names for rest, part in plain(getattr(tensor, name))]


def is_shell(tensor: Tensor) -> bool:
    """Whether it is made of others, besides being sharded."""
    return type(tensor) is not Tensor and is_traceable_wrapper_subclass(local(tensor.detach()))


def is_opaque(tensor: Tensor) -> bool:
    """Whether it decides itself what every operation does, and does not say what it is made of."""
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter or is_dtensor(tensor) or is_traceable_wrapper_subclass(tensor):
        return False
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def numbers(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors in it that can be non-finite, in a form whose norm can be taken."""
    if is_opaque(tensor):
        return
    for _, part in [("", tensor.detach())] if type(tensor) in _PLAIN else plain(tensor):
        if part.layout is torch.sparse_coo:
            part = part.coalesce().values()
        elif part.layout is not torch.strided:
            part = part.values()
        if part.is_complex():
            part = torch.view_as_real(part)
        if not part.is_floating_point() or not part.numel() or part.is_meta:
            continue
        yield part.float() if part.element_size() == 1 else part  # no norm is defined on 8-bit floats


SMALL = 1 << 12
"""Elements of a tensor that is looked at together with others, at the most."""
_TOGETHER = 1 << 10
"""Small tensors that are looked at together, at the most."""
_PLAIN = (Tensor, torch.nn.Parameter)


@torch.no_grad()
def bounds(tensors: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Return the smallest and the largest number of each plain tensor that is not empty; both are NaN where it holds one.

    Small tensors of one shape are looked at together, and the device is waited for once. For failures and the end only.
    """
    alike: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        small = t.numel() <= SMALL and type(t) in _PLAIN
        alike.setdefault((t.dtype, t.device, t.shape if small else i), []).append(i)
    ends: dict[Any, list[tuple[list[int], Tensor, Tensor]]] = {}
    for (dtype, device, _), every in alike.items():
        for first in range(0, len(every), _TOGETHER):
            places = every[first : first + _TOGETHER]
            if len(places) == 1:
                low, high = torch.aminmax(tensors[places[0]].detach())
            else:
                low, high = torch.aminmax(torch.stack([tensors[i] for i in places]).reshape(len(places), -1), dim=1)
            ends.setdefault((dtype, device), []).append((places, low.reshape(-1), high.reshape(-1)))
    found = [(0.0, 0.0)] * len(tensors)
    for parts in ends.values():
        numbers_read, at = torch.cat([end for _, *both in parts for end in both]).tolist(), 0
        for places, *_ in parts:
            highest = at + len(places)
            for k, i in enumerate(places):
                found[i] = numbers_read[at + k], numbers_read[highest + k]
            at = highest + len(places)
    return found


def nonfinite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the tensors that hold a NaN or an Inf. Waits: for failures and `close` only."""
    names: list[str] = []
    bad: set[int] = set()
    small: list[tuple[int, Tensor]] = []

    def look(parts: list[tuple[int, Tensor]]) -> None:
        ends = bounds([part for _, part in parts])
        bad.update(i for (i, _), pair in zip(parts, ends, strict=True) if not all(map(math.isfinite, pair)))

    for i, (name, tensor) in enumerate(tensors):
        names.append(name)
        for part in numbers(tensor):
            if part.numel() > SMALL:
                look([(i, part)])
            else:
                small.append((i, part))
        if len(small) >= _TOGETHER:
            look(small)
            small = []
    look(small)
    return [name for i, name in enumerate(names) if i in bad]


def own_copy_of(value: Any) -> Any:
    """A copy of anything that an optimizer keeps."""
    if isinstance(value, (list, tuple, dict)):
        return map_tensors(value, own_copy_of) if type(value) in (list, tuple, dict) else copy.deepcopy(value)
    if not isinstance(value, Tensor) or is_opaque(value):
        return copy.deepcopy(value)
    if not is_shell(value):
        return value.detach().clone()
    inner: Any = local(value.detach())
    names, context = inner.__tensor_flatten__()
    kept = {name: own_copy_of(getattr(inner, name)) for name in names}
    made: Tensor = type(inner).__tensor_unflatten__(kept, context, inner.shape, inner.stride())
    return rewrapped(made, value) if is_dtensor(value) else made


def rewrapped(part: Tensor, like: Any) -> Tensor:
    """This rank's part as a sharded tensor again. `DTensor.from_local` would move the part to the mesh's device."""
    from torch.distributed.tensor import DTensor

    if part.device.type == like.device_mesh.device_type:
        shape, stride = like.shape, like.stride()
        return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
    return DTensor(part, like._spec, requires_grad=False)


def fits(place: Any, value: Any) -> bool:
    """Whether a tensor can be written into another without a change of its kind."""
    if not (isinstance(place, Tensor) and isinstance(value, Tensor)) or type(place) is not type(value):
        return False
    if place is value or is_opaque(place) or place.dtype != value.dtype:
        return False
    inside, other = plain(place), plain(value)
    return [(name, t.shape, t.dtype) for name, t in inside] == [(name, t.shape, t.dtype) for name, t in other]


@torch.no_grad()
def write(place: Tensor, value: Tensor) -> None:
    """Write one tensor into another that it fits, bit for bit."""
    for (_, live), (_, kept) in zip(plain(place), plain(value), strict=True):
        live.copy_(kept)


def shell_of(tensor: Tensor) -> dict[str, Any] | None:
    """How a tensor is made of plain ones, in plain values; None if it is plain itself."""
    tensor = local(tensor.detach())
    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, context = tensor.__tensor_flatten__()
    return {
        "class": [type(tensor).__module__, type(tensor).__qualname__],
        "context": context,
        "shape": tuple(tensor.shape),
        "stride": tensor.stride(),
        "inner": {name: shell_of(getattr(tensor, name)) for name in names},
    }


def rebuilt(shell: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Tensor:
    """A tensor from its plain ones, by their names inside. Its class must be one that this process has loaded already: what a
    file says is never a reason to import anything."""
    module, name = shell["class"]
    kind: Any = sys.modules.get(module)
    for word in name.split("."):
        kind = getattr(kind, word, None)
    if not (isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise ValueError(f"a tensor of class {module}.{name} is not known here; import what defines it before this")
    inner: dict[str, Tensor] = {}
    for name, below in shell["inner"].items():
        own = {rest: t for key, t in parts.items() for head, _, rest in [key.partition(":")] if head == name}
        inner[name] = own[""] if below is None else rebuilt(below, own)
    made: Tensor = kind.__tensor_unflatten__(inner, shell["context"], torch.Size(shell["shape"]), shell["stride"])
    return made
