"""In what precision to train, why, and what is wrong with a model that is held in another.

One rule: weights that learn are fp32. Half precision is for the forward, under autocast: bf16 where the device has it, else fp16
with a loss scale. Weights that are fp16 or bf16 themselves lose small updates, and Adam's eps is 0 in fp16. `choose` says what
fits a device, `problems` what is wrong with a model and its optimizer, `cast_trainable` puts it right.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn, optim

from nanproof._errors import UsageError
from nanproof._wording import listed
from nanproof.core.judge._parameters import clean_name, local, unwrap
from nanproof.core.support._casting import HALF, buffers_beside, cast
from nanproof.core.support._members import optimizers_in
from nanproof.explain.causes._learning import Bf16UpdateRounding
from nanproof.explain.causes._optimizer import Fp16WeightsWithGradScaler
from nanproof.explain.causes._update import Fp16OptimizerUnderflow

__all__ = ["Ask", "Precision", "Problem", "cast_trainable", "choose", "problems"]

Ask = Literal["auto", "bf16", "fp16", "fp32"]
Optimizers: TypeAlias = "optim.Optimizer | Sequence[optim.Optimizer]"
_DIVIDES_BY_EPS = (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.RMSprop, optim.Adagrad)
"""Optimizers whose step is 0/0 for a gradient of 0 where eps is 0, unless they are fused."""
_ENOUGH_EPS = 1e-4
"""In fp16: below it, an element whose second moment underflows moves hundreds of times too far."""
_BITS = {torch.float16: 11, torch.bfloat16: 8}
_CAST = "nanproof.numerics.precision.cast_trainable(model) casts them."


@dataclass(frozen=True, slots=True)
class Precision:
    """In what precision to train, and why."""

    name: Literal["bf16", "fp32", "fp16"]
    weights: torch.dtype
    """Of the weights that learn: always fp32."""
    compute: torch.dtype | None
    """What autocast casts to; None without autocast."""
    scaler: bool
    """Whether the loss has to be scaled."""
    reason: str
    """One sentence, to be printed."""
    device: str = "cpu"
    """The type of device it was chosen for."""

    def autocast(self, device_type: str | None = None) -> AbstractContextManager[Any]:
        """To be open around the forward and the loss; not around backward."""
        return nullcontext() if self.compute is None else torch.autocast(device_type or self.device, dtype=self.compute)

    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """A new GradScaler where the loss has to be scaled."""
        return torch.amp.GradScaler(self.device) if self.scaler else None

    def trainer_arguments(self) -> dict[str, bool]:
        """For TrainingArguments of transformers. The weights are yours to cast: the Trainer trains them as they are."""
        return {"bf16": self.name == "bf16", "fp16": self.name == "fp16"}

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Device:
    """What of a device matters for the choice."""

    kind: str
    bf16: bool
    """It computes in bf16 by itself, not by emulation."""
    said: str
    """What is known of it, as the beginning of a sentence."""
    autocast: bool = True

    @classmethod
    def of(cls, device: torch.device) -> Device:
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise UsageError(f'choose(device="{device}"): torch finds no CUDA device here; leave `device` out, or say "cpu"')
            major, minor = torch.cuda.get_device_capability(device)
            name = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
            return cls("cuda", _cuda_bf16(device), name)
        if device.type == "cpu":
            found = [name for name, there in _cpu_instructions().items() if there]
            said = (
                f"this CPU has instructions for bf16 ({', '.join(found)})" if found else "this CPU has no instructions for bf16"
            )
            return cls("cpu", bool(found), said)
        kind = device.type
        return cls(kind, False, f"whether {kind} computes in bf16 is not known here", torch.amp.is_autocast_available(kind))


def choose(model: nn.Module | None = None, device: torch.device | str | None = None, ask: Ask = "auto") -> Precision:
    """What to train in, and why: bf16 autocast over fp32 weights where the device computes in bf16 by itself, else fp16 with a
    loss scale over fp32 weights on CUDA, else fp32.

    Args:
        model: the reason says so if weights of it that learn are not fp32; its device is the device.
        device: where it will be trained; without it and without a model, CUDA if there is one.
        ask: "bf16", "fp16" or "fp32" instead. What cannot work on the device is refused.
    """
    if ask not in ("auto", "bf16", "fp16", "fp32"):
        raise UsageError(f'choose(ask={ask!r}): "auto", "bf16", "fp16" or "fp32" is needed')
    chosen = precision_for(Device.of(_place(model, device)), ask)
    narrow = _narrow(model) if model is not None else {}
    if not narrow:
        return chosen
    held = (
        f"{len(narrow)} of the parameters that learn are {_names_of([p.dtype for p in narrow.values()])}: cast them to fp32 first"
    )
    return replace(chosen, reason=f"{chosen.reason}. {held}, cast_trainable(model) does it")


def precision_for(device: Device, ask: Ask = "auto") -> Precision:
    """The rule itself, for a device that need not be there."""
    fp32, asked = torch.float32, "as asked; " if ask != "auto" else ""
    if ask == "fp32" or (ask == "auto" and not device.bf16 and device.kind != "cuda"):
        why = asked or f"{device.said}, so half precision gains nothing that is sure; "
        return Precision("fp32", fp32, None, False, f"{why}weights and forward are fp32", device.kind)
    if ask == "bf16" and not device.bf16:
        if device.kind == "cuda":
            raise UsageError(
                f'choose(ask="bf16"): {device.said} does not compute in bf16, which begins with 8.0: torch would emulate it, '
                'slowly. Ask for "fp16", which is scaled there, or "fp32"'
            )
        if not device.autocast:
            raise UsageError(f'choose(ask="bf16"): torch has no autocast for {device.kind}. Ask for "fp32"')
        why = f"{asked}{device.said}, so it may be slower than fp32; the weights stay fp32"
        return Precision("bf16", fp32, torch.bfloat16, False, why, device.kind)
    if ask == "bf16" or (ask == "auto" and device.bf16):
        does = device.said if device.kind == "cpu" else f"{device.said} computes in bf16"
        why = (
            f"{asked if ask == 'bf16' else ''}{does}, which has the range of fp32 and needs no loss scale; the weights stay fp32"
        )
        return Precision("bf16", fp32, torch.bfloat16, False, why, device.kind)
    if device.kind != "cuda":
        raise UsageError(_no_fp16(device.kind))
    why = asked or f"{device.said} does not compute in bf16, so "
    return Precision(
        "fp16", fp32, torch.float16, True, f"{why}the forward is fp16 with a loss scale; the weights stay fp32", device.kind
    )


def _no_fp16(kind: str) -> str:
    if kind != "cpu":
        return f'choose(ask="fp16"): scaled fp16 is known to work on CUDA only, not on {kind}. Ask for "fp32", or "bf16"'
    return (
        'choose(ask="fp16"): on a CPU Trainer(fp16=True) trains in fp32 without saying so, and fp16 is slower than fp32 where '
        'the CPU has no instructions for it. Ask for "bf16" or "fp32". In a loop of your own torch.autocast("cpu", '
        'torch.float16) and torch.amp.GradScaler("cpu") do work'
    )


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the dtypes that will spoil the training."""

    slug: str
    """Of the catalogue of causes: the page with this name says more."""
    sentence: str
    fix: str

    def __str__(self) -> str:
        return f"{self.slug}: {self.sentence}. {self.fix}"


