"""Pack: any batch as strict JSON that refers to named tensors, and back.

A bundle must be readable anywhere and by anyone, so nothing is pickled and no class is looked up by its name: mappings and
dataclasses come back as dictionaries, named tuples as tuples, and what has no such form is left out and listed.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nanproof._errors import UsageError
from nanproof.core.judge._parameters import is_dtensor

Node: TypeAlias = Any
"""What JSON holds: a plain value as it is, everything else as an object with one tag ("list", "dict", "tensor", ...)."""

_DEEPEST = 100
_LONGEST_INT = 8192
"""Bits; Python itself refuses to print integers much longer."""
_NATIVE = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
_USUAL = (Tensor, torch.nn.Parameter)
"""What every version of safetensors holds; other dtypes (complex, float8, ...) are stored as their bytes."""


class Packer:
    """Packs values one after the other and gathers their tensors, each once. Nothing is copied before `copies`."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.left_out: list[str] = []
        self._known: dict[int, tuple[Any, Node]] = {}
        """By id, with the object itself: an id is unique only while its object lives."""
        self._path: set[int] = set()

    @property
    def size(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def copies(self) -> dict[str, Tensor]:
        """The tensors in host memory, as the file wants them: dense, row by row, none sharing memory with another."""
        with torch.no_grad():
            usual = {name: t.is_cpu and t.is_contiguous() for name, t in self.tensors.items()}
            return {
                name: t.clone(memory_format=torch.contiguous_format) if usual[name] else t.to("cpu", copy=True).contiguous()
                for name, t in self.tensors.items()
            }

    def pack(self, value: Any, name: str) -> Node:
        """The value as JSON; `name` is the expression that reaches it, for its tensors and for the list of what is left out."""
        if value is None or type(value) in (bool, str):
            return value
        if isinstance(value, Tensor):
            return self.tensor(value, name)
        if isinstance(value, str):
            return str.__str__(value)
        if _is_numpy(value):
            return self._array(value, name)
        if isinstance(value, int):
            return int(value) if value.bit_length() <= _LONGEST_INT else self._without(name, "an integer too long for JSON")
        if isinstance(value, float):
            return _number(float(value))
        if isinstance(value, complex):
            return {"complex": [_number(value.real), _number(value.imag)]}
        if id(value) in self._path:
            return self._without(name, "it contains itself")
        if len(self._path) > _DEEPEST:
            return self._without(name, f"nested deeper than {_DEEPEST}")
        self._path.add(id(value))
        try:
            return self._container(value, name)
        finally:
            self._path.discard(id(value))

    def tensor(self, value: Tensor, name: str) -> Node:
        node: dict[str, Any]
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if type(value) in _USUAL and value.dtype in _NATIVE and value.layout is torch.strided and value.is_contiguous():
            plain = value.detach()
            if plain.is_cpu and not plain.is_neg():
                node = {"tensor": self._unique(name)}
                if value.requires_grad:
                    node["requires_grad"] = True
                self.tensors[node["tensor"]] = plain
                self._known[id(value)] = value, node
                return node
        why = _no_form(value)
        if why:
            return self._without(name, why)
        plain = value.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
        node = {"tensor": self._unique(name)}
        if plain.dtype not in _NATIVE:
            node["dtype"], node["shape"] = dtype_name(plain.dtype), list(plain.shape)
            stored = plain.contiguous().reshape(-1).view(torch.uint8)
        else:
            stored = plain
        if not plain.is_contiguous() and _dense(plain.shape, plain.stride()):
            node["stride"] = list(plain.stride())
        if value.requires_grad:
            node["requires_grad"] = True
        if plain.device.type != "cpu":
            node["device"] = str(plain.device)
        self.tensors[node["tensor"]] = stored
        self._known[id(value)] = value, node
        return node

    def _container(self, value: Any, name: str) -> Node:
        if isinstance(value, Mapping):
            return {"dict": self._pairs(value.items(), name)}
        if isinstance(value, (list, tuple)):
            items = [self.pack(item, f"{name}[{i}]") for i, item in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": items}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
            return {"dict": self._pairs(((key, getattr(value, key)) for key in fields), name)}
        return self._without(name, type_name(value))

    def _pairs(self, items: Any, name: str) -> list[list[Node]]:
        pairs = []
        for key, item in items:
            place = f"{name}[{repr(key)[:80]}]"
            if _is_key(key):
                pairs.append([self.pack(key, place), self.pack(item, place)])
            else:
                self._without(place, f"its key, {type_name(key)}")
        return pairs

    def _array(self, value: Any, name: str) -> Node:
        """A NumPy array or scalar, through a copy: torch takes no read-only memory and no negative strides."""
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.ndarray) and type(value) not in (numpy.ndarray, numpy.memmap):
            return self._without(name, type_name(value))
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        try:
            tensor = torch.from_numpy(numpy.array(value, order="C"))
        except TypeError:
            return self._without(name, f"{type_name(value)} of dtype {value.dtype}")
        node = {"array" if isinstance(value, numpy.ndarray) else "scalar": self.tensor(tensor, name)}
        self._known[id(value)] = value, node
        return node

    def _without(self, name: str, why: str) -> Node:
        self.left_out.append(f"{name}: {why}")
        return {"left_out": why}

    def _unique(self, name: str) -> str:
        return name if name not in self.tensors else f"{name}#{len(self.tensors)}"


class Unpacker:
    """The values again. Every tensor gets memory of its own: an operation's last bit can depend on how memory is aligned."""

    def __init__(self, tensors: Mapping[str, Tensor], source: str, to_devices: bool = False) -> None:
        self._tensors, self._source, self._to_devices = tensors, source, to_devices
        self._made: dict[str, Any] = {}

    def unpack(self, node: Node) -> Any:
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        if "list" in node:
            return [self.unpack(item) for item in node["list"]]
        if "tuple" in node:
            return tuple(self.unpack(item) for item in node["tuple"])
        if "dict" in node:
            return {self.unpack(key): self.unpack(item) for key, item in node["dict"]}
        if "tensor" in node:
            return self._once(node["tensor"], lambda: self._tensor(node))
        if "array" in node:
            return self._once(f"array {node['array']['tensor']}", lambda: self._tensor(node["array"]).numpy())
        if "scalar" in node:
            return self._tensor(node["scalar"]).numpy()[()]
        if "float" in node:
            return float(node["float"])
        if "complex" in node:
            real, imaginary = map(self.unpack, node["complex"])
            return complex(real, imaginary)
        if "left_out" in node:
            return None
        raise UsageError(f"{self._source}: {sorted(node)} is no form of a value. Use the nanproof that wrote it, or a newer one")

    def _once(self, key: str, make: Any) -> Any:
        """An object that was at two places is one object again."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _tensor(self, node: Mapping[str, Any]) -> Tensor:
        name = node["tensor"]
        if name not in self._tensors:
            raise UsageError(
                f"{self._source} holds no tensor {name!r}, which manifest.json refers to. Copy the whole folder again"
            )
        tensor = self._tensors[name].clone()
        if "dtype" in node:
            dtype = getattr(torch, node["dtype"], None)
            if not isinstance(dtype, torch.dtype):
                raise UsageError(f"{self._source}: {node['dtype']!r} is no dtype of torch {torch.__version__}. Use a newer torch")
            tensor = tensor.view(dtype).reshape(node["shape"])
        if "stride" in node:
            if not _dense(tensor.shape, node["stride"]):
                raise UsageError(f"{self._source}: the strides of {name!r} do not fit its shape. Copy the whole folder again")
            tensor = torch.empty_strided(tensor.shape, node["stride"], dtype=tensor.dtype).copy_(tensor)
        if self._to_devices:
            tensor = tensor.to(nearest(node.get("device", "cpu")))
        return tensor.requires_grad_() if node.get("requires_grad") else tensor


def nearest(device: str) -> torch.device:
    """The device of that name; another of its kind where there are fewer; the CPU where there is none."""
    wanted = torch.device(device)
    if wanted.type == "cpu":
        return wanted
    try:
        module = torch.get_device_module(wanted.type)
        count = module.device_count() if module.is_available() else 0
    except (RuntimeError, AttributeError):
        count = 0
    if count == 0:
        return torch.device("cpu")
    return wanted if (wanted.index or 0) < count else torch.device(wanted.type, 0)


def type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _number(x: float) -> Node:
    return x if math.isfinite(x) else {"float": "nan" if x != x else "inf" if x > 0 else "-inf"}


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _is_key(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_key, key))
    return key is None or _is_numpy(key) or isinstance(key, (bool, int, float, complex, str))


def _dense(shape: Any, strides: Any) -> bool:
    """Whether elements of this shape and these strides fill one block of memory, each place once."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _no_form(tensor: Tensor) -> str:
    """Why a tensor cannot be stored, or nothing."""
    if is_dtensor(tensor):
        return "a tensor sharded over ranks"
    if tensor.is_nested or tensor.is_quantized or tensor.is_meta or is_traceable_wrapper_subclass(tensor):
        return f"{type_name(tensor)}, which has no plain memory"
    return "" if tensor.layout is torch.strided else f"a tensor of layout {tensor.layout}"
