"""Causes that end the step with an exception: ids outside a table, a norm over one value, a matrix that cannot be factored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanproof._records import Diagnosis
from nanproof._wording import few, listed
from nanproof.core.judge._parameters import clean_name, unwrap
from nanproof.core.support._tree import tensors_in
from nanproof.explain._case import Case, Trial
from nanproof.explain._cause import Cause, Match
from nanproof.explain.locate._calls import CallStack
from nanproof.explain.locate._indices import ClampedIds, find_outside_id, place_in_batch, places
from nanproof.explain.locate._locate import batch_shape, where_in_batch
from nanproof.explain.locate._matrices import Jitter, Matrix, MatrixCheck
from nanproof.explain.locate._trace import is_users, short

_ASSERTED = "device-side assert"
_RERUN = (
    "rerun with CUDA_LAUNCH_BLOCKING=1 for the line, or this batch on the CPU with nanproof.diagnose for the id and the table"
)


def device_is_lost(error: BaseException | None) -> bool:
    """Whether a device-side assert ended the CUDA context: from then on no tensor on the device can be read."""
    return error is not None and _ASSERTED in str(error)


class IdsOutOfRange(Cause):
    """A token, class or position id is beyond its table."""

    slug = "ids-out-of-range"
    specific = 2
    fix = (
        "Check the vocabulary against the tokenizer, labels against the number of classes, and sequence lengths against the "
        "position table; resize the table, or drop the sample."
    )

    def match(self, case: Case) -> Match | None:
        if case.kind != "exception" or case.error is None:
            return None
        if device_is_lost(case.error):
            return self._from_shapes(case)
        if case.replay is None or not isinstance(case.error, (IndexError, RuntimeError)):
            return None
        found, _ = find_outside_id(case.replay)
        if found is None:
            return None
        lookup = found.lookup
        place = place_in_batch(lookup, case.replay.batches)
        count = int(lookup.outside.sum())
        said = f"{lookup.op} in {found.where} is given {place}, for {lookup.table}"
        said += f" ({count} of {lookup.ids.numel()} ids are outside of it)" * (count > 1)
        if place.name is None:
            said += "; no tensor of the batch holds this id: it is computed, as positions are"
        return Match(
            confidence=0.98,
            evidence=(said,),
            phase="data" if place.name is not None else "forward",
            where=found.where,
            op=lookup.op,
            source=found.source or None,
            samples=place.samples or None,
            tokens=place.tokens,
            trial=lambda: self._clamped(case),
            tried="these ids clamped into the table, and no other changed",
        )

    def _clamped(self, case: Case) -> Trial:
        clamp = ClampedIds()
        trial = case.cured_by(clamp)
        changed = f"{clamp.changed} id{'s' * (clamp.changed != 1)} changed"
        return Trial(trial.held, f"{trial.result}, {changed}")

    def _from_shapes(self, case: Case) -> Match:
        """Compare what is on the CPU with the sizes of tables, which are known without the device."""
        tables, outputs = _tables(case.model), _outputs(case.model)
        shown = listed([f"{name} has {size} rows" for name, size in tables]) if tables else "the model has no nn.Embedding"
        for batch in case.batches:
            for name, t in tensors_in(batch):
                if t.device.type != "cpu" or t.is_floating_point() or t.is_complex() or t.dtype == torch.bool or not t.numel():
                    continue
                # Ids may well be beyond a smaller table that they are not used with; one label a sample goes with the outputs.
                known = (*tables, *outputs) if t.dim() > 1 else outputs or tables
                path, size = max(known, key=lambda each: each[1], default=("", 0))
                if not path or int(t.max()) < size:
                    continue
                samples, tokens = places(t >= size, batch) if t.dim() else ((), ())
                kind = "rows" if (path, size) in tables else "outputs"
                said = f"{name} holds ids up to {int(t.max())}, and {path} has {size} {kind}"
                return self._lost(0.8 if t.dim() > 1 else 0.6, (said, shown), path, name, samples, tokens)
        said = "a lookup (embedding, indexing, gather, scatter, a target of cross entropy) is the usual source of such an assert"
        return self._lost(0.4, (said, shown), None, None, (), ())

    def _lost(
        self,
        confidence: float,
        evidence: tuple[str, ...],
        where: str | None,
        name: str | None,
        samples: tuple[int, ...],
        tokens: tuple[int, ...],
    ) -> Match:
        lost = "a device-side assert ended the CUDA context: nothing on the device can be read or run again in this process"
        return Match(
            confidence=confidence,
            evidence=(lost, *evidence),
            phase="data" if name is not None else "forward",
            where=where,
            samples=samples or None,
            tokens=tokens,
            fix=f"{self.fix} hint: {_RERUN}.",
        )


def _tables(model: nn.Module | None) -> list[tuple[str, int]]:
    if model is None:
        return []
    kinds = (nn.Embedding, nn.EmbeddingBag)
    named = unwrap(model).named_modules()
    return [(clean_name(name) or type(m).__name__, m.num_embeddings) for name, m in named if isinstance(m, kinds)]


def _outputs(model: nn.Module | None) -> list[tuple[str, int]]:
    """The last linear layer, which gives the classes where there are any."""
    named = unwrap(model).named_modules() if model is not None else ()
    return [(clean_name(name) or type(m).__name__, m.out_features) for name, m in named if isinstance(m, nn.Linear)][-1:]


def explain_lost_device(case: Case) -> Diagnosis:
    """The diagnosis of a step whose CUDA context is gone. No other cause may look: reading a tensor would raise."""
    match = IdsOutOfRange().match(case)
    assert match is not None
    return Diagnosis(
        cause=IdsOutOfRange.slug,
        confidence=match.confidence,
        phase=match.phase,
        where=match.where,
        source=raised_at(case.error) if case.error is not None else None,
        samples=match.samples or (),
        tokens=match.tokens,
        evidence=match.evidence,
        fix=match.fix,
        verified=False,
    )


class BatchOfOne(Cause):
    """BatchNorm or InstanceNorm has a single value per channel to normalise over, and raises."""

    slug = "batch-of-one"
    specific = 2
    fix = (
        "Set drop_last=True on the DataLoader, or use a batch size that does not leave one sample over; GroupNorm or LayerNorm "
        "do not depend on the batch."
    )

    def match(self, case: Case) -> Match | None:
        text = str(case.error or "")
        if case.error is None or not ("more than 1 value per channel" in text or "more than 1 spatial element" in text):
            return None
        norm = next((name for name in _functions(case.error) if name in ("batch_norm", "instance_norm", "group_norm")), None)
        if norm == "group_norm":
            return None  # it does not depend on the batch: the layer has one channel a group
        samples = batch_shape(case.batches[0])[0] if len(case.batches) == 1 else 0
        where = module_in(case.error, case.model)
        said = f"{where or 'a norm layer'} was given shape {_size_in(text)} in training mode: one value per channel"
        said += f", from a batch of {samples} sample{'s' * (samples != 1)}" * bool(samples)
        return Match(
            confidence=0.98,
            evidence=(said,),
            phase="forward",
            where=where,
            op=norm or "batch_norm",
            source=raised_at(case.error),
            trial=(lambda: case.cured_by(_NormOfOne())) if case.replay is not None else None,
            tried="this norm on its running statistics (GroupNorm where it has none)",
            fix="" if "per channel" in text else "Give InstanceNorm more than one pixel per channel, or use GroupNorm.",
        )


class _NormOfOne:
    """While open, a norm over one value per channel uses its running statistics, or one group of channels where it has none.
    All other norms stay as they are."""

    def __init__(self) -> None:
        self.acted = 0
        self._saved: tuple[Any, Any] = (F.batch_norm, F.instance_norm)

    def __enter__(self) -> _NormOfOne:
        self._put(self._batch_norm, self._instance_norm)
        return self

    def __exit__(self, *error: object) -> None:
        self._put(*self._saved)

    def _put(self, batch_norm: Any, instance_norm: Any) -> None:
        F.batch_norm, F.instance_norm = batch_norm, instance_norm

    def _batch_norm(self, x: Tensor, mean: Any, var: Any, weight: Any = None, bias: Any = None, *rest: Any, **named: Any) -> Any:
        training = named.get("training", rest[0] if rest else False)
        if not training or x.numel() > x.shape[1]:
            return self._saved[0](x, mean, var, weight, bias, *rest, **named)
        self.acted += 1
        eps = named.get("eps", rest[2] if len(rest) > 2 else 1e-5)
        if mean is not None and var is not None:
            return self._saved[0](x, mean, var, weight, bias, False, 0.0, eps)
        return self._one_group(x, weight, bias, eps)

    def _instance_norm(
        self, x: Tensor, mean: Any = None, var: Any = None, weight: Any = None, bias: Any = None, *rest: Any, **named: Any
    ) -> Any:
        if x.dim() < 3 or x[0, 0].numel() > 1:
            return self._saved[1](x, mean, var, weight, bias, *rest, **named)
        self.acted += 1
        return self._one_group(x, weight, bias, 1e-5)

    def _one_group(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return F.group_norm(x, 1, weight, bias, eps) if x[0].numel() > 1 else x


def _size_in(text: str) -> str:
    """The shape that torch's message ends with."""
    return text[text.find("[") : text.find("]") + 1] or "unknown"