def problems(
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    fp16: bool = False,
    bf16: bool = False,
    scaler: Any = None,
) -> list[Problem]:
    """What is wrong with the dtypes of a model and its optimizer, surest first; nothing is run. Frozen weights may be anything:
    an fp16 base under fp32 adapters is no problem.

    Args:
        optimizer: the optimizer you will train with, or a list of them; without it, eps is not checked.
        fp16: the Trainer's argument, or autocast to fp16.
        bf16: the Trainer's argument, or autocast to bf16.
        scaler: the GradScaler, if there will be one.
    """
    narrow = _narrow(model)
    names = {name: p.dtype for name, p in narrow.items()}
    half = [name for name, dtype in names.items() if dtype == torch.float16]
    found: list[Problem] = []
    if half and (fp16 or (scaler is not None and scaler.is_enabled())):
        said = (
            f"{len(half)} parameters that learn are fp16 ({listed(half)}), and the loss is to be scaled: GradScaler raises "
            '"Attempting to unscale FP16 gradients." at their gradients'
        )
        found.append(Problem(Fp16WeightsWithGradScaler.slug, said, f"{Fp16WeightsWithGradScaler.fix} {_CAST}"))
    small = [(each, eps) for each in _all_of(optimizer) if (eps := _eps_in_fp16(each)) is not None]
    if half and small:
        (first, eps), *_ = small
        said = f"{len(half)} parameters that learn are fp16 ({listed(half)}) under {type(first).__name__}, not fused: "
        rounded = float(torch.tensor(eps, dtype=torch.float16))
        if rounded == 0:
            said += f"eps={eps:g} is 0 in fp16, so the first step divides by 0 wherever the second moment is 0 too"
        else:
            said += (
                f"second moments below 3e-8 are 0 in fp16, which leaves eps={eps:g} to divide by: a gradient of 0.001 can "
                f"move its weight {0.001 / rounded:.0f} times the learning rate"
            )
        found.append(Problem(Fp16OptimizerUnderflow.slug, said, f"{Fp16OptimizerUnderflow.fix} {_CAST}"))
    for dtype in HALF:
        those = [name for name, held in names.items() if held == dtype]
        if those:
            found.append(_rounding(dtype, those, optimizer, fp16 or bf16))
    return found


