"""`nanproof replay`: run a bad step again from its bundle, anywhere, and say whether it is still bad and why.

The bundle holds batches, random numbers, weights and mode. The code is the user's: `--entry module:build` names a function that
returns the model and the loss function.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanproof._errors import UsageError
from nanproof._records import Diagnosis, encode
from nanproof._text import one_line, shown
from nanproof._wording import rows
from nanproof.cli._entry import built
from nanproof.cli._shared import could_not_run, grid

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nanproof.explain.bundle._bundle import Bundle
    from nanproof.explain.replay._replay import Outcome, Replay

MAY_BE_FINITE = ("spike", "divergence", "no-learning", "nonfinite-weight")
"""Incidents whose loss and gradients may be finite: still bad means the same numbers again."""


def replay(
    bundle: Annotated[Path, typer.Argument(help="The folder of a bundle, run_dir/incidents/step-...", show_default=False)],
    entry: Annotated[
        str,
        typer.Option(
            help="module:function of yours that returns a dictionary of model, loss_fn and perhaps optimizer.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output instead.")] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long the diagnosis may take.")] = 60.0,
) -> None:
    """Run a bad step again from its bundle, and diagnose it. Exit status: 1 still bad, 0 finite now, 2 could not run."""
    try:
        # What the user's own code prints must not get into the output.
        with contextlib.redirect_stdout(sys.stderr):
            result = run(bundle, entry, seconds)
    except UsageError as error:
        raise could_not_run(error) from error
    except (Exception, SystemExit) as error:
        traceback.print_exc(file=sys.stderr)
        what = f"{bundle} cannot be run again here ({type(error).__name__}: {error})"
        hint = "Check that the bundle is whole and that --entry builds the model it came from"
        raise could_not_run(UsageError(f"{what}. {hint}")) from error
    if as_json:
        typer.echo(json.dumps(result.to_json(), allow_nan=False))
    else:
        from rich.console import Console

        Console(markup=False, highlight=False).print(picture(result))
    raise typer.Exit(1 if result.bad else 0)


@dataclass(frozen=True, slots=True)
class Result:
    """What two runs of the step came to."""

    bundle: Bundle
    runs: tuple[Outcome, Outcome]
    same: bool | None
    """As recorded, to the six digits that are on disk; None where nothing was recorded to compare with."""
    buffer: str
    """A buffer that the forward makes non-finite."""
    diagnosis: Diagnosis | None
    notes: tuple[str, ...]

    @property
    def bad(self) -> bool:
        return not all(run.finite for run in self.runs) or bool(self.buffer) or (was_finite(self.bundle) and self.same is True)

    @property
    def verdict(self) -> str:
        if not self.bad:
            return "transient"
        return "unsteady" if self.runs[0].finite != self.runs[1].finite else "persistent"

    def sentence(self) -> str:
        if self.verdict == "unsteady":
            return "unsteady: bad in one of two runs from the same state"
        if not self.bad:
            return "finite now: the code has changed since (a fix that works?), or it was transient"
        what = f"the forward makes {self.buffer} non-finite" if self.buffer else "bad both times"
        if not self.buffer and self.runs[0].finite:
            what = "finite, but the same numbers both times"
        as_then = {True: ", as recorded", False: ", though not with the recorded numbers", None: ""}[self.same]
        return f"persistent: {what}{as_then}"

    def to_json(self) -> dict[str, Any]:
        incident = self.bundle.incident
        return {
            "v": 1,
            "bundle": str(self.bundle.path),
            "step": incident.step,
            "kind": incident.kind,
            "verdict": self.verdict,
            "bad": self.bad,
            "same_as_recorded": self.same,
            "same_twice": self.runs[0].same_as(self.runs[1]),
            "recorded": {"loss": encode(incident.loss), "grad_norm": encode(incident.grad_norm)},
            "runs": [_outcome(run) for run in self.runs],
            "buffer": self.buffer or None,
            "diagnosis": replace(incident, diagnosis=self.diagnosis).to_json()["diagnosis"],
            "notes": list(self.notes),
        }


def run(path: Path, entry: str, seconds: float) -> Result:
    """Read the bundle, build the model, run the step twice, explain what is bad."""
    from nanproof.core.judge._optimizers import bare_optimizer
    from nanproof.core.judge._parameters import unwrap
    from nanproof.core.support._inner import nonfinite
    from nanproof.explain.bundle._bundle import read_bundle
    from nanproof.explain.bundle._restore import load_model, load_optimizer, notes_on, numerics, usable
    from nanproof.explain.replay._replay import Replay

    bundle = read_bundle(path, to_devices=True)
    notes = notes_on(bundle)
    with numerics(bundle.mode.numerics):
        made = built(entry)
        model, loss_fn = made.model, made.loss_fn
        optimizer = None if made.optimizer is None else bare_optimizer(made.optimizer)
        with _as_recorded(bundle):
            notes += load_model(bundle, model) + load_optimizer(bundle, model, optimizer)
        for note in notes:
            typer.echo(f"note: {one_line(note)}", err=True)
        scale = bundle.record.scale if bundle.record is not None else None
        with _as_recorded(bundle):
            step = Replay(model, loss_fn, bundle.batches, random=usable(bundle.random), mode=bundle.mode.on(model))
        buffers = list(unwrap(model).named_buffers())
        before = nonfinite(buffers)
        after: list[str] = []

        def look() -> None:
            after.extend(name for name in nonfinite(buffers) if name not in before)

        with _as_recorded(bundle):
            first = step.run(scale=scale or 1.0)
            second = step.run(scale=scale or 1.0, after=look)
        if first.error is not None and bundle.incident.kind not in ("exception", "generation"):
            raise UsageError(
                f"{entry}: the step raises here what it did not then ({type(first.error).__name__}: {first.error}). "
                f"The batch came back as {_shape_of(bundle)}; let loss_fn take that (dataclasses and named tuples come back as "
                "dictionaries and tuples; for bundles of trainers see docs/frameworks/README.md)"
            )
        result = Result(bundle, (first, second), _same(bundle, first), after[0] if after else "", None, tuple(notes))
        return replace(result, diagnosis=_diagnosis(result, step, optimizer, seconds)) if result.bad else result


def _shape_of(bundle: Bundle) -> str:
    first = bundle.batches[0] if bundle.batches else None
    keys = ", ".join(repr(key) for key in first) if isinstance(first, dict) else ""
    return f"a dictionary with {keys}" if keys else f"a {type(first).__name__}"


@contextlib.contextmanager
def _as_recorded(bundle: Bundle) -> Iterator[None]:
    """What the step itself raises is part of its outcome; this is about putting the recorded state back."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{bundle.path}: the recorded state does not fit this machine ({type(error).__name__}: {one_line(error, 300)}). "
            f"Use torch {bundle.versions.get('torch', '?')}"
        ) from error