class NotPositiveDefinite(Cause):
    """Cholesky, an inverse or a solve of a matrix that is not positive definite, or is singular."""

    slug = "not-positive-definite"
    specific = 2
    fix = (
        "Add a jitter to the diagonal (K + 1e-6 * I, more in fp32), symmetrise the matrix, and compute it in float64; or "
        "parametrise its Cholesky factor directly."
    )

    def match(self, case: Case) -> Match | None:
        if not case.nonfinite or case.replay is None or not self._could_be(case):
            return None
        stack = CallStack(case.replay.model)
        check = MatrixCheck(stack)
        case.replay.run(stack.following(), check)
        matrix = self._guilty(case, check.found)
        if matrix is None:
            return None
        bad = matrix.indefinite
        element = tuple(int(i) for i in torch.nonzero(bad)[0])
        least, largest = float(matrix.least[element]), float(matrix.largest[element])
        kind = str(matrix.dtype).removeprefix("torch.")
        said = f"{matrix.op} of a {matrix.value.shape[-1]} by {matrix.value.shape[-1]} matrix whose smallest eigenvalue is "
        said += f"{least:.4g} and largest {largest:.4g} (computed in float64; the matrix is {kind})"
        if bad.dim():
            said += f", batch element {few(torch.nonzero(bad.reshape(-1)).flatten().tolist())}"
        return Match(
            confidence=0.97,
            evidence=(said, *_first_line(case.error)),
            phase="backward" if case.birth is not None and case.birth.in_backward and not matrix.failed else "forward",
            where=matrix.where,
            op=matrix.op,
            source=matrix.source or None,
            samples=_stacked(bad, case) or None,
            trial=lambda: case.cured_by(Jitter()),
            tried="a jitter on the diagonal of the matrices that are not positive definite",
        )

    def _could_be(self, case: Case) -> bool:
        text = str(case.error or "")
        if any(part in text for part in _MATRIX_ERRORS):
            return True
        birth = case.birth
        return birth is not None and any(op.name in _FACTORING for op in birth.trace.ops)

    def _guilty(self, case: Case, found: list[Matrix]) -> Matrix | None:
        """The matrix at which it failed; where the trouble is in backward, the one whose gradient is bad."""
        birth = case.birth
        failed = [m for m in found if m.failed]
        if not failed and birth is not None and birth.in_backward and birth.op.name in _FACTORING:
            failed = [m for m in found if m.source == birth.op.source]
        able = [m for m in failed[-1:] if m.finite]  # a matrix that is NaN already has its cause elsewhere
        return next((m for m in able if bool(m.indefinite.any())), None)


