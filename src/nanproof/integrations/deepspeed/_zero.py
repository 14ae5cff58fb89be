"""Where DeepSpeed keeps the gradients of a step that is about to be taken, and how each of its optimizers leaves one out.

DeepSpeed wraps the optimizer, and by the time of its step the gradients are reduced and, from ZeRO stage 1 on, cut up: every
rank holds a part of each, or none of it. The parts lie in lists that are DeepSpeed's own business; this file is the only one that
knows them. It was written for DeepSpeed 0.19 and tried with 0.18. A step is left out the way DeepSpeed itself leaves out an
overflow, so that its buffers, counters and loss scale stay in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanproof._errors import UnsupportedError
from nanproof.integrations._patches import Patches

Pieces = list[tuple[Tensor, Tensor]]
"""(parameter, what this rank holds of its gradient)"""


class Holder:
    """An engine without ZeRO: the gradients are where torch has them, whole on every rank."""

    cut_up = False
    """Whether each rank holds its own part only, so that squares of norms have to be summed over ranks."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.optimizer = engine, engine.optimizer

    def pieces(self) -> Pieces:
        return [(p, p.grad) for p in self.engine.module.parameters() if p.grad is not None]

    @property
    def scale(self) -> float:
        """What the loss was multiplied by. DeepSpeed 0.19 scales the loss for ZeRO only."""
        return 1.0

    @property
    def dynamic(self) -> bool:
        """The loss scale finds its level by itself, by overflowing now and then."""
        return False

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Weights, master weights and moments that this rank has, by name."""
        yield from self.engine.module.named_parameters()
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        for group in inner.param_groups:
            for p in group["params"]:
                yield "fp32 weights in the optimizer", p
                there = inner.state.get(p, {}).items()
                yield from ((f"optimizer state {key}", value) for key, value in there if isinstance(value, Tensor))

    def take(self, step: Callable[[], Any], total: Tensor) -> None:
        """The step is good. `total` is the norm of the scaled gradients over all ranks, for who would compute it again."""
        self.optimizer.overflow = False
        step()

    def refuse(self, step: Callable[[], Any]) -> None:
        """The step is left out; the engine clears the gradients and does not advance its schedule."""
        self.optimizer.overflow = True
        if hasattr(self.optimizer, "_global_grad_norm"):
            self.optimizer._global_grad_norm = float("inf")
        for group in getattr(self.optimizer, "fp32_groups", ()):
            for p in group:
                p.grad = None


class Bf16Holder(Holder):
    """bf16 weights with fp32 accumulation: whole gradients, kept in fp32 beside the weights."""

    def pieces(self) -> Pieces:
        optimizer, found = self.optimizer, []
        for i, group in enumerate(optimizer.bf16_groups):
            there = zip(group, optimizer.fp32_groups_gradients[i], optimizer.fp32_groups_has_gradients[i], strict=True)
            found += [(p, g) for p, g, has in there if has]
        return found

    def refuse(self, step: Callable[[], Any]) -> None:
        super().refuse(step)
        self.optimizer.clear_hp_grads()
        self.optimizer.clear_lp_grads()


class ZeroHolder(Holder):
    """ZeRO: cut up, and in fp16 with a loss scale."""

    cut_up = True

    @property
    def scale(self) -> float:
        return float(self.optimizer.loss_scale)

    @property
    def dynamic(self) -> bool:
        return bool(self.optimizer.dynamic_loss_scale)


class Zero12Holder(ZeroHolder):
    """ZeRO 1 and 2: a list for each parameter group, of what lies in this rank's partition."""

    def pieces(self) -> Pieces:
        optimizer, found = self.optimizer, []
        if optimizer.cpu_offload:
            getattr(optimizer, "_wait_for_offload_copies", lambda: None)()
            return self._offloaded()
        for i, params in enumerate(optimizer.params_in_partition):
            there = [g for g in optimizer.averaged_gradients[i] if not getattr(g, "_zero_padding", False)]
            found += [(p, g) for p, g in zip(params, there, strict=False) if g is not None]
        return found

    def _offloaded(self) -> Pieces:
        optimizer, found = self.optimizer, []
        for i, params in enumerate(optimizer.params_in_partition):
            flat = optimizer.single_partition_of_fp32_groups[i].grad
            for p in params:
                _, _, start, size = optimizer.grad_position[optimizer.get_param_id(p)]
                if flat is not None and size:
                    found.append((p, flat.view(-1).narrow(0, int(start), int(size))))
        return found

    def take(self, step: Callable[[], Any], total: Tensor) -> None:
        optimizer = self.optimizer
        optimizer.overflow = False
        if optimizer.cpu_offload or not _plain(self.engine, optimizer):
            step()
            return
        # DeepSpeed would look through the gradients for an overflow, and compute their norm: both are known by now.
        with _instead(optimizer, check_overflow=lambda **_: None, scaled_global_norm=lambda **_: total):
            step()

    def refuse(self, step: Callable[[], Any]) -> None:
        optimizer = self.optimizer

        def overflow(**_: Any) -> None:
            optimizer.overflow = True

        # The loss scale stays: that a step is refused is not its fault.
        with _instead(optimizer, check_grad_overflow=True, check_overflow=overflow, _update_scale=lambda _: None):
            step()
        optimizer._global_grad_norm = float("inf")


