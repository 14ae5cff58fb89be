"""Make the text that ships: the docstrings of Python's standard library.

Run `python -m nanproof_recipes.latent_dlm.data.docstrings OUT`.

Only source files are parsed; nothing of them is imported or run.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import io
import platform
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from nanproof import UsageError

SHORTEST = 40
"""Bytes; shorter ones say little."""
SEPARATOR = b"\f"
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
_BUILT = ("config-", "_sysconfigdata")
"""Made when that Python was built; they name the machine."""


def docstrings(library: Path) -> list[bytes]:
    """Of all modules, classes and functions below a folder; each once, sorted, with no form feed in it."""
    found: set[bytes] = set()
    for path in library.rglob("*.py"):
        parts = path.relative_to(library).parts
        if not _LEFT_OUT.intersection(parts) and not parts[0].startswith(_BUILT):
            found.update(_inside(path))
    return sorted(text for text in found if len(text) >= SHORTEST)


def _inside(path: Path) -> Iterator[bytes]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in their strings
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""  # cleaned by inspect.cleandoc
            plain = "".join(c for c in text if c in "\n\t" or c.isprintable())
            yield plain.strip().encode("utf-8", "ignore")


def pack(texts: list[bytes]) -> bytes:
    """The same bytes for the same texts, whenever and wherever they are packed."""
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=packed, mtime=0) as file:
        file.write(SEPARATOR.join(texts))
    return packed.getvalue()


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise UsageError("python -m nanproof_recipes.latent_dlm.data.docstrings OUT: the file to write is needed")
    texts = docstrings(Path(sysconfig.get_paths()["stdlib"]))
    raw, packed = SEPARATOR.join(texts), pack(texts)
    Path(arguments[0]).write_bytes(packed)
    print(f"Python {platform.python_version()}: {len(texts)} docstrings, {len(raw)} bytes, packed {len(packed)} bytes")
    print(f"sha256 of the text: {hashlib.sha256(raw).hexdigest()}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UsageError, OSError) as error:
        sys.exit(str(error))
