"""Matrices that are factored, inverted or decomposed: look at them, and add a little to their diagonal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanproof.explain.locate._calls import CallStack
from nanproof.explain.locate._trace import source_of_operation
from nanproof.explain.replay._interventions import Intervention

_SYMMETRIC = frozenset({"cholesky", "linalg_cholesky", "linalg_cholesky_ex", "linalg_eigh", "linalg_eigvalsh"})
_GENERAL = frozenset(
    {
        *("inverse", "linalg_inv", "linalg_inv_ex", "linalg_solve", "linalg_solve_ex", "logdet", "slogdet", "linalg_slogdet"),
        *("linalg_lu_factor", "linalg_lu_solve"),
    }
)
DECOMPOSITIONS = frozenset(
    {
        "linalg_svd",
        "svd",
        "linalg_svdvals",
        "linalg_eigh",
        "linalg_eig",
        "linalg_qr",
        "qr",
        "linalg_matrix_norm",
        "linalg_eigvalsh",
    }
)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix, or a stack of them, that went into an operation of linear algebra."""

    name: str
    value: Tensor
    """In float64."""
    dtype: torch.dtype
    where: str
    source: str
    failed: bool
    """Whether the operation raised, or reported that it did not succeed."""

    @property
    def op(self) -> str:
        return self.name.removeprefix("linalg_")

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.value).all())

    @property
    def least(self) -> Tensor:
        return _ends(self.name, self.value)[0]

    @property
    def largest(self) -> Tensor:
        return _ends(self.name, self.value)[1]

    @property
    def indefinite(self) -> Tensor:
        """Mark the matrices whose smallest eigenvalue, or singular value, is 0 or below as far as the dtype can tell."""
        return _indefinite(self.name, self.value, self.dtype)


def _ends(name: str, value: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and largest eigenvalue; the singular values where the matrix is not symmetric."""
    symmetric = name in _SYMMETRIC or torch.allclose(value, value.mT, rtol=1e-5)
    found = torch.linalg.eigvalsh(value) if symmetric else torch.linalg.svdvals(value)
    return found.amin(-1), found.amax(-1)


def _indefinite(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    least, largest = _ends(name, value)
    return least <= value.shape[-1] * torch.finfo(dtype).eps * largest.abs()


def _matrix(value: Any) -> bool:
    square = isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2
    return square and value.shape[-1] == value.shape[-2] and value.numel() > 0


class MatrixCheck(Intervention):
    """Looks at every matrix that is factored, inverted or solved with, and keeps those that may be why it fails."""

    names = _SYMMETRIC | _GENERAL

    def __init__(self, stack: CallStack) -> None:
        super().__init__()
        self._stack = stack
        self.found: list[Matrix] = []

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not _matrix(x):
            return func(*args, **kwargs)
        assert isinstance(x, Tensor)
        value = x.detach().double().clone()
        try:
            out = func(*args, **kwargs)
        except Exception:
            self._keep(name, value, x.dtype, True)
            raise
        status = getattr(out, "info", None)
        parts = out if isinstance(out, tuple) else (out,)
        bad = any(isinstance(p, Tensor) and p.is_floating_point() and not bool(torch.isfinite(p).all()) for p in parts)
        bad = bad or (isinstance(status, Tensor) and bool(status.any()))
        if bad or (bool(torch.isfinite(value).all()) and bool(_indefinite(name, value, x.dtype).any())):
            self._keep(name, value, x.dtype, bad)
        return out

    def _keep(self, name: str, value: Tensor, dtype: torch.dtype, failed: bool) -> None:
        call = self._stack.current
        path = call.path if call is not None else "loss_fn"
        self.found.append(Matrix(name, value, dtype, path, source_of_operation(), failed))


class Jitter(Intervention):
    """A small multiple of the identity is added to each matrix that is not positive definite or not invertible, and to no
    other."""

    names = _SYMMETRIC | _GENERAL

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if args and _matrix(args[0]):
            x = args[0]
            value = x.detach().double()
            if bool(torch.isfinite(value).all()) and bool((bad := _indefinite(name, value, x.dtype)).any()):
                self.acted += 1
                least, largest = _ends(name, value)
                size = least.clamp(max=0).neg() * 1.01 + 1e-3 * largest.abs().clamp(min=1e-3)
                eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
                args = (x + (size * bad).to(x.dtype)[..., None, None] * eye, *args[1:])
        return func(*args, **kwargs)


class ChangedMatrix(Intervention):
    """The input of every SVD, eigendecomposition and QR passed through a function."""

    names = DECOMPOSITIONS

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._how = how

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].dim() >= 2 and args[0].is_floating_point():
            self.acted += 1
            args = (self._how(args[0]), *args[1:])
        return func(*args, **kwargs)


def values_apart(x: Tensor) -> Tensor:
    """Add a small ramp to the diagonal, which makes equal singular values or eigenvalues differ and zero ones positive."""
    count = min(x.shape[-2:])
    size = 1e-2 * x.detach().abs().amax().clamp(min=1e-3)
    ramp = torch.arange(1, count + 1, dtype=x.dtype, device=x.device) / count * size
    return x + torch.diag_embed(ramp)[..., :count, :count] if x.shape[-1] == x.shape[-2] else x + _wide(ramp, x)


def _wide(ramp: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[-2:], dtype=x.dtype, device=x.device)
    out.diagonal().copy_(ramp)
    return out
