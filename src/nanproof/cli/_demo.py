"""`nanproof demo`: the same small training twice, over data with a bug that real projects have.

A character-level language model learns from the documentation strings of Python's own standard library. The loss is the mean
over each document's characters, averaged over the batch. A few documents are a single character long: there is nothing to
predict in them, and their mean is 0/0. One of them in a batch is enough.
"""

from __future__ import annotations

import ast
import json
import logging
import math
import os
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanproof._access import remove
from nanproof._records import Incident, encode
from nanproof._wording import repeated, spans

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import Tensor, nn

LENGTH, BATCH = 128, 24
ALPHABET = "\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;'\"`()[]{}<>=+-*/\\_@#%&|!?$^~"


def demo(
    steps: Annotated[int, typer.Option(min=60, max=20000, help="Steps of each run.")] = 240,
    seed: Annotated[int, typer.Option(help="Seed of model and data order.")] = 0,
    run_dir: Annotated[Path, typer.Option(help="Where the guarded run's records go.")] = Path("runs/demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON on standard output instead.")] = False,
) -> None:
    """An unguarded run dies; the same one guarded lives. Under a minute on two cores, no network."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    messages = Console(stderr=True)
    log = logging.getLogger("nanproof")
    level = log.level
    log.setLevel(logging.ERROR)  # the refused steps are told at the end
    text = documents()
    nothing = sum(len(document) < 2 for document in text)
    messages.print(
        f"Learning the characters of {len(text)} documentation strings. {nothing} of them are a single character: "
        "nothing to predict, and a mean loss of 0/0."
    )
    runs = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=messages) as progress:
        for guarded in (False, True):
            name = "guarded  " if guarded else "unguarded"
            task = progress.add_task(name, total=steps, loss="")

            def tick(loss: float, task: Any = task) -> None:
                progress.update(task, advance=1, loss=f"loss {loss:.3f}")

            runs.append(train(text, steps, seed, run_dir if guarded else None, tick))
    log.setLevel(level)
    from nanproof.report._html import write

    report = write(run_dir)
    if as_json:
        typer.echo(json.dumps({**{run.name: run.to_json() for run in runs}, "report": str(report)}, allow_nan=False))
    else:
        output = Console()
        output.print(picture(runs[0], runs[1], report, output.width, output.options.ascii_only))
    if not math.isfinite(runs[1].losses[-1]):
        raise typer.Exit(1)


@dataclass
class Result:
    """One finished run."""

    name: str
    path: str = ""
    losses: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    broken: int = 0
    tensors: int = 0
    seconds: float = 0.0
    incidents: list[Incident] = field(default_factory=list)

    @property
    def died_at(self) -> int | None:
        """The step from which on every loss is non-finite."""
        alive = [i for i, loss in enumerate(self.losses) if math.isfinite(loss)]
        last = alive[-1] if alive else -1
        return None if last == len(self.losses) - 1 else last + 1

    def to_json(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy,
            "died_at": self.died_at,
            "losses": [encode(x) for x in self.losses],
            "weights_nonfinite": self.broken,
            "weights": self.tensors,
            "seconds": round(self.seconds, 2),
            "path": self.path,
            "incidents": [incident.to_json() for incident in self.incidents],
        }


def documents() -> list[str]:
    """Documentation strings of the standard library's top-level modules, without code examples, in a fixed order."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and (text := ast.get_docstring(node)):
                kept = [line for line in text.splitlines() if not line.lstrip().startswith((">>>", "...", "Traceback"))]
                found.append("\n".join(kept).strip())
    # Every version of Python so far has some of a single character; should one not, the bug comes all the same.
    return found if any(len(text) < 2 for text in found) else [*found, "."]