_MATRIX_ERRORS = (
    "positive-definite",
    "positive definite",
    "singular",
    "PositiveDefinite()",
    "failed to converge",
    "ill-conditioned",
)
_FACTORING = frozenset(
    {
        *("linalg_cholesky_ex", "cholesky", "linalg_inv_ex", "_linalg_solve_ex", "_linalg_slogdet", "linalg_lu_factor_ex"),
        *("linalg_solve_triangular", "cholesky_inverse", "cholesky_solve"),
    }
)


def _first_line(error: BaseException | None) -> tuple[str, ...]:
    return () if error is None else (str(error).strip().split("\n")[0][:160],)


def _stacked(bad: Tensor, case: Case) -> tuple[int, ...]:
    """The samples whose matrices are marked, where there is one matrix a sample."""
    if case.replay is None or len(case.replay.batches) != 1 or not bad.dim():
        return ()
    samples, length = batch_shape(case.replay.batches[0])
    rows = where_in_batch(bad, samples, length)[0] if samples > 1 else ()
    return rows if len(rows) < samples else ()


# -- reading a traceback ---------------------------------------------------------------------------------------------------------


def _frames(error: BaseException) -> Iterator[Any]:
    frame = error.__traceback__
    while frame is not None:
        yield frame
        frame = frame.tb_next


def passed_through(error: BaseException, loss_fn: Any) -> bool:
    """Whether an exception came through the loss function, a module, or backward: what a replay runs again."""
    codes = [frame.tb_frame.f_code for frame in _frames(error)]
    own = getattr(getattr(loss_fn, "func", loss_fn), "__code__", None)
    modules = any(isinstance(frame.tb_frame.f_locals.get("self"), nn.Module) for frame in _frames(error))
    return modules or own in codes or any("autograd" in Path(code.co_filename).parts for code in codes)


def _functions(error: BaseException) -> list[str]:
    """The functions the exception came through, innermost first."""
    return [frame.tb_frame.f_code.co_name for frame in _frames(error)][::-1]


def module_in(error: BaseException, model: nn.Module | None) -> str | None:
    """The path of the innermost module whose forward the exception came through."""
    if model is None:
        return None
    paths = {id(m): clean_name(name) or type(m).__name__ for name, m in unwrap(model).named_modules()}
    owners = [frame.tb_frame.f_locals.get("self") for frame in _frames(error)]
    return next((paths.get(id(o), type(o).__name__) for o in reversed(owners) if isinstance(o, nn.Module)), None)


def raised_at(error: BaseException) -> str | None:
    """The last line outside torch that the exception came through."""
    lines = [(frame.tb_frame.f_code.co_filename, frame.tb_lineno) for frame in _frames(error)]
    return next((f"{short(name)}:{number}" for name, number in reversed(lines) if is_users(name)), None)
