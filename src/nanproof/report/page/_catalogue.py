"""What happens, in a sentence, by cause: the docstrings of the catalogue, from its source: importing it would import torch."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import nanproof


@cache
def sentences() -> dict[str, str]:
    """Cause: what happens. Nothing where the source is not there to be read."""
    found: dict[str, str] = {}
    for path in sorted((Path(nanproof.__file__).parent / "explain" / "causes").glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        for node in tree.body:
            slug = _slug(node) if isinstance(node, ast.ClassDef) else None
            if slug and isinstance(node, ast.ClassDef) and (text := ast.get_docstring(node)):
                found[slug] = " ".join(text.split("\n\n")[0].split())
    return found


def _slug(node: ast.ClassDef) -> str | None:
    for line in node.body:
        named = isinstance(line, ast.Assign) and any(isinstance(x, ast.Name) and x.id == "slug" for x in line.targets)
        if named and isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str):
            return line.value.value
    return None