def train(text: list[str], steps: int, seed: int, run_dir: Path | None, tick: Callable[[float], None]) -> Result:
    """Train on the documents, guarded if there is a `run_dir`; the two loops differ in that alone."""
    import torch

    import nanproof

    torch.manual_seed(seed)
    tokens, mask = encode_text(text)
    held_out = torch.arange(len(text)) % 10 == 0
    nothing = mask[:, 1:].sum(1) == 0
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    order = torch.Generator().manual_seed(seed)
    pool = torch.nonzero(~held_out).squeeze(1)
    bad = torch.nonzero(nothing).squeeze(1)
    result = Result("guarded" if run_dir else "unguarded")
    if run_dir is not None:
        for name in ("steps.jsonl", "steps", "norms.bin", "incidents.jsonl", "incidents"):
            remove(run_dir / name)
    guard = nanproof.Guard(model, optimizer, loss_fn=document_loss, run_dir=run_dir) if run_dir else None
    start = time.perf_counter()
    for step in range(steps):
        chosen = pool[torch.randint(len(pool), (BATCH,), generator=order)]
        if step in (steps // 3, steps // 2) and len(bad):
            chosen[0] = bad[step % len(bad)]  # with any version of Python and any seed, they come up
        batch = tokens[chosen], mask[chosen]
        if guard is not None:
            loss = guard.train_step(batch)
        else:
            optimizer.zero_grad()
            loss = document_loss(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        result.losses.append(loss.item())
        tick(result.losses[-1])
    result.seconds = time.perf_counter() - start
    if guard is not None:
        guard.close()
        result.incidents, result.path = guard.incidents, guard.path
        refused = {incident.step for incident in guard.incidents if incident.action == "skipped"}
        result.losses = [x for i, x in enumerate(result.losses) if i not in refused]
    result.accuracy = accuracy(model, tokens[held_out & ~nothing][:400], mask[held_out & ~nothing][:400])
    result.tensors = len(list(model.parameters()))
    result.broken = sum(not torch.isfinite(p).all() for p in model.parameters())
    return result


def encode_text(text: list[str]) -> tuple[Tensor, Tensor]:
    import torch

    place = {c: i + 1 for i, c in enumerate(ALPHABET)}
    tokens = torch.zeros(len(text), LENGTH, dtype=torch.long)
    mask = torch.zeros(len(text), LENGTH)
    for i, document in enumerate(text):
        ids = [place.get(c, 0) for c in document[:LENGTH]]
        tokens[i, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        mask[i, : len(ids)] = 1
    return tokens, mask


def make_model() -> nn.Module:
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(len(ALPHABET) + 1, 64)
            self.rnn = nn.GRU(64, 192, batch_first=True)
            self.head = nn.Linear(192, len(ALPHABET) + 1)

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.head(self.rnn(self.embed(tokens))[0])
            return out

    return Model()


def document_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean over each document's characters, then over the documents: 0/0 where there is nothing to predict."""
    import torch.nn.functional as F

    tokens, mask = batch
    logits = model(tokens)[:, :-1]
    each = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none") * mask[:, 1:]
    return (each.sum(1) / mask[:, 1:].sum(1)).mean()


def entry() -> dict[str, Any]:
    """For `nanproof replay` and `nanproof check`: what the demo trains."""
    import torch

    model = make_model()
    tokens, mask = encode_text(documents())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    return {"model": model, "loss_fn": document_loss, "optimizer": optimizer, "batch": (tokens[:BATCH], mask[:BATCH])}


def accuracy(model: nn.Module, tokens: Tensor, mask: Tensor) -> float:
    """Share of held-out characters that the model predicts."""
    import torch

    with torch.no_grad():
        right = (model(tokens)[:, :-1].argmax(-1) == tokens[:, 1:]) & (mask[:, 1:] > 0)
    return float(right.sum() / mask[:, 1:].sum())


def picture(unguarded: Result, guarded: Result, report: Path, width: int, ascii_only: bool = False) -> RenderableType:
    """Two curves side by side, what was refused and why, and the metric of both."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from nanproof._wording import rows
    from nanproof.cli._shared import grid
    from nanproof.watch._plot import ASCII, FINE, Scale, curve

    finite = [x for run in (unguarded, guarded) for x in run.losses if math.isfinite(x)]
    scale = Scale(min(finite), max(finite), log=False)
    panels = []
    each = min(60, (width - 1) // 2)
    for run, style in ((unguarded, "red"), (guarded, "green")):
        bars = curve(run.losses, each - 4, 9, scale, ASCII if ascii_only else FINE)
        end = f"nan since step {run.died_at}" if run.died_at is not None else f"{run.losses[-1]:.2f}"
        panels.append(Panel(Text("\n".join(bars), style=style), title=f"{run.name}: loss", subtitle=end, width=each))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, justify in (("", "left"), ("unguarded", "right"), ("guarded", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    both = (unguarded, guarded)
    table.add_row("held-out characters predicted", *(f"{run.accuracy:.1%}" for run in both))
    table.add_row("weight tensors with NaN", *(f"{run.broken} of {run.tensors}" for run in both))
    table.add_row("seconds", *(f"{run.seconds:.1f}" for run in both))
    lines: list[RenderableType] = [Columns(panels, padding=(0, 1)), table, Text()]
    lines.append(Text(f"refused by the guard ({guarded.path})", style="bold"))
    lines += [Padding(Text(text), (0, 0, 0, 2)) for text in _refused(guarded.incidents)]
    first = next((i for i in guarded.incidents if i.diagnosis is not None), None)
    if first is not None and first.diagnosis is not None:
        lines += [Text(), Text(f"why, from running step {first.step} again", style="bold")]
        lines.append(Padding(grid(rows(first.diagnosis)), (0, 0, 0, 2)))
        if first.bundle:
            command = f"nanproof replay {os.path.relpath(first.bundle)} --entry nanproof.cli:demo_entry"
            lines += [Text(), Text("again, in a fresh process:"), Text(command, overflow="fold")]
    lines += [Text(), Text(f"all of it, for a browser: {report}", overflow="fold")]
    return Group(*lines)


def _refused(incidents: Sequence[Incident]) -> list[str]:
    """The first incident, the steps of those like it, and the steps of the others."""
    if not incidents:
        return ["nothing"]
    first, *rest = incidents
    alike = [incident.step for incident in rest if incident.same_as == first.step]
    others = [incident.step for incident in rest if incident.same_as != first.step]
    more = [repeated(first, alike), f"also refused: steps {spans(others)}" if others else ""]
    return [str(first), *filter(None, more)]