def _rounding(dtype: torch.dtype, names: list[str], optimizer: Optimizers | None, autocast: bool) -> Problem:
    kind, part = _names_of([dtype]), 2 ** (_BITS[dtype] + 1)
    said = f"{len(names)} parameters that learn are {kind} ({listed(names)}): an update below 1/{part} of its weight is lost"
    adams = [each for each in _all_of(optimizer) if isinstance(each, (optim.Adam, optim.AdamW))]
    if adams:
        rate = max(float(group["lr"]) for each in adams for group in each.param_groups)
        if rate > 0:
            said += f"; Adam moves a weight by about lr={rate:g}, so those above {rate * part:.2g} in size stand still"
    if autocast:
        said += "; autocast does not help, it leaves the weights as they are"
    return Problem(Bf16UpdateRounding.slug, said, f"{Bf16UpdateRounding.remedy}. {_CAST}")


def cast_trainable(model: nn.Module, dtype: torch.dtype = torch.float32, optimizer: Optimizers | None = None) -> tuple[str, ...]:
    """The weights that learn in fp32, in place: names of those that were narrower. Parameters stay the objects they are; their
    gradients, and half-precision buffers of the modules that own them, are cast too. Frozen weights stay as they are: run the
    forward under autocast (`Precision.autocast`) where they are half.

    Call it before the optimizer is made. One that has taken a step keeps moments in the old dtype: give it as `optimizer`, and
    they are cast too. Call it before DistributedDataParallel, which sorts gradients by dtype when it is made.
    """
    if dtype not in (torch.float32, torch.float64):
        raise UsageError(
            f"cast_trainable(dtype={dtype}): torch.float32 or torch.float64 is needed; weights that learn are not half"
        )
    narrow = _narrow(model, dtype)
    beside = buffers_beside(model, narrow.values())
    for tensor in (*narrow.values(), *beside):
        cast(tensor, dtype, *_all_of(optimizer))
    return tuple(narrow)


def _narrow(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights that learn, by name, each once, in fewer bits than this."""
    wanted = torch.finfo(dtype).bits
    return {
        clean_name(name): p
        for name, p in unwrap(model).named_parameters()
        if p.requires_grad and p.is_floating_point() and torch.finfo(p.dtype).bits < wanted
    }


def _all_of(optimizer: Optimizers | None) -> list[Any]:
    return [] if optimizer is None else optimizers_in(optimizer)


def _eps_in_fp16(optimizer: optim.Optimizer) -> float | None:
    """The smallest eps that is too small, of the groups that hold fp16 weights and are not fused; None where there is none."""
    if not isinstance(optimizer, _DIVIDES_BY_EPS):
        return None
    groups = [g for g in optimizer.param_groups if any(p.dtype == torch.float16 and p.requires_grad for p in g["params"])]
    found = [float(g["eps"]) for g in groups if not g.get("fused") and float(g["eps"]) < _ENOUGH_EPS]
    return min(found, default=None)


def _names_of(dtypes: list[torch.dtype]) -> str:
    short = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    return " and ".join(dict.fromkeys(short.get(d, str(d).removeprefix("torch.")) for d in dtypes))


def _place(model: nn.Module | None, device: torch.device | str | None) -> torch.device:
    if device is not None:
        try:
            return torch.device(device)
        except RuntimeError as error:
            raise UsageError(f'choose(device={device!r}): a device of torch is needed, such as "cuda" or "cpu"') from error
    first = next(model.parameters(), None) if model is not None else None
    if first is not None:
        return local(first).device
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


def _cuda_bf16(device: torch.device) -> bool:
    with torch.cuda.device(device):
        if "including_emulation" in inspect.signature(torch.cuda.is_bf16_supported).parameters:
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
        return bool(torch.cuda.is_bf16_supported())


def _cpu_instructions() -> dict[str, bool]:
    """Instructions that multiply bf16. torch asks the CPU; a version that cannot ask knows of none."""
    asked = {"AMX": "_is_amx_tile_supported", "AVX512_BF16": "_is_avx512_bf16_supported"}
    return {name: bool(getattr(torch.cpu, function, lambda: False)()) for name, function in asked.items()}
