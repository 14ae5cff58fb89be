"""docs/reference/api.md: the public names, with their signatures and docstrings, read from the sources without importing them.

`python -m tools.tables` writes it; a test fails when it differs from the sources, or lacks a public name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nanproof

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "api.md"
NOTE = "<!-- made by tools/tables.py from the docstrings; change those -->"
MEANT = """What is named on this page is public: it changes only with a line in the changelog. Everything else may change at any
time. `import nanproof` does not import torch; a name is imported when it is first used."""

GROUPS: dict[str, tuple[str, str, str]] = {
    "Guarding": (
        "Your own loop, or a trainer's: [guard.md](../guard.md), [guides](../frameworks/README.md).",
        "nanproof",
        "Guard protect ProtectedRun Policy Observe Checkpoints",
    ),
    "Finding out": ("Without a guard, or before step 0: [explain.md](../explain.md).", "nanproof", "diagnose preflight"),
    "What happened": (
        "Plain frozen data, the same in memory and on disk: [formats.md](formats.md).",
        "nanproof",
        "StepRecord Incident Diagnosis Forecast Observed read_steps read_incidents read_forecasts",
    ),
    "Errors": (
        "",
        "nanproof",
        "NanproofError UsageError AlreadyGuarded UnsupportedError TrainingHalted BadLogits RefusedFile",
    ),
    "Checkpoints, looked into": ("[scan.md](../scan.md).", "nanproof", "scan ScanReport first_bad load"),
    "Sampling under a guard": ("[generation.md](../generation.md#under-a-guard).", "nanproof", "GuardedSampling"),
    "A model's own call, again": (
        "For `nanproof replay` of bundles of Accelerate, Fabric and `nanproof run`.",
        "nanproof",
        "call_again",
    ),
    "Callbacks of transformers": (
        "From `nanproof.integrations.transformers`: [transformers.md](../frameworks/transformers.md#callbacks).",
        "nanproof.integrations.transformers",
        "GradientMonitorCallback LossCheckCallback ActivationMonitorCallback",
    ),
    "Losses of transformers": (
        "From `nanproof.integrations.transformers`: [numerics.md](../numerics.md#losses-of-a-trainer).",
        "nanproof.integrations.transformers",
        "safe_compute_loss replay_loss",
    ),
    "Callback of Lightning": (
        "From `nanproof.integrations.lightning`: [lightning.md](../frameworks/lightning.md).",
        "nanproof.integrations.lightning",
        "NanproofCallback",
    ),
    "Sampling": (
        "From `nanproof.numerics.generation`: [generation.md](../generation.md).",
        "nanproof.numerics.generation",
        "NumericalStabilityLogitsProcessor TemperatureLogitsWarper BadRow",
    ),
    "Policy gradients": (
        "From `nanproof.numerics.rl`: [trl.md](../frameworks/trl.md#for-losses-of-your-own).",
        "nanproof.numerics.rl",
        "log_ratio ratio Ratio kl clamped_kl KL masked_mean group_advantages Advantages Signals",
    ),
    "Precision": (
        "From `nanproof.numerics.precision`: [numerics.md](../numerics.md#precision).",
        "nanproof.numerics.precision",
        "choose Precision problems Problem cast_trainable",
    ),
    "Losses": (
        "From `nanproof.numerics.losses`: [numerics.md](../numerics.md#the-loss).",
        "nanproof.numerics.losses",
        "masked_cross_entropy masked_mse supervised_tokens check_supervised Supervision weighted_sum",
    ),
    "Comparing runs": (
        "From `nanproof_recipes.comparison` (`pip install nanproof-recipes`), without torch: "
        "[report.md](../report.md#comparing-runs).",
        "nanproof_recipes.comparison",
        "Comparison Column Arm Check write read rich_table",
    ),
}
"""By heading: what is said of it, the public module, and its names."""
INHERITED = {"Face": "nanproof.core._tell"}
"""Base classes whose properties are described with the class that has them."""

Node = ast.ClassDef | ast.FunctionDef


@cache
def _tree(module: str) -> ast.Module:
    root = ROOT / ("src" if module.split(".")[0] == "nanproof" else "recipes/src")
    base = root / Path(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _find(module: str, name: str) -> Node:
    """Where a public name is defined: a thin public module only imports it."""
    home = f"nanproof.{nanproof._homes()[name]}" if module == "nanproof" else module
    for node in _tree(home).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module and any((alias.asname or alias.name) == name for alias in node.names):
            return _find(node.module, name)
    raise LookupError(f"{home} has no {name}")


def page() -> str:
    parts = ["# API reference", MEANT]
    for title, (about, module, names) in GROUPS.items():
        parts += [f"## {title}", *([about] if about else [])]
        for name in names.split():
            parts += described(module, _find(module, name))
    return "\n\n".join([*parts, NOTE]) + "\n"


def described(module: str, node: Node) -> Iterator[str]:
    yield f"### {node.name}"
    if isinstance(node, ast.FunctionDef):
        yield f"```py\n{signature(f'{module}.{node.name}', node)}\n```"
        yield from text(node)
        return
    init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    fields = list(_fields(node))
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    if init is not None:
        yield f"```py\n{signature(f'class {module}.{node.name}', init)}\n```"
    elif fields and _is_data(node):
        names = ", ".join(name for name, *_ in fields)
        yield f"```py\nclass {module}.{node.name}({names if len(names) < 80 else '...'})\n```"
    else:
        yield f"```py\nclass {module}.{node.name}" + (f"({bases})" if bases else "") + "\n```"
    yield from text(node)
    if init is not None:
        yield from text(init)
    if fields:
        rows = [f"| `{name}` | {_code(kind)} | {_code(default)} | {_cell(said)} |" for name, kind, default, said in fields]
        yield "| field | type | default | |\n|---|---|---|---|\n" + "\n".join(rows)
    attributes = [*(_attributes(init) if init is not None else ()), *_properties(node)]
    if attributes:
        yield "| attribute | type | |\n|---|---|---|\n" + "\n".join(
            f"| `{name}` | {_code(kind)} | {_cell(said)} |" for name, kind, said in attributes
        )
    for method in node.body:
        if _is_public(method) and isinstance(method, ast.FunctionDef) and not _is_property(method) and ast.get_docstring(method):
            yield f"#### {node.name}.{method.name}"
            yield f"```py\n{signature(method.name, method)}\n```"
            yield from text(method)


def _is_public(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not node.name.startswith("on_")


def _decorators(node: Node) -> list[str]:
    return [ast.unparse(d) for d in node.decorator_list]


def _is_property(node: ast.FunctionDef) -> bool:
    return any(d.endswith("property") for d in _decorators(node))


def _is_data(node: ast.ClassDef) -> bool:
    return any(d.startswith("dataclass") for d in _decorators(node))


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str, ast.expr | None, str]]:
    """Assignments: name, type, value, and the string under each."""
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, (ast.AnnAssign, ast.Assign)):
            said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            kind = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
            yield ast.unparse(target), kind, node.value, " ".join(str(said).split())


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str, str]]:
    if not _is_data(node):
        return
    for name, kind, value, said in _documented(node.body):
        if kind and not name.startswith("_"):
            default = "" if value is None else ast.unparse(value)
            default = re.sub(r"field\(default=(\w+),.*\)", r"\1", default)
            yield name, kind, re.sub(r"field\(default_factory=(\w+)\)", r"\1()", default), said


def _attributes(init: ast.FunctionDef) -> Iterator[tuple[str, str, str]]:
    for name, kind, _, said in _documented(init.body):
        if said and name.startswith("self.") and not name.startswith("self._"):
            yield name.removeprefix("self."), kind, said


def _properties(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    for base in map(ast.unparse, node.bases):
        shared = _find(INHERITED[base], base) if base in INHERITED else None
        if isinstance(shared, ast.ClassDef):
            yield from _properties(shared)
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and _is_public(method) and _is_property(method):
            kind = "" if method.returns is None else ast.unparse(method.returns)
            yield method.name, kind, " ".join((ast.get_docstring(method) or "").split())


def signature(name: str, node: ast.FunctionDef) -> str:
    """One line, or one line for each argument."""
    a = node.args
    positional = a.posonlyargs + a.args
    defaults = [None] * (len(positional) - len(a.defaults)) + [ast.unparse(d) for d in a.defaults]
    shown = [_argument(arg, default) for arg, default in zip(positional, defaults, strict=True) if arg.arg not in ("self", "cls")]
    if a.vararg:
        shown.append("*" + _argument(a.vararg, None))
    elif a.kwonlyargs:
        shown.append("*")
    shown += [_argument(arg, d and ast.unparse(d)) for arg, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    if a.kwarg:
        shown.append("**" + _argument(a.kwarg, None))
    back = f" -> {ast.unparse(node.returns)}" if node.returns is not None and not name.startswith("class ") else ""
    line = f"{name}({', '.join(shown)}){back}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {arg},\n" for arg in shown) + f"){back}"


def _argument(arg: ast.arg, default: str | None) -> str:
    kind = "" if arg.annotation is None else f": {ast.unparse(arg.annotation)}"
    return f"{arg.arg}{kind}" + ("" if default is None else f" = {default}" if kind else f"={default}")


def text(node: Node) -> Iterator[str]:
    """The docstring; its arguments as a table."""
    said = ast.get_docstring(node) or ""
    before, _, rest = said.partition("Args:\n")
    if before.strip():
        yield before.strip()
    if rest:
        block, _, after = rest.partition("\n\n")
        found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", block, flags=re.MULTILINE)
        yield "| argument | |\n|---|---|\n" + "\n".join(f"| `{name}` | {_cell(' '.join(what.split()))} |" for name, what in found)
        if after.strip():
            yield after.strip()


def _cell(said: str) -> str:
    return said.replace("|", "\\|")


def _code(said: str) -> str:
    return f"`{_cell(said)}`" if said else ""
