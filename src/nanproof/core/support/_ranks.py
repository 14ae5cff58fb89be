"""Several ranks: who takes part, and what may be said between them.

On the healthy path the guard adds no collective: verdicts come from reduced gradients, which are alike on every rank. Two rare
set-ups need a small one a step, because values differ there: sharded half-precision weights (`any_rank`) and parameters that
nobody reduces (`share_norms`). When a step was refused, which all ranks learn at the same step, they exchange a few numbers
to name the guilty one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanproof._errors import UnsupportedError
from nanproof.core.judge._parameters import Parameters, is_dtensor, moved


class Ranks:
    """The ranks that train this model together."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.rank, self.world = 0, 1
        self._group: Any = None
        self._device = device
        self.together = False
        """Whether the ranks are known to train one model, so that a collective may be entered on failure."""
        self._ddp: nn.parallel.DistributedDataParallel | None = None
        self._fsdp: Any = None
        self._sharded = False
        self._places: dict[tuple[int, ...], Tensor] = {}
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        for module in model.modules():
            if type(module).__name__ == "FullyShardedDataParallel":
                raise UnsupportedError(
                    "Guard does not take the old FullyShardedDataParallel: use torch.distributed.fsdp.fully_shard"
                )
            if isinstance(module, nn.parallel.DistributedDataParallel):
                self._ddp, self._group = module, module.process_group
                self.together = True
                break
        sharded = next((p for p in model.parameters() if is_dtensor(p)), None)
        if self._ddp is None and sharded is not None:
            mesh = sharded.device_mesh  # type: ignore[attr-defined]
            self._group = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
            self._fsdp = model if hasattr(model, "set_requires_gradient_sync") else None
            self.together = True
        self.together = self.together and dist.get_world_size(self._group) > 1
        self._sharded = sharded is not None and self._ddp is None

    def train_over(self, group: Any, size: int) -> None:
        """Train with the ranks of this group, whatever the model looks like."""
        self._group, self.together = group, size > 1

    def unreduced(self, parameters: Parameters) -> set[int]:
        """Indices of the optimizer's parameters whose gradients nobody reduces over the ranks."""
        if not self.together:
            return set()
        foreign = {i for i, name in enumerate(parameters.names) if name in parameters.foreign}
        plain = {i for i, p in enumerate(parameters.tensors) if self._sharded and not is_dtensor(p)}
        return foreign | plain

    @property
    def members(self) -> list[int]:
        """The global ranks that train together."""
        return dist.get_process_group_ranks(self._group) if self._group is not None else list(range(self.world))

    @property
    def several(self) -> bool:
        return self.world > 1

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Around one micro-batch: gradients are reduced with the last one only."""
        if self._fsdp is not None:
            self._fsdp.set_requires_gradient_sync(last)
        with self._ddp.no_sync() if self._ddp is not None and not last else nullcontext():
            yield

    def forget_gradients(self) -> None:
        """FSDP2 accumulates micro-batches in a place of its own, which zero_grad does not reach: clear it, or what was given up
        would go into the next step. The names are private to torch; where they are not there, nothing is done."""
        if self._fsdp is None:
            return
        with suppress(AttributeError):
            for module in self._fsdp.modules():
                state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
                groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
                for parameter in (p for group in groups if group is not None for p in group.fsdp_params):
                    parameter.unsharded_accumulated_grad = None
                    if getattr(parameter, "_unsharded_param", None) is not None:
                        parameter._unsharded_param.grad = None

    def seed(self, loss: Tensor, bad_buffer: Tensor | None) -> Tensor:
        """What backward starts from on several ranks. A bad loss or buffer seeds NaN, so that it travels to the others in the
        gradients they reduce anyway: an Inf loss with finite gradients would else be one rank's secret."""
        good = torch.isfinite(loss)
        if bad_buffer is not None:
            good = good & moved(bad_buffer == 0, loss.device)
        return torch.where(good, 1.0, torch.nan).to(loss.dtype)

    def any_rank(self, flag: Tensor) -> Tensor:
        """Whether the flag is set on any rank. A collective: one scalar."""
        if not self.together:
            return flag
        number = flag.float()
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group)
        return number > 0

    def share_norms(self, norms: Tensor, present: list[int], own: set[int]) -> Tensor:
        """Norms of gradients that no wrapper reduces (a loss's own parameters beside DDP) differ from rank to rank; the largest
        counts for all. A collective, and only where there are such parameters."""
        places = [k for k, i in enumerate(present) if i in own]
        if not self.together or not places:
            return norms
        key = tuple(places)
        index = self._places.get(key)
        if index is None:
            index = self._places[key] = torch.tensor(places, device=norms.device)
        mine = norms[index]
        mine = torch.where(torch.isfinite(mine), mine, torch.inf)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group)
        return norms.index_copy(0, index, mine)

    @property
    def sharded(self) -> bool:
        """Parameters are spread over the ranks: no forward without the others."""
        return self._sharded

    def share_text(self, text: str, source: int) -> str:
        """One rank's text, on every rank. A collective: only where all ranks are known to come."""
        data = text.encode() if self.rank == source else b""
        size = int(max(said[0] for said in self.gather([float(len(data))]).values()))
        if size == 0:
            return ""
        device = self._device if self._device.type == "cuda" else torch.device("cpu")
        parcel = torch.zeros(size, dtype=torch.uint8, device=device)
        if self.rank == source:
            parcel.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(parcel, source, group=self._group)
        return bytes(parcel.tolist()).decode()

    def gather(self, values: list[float]) -> dict[int, list[float]]:
        """Every rank's numbers, by global rank. A collective: only where all ranks are known to come."""
        if not self.together:
            return {self.rank: values}
        mine = torch.tensor(values, dtype=torch.float64, device=self._device if self._device.type == "cuda" else "cpu")
        size = dist.get_world_size(self._group)
        out = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(out, mine, group=self._group)
        return {dist.get_global_rank(self._group, i) if self._group else i: t.tolist() for i, t in enumerate(out)}
