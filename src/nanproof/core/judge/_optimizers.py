"""How a verdict reaches the optimizer: on the device where that is exact, else through one read on the host.

The fused optimizers of torch read two attributes of the optimizer, on CPU and CUDA alike: `found_inf` (1: leave parameters,
moments and step count as they are) and `grad_scale` (divide the gradients by it). That is an exact skip and a free clip
without asking the host. The combinations in which it is not exact are listed in `_obstacle`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from nanproof._errors import UsageError
from nanproof.core.fast._fused import FusedStep
from nanproof.core.judge._parameters import Parameters, Present, is_dtensor, is_plain, unwrap

_FUSED = (Adam, AdamW, SGD, Adagrad)
BARE = frozenset(vars(SGD([torch.zeros(1, requires_grad=True)])))
"""What every optimizer has. What one of another kind has besides may hold more of them."""
_DEEPEST = 3
"""Lists and dictionaries in each other in which optimizers are looked for."""


def bare_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer itself: `found_inf` set on accelerate's transparent wrapper would be ignored. One that is made of others (a
    list, torchtitan's container, Lookahead) is opened: what it holds belongs to the run as well."""
    if isinstance(optimizer, Mapping):
        optimizer = list(optimizer.values())
    if isinstance(optimizer, (list, tuple)):
        return Several(optimizer) if len(optimizer) != 1 else bare_optimizer(optimizer[0])  # type: ignore[return-value]
    optimizer = _unwrapped(optimizer)
    if not is_optimizer(optimizer):
        raise UsageError(
            f"Guard(optimizer={type(optimizer).__name__}): this is not an optimizer; pass an object with param_groups, state, "
            "step() and zero_grad(), such as torch.optim.AdamW(model.parameters())"
        )
    return Several([optimizer]) if inside_of(optimizer) else optimizer  # type: ignore[return-value]


def is_optimizer(value: Any) -> bool:
    """Whether it can be stepped and holds parameters; not only torch's own class, and no class itself."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in ("param_groups", "state", "step", "zero_grad"))


def check_limits(optimizer: Any, max_norm: Any) -> None:
    """A mapping of norms to clip to must be about these optimizers."""
    if not isinstance(max_norm, Mapping):
        return
    members = members_of(optimizer)
    strangers = [key for key in max_norm if not any(key is member for member in members)]
    if strangers:
        raise UsageError(
            f"Guard(max_norm={{...}}): {type(strangers[0]).__name__} is none of the guard's optimizers; the keys are the "
            "optimizers themselves, and one that is left out is not clipped"
        )
    for limit in max_norm.values():
        if limit is not None and (isinstance(limit, (bool, str)) or not limit > 0):
            raise UsageError(f"Guard(max_norm={{...: {limit!r}}}): the norm to clip to must be above 0, or None")


def members_of(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers that one step is made of: those whose `step` is called."""
    return optimizer.members if isinstance(optimizer, Several) else (optimizer,)


