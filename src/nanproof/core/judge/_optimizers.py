"""How a verdict reaches the optimizer: on the device where that is exact, else through one read on the host.

The fused optimizers of torch read two attributes of the optimizer, on CPU and CUDA alike: `found_inf` (1: leave parameters,
moments and step count as they are) and `grad_scale` (divide the gradients by it). That is an exact skip and a free clip
without asking the host. The combinations in which it is not exact are listed in `_obstacle`.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from nanproof._errors import UnsupportedError, UsageError
from nanproof.core.judge._parameters import Parameters, is_dtensor, unwrap
from nanproof.core.judge._verdict import Reading, Verdict

_FUSED = (Adam, AdamW, SGD, Adagrad)


def bare_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer itself: `found_inf` set on accelerate's transparent wrapper would be ignored. Wrappers that do something of
    their own (Lookahead, say) stay, and take the host path."""
    if isinstance(optimizer, (list, tuple)):
        return Several(optimizer) if len(optimizer) != 1 else bare_optimizer(optimizer[0])  # type: ignore[return-value]
    while type(optimizer).__module__.startswith("accelerate."):
        optimizer = optimizer.optimizer
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state", "step", "zero_grad")):
        raise UsageError(
            f"Guard(optimizer={type(optimizer).__name__}): this is not an optimizer; pass an object with param_groups, state, "
            "step() and zero_grad(), such as torch.optim.AdamW(model.parameters())"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "Guard cannot refuse a step of LBFGS, which evaluates the loss several times inside one: use another optimizer"
        )
    return optimizer  # type: ignore[no-any-return]


def members_of(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers that one step is made of."""
    return optimizer.members if isinstance(optimizer, Several) else (optimizer,)


class Several:
    """Several optimizers over one model, as one: all of them take a step, or none does."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.members = tuple(bare_optimizer(optimizer) for optimizer in optimizers)
        if not self.members:
            raise UsageError("Guard(optimizer=[]): the list is empty; give at least one optimizer")
        ids = [id(p) for group in self.param_groups for p in group["params"]]
        if len(set(ids)) < len(ids):
            raise UsageError("Guard(optimizer=[...]): a parameter is in two optimizers; give each parameter to one of them")
        self.state = _States(self.members)
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for member in self.members for group in member.param_groups]

    def step(self) -> None:
        for member in self.members:
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self.members:
            member.zero_grad(set_to_none)


