"""The trainer's tokenizer beside the run's records, so that a report shows the guilty token as text and not as a number."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from nanproof.core.support._files import write_whole

log = logging.getLogger("nanproof")

FILE = "tokenizer.json"


def keep_tokenizer(trainer: Any, run_dir: str | Path | None) -> None:
    """Write `tokenizer.json` into the run's folder, on the first rank, if the trainer has a tokenizer that can be written so.
    Training never fails for it."""
    try:
        if run_dir is None or not trainer.is_world_process_zero():
            return
        given = getattr(trainer, "processing_class", None)
        given = getattr(given, "tokenizer", given)  # a processor of texts and images has one
        backend = getattr(given, "backend_tokenizer", None)
        if backend is not None:
            write_whole(Path(run_dir) / FILE, backend.to_str())
    except Exception as error:
        log.debug("nanproof: %s was not written", FILE, exc_info=error)
