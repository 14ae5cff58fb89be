"""Changes to a replay that stand for a fix: safe inputs of dangerous functions, fp32 everywhere, repaired weights.

They act above autograd, at every matching call, so that forward and backward both follow from the changed computation; patching
a backward operation instead would be disguise. What a checkpointed part computes a second time inside backward is forward, and
is changed like the first time. Each is a context to run a replay under, and counts how often it acted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional
from torch import Tensor
from torch.overrides import TorchFunctionMode

_HALF = (torch.float16, torch.bfloat16)
_BACKWARD_NAMES = {"gradient": "grad_tensors"}
"""Arguments of Tensor.backward that torch.autograd.backward calls something else."""


class Intervention(TorchFunctionMode):
    """Calls `change` in the place of every function whose name is in `names`."""

    names: ClassVar[frozenset[str]] = frozenset()
    lived: ClassVar[str] = ""
    """What it comes to, for one that a run may go on under; the others are for replays only."""
    livable: ClassVar[dict[str, type[Intervention]]] = {}
    """By name: how to make those again."""

    def __init_subclass__(cls) -> None:
        if cls.__dict__.get("lived"):
            Intervention.livable[cls.__name__.strip("_")] = cls

    def __init__(self) -> None:
        super().__init__()
        self.acted = 0
        self.settings: dict[str, Any] = {}
        """The arguments it was made with, as plain data."""
        self._open: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            return self._backward(*args, **kwargs)
        name = getattr(func, "__name__", "")
        name = name if name.startswith("__") else name.removesuffix("_") or name
        if not self.wants(name) or _in_a_backward_operation():
            return func(*args, **kwargs)
        return self.change(name, func, args, kwargs)

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """torch takes a mode off while it handles a call, here for the whole of backward: put it on again."""
        TorchFunctionMode.__enter__(self)
        try:
            torch.autograd.backward(loss, *args, **{_BACKWARD_NAMES.get(k, k): v for k, v in kwargs.items()})
        finally:
            TorchFunctionMode.__exit__(self, None, None, None)

    def wants(self, name: str) -> bool:
        return name in self.names

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def __enter__(self) -> Any:
        self._open = _in_pieces()
        self._open.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._open.__exit__(*exc)

    def where(self, condition: Tensor, safe: float | Tensor, x: Tensor) -> Tensor:
        """`x` with the marked places replaced; their gradient is exactly 0."""
        if bool(condition.any()):
            self.acted += 1
            return torch.where(condition, torch.as_tensor(safe, dtype=x.dtype, device=x.device), x)
        return x


def _in_a_backward_operation() -> bool:
    """Python code of a backward itself (a custom autograd.Function); a checkpointed part is computed again with gradients on."""
    return not torch.is_grad_enabled() and torch._C._current_autograd_node() is not None


@contextmanager
def _in_pieces() -> Iterator[None]:
    """torch.nn.functional and torch.autograd hand a whole function to a mode; here its body is to run, so that the mode sees what
    it calls."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    places = [(module, name) for module in (torch.nn.functional, torch.autograd) for name in names if hasattr(module, name)]
    saved = [(module, name, getattr(module, name)) for module, name in places]
    for module, name in places:
        setattr(module, name, lambda *_: False)
    try:
        yield
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


class SafeInput(Intervention):
    """Replaces the first argument where `unsafe` says so."""

    def __init__(self, names: Iterable[str], unsafe: Callable[[Tensor], Tensor], safe: float) -> None:
        super().__init__()
        self._names, self._unsafe, self._safe = frozenset(names), unsafe, safe

    def wants(self, name: str) -> bool:
        return name in self._names

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0] if args else kwargs.pop("input")
        if isinstance(x, Tensor) and x.is_floating_point():
            x = self.where(self._unsafe(x.detach()), self._safe, x)
        return (
            getattr(torch, name)(x, *args[1:], **kwargs)
            if getattr(func, "__name__", "").endswith("_")
            else func(x, *args[1:], **kwargs)
        )


EXP = frozenset({"exp", "exp2", "expm1", "sinh", "cosh"})
LOG = frozenset({"log", "log2", "log10"})