def holders_of(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers that keep state and settings: those that are stepped, and those inside them."""
    return optimizer.holders if isinstance(optimizer, Several) else (optimizer,)


def name_of(optimizer: Any) -> str:
    """The class of an optimizer; of several, each."""
    return ", ".join(dict.fromkeys(type(member).__name__ for member in members_of(optimizer)))


def _unwrapped(optimizer: Any) -> Any:
    while type(optimizer).__module__.startswith("accelerate."):
        optimizer = optimizer.optimizer
    return optimizer


def inside_of(optimizer: Any) -> list[Any]:
    """The optimizers that one holds in its attributes, and those that they hold, outermost first."""
    found: list[Any] = []
    seen = {id(optimizer)}

    def look(value: Any, depth: int) -> None:
        value = _unwrapped(value)
        if isinstance(value, (list, tuple)) and depth < _DEEPEST:
            for item in value:
                look(item, depth + 1)
        elif isinstance(value, dict) and depth < _DEEPEST:
            for item in value.values():
                look(item, depth + 1)
        elif (isinstance(value, Optimizer) or hasattr(type(value), "step")) and id(value) not in seen and is_optimizer(value):
            seen.add(id(value))
            found.append(value)
            open_up(value)

    def open_up(holder: Any) -> None:
        for name, value in getattr(holder, "__dict__", {}).items():
            if name not in BARE:
                look(value, 0)

    open_up(optimizer)
    return found


class Several:
    """Several optimizers over one model, as one: all of them take a step, or none does. Those inside them count as well."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.defaults: dict[str, Any] = {}
        self.become(optimizers)

    def become(self, optimizers: Sequence[Any]) -> None:
        """Be made of these from now on."""
        members = tuple(_unwrapped(optimizer) for optimizer in optimizers)
        if not members:
            raise UsageError("Guard(optimizer=[]): the list is empty; give at least one optimizer")
        for member in members:
            if not is_optimizer(member):
                bare_optimizer(member)
        self.members = members
        self.reopen()

    def reopen(self) -> None:
        """Look again for what the members hold."""
        families = [(*inside_of(member), member) for member in self.members]
        owner: dict[int, int] = {}
        for i, family in enumerate(families):
            for p in (p for holder in family for group in holder.param_groups for p in group["params"]):
                if owner.setdefault(id(p), i) != i:
                    raise UsageError(
                        "Guard(optimizer=[...]): a parameter is in two optimizers; give each parameter to one of them"
                    )
        self.holders = tuple({id(holder): holder for family in families for holder in family}.values())
        self.state = _States(self.holders)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return list({id(group): group for holder in self.holders for group in holder.param_groups}.values())

    def step(self, closure: Any = None) -> None:
        for member in self.members:
            member.step() if closure is None else member.step(closure)

    def zero_grad(self) -> None:
        for member in self.members:
            member.zero_grad()


class _States(MutableMapping[Any, Any]):
    """The states of several optimizers: that of a parameter is with the optimizer that has it."""

    def __init__(self, holders: Sequence[Any]) -> None:
        self._holders = holders

    def _of(self, key: Any) -> Any:
        for holder in self._holders:
            if key in holder.state or any(key is p for group in holder.param_groups for p in group["params"]):
                return holder.state
        return self._holders[0].state

    def __contains__(self, key: object) -> bool:
        return any(key in holder.state for holder in self._holders)

    def __getitem__(self, key: Any) -> Any:
        return self._of(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._of(key)[key]

    def get(self, key: Any, default: Any = None) -> Any:
        return next((holder.state[key] for holder in self._holders if key in holder.state), default)

    def __iter__(self) -> Iterator[Any]:
        return iter(dict.fromkeys(key for holder in self._holders for key in holder.state))

    def __len__(self) -> int:
        return len(set(map(id, self)))


class DevicePath:
    """The verdict stays on the device: the fused kernel reads it."""

    on_device = True

    def __init__(self, optimizer: Optimizer, note: str) -> None:
        self.optimizer = optimizer
        self.note = note
        self.description = f"device: {note}" if note else "device"
        self._was = [(group, group["fused"], group["foreach"]) for group in (*optimizer.param_groups, optimizer.defaults)]
        self._fused: FusedStep | None = None
        self._prepare()
        self._hook = optimizer.register_load_state_dict_post_hook(lambda _: self._prepare())
        self.own_hooks: set[int] = set()
        """Ids of hooks before the optimizer's step that need not see a step of this path."""
        self.captured = False
        """Its steps may be captured."""

    def step(self, skip: Tensor, divisor: Tensor | None, gradients: list[Tensor], present: Present) -> None:
        fused = self.fused(present)
        if fused is not None and fused.take(skip, divisor, gradients):
            return
        self._own_step(skip, divisor)
        if fused is None or fused.outdated:
            self._fused = FusedStep(self.optimizer, present, gradients, self.own_hooks, self.captured)

    def fused(self, present: Present) -> FusedStep | None:
        """The step with kept lists for these gradients, if there is one already."""
        return self._fused if self._fused is not None and self._fused.present is present else None

    def _own_step(self, skip: Tensor, divisor: Tensor | None) -> None:
        optimizer: Any = self.optimizer
        self._prepare_momentum()
        optimizer.found_inf = skip
        if divisor is not None:
            optimizer.grad_scale = divisor
        try:
            optimizer.step()
        finally:
            # Left behind, they would make a later GradScaler.step raise.
            del optimizer.found_inf
            if divisor is not None:
                del optimizer.grad_scale

    def close(self) -> None:
        self._hook.remove()
        self._fused = None

    def unswitch(self) -> None:
        """Give the optimizer the form that it had."""
        for group, fused, foreach in self._was:
            group["fused"], group["foreach"] = fused, foreach

    def _prepare(self) -> None:
        """Make flags and state fit the fused kernels; again after `load_state_dict`, which brings the flags of the checkpoint."""
        optimizer: Any = self.optimizer
        self._fused = None
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


class UndoPath:
    """The verdict stays on the device: the optimizer acts, and where the step was bad, the device puts back what it wrote.

    For torch's Muon, which keeps nothing on the host. Waiting for the verdict would cost it most: its many launches could no
    longer be queued while backward runs. What is copied, and only on a bad step, goes to pinned memory of the host.
    """

    on_device = True

    def __init__(self, optimizer: Optimizer, aside: Aside) -> None:
        self.optimizer, self._aside = optimizer, aside
        self.note = f"{type(optimizer).__name__} is put back on a bad step"
        self.description = f"device: {self.note}"

    def step(self, skip: Tensor, divisor: Tensor | None, gradients: list[Tensor], present: Present) -> None:
        if divisor is not None:
            torch._foreach_div_(gradients, divisor.to(gradients[0].device, non_blocking=True))
        state = self.optimizer.state
        written: list[Tensor] = []
        for p in (p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None):
            if "momentum_buffer" not in state[p]:  # made by a bad step, it would stay bad
                state[p]["momentum_buffer"] = torch.zeros_like(p.grad, memory_format=torch.preserve_format)
            written += [p.detach(), state[p]["momentum_buffer"]]
        self._aside.save(written, skip)
        self.optimizer.step()
        self._aside.put_back(skip)

    def close(self) -> None:
        pass


class Aside(Protocol):
    """Where tensors are kept on a bad step, without asking the host; see `nanproof.core.fast._kernels`."""

    def save(self, tensors: list[Tensor], skip: Tensor) -> None: ...
    def put_back(self, skip: Tensor) -> None: ...


class HostPath:
    """The verdict is read once a step, and a refused step is not taken."""

    on_device = False
    clips = True
    """Whether gradients can be clipped before the optimizer acts."""

    def __init__(self, why: str, note: str = "") -> None:
        """`note`: the reason without the names of settings, for users who made none."""
        self.note = note or why
        self.description = f"host: {why}"

    def close(self) -> None:
        pass


def divide(gradients: list[Tensor], divisor: float) -> None:
    """Clip and unscale gradients in place."""
    if divisor != 1:
        dense = [g for g in gradients if not g.is_sparse]
        if dense:
            torch._foreach_div_(dense, divisor)
        for g in gradients:
            if g.is_sparse:
                g.div_(divisor)


class CopyPath(HostPath):
    """A step cannot be vetoed: what it writes is copied first, and put back if it was bad."""

    def __init__(self, why: str, clips: bool) -> None:
        super().__init__(why)
        self.clips = clips
        self.description = f"copy: {why}" if clips else f"copy: {why}; gradients are not clipped"


class DevicePaths:
    """The verdict stays on the device for every one of several optimizers."""

    on_device = clips = True

    def __init__(self, paths: Sequence[DevicePath | UndoPath]) -> None:
        self.paths = tuple(paths)
        self.note = ", ".join(filter(None, (path.note for path in paths)))
        self.description = f"device: {self.note}" if self.note else "device"

    def close(self) -> None:
        for path in self.paths:
            path.close()


Path = DevicePaths | HostPath


EVALUATES = "evaluates the loss inside its step"


def choose_path(
    model: nn.Module, optimizer: Any, switch: bool = True, aside: Callable[[torch.device], Aside | None] | None = None
) -> Path:
    """The device path where it is exact. With `switch`, one whose user left `fused` and `foreach` unset becomes fused. Of several
    optimizers, all take it, or none. `aside`: makes room for what only the device can put back, if there is a way."""
    members = members_of(optimizer)
    evaluating = [member for member in members if evaluates(member)]
    if evaluating:
        return CopyPath(f"{name_of(evaluating[0])} {EVALUATES}", clips=False)
    places = {id(member): aside(member.param_groups[0]["params"][0].device) for member in members if aside and _undoable(member)}
    on_host = []
    for member in members:
        why = None if places.get(id(member)) is not None else _unfused(member) or _host(model, member, switch)
        on_host += [why] if why is not None else []
    if on_host:
        return HostPath(*on_host[0])
    paths: list[DevicePath | UndoPath] = []
    for member in members:
        place = places.get(id(member))
        name = type(member).__name__
        paths.append(
            UndoPath(member, place)
            if place is not None
            else DevicePath(member, "" if _all_fused(member) else f"{name} switched to fused")
        )
    return DevicePaths(paths)


def evaluates(optimizer: Any) -> bool:
    """Whether its step evaluates the loss itself, and moves weights in between."""
    asked = _closure_of(type(optimizer).step)
    return isinstance(optimizer, torch.optim.LBFGS) or (asked is not None and asked.default is inspect.Parameter.empty)


def may_evaluate(optimizer: Any) -> bool:
    """Whether its step may do so if it can: one that is not torch's own and takes a closure (SAM)."""
    return evaluates(optimizer) or (
        not type(optimizer).__module__.startswith("torch.") and _closure_of(type(optimizer).step) is not None
    )


@functools.cache
def _closure_of(step: Callable[..., Any]) -> inspect.Parameter | None:
    """Return the closure parameter of an optimizer's `step`. Cached, because `train_step` asks at every step."""
    try:
        return inspect.signature(step).parameters.get("closure")
    except (TypeError, ValueError):
        return None


class Evaluated:
    """A closure whose first call, with the weights as they were, returns what was evaluated and judged already."""

    def __init__(self, parameters: Sequence[Tensor], evaluate: Callable[[], Any], first: list[Tensor]) -> None:
        self._parameters, self._evaluate, self._first = parameters, evaluate, first
        self.again = False
        """It was evaluated with weights that the optimizer had moved."""
        self._versions = self._written()

    def _written(self) -> list[int]:
        return [p._version for p in self._parameters]

    def __call__(self) -> Any:
        first, self._first = self._first, []
        if first and self._written() == self._versions:
            return first[0] if len(first) == 1 else torch.stack([loss.reshape(()) for loss in first]).sum()
        self.again = True
        return self._evaluate()


def _undoable(optimizer: Any) -> bool:
    """Whether its step writes nothing but dense tensors on a CUDA device, so that the device can undo it."""
    if type(optimizer) is not getattr(torch.optim, "Muon", None):
        return False
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return all(is_plain(p) and p.device.type == "cuda" and p.dtype == torch.float32 for p in parameters)


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
    if inside_of(optimizer):
        return f"{name} steps the optimizers inside it itself"
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
    if not all(is_plain(p) or is_dtensor(p) for p in parameters.tensors):
        return "the fused kernels take no weights that are made of others (quantised ones)"
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
    if "cpu" in devices and len(devices) > 1:
        return "weights lie on the CPU and on another device, so the CPU must have the verdict first"
    supported = {"cpu"} if isinstance(optimizer, Adagrad) else {"cpu", "cuda", "xpu", "mps"}
    if not devices <= supported:
        return f"fused {name} does not run on {', '.join(sorted(devices - supported))}"
    return None
