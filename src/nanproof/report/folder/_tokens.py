"""Tokens as text, where the run's tokenizer is at hand: `tokenizer.json`, read by the `tokenizers` package if it is installed."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from nanproof._errors import UsageError
from nanproof._text import shown

FILE = "tokenizer.json"
MOST_BYTES = 256 << 20
HINT = "Token ids only: there is no tokenizer.json in the run's folder; name it with --tokenizer."
NOT_INSTALLED = "Token ids only: `pip install tokenizers` shows them as text."


class Tokens:
    """Turns ids into text, one by one. Without a tokenizer every text is empty, and `hint` says how to have some."""

    def __init__(self, tokenizer: Any = None, hint: str = HINT) -> None:
        self._tokenizer, self.hint = tokenizer, "" if tokenizer is not None else hint
        self._known: dict[int, str] = {}

    def text(self, token: int) -> str:
        """What the token stands for; empty if that is not known."""
        if self._tokenizer is None or not 0 <= token < 1 << 31:
            return ""
        if token not in self._known:
            try:
                said = self._tokenizer.decode([token], skip_special_tokens=False) or self._tokenizer.id_to_token(token) or ""
                piece = self._tokenizer.id_to_token(token) or ""
            except Exception:  # whatever a damaged tokenizer raises, the ids are still there
                said = piece = ""
            if piece.startswith("\u2581") and not said.startswith(" "):
                said = f" {said}"  # a decoder drops the space in front of the first word
            self._known[token] = shown(said, 80)
        return self._known[token]


def find(folder: Path, named: Path | None = None) -> Tokens:
    """The tokenizer that was named; else the one of the run, or of the newest checkpoint beside it."""
    if named is not None:
        path = named / FILE if named.is_dir() else named
        if not path.is_file():
            raise UsageError(f"--tokenizer {named}: there is no {FILE}. Name that file, or the folder it is in")
        return _load(path, must=True)
    for path in (folder / FILE, *_beside(folder)):
        if path.is_file():
            return _load(path, must=False)
    return Tokens()


def _beside(folder: Path) -> list[Path]:
    """Of trainers: the run's folder lies in the output folder, among `checkpoint-100`, `checkpoint-200`, ..."""
    there = [path for parent in (folder, folder.absolute().parent) for path in parent.glob("checkpoint-*")]
    found = [(int(match[1]), path / FILE) for path in there if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))]
    return [path for _, path in sorted(found, reverse=True)[:20]]


def _load(path: Path, must: bool) -> Tokens:
    try:
        about = path.stat()
        if about.st_size > MOST_BYTES:
            raise ValueError("too large")
        return _read(path, about.st_mtime_ns)
    except ImportError:
        return Tokens(hint=NOT_INSTALLED)
    except Exception as error:  # the package raises plain Exception for a file it cannot read
        if must:
            raise UsageError(f"{path} is no tokenizer ({shown(error, 200)}). Name a {FILE} as transformers writes it") from error
        return Tokens(hint=f"Token ids only: {path.name} cannot be read.")


@lru_cache(maxsize=2)
def _read(path: Path, changed: int) -> Tokens:
    """Once, as long as the file is the same: a live page asks every two seconds, and a large one takes a second."""
    from tokenizers import Tokenizer

    return Tokens(Tokenizer.from_file(str(path)))