def exp_limit(dtype: torch.dtype) -> float:
    """Above this, exp overflows."""
    return float(torch.log(torch.tensor(torch.finfo(dtype).max, dtype=torch.float64)))


class BoundedExp(Intervention):
    """The input of every exp clamped from above before it, well below the overflow."""

    names = EXP
    lived = "the input of every exp is clamped to 20 at the most (8 in fp16)"

    def __init__(self, limit: float = 20.0) -> None:
        super().__init__()
        self.settings = {} if limit == 20 else {"limit": limit}
        self._limit = limit

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        limit = min(8.0, self._limit) if x.dtype == torch.float16 else self._limit
        if isinstance(x, Tensor) and x.is_floating_point() and bool((x.detach() > limit).any()):
            self.acted += 1
            x = x.clamp(max=limit)
        return getattr(torch, name)(x)


class PositiveLog(SafeInput):
    """The input of every logarithm kept away from 0. `0 * log(0)` becomes 0, `log(softmax)` stays finite. NaN stays NaN."""

    lived = "an input of log that is not above 0 is taken as 1e-6"

    def __init__(self) -> None:
        super().__init__(LOG | {"log1p", "xlogy", "logit"}, lambda x: x <= _tiny(x), 1e-6)

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == "log1p":
            return torch.log1p(self.where(args[0].detach() <= -1, 1e-6 - 1, args[0]))
        if name == "xlogy" and isinstance(args[1], Tensor):
            return torch.xlogy(args[0], self.where(args[1].detach() <= _tiny(args[1]), 1e-6, args[1]))
        if name == "logit":
            x = self.where(args[0].detach() >= 1, 1 - 1e-6, args[0])
            return func(self.where(x.detach() <= 0, 1e-6, x), *args[1:], **kwargs)
        return super().change(name, func, args, kwargs)


def _tiny(x: Tensor) -> float:
    return 6e-8 if x.dtype == torch.float16 else 1e-30


class SafeRoot(Intervention):
    """An epsilon under every square root, fractional power, and norm."""

    lived = "there is an epsilon under every root, fractional power and norm"
    names = frozenset(
        {
            "sqrt",
            "rsqrt",
            "pow",
            "__pow__",
            "norm",
            "linalg_norm",
            "linalg_vector_norm",
            "vector_norm",
            "dist",
            "cdist",
            "pairwise_distance",
            "std",
            "std_mean",
        }
    )

    def __init__(self, least: float = 1e-6) -> None:
        super().__init__()
        self._least = least

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x, least = args[0], self._least
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return func(*args, **kwargs)
        if name in ("sqrt", "rsqrt"):
            return getattr(torch, name)(self.where(x.detach() <= _tiny(x), least, x))
        if name in ("pow", "__pow__"):
            p = args[1] if len(args) > 1 else kwargs.get("exponent")
            if isinstance(p, (int, float)) and p < 1 and p != 0:
                x = self.where(x.detach() <= _tiny(x), least, x)
            return torch.pow(x, p)
        self.acted += 1
        if name == "std":
            return (torch.var(x, *args[1:], **kwargs) + least**2).sqrt()
        if name == "std_mean":
            var, mean = torch.var_mean(x, *args[1:], **kwargs)
            return (var + least**2).sqrt(), mean
        if name in ("dist", "cdist", "pairwise_distance"):
            return func(x + least, *args[1:], **kwargs)
        # norm(x, p=2, dim, keepdim): a zero vector gets a length of 1e-6 and no gradient.
        dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
        zero = (
            (x.detach() == 0).all()
            if dim is None
            else (x.detach() == 0).all(dim if isinstance(dim, int) else next(iter(dim)), keepdim=True)
        )
        return func(torch.where(zero, torch.as_tensor(least, dtype=x.dtype, device=x.device), x), *args[1:], **kwargs)


