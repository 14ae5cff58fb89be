"""What a bundle holds of the guilty samples: the shape and the numbers of every tensor, and token ids as text.

Only the manifest is read, and of `batch.safetensors` the rows of those samples. Nothing is unpickled and torch is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nanproof._access import read_json
from nanproof._records import Incident, encode
from nanproof._text import shown
from nanproof.report.folder._tensors import INTEGERS, NotRead, Tensors
from nanproof.report.folder._tokens import Tokens

MOST_SAMPLES = 3
MOST_TENSORS = 12
MOST_TOKENS = 160
"""Of a row of ids, those around the guilty one."""
MOST_VALUES = 12
MOST_MANIFEST = 64 << 20
_DTYPES = {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "U16": "uint16", "U32": "uint32",
           "U64": "uint64", "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}  # fmt: skip


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest of a bundle; empty where there is none that can be read."""
    try:
        data = read_json(folder / "manifest.json", MOST_MANIFEST)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def samples_of(folder: Path, incident: Incident, tokens: Tokens) -> list[dict[str, Any]]:
    """One entry a guilty sample, with what the batch held of it; none where no sample is named, or the bundle is gone."""
    diagnosis = incident.diagnosis
    batches = manifest_of(folder).get("batches")
    if diagnosis is None or not diagnosis.samples or not isinstance(batches, list) or not batches:
        return []
    micro = incident.micro_batch or 0
    try:
        stored = Tensors(folder / "batch.safetensors")
        places = [
            (label, name) for label, name in _tensors(batches[micro if micro < len(batches) else 0], "") if name in stored.stored
        ]
    except (NotRead, RecursionError, TypeError):
        return []
    bad_tokens = frozenset(diagnosis.tokens)
    found = []
    for index in diagnosis.samples[:MOST_SAMPLES]:
        rows = []
        for label, name in places[:MOST_TENSORS]:
            try:
                rows.append(_row(stored, label, name, index, bad_tokens, tokens))
            except (NotRead, OSError):
                continue
        found.append({"sample": index, "tensors": [row for row in rows if row]})
    return [sample for sample in found if sample["tensors"]]


def _tensors(node: Any, label: str) -> Iterator[tuple[str, str]]:
    """(how it is reached, its name in the file) of every tensor of a batch."""
    if not isinstance(node, dict):
        return
    for tag in ("list", "tuple"):
        for i, item in enumerate(node.get(tag) or ()):
            yield from _tensors(item, f"{label}[{i}]")
    for pair in node.get("dict") or ():
        if isinstance(pair, list) and len(pair) == 2:
            yield from _tensors(pair[1], f"{label}.{pair[0]}" if label else str(pair[0]))
    for tag in ("array", "scalar"):
        yield from _tensors(node.get(tag), label)
    if isinstance(node.get("tensor"), str) and "dtype" not in node:  # with one it is stored as bytes
        yield label or "batch", node["tensor"]


def _row(stored: Tensors, label: str, name: str, index: int, bad: frozenset[int], tokens: Tokens) -> dict[str, Any] | None:
    """What one tensor holds of a sample; None where it has no such row."""
    about = stored.stored[name]
    if not about.shape or index >= about.shape[0]:
        return None
    inner = about.shape[1:]
    said: dict[str, Any] = {
        "name": shown(label, 200),
        "dtype": _DTYPES.get(about.dtype, shown(about.dtype, 20)),
        "shape": list(inner),
    }
    if about.dtype in INTEGERS and len(inner) == 1:
        names = _names_tokens(label)
        return {
            **said,
            **_ids(stored, name, index, inner[0], bad if names else frozenset(), tokens if names else Tokens(hint="")),
        }
    return {**said, **_numbers(stored.row(name, index), math.prod(inner))}


def _ids(stored: Tensors, name: str, index: int, length: int, bad: frozenset[int], tokens: Tokens) -> dict[str, Any]:
    """Whole numbers in a row: token ids, labels, masks."""
    first = min(bad, default=0)
    start = max(0, min(first - MOST_TOKENS // 2, length - MOST_TOKENS))
    ids = [int(x) for x in stored.row(name, index, start, MOST_TOKENS)]
    texts = [tokens.text(x) for x in ids]
    return {
        "start": start,
        "ids": ids,
        "texts": texts if any(texts) else [],
        "bad": sorted(x for x in bad if start <= x < start + len(ids)),
        "hint": tokens.hint,
    }


def _numbers(values: Sequence[float], count: int) -> dict[str, Any]:
    """The few figures that tell a usable row from one that is not."""
    finite = [x for x in values if math.isfinite(x)]
    spoilt = [i for i, x in enumerate(values) if not math.isfinite(x)]
    said: dict[str, Any] = {"count": count, "read": len(values), "nonfinite": len(spoilt)}
    if finite:
        said |= {"min": encode(min(finite)), "max": encode(max(finite)), "mean": encode(math.fsum(finite) / len(finite))}
    start = max(0, spoilt[0] - 4) if spoilt else 0
    return {**said, "start": start, "values": [encode(x) for x in values[start : start + MOST_VALUES]]}


def _names_tokens(label: str) -> bool:
    """Masks and positions are whole numbers as well, and are no tokens."""
    lower = label.lower()
    ids = "ids" in lower or "token" in lower or "label" in lower
    return ids and not any(word in lower for word in ("mask", "position", "type"))
