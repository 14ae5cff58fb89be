"""A case of the zoo as a script of its own: the function, what it needs from its file, and the guard around it.

The pages of causes show one such script each, so that a reader can paste it; a test runs all of them. It is put together from the
sources of zoo, by name: nothing is copied by hand.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from pathlib import Path
from typing import Any

from zoo.plain import load
from zoo.registry import CASES, Case

load()
LOOP = """
def training(**settings):
    return SimpleNamespace(**{{"max_norm": None, "scaler": None, "scheduler": None, **settings}})


for fixed in (False, True):
    t = {name}(fixed)
    settings = {{"loss_fn": t.loss_fn, "max_norm": t.max_norm, "scaler": t.scaler, "scheduler": t.scheduler}}
    guard = nanproof.Guard(t.model, t.optimizer, **settings)
    try:
        for batch in t.batches:
            {step}
    except Exception as error:
        print(type(error).__name__, error)
    guard.close()
    print("fixed:" if fixed else "broken:", *(i.diagnosis for i in guard.incidents[:1]))
"""
STEP = "guard.train_step(batch)"
OWN = """if fixed:
                guard.train_step(batch)  # clears gradients itself
            else:
                loss = t.loss_fn(t.model, batch)
                guard.backward(loss)
                guard.step(loss)"""
"""Where what goes wrong is that gradients are never cleared, the loop has to be the user's own."""


@cache
def _file(path: str) -> tuple[str, ast.Module]:
    text = Path(path).read_text()
    return text, ast.parse(text)


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _binds(node: ast.stmt) -> list[str]:
    """The names that a statement of a module makes."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(a.asname or a.name).split(".")[0] for a in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [t.id for t in targets if isinstance(t, ast.Name)]


def _source(text: str, node: ast.stmt) -> str:
    """The statement without its decorators."""
    assert node.end_lineno is not None
    return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])


def script(case: Case) -> str:
    """The case, complete: imports, the function, what it uses, and a guarded run of the broken and of the healthy one."""
    text, tree = _file(inspect.getfile(case.build))
    made = {name: node for node in tree.body for name in _binds(node)}
    needed, queue = [], [case.name]
    while queue:
        node = made[queue.pop(0)]
        if node not in needed:
            needed.append(node)
            # sorted: the same page every time
            queue += sorted(name for name in _names(node) if name in made)
    own_loop = "own_loop=" in _source(text, made[case.name])
    imports = [line for node in needed if (line := _import(node, needed))]
    others = [node for node in needed if not isinstance(node, (ast.Import, ast.ImportFrom))]
    # Values first, since classes may use them as defaults; then the case, then what it uses, in the order of the file.
    values = [node for node in tree.body if node in others and not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    rest = [node for node in tree.body if node in others and node not in values and node is not made[case.name]]
    parts = ["\n".join(_source(text, node) for node in values)] if values else []
    parts += [_source(text, node) for node in (made[case.name], *rest)]
    body = "\n\n\n".join(parts).replace("-> Training:", "-> Any:").replace("Training(", "training(")
    standard = {"from types import SimpleNamespace", "from typing import Any", *_std(imports)}
    head = ["from __future__ import annotations", "", *sorted(standard, key=_order)]
    head += ["", *_other(imports), "", "import nanproof"]
    loop = LOOP.format(name=case.name, step=OWN if own_loop else STEP)
    return "\n".join(head) + "\n\n\n" + body + "\n\n" + loop


def _import(node: ast.stmt, needed: list[ast.stmt]) -> str | None:
    """An import of the file, with the names that are needed; what registers cases is not."""
    if not isinstance(node, (ast.Import, ast.ImportFrom)):
        return None
    used = {name for other in needed for name in _names(other)}
    kept = [alias for alias in node.names if (alias.asname or alias.name).split(".")[0] in used]
    if isinstance(node, ast.Import):
        return ast.unparse(ast.Import(kept))
    return None if (node.module or "").endswith("registry") else ast.unparse(ast.ImportFrom(node.module, kept, node.level))


def _is_torch(line: str) -> bool:
    return line.split()[1].split(".")[0] in ("torch", "transformers")


def _std(imports: list[str]) -> list[str]:
    return [line for line in imports if not _is_torch(line)]


def _other(imports: list[str]) -> list[str]:
    return sorted({line for line in imports if _is_torch(line)} | {"import torch"}, key=_order)


def _order(line: str) -> tuple[bool, str]:
    return line.startswith("from"), line


def shown(cause: str) -> Case | None:
    """The case of a cause that makes the shortest script."""
    mine = [case for case in CASES.values() if case.cause == cause]
    return min(mine, key=lambda case: (len(script(case)), case.name), default=None)


def main() -> Any:
    print(script(CASES[sys.argv[1]]))


if __name__ == "__main__":
    main()
