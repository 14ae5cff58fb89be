"""The processes that train together: one, or as many as torchrun started. What differs between them is said here alone."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DistributedSampler, RandomSampler, Sampler

from nanproof import UsageError
from nanproof_recipes.latent_dlm.config import Config
from nanproof_recipes.latent_dlm.model.model import MMDiT, sharded
from nanproof_recipes.machine import device


@dataclass(frozen=True, slots=True)
class Team:
    """Who this process is."""

    rank: int = 0
    world: int = 1
    place: torch.device = field(default_factory=device)

    @property
    def leads(self) -> bool:
        """Writes logs, results and words."""
        return self.rank == 0

    def wrapped(self, model: MMDiT, config: Config) -> nn.Module:
        """The model as the processes share it. All begin with the weights of the first."""
        if self.world == 1:
            return model
        if config.training.parallel == "fsdp2":
            # Torch warns of in-place changes of what a model gives; nothing here makes one.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            return sharded(model, mesh=init_device_mesh(self.place.type, (self.world,)))
        # The buffers are positions, the same everywhere: to send them around with every forward is of no use. Torch has renamed
        # how that is said, and warns of the old name.
        ddp = nn.parallel.DistributedDataParallel
        sent = "forward_sync_buffers" if "forward_sync_buffers" in signature(ddp).parameters else "broadcast_buffers"
        quiet: dict[str, Any] = {sent: False}
        places = [self.place] if self.place.type == "cuda" else None
        # A term of weight 0 is left out, and with it the parameters that only it reaches: DDP would wait for their gradients.
        unused = 0 in (config.loss.text_loss_weight, config.loss.latent_loss_weight)
        return ddp(model, device_ids=places, find_unused_parameters=unused, **quiet)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """All weights of a shared model by their own names, on the CPU of the first process; nothing on the others. All call."""
        if self.world > 1 and not isinstance(model, nn.parallel.DistributedDataParallel):
            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

            whole: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            return whole
        if not self.leads:
            return {}
        own: Any = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        return {name: tensor.detach().cpu().contiguous() for name, tensor in own.state_dict().items()}

    def order(self, samples: Any, seed: int) -> Sampler[int]:
        """In which order this process sees which samples."""
        if self.world > 1:
            return DistributedSampler(samples, num_replicas=self.world, rank=self.rank, shuffle=True, seed=seed, drop_last=True)
        return RandomSampler(samples, generator=torch.Generator().manual_seed(seed))

    def sum(self, numbers: Tensor) -> Tensor:
        """Over all processes."""
        if self.world > 1:
            dist.all_reduce(numbers)
        return numbers

    def share(self, said: Any) -> Any:
        """What the first process says, on all of them."""
        if self.world == 1:
            return said
        box = [said]
        dist.broadcast_object_list(box, 0, device=self.place)
        return box[0]


@contextmanager
def team() -> Iterator[Team]:
    """This process alone, or one of those that torchrun started."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Team(place=device())
        return
    if "RANK" not in os.environ:
        raise UsageError("WORLD_SIZE is set, but RANK is not. Start with torchrun --nproc-per-node N -m nanproof recipe ...")
    if torch.cuda.is_available():
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    else:
        place = torch.device("cpu")
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=timedelta(minutes=10))
    try:
        yield Team(dist.get_rank(), world, place)
    finally:
        dist.destroy_process_group()
