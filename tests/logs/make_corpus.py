"""Makes the corpus of logs by really running what writes them, at a tiny size, with real causes of failure.

    python tests/logs/make_corpus.py [NAME ...]    # all, or those whose name begins with one of NAME

Each maker says beforehand what is wrong in its log, and where, from what it did to the run: the manifest is never filled from
what nanproof finds. Files are stable in content, not in bytes: times differ. No name of a machine or a user may be in them.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
MANIFEST = CORPUS / "manifest.json"


@dataclass(frozen=True)
class Truth:
    """What is known of a log because it was made so."""

    how: str
    kind: str | None = None
    """Of the first finding; None for a healthy run."""
    severity: str = "failure"
    step: tuple[float, float] | None = None
    """Between which steps it began, both included."""
    line: tuple[int, int] | None = None
    held_out: bool = False
    """Made after the rules, and not used to make them."""
    missed: bool = False
    """Known not to be found: the manifest says what is true all the same."""


MAKERS: dict[str, tuple[Truth, Callable[..., Any]]] = {}


def log(name: str, how: str, kind: str | None = None, **known: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A maker of the log `name`: it gets the path (a file, or a folder if the name has no dot) and may return what it learned of
    the run while it ran, such as the step at which its own loss was NaN."""

    def decorate(make: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in MAKERS, name
        MAKERS[name] = (Truth(how, kind, **known), make)
        return make

    return decorate


def scrubbed(text: str) -> str:
    """Without the folders of this machine, which tracebacks and warnings name."""
    for folder, shown in ((str(HERE), "."), (sys.prefix, "/venv"), (sys.base_prefix, "/python"), (os.getcwd(), ".")):
        text = text.replace(folder, shown)
    return text


@contextlib.contextmanager
def said(path: Path, encoding: str = "utf-8", *, compress: bool = False, append: bool = False) -> Any:
    """What is printed to either stream inside goes to the file."""
    text = io.StringIO(newline="")
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            yield text
    finally:
        data = scrubbed(text.getvalue()).encode(encoding)
        before = path.read_bytes() if append and path.exists() else b""
        path.write_bytes(gzip.compress(data, mtime=0) if compress else before + data)


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", COLUMNS="100")
    sys.path.insert(0, str(HERE))
    import make_corpus  # the makers register in the module, not in __main__

    for part in ("corpus_torch", "corpus_transformers", "corpus_others", "corpus_tools", "corpus_held_out"):
        if (HERE / f"{part}.py").exists():
            __import__(part)
    CORPUS.mkdir(exist_ok=True)
    manifest = json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {}
    home = Path.cwd()
    for name, (truth, make) in make_corpus.MAKERS.items():
        if names and not any(name.startswith(n) for n in names):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            os.chdir(scratch)
            try:
                learned = make(CORPUS / name) or {}
            except Exception as error:
                print(f"{name}: FAILED {type(error).__name__}: {error}", flush=True)
                continue
            finally:
                os.chdir(home)
        manifest[name] = {k: v for k, v in {**asdict(truth), **learned}.items() if v not in (None, False)}
        print(name, manifest[name].get("step"), manifest[name].get("line"), flush=True)
        MANIFEST.write_text(json.dumps(dict(sorted(manifest.items())), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