class Zero3Holder(ZeroHolder):
    """ZeRO 3: as before, and the weights are cut up too."""

    def pieces(self) -> Pieces:
        optimizer, found = self.optimizer, []
        for i, params in enumerate(optimizer.fp16_groups):
            found += [(p, g) for p, g in zip(params, optimizer.averaged_gradients[i], strict=False) if g is not None]
        return found

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of the weights, without the padding, which holds whatever was in memory. Masters and moments are
        padded in places that only DeepSpeed knows: they are not looked at."""
        for name, p in self.engine.module.named_parameters():
            part = p.ds_tensor.view(-1)
            start = dist.get_rank(p.ds_process_group) * part.numel()
            yield name, part[: max(p.ds_numel - start, 0)]

    def take(self, step: Callable[[], Any], total: Tensor) -> None:
        self.optimizer.overflow = False
        if not _plain(self.engine, self.optimizer):
            step()
            return

        with _instead(self.optimizer, check_overflow=lambda **_: None, _get_norm_groups=lambda: [total.double()]):
            step()

    def refuse(self, step: Callable[[], Any]) -> None:
        def overflow(**_: Any) -> bool:
            self.optimizer.overflow = True
            if not hasattr(self.optimizer, "_loss_scale_update_and_overflow_cleanup"):  # 0.18 cleans up in here
                self.optimizer._overflow_clean_up(self.optimizer.loss_scale)
            return True

        with _instead(self.optimizer, _overflow_check_and_loss_scale_update=overflow, _update_scale=lambda _: None):
            step()
        self.optimizer._global_grad_norm = float("inf")


_HOLDERS: dict[str, tuple[type[Holder], tuple[str, ...]]] = {
    "DeepSpeedZeroOptimizer": (
        Zero12Holder,
        ("averaged_gradients", "params_in_partition", "check_grad_overflow", "check_overflow", "_update_scale"),
    ),
    "DeepSpeedZeroOptimizer_Stage3": (
        Zero3Holder,
        ("averaged_gradients", "fp16_groups", "_overflow_check_and_loss_scale_update", "_get_norm_groups", "_update_scale"),
    ),
    "BF16_Optimizer": (Bf16Holder, ("bf16_groups", "fp32_groups_gradients", "clear_hp_grads", "clear_lp_grads")),
    "FP16_Optimizer": (Holder, ()),
    "FP16_UnfusedOptimizer": (Holder, ()),
}
"""By the name of DeepSpeed's class: who reads it, and what it must have for that."""


def holder_of(engine: Any) -> Holder:
    """The reader that fits this engine, or why there is none."""
    optimizer = engine.optimizer
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.Optimizer):
        if getattr(engine, "torch_autocast_z0_gradscaler", None) is not None:
            raise UnsupportedError(
                "protect(engine): fp16 torch_autocast without ZeRO steps inside a GradScaler; use ZeRO stage 1"
            )
        return Holder(engine)
    kind, needed = _HOLDERS.get(name, (None, ()))
    if kind is None:
        raise UnsupportedError(f"protect(engine): DeepSpeed's {name} is not known; ZeRO stages 0 to 3 in fp32, bf16 and fp16 are")
    missing = [attribute for attribute in needed if not hasattr(optimizer, attribute)]
    if missing:
        raise UnsupportedError(
            f"protect(engine): this DeepSpeed's {name} has no {', '.join(missing)}; the guard is made for DeepSpeed 0.18 and 0.19"
        )
    if kind is Zero3Holder and optimizer.offload_optimizer:
        raise UnsupportedError(
            "protect(engine): ZeRO 3 with optimizer offload is not supported; without it, or ZeRO 2 with it, is"
        )
    return kind(engine)


def _plain(engine: Any, optimizer: Any) -> bool:
    """The norm of all gradients is what DeepSpeed clips by: no model parallelism, no experts, no Muon."""
    inner = type(getattr(optimizer, "optimizer", None)).__name__.lower()
    return engine.mpu is None and not engine.has_moe_layers and "muon" not in inner


def _instead(owner: Any, **attributes: Any) -> Patches:
    """While open, the object has these attributes of its own."""
    patches = Patches()
    for name, value in attributes.items():
        patches.set(owner, name, value)
    return patches