class SafeDivision(Intervention):
    """A divisor that is exactly 0 becomes 1."""

    names = frozenset(
        {
            *("div", "true_divide", "divide", "__truediv__", "__rtruediv__", "__rdiv__", "__div__", "reciprocal"),
            *("pow", "__pow__", "rsqrt", "_weight_norm"),
        }
    )
    lived = "a divisor of 0 is taken as 1"

    def __init__(self, floor: float | None = None) -> None:
        super().__init__()
        self.settings = {} if floor is None else {"floor": floor}
        self._floor = floor
        """Divisors smaller than this become 1 as well."""

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name in ("reciprocal", "__rtruediv__", "__rdiv__"):
            divisor = self._safe(args[0])
            return torch.div(1.0 if name == "reciprocal" else args[1], divisor)
        if name in ("pow", "__pow__", "rsqrt"):
            exponent = -0.5 if name == "rsqrt" else args[1] if len(args) > 1 else kwargs["exponent"]
            divides = isinstance(exponent, (int, float)) and exponent < 0 and isinstance(args[0], Tensor)
            return torch.pow(self._safe(args[0]) if divides else args[0], exponent)
        if name == "_weight_norm":
            return self._weight_norm(*args, **kwargs)
        divisor = args[1] if len(args) > 1 else kwargs.pop("other")
        return torch.div(args[0], self._safe(divisor), **kwargs)

    def _weight_norm(self, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
        """g * v / |v|, which torch computes in one piece."""
        others = [d for d in range(v.dim()) if d != dim] if dim != -1 else list(range(v.dim()))
        length: Tensor = self._safe(torch.linalg.vector_norm(v, dim=others, keepdim=True))
        return v * (g / length)

    def _safe(self, divisor: Any) -> Any:
        if not isinstance(divisor, Tensor):
            if divisor == 0:
                self.acted += 1
                return 1.0
            return divisor
        if not divisor.is_floating_point():
            return self.where(divisor == 0, 1, divisor)
        if self._floor is not None:
            return self.where(divisor.detach().abs() < self._floor, 1.0, divisor)
        return self.where(divisor.detach() == 0, 1.0, divisor)


class SafeSoftmax(Intervention):
    """A row in which everything is -inf is unmasked."""

    names = frozenset({"softmax", "log_softmax", "logsumexp", "masked_fill"})
    lived = "a row of a softmax that is masked throughout is unmasked"

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        if name == "masked_fill":
            mask = args[1] if len(args) > 1 else kwargs["mask"]
            value = args[2] if len(args) > 2 else kwargs["value"]
            if float(value) == -torch.inf and mask.dim():
                whole = mask.expand(x.shape).all(-1, keepdim=True) if mask.dim() <= x.dim() else mask
                if bool(whole.any()):
                    self.acted += 1
                    mask = mask & ~whole
            return torch.masked_fill(x, mask, value)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        if isinstance(x, Tensor) and isinstance(dim, int):
            x = self.where((x.detach() == -torch.inf).all(dim, keepdim=True), 0.0, x)
        return func(x, *args[1:], **kwargs)


class OneMask(Intervention):
    """Additions that pass the dtype's range stay at its edge instead of becoming -inf, as one boolean mask would have it."""

    lived = "a masked score that passes the dtype's range stays at its edge"
    names = frozenset(
        {"add", "__add__", "__radd__", "__iadd__", "sub", "__sub__", "to", "half", "type", "type_as", "mul", "__mul__"}
    )

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        self._share = share
        """Of the dtype's range, where such a score stays."""

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.is_floating_point():
            born = torch.isneginf(out.detach())
            for a in args[:2]:
                if isinstance(a, Tensor) and a.is_floating_point():
                    born = born & ~torch.isinf(a.detach()).to(born.device)
            out = self.where(born, self._share * torch.finfo(out.dtype).min, out)
        return out


class Fp32(Intervention):
    """Every half-precision argument in fp32, autocast off, no cast back."""

    lived = "what ran in fp16 runs in fp32"

    def __init__(self, dtypes: tuple[torch.dtype, ...] = (torch.float16,)) -> None:
        super().__init__()
        self._dtypes = dtypes

    def wants(self, name: str) -> bool:
        return name not in (
            "__get__",
            "__set__",
            "is_floating_point",
            "size",
            "dim",
            "data_ptr",
            "requires_grad",
            "copy",
            "backward",
        )

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == "half":
            self.acted += 1
            return args[0].float()
        args, kwargs = self._up(args), {k: self._up(v) for k, v in kwargs.items()}
        self.acted += torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        with (
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else nullcontext(),
        ):
            return func(*args, **kwargs)

    def _up(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in self._dtypes:
            self.acted += 1
            return value.float()
        if isinstance(value, torch.dtype) and value in self._dtypes:
            self.acted += 1
            return torch.float32
        if type(value) in (tuple, list):
            return type(value)(self._up(v) for v in value)
        return value


class SpreadOfOne(Intervention):
    """A standard deviation over a single element counts as 1 instead of NaN."""

    names = frozenset({"std", "var", "std_mean", "var_mean"})
    lived = "the standard deviation of a single element is taken as 1"

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if not bool(torch.isfinite(args[0].detach()).all()):
            return out
        first, *rest = out if isinstance(out, tuple) else (out,)
        single = args[0].numel() == first.numel() > 0
        if single and bool(torch.isnan(first.detach()).any()):
            # All of it is NaN, its gradient too: 0 times that would still be NaN.
            self.acted += 1
            first = torch.ones_like(first.detach())
        return (first, *rest) if rest else first


class InsideTrig(Intervention):
    """Arguments of acos, asin, atanh and acosh kept off the boundary of their domain."""

    names = frozenset({"acos", "arccos", "asin", "arcsin", "atanh", "arctanh", "acosh", "arccosh"})
    lived = "arguments of acos, asin, atanh and acosh are kept off the boundary of their domain"

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        edge = 1e-3 if x.dtype in _HALF else 1e-6
        hyperbolic = name in ("acosh", "arccosh")
        outside = x.detach() < 1 + edge if hyperbolic else x.detach().abs() > 1 - edge
        if bool(outside.any()):
            self.acted += 1
            x = x.clamp(min=1 + edge) if hyperbolic else x.clamp(-1 + edge, 1 - edge)
        return getattr(torch, name)(x)


class NoEmptyMean(Intervention):
    """A mean over nothing is 0: the sum over max(1, count)."""

    lived = "a mean over nothing is 0"
    names = frozenset(
        {
            "cross_entropy_loss",
            "nll_loss",
            "nll_loss_nd",
            "mean",
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
            "kl_div",
        }
    )

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor) or out.dim() or not bool(torch.isnan(out.detach())):
            return out
        x = args[0]
        empty = x.numel() == 0
        if name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd"):
            target = args[1]
            ignored = kwargs.get("ignore_index", args[4] if len(args) > 4 else -100)
            empty = empty or (not target.is_floating_point() and bool((target == ignored).all()))
        if not empty:
            return out
        self.acted += 1
        return torch.nan_to_num(x.float(), 0.0, 0.0, 0.0).sum() * 0


class ZeroInfinity(Intervention):
    """ctc_loss with zero_infinity=True."""

    names = frozenset({"ctc_loss"})
    lived = "ctc_loss runs with zero_infinity=True"

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        self.acted += 1
        return func(*args[:6], True) if len(args) >= 6 else func(*args, **{**kwargs, "zero_infinity": True})


class Leaky(Intervention):
    """relu replaced by a leaky one, so that a unit that is off still has a gradient."""

    names = frozenset({"relu", "clamp_min", "relu6", "hardtanh", "threshold", "clamp"})

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        low = kwargs.get("min", args[1] if len(args) > 1 else None)
        if name in ("clamp", "clamp_min", "threshold") and not (isinstance(low, (int, float)) and low == 0):
            return func(*args, **kwargs)
        self.acted += 1
        return torch.nn.functional.leaky_relu(args[0], 0.01)


class CoolLogits(Intervention):
    """A division by a small number that overflows is done in fp32, after subtracting the row's maximum. Others stay as they are:
    what is divided there need not be logits."""

    names = frozenset({"div", "true_divide", "__truediv__"})
    lived = "a division by a small temperature that overflows is done in fp32 after subtracting the maximum"

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        x, t = args[0], args[1] if len(args) > 1 else kwargs.get("other")
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim():
            return out
        born = torch.isinf(out.detach()) & torch.isfinite(x.detach())
        least = float(t.detach().abs().min()) if isinstance(t, Tensor) else abs(t)
        if not 0 < least < 1 or not bool(born.any()):
            return out
        self.acted += 1
        x = x.float()
        return (x - x.amax(-1, keepdim=True)) / (t.float() if isinstance(t, Tensor) else t)
