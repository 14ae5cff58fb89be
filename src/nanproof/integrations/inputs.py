"""What a model was called with, looked at when its step was refused and cannot be run again.

Most loops compute their loss outside of the model, where nobody but the script can do it a second time. Whether the trouble
came in with the data can still be told.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from nanproof.core.tree import tensors_in
from nanproof.records import few


def bad_inputs(calls: Iterable[dict[str, Any]]) -> str:
    """A sentence about non-finite numbers in the calls of a step; reads every element and waits."""
    looked, found = False, []
    for i, call in enumerate(calls):
        for name, tensor in (*tensors_in(call["args"], "args"), *tensors_in(call["kwargs"], "kwargs")):
            looked = True
            values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
            if not values.is_floating_point() or values.layout is not torch.strided or bool(torch.isfinite(values).all()):
                continue
            rows = (~torch.isfinite(values)).flatten(1).any(dim=1).nonzero().flatten().tolist() if values.dim() > 1 else []
            call_number = f"call {i}, " if i else ""
            found.append(f"{call_number}{name}" + (f", sample {few(rows)}" if rows else ""))
    if found:
        return f"the model was called with non-finite numbers: {'; '.join(found[:3])}"
    return "the model was called with finite numbers only" if looked else ""