def was_finite(bundle: Bundle) -> bool:
    """Loss and gradients were finite when the step was recorded: something else was wrong with it."""
    numbers = [x for x in (bundle.incident.loss, bundle.incident.grad_norm) if x is not None]
    return bundle.incident.kind in MAY_BE_FINITE and bool(numbers) and all(map(math.isfinite, numbers))


def _same(bundle: Bundle, outcome: Outcome) -> bool | None:
    incident, record = bundle.incident, bundle.record
    if (incident.kind == "exception") != (outcome.error is not None):
        return False
    if outcome.error is not None:
        return True
    pairs = [(x, y) for x, y in ((incident.loss, outcome.loss), (incident.grad_norm, outcome.total)) if x is not None]
    if record is not None:
        pairs += [(norm, outcome.norms.get(name, math.inf)) for name, norm in record.by_parameter.items()]
    return all((x != x and y != y) or math.isclose(x, y, rel_tol=1e-5) for x, y in pairs) if pairs else None


def _diagnosis(result: Result, step: Replay, optimizer: Any, seconds: float) -> Diagnosis:
    from nanproof.explain._case import Case
    from nanproof.explain._diagnose import explain
    from nanproof.explain.causes._weights import NonfiniteWeightsMidRun
    from nanproof.explain.replay._replay import Deadline, Replay

    bundle, outcome, then = result.bundle, result.runs[0], result.bundle.incident.diagnosis
    kind, micro = bundle.incident.kind, bundle.incident.micro_batch
    scale = bundle.record.scale if bundle.record is not None else None
    if micro is not None and len(step.batches) > max(1, micro):
        # Samples are counted within the bad micro-batch, if it is bad alone too.
        alone = Replay(step.model, step.loss_fn, [step.batches[micro]], random=step.random, mode=step.mode)
        step = step if alone.run(scale=scale).finite else alone
    step.deadline = Deadline.after(seconds)
    if kind == "nonfinite-gradient" and scale is not None:
        kind = "loss-scale-collapse"  # as the guard has it
    case = Case(
        kind,
        replay=step,
        optimizer=optimizer,
        record=bundle.record,
        error=outcome.error,
        bad_buffer=result.buffer,
        weights_broke=kind == "nonfinite-weight" and outcome.finite and not result.buffer,
        details={"mid_run": then.evidence} if then is not None and then.cause == NonfiniteWeightsMidRun.slug else {},
    )
    return explain(case)


def _outcome(outcome: Outcome) -> dict[str, Any]:
    """All digits, so that runs can be compared bit for bit."""

    def exact(x: float) -> float | str | None:
        return x if math.isfinite(x) else encode(x)

    return {
        "loss": exact(outcome.loss),
        "grad_norm": exact(outcome.total),
        "norms": {name: exact(norm) for name, norm in outcome.norms.items()},
        "finite": outcome.finite,
        "error": None if outcome.error is None else str(outcome),
        "seconds": round(outcome.seconds, 4),
    }


def picture(result: Result) -> RenderableType:
    """What happened then, what happens now, and the diagnosis."""
    from rich.console import Group
    from rich.text import Text

    incident, diagnosis = result.bundle.incident, result.diagnosis
    found = [
        ("recorded", f"loss {_short(incident.loss)}, gradient norm {_short(incident.grad_norm)}, {incident.action}"),
        ("run again", str(result.runs[0])),
        ("and again", "the same, bit for bit" if result.runs[0].same_as(result.runs[1]) else str(result.runs[1])),
        ("verdict", result.sentence()),
        ("then", str(incident.diagnosis) if not result.bad and incident.diagnosis is not None else None),
        *(rows(diagnosis) if diagnosis is not None else ()),
    ]
    rows_shown = [(heading, None if text is None else shown(text)) for heading, text in found]
    created = one_line(result.bundle.created, 40)
    return Group(Text(f"step {incident.step}: {incident.kind} ({created})", style="bold"), grid(rows_shown))


def _short(x: float | None) -> str:
    return "unknown" if x is None else f"{x:.4g}"