class _States(MutableMapping[Any, Any]):
    """The states of several optimizers: that of a parameter is with the optimizer that has it."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self._members = members

    def _of(self, key: Any) -> Any:
        for member in self._members:
            if key in member.state or any(key is p for group in member.param_groups for p in group["params"]):
                return member.state
        return self._members[0].state

    def __contains__(self, key: object) -> bool:
        return any(key in member.state for member in self._members)

    def __getitem__(self, key: Any) -> Any:
        return self._of(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._of(key)[key]

    def get(self, key: Any, default: Any = None) -> Any:
        return next((member.state[key] for member in self._members if key in member.state), default)

    def __iter__(self) -> Iterator[Any]:
        return (key for member in self._members for key in member.state)

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._members)


class DevicePath:
    """The verdict stays on the device: the fused kernel reads it."""

    on_device = True

    def __init__(self, optimizer: Optimizer, note: str) -> None:
        self.optimizer = optimizer
        self.note = note
        self.description = f"device: {note}" if note else "device"
        self._prepare()
        self._hook = optimizer.register_load_state_dict_post_hook(lambda _: self._prepare())

    def step(self, verdict: Verdict, acting: Sequence[Any] | None = None) -> None:
        """`acting`: the optimizers that act now; None is all of them."""
        optimizer: Any = self.optimizer
        self._prepare_momentum()
        optimizer.found_inf = verdict.skip
        if verdict.divisor is not None:
            optimizer.grad_scale = verdict.divisor
        try:
            optimizer.step()
        finally:
            # Left behind, they would make a later GradScaler.step raise.
            del optimizer.found_inf
            if verdict.divisor is not None:
                del optimizer.grad_scale

    def close(self) -> None:
        self._hook.remove()

    def _prepare(self) -> None:
        """Make flags and state fit the fused kernels; again after `load_state_dict`, which brings the flags of the checkpoint."""
        optimizer: Any = self.optimizer
        for group in (*optimizer.param_groups, optimizer.defaults):
            group["fused"], group["foreach"] = True, False
        optimizer._step_supports_amp_scaling = True
        for p, state in optimizer.state.items():
            step = state.get("step")
            if step is not None:
                state["step"] = torch.as_tensor(step, dtype=torch.float32, device=p.device)

    def _prepare_momentum(self) -> None:
        """A skipped first step of SGD would leave an uninitialised buffer behind; zeros give the same first step."""
        if not isinstance(self.optimizer, SGD):
            return
        for group in self.optimizer.param_groups:
            for p in group["params"] if group["momentum"] else ():
                if p.grad is not None and self.optimizer.state[p].get("momentum_buffer") is None:
                    self.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


class DevicePaths:
    """The verdict stays on the device, and the fused kernels of several optimizers read it."""

    on_device = True

    def __init__(self, paths: Sequence[DevicePath]) -> None:
        self._paths = paths
        self.note = ", ".join(filter(None, (path.note for path in paths)))
        self.description = f"device: {self.note}" if self.note else "device"

    def step(self, verdict: Verdict, acting: Sequence[Any] | None = None) -> None:
        for path in self._paths:
            if acting is None or any(path.optimizer is member for member in acting):
                path.step(verdict)

    def close(self) -> None:
        for path in self._paths:
            path.close()


class HostPath:
    """The verdict is read once a step, and a refused step is not taken."""

    on_device = False

    def __init__(self, optimizer: Optimizer | Several, why: str, note: str = "") -> None:
        """`note`: the reason without the names of settings, for users who made none."""
        self.optimizer = optimizer
        self.note = note or why
        self.description = f"host: {why}"

    def step(self, reading: Reading, gradients: Sequence[Tensor], acting: Sequence[Any] | None = None) -> None:
        if reading.bad:
            return
        divisor = reading.clip * (reading.scale or 1.0)
        if divisor != 1:
            dense = [g for g in gradients if not g.is_sparse]
            if dense:
                torch._foreach_div_(dense, divisor)
            for g in gradients:
                if g.is_sparse:
                    g.div_(divisor)
        for optimizer in (self.optimizer,) if acting is None else acting:
            optimizer.step()

    def close(self) -> None:
        pass


Path = DevicePath | DevicePaths | HostPath


def choose_path(model: nn.Module, optimizer: Any, switch: bool = True) -> Path:
    """The device path where it is exact. With `switch`, one whose user left `fused` and `foreach` unset becomes fused. Of several
    optimizers, all take it, or none."""
    members = members_of(optimizer)
    on_host = [why for member in members if (why := _unfused(member) or _host(model, member, switch)) is not None]
    if on_host:
        return HostPath(optimizer, *on_host[0])
    paths = [DevicePath(member, "" if _all_fused(member) else f"{type(member).__name__} switched to fused") for member in members]
    return paths[0] if len(paths) == 1 else DevicePaths(paths)


def _all_fused(optimizer: Optimizer) -> bool:
    return all(group["fused"] for group in optimizer.param_groups)


def _unfused(optimizer: Optimizer) -> tuple[str] | None:
    """Switch an optimizer off the fused kernel where that computes wrong updates; return that reason."""
    if not _fused_is_wrong(optimizer, asked=True):
        return None
    for group in (*optimizer.param_groups, optimizer.defaults):
        group["fused"] = False
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return ("torch's fused SGD computes wrong updates of half-precision weights on CPU; switched to foreach",)


def _host(model: nn.Module, optimizer: Optimizer, switch: bool) -> tuple[str, str] | None:
    """Return why an optimizer takes the host path, with and without the names of settings; None if it need not."""
    why = _obstacle(model, Parameters(model, optimizer), optimizer)
    if why:
        return why, why
    if switch or _all_fused(optimizer):
        return None
    return f"{type(optimizer).__name__} is kept as it is (switch_to_fused=False)", "its own form is kept"


def _fused_is_wrong(optimizer: Optimizer, asked: bool) -> bool:
    """The vectorised CPU kernel of fused SGD mixes up halves (seen in torch 2.13: weights off by 0.5 after 4 steps)."""
    return type(optimizer) is SGD and any(
        p.device.type == "cpu" and p.dtype in (torch.float16, torch.bfloat16)
        for group in optimizer.param_groups
        if group["fused"] or not asked
        for p in group["params"]
    )


def _obstacle(model: nn.Module, parameters: Parameters, optimizer: Optimizer) -> str | None:
    """Why the device path would not be exact, or None."""
    name = type(optimizer).__name__
    if type(optimizer) not in _FUSED:
        return f"{name} has no fused form"
    groups = optimizer.param_groups
    asked = [group["fused"] for group in groups]
    if not all(asked):
        if any(flag is not None for flag in asked):
            return f"{name}(fused=False) was asked for"
        for flag in ("foreach", "differentiable", "capturable"):
            if any(group.get(flag) for group in groups):
                return f"{name}({flag}=True) was asked for"
        if any(group["foreach"] is not None for group in groups):
            return f"{name}(foreach=False) was asked for"
        if any(p.dtype == torch.float16 and p.requires_grad for p in parameters.tensors):
            return "trainable weights are fp16, and switching to fused would hide an underflow in the optimizer"
    if _fused_is_wrong(optimizer, asked=False):
        return "torch's fused SGD computes wrong updates of half-precision weights on CPU"
    trainable = [p for p in parameters.tensors if p.requires_grad]
    if any(not p.is_floating_point() for p in trainable):
        return "the fused kernels take no complex parameters"
    if any(getattr(module, "sparse", False) is True for module in unwrap(model).modules()):
        return "the fused kernels take no sparse gradients"
    if isinstance(optimizer, (SGD, Adagrad)) and any(is_dtensor(p) for p in trainable):
        return f"fused {name} does not take sharded parameters"
    if isinstance(optimizer, SGD) and any(g["momentum"] and g["dampening"] for g in groups):
        return "SGD with dampening starts its momentum from the first gradient, which a refused first step would leave undefined"
    devices = {p.device.type for p in trainable}
    supported = {"cpu"} if isinstance(optimizer, Adagrad) else {"cpu", "cuda", "xpu", "mps"}
    if not devices <= supported:
        return f"fused {name} does not run on {', '.join(sorted(devices - supported))}"
    return None
