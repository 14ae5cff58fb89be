"""The tokenizer that `protect(trainer)` leaves in the run's folder for the report."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("trl.trainer")

from integrations import tiny_trl as tiny
from nanproof import protect
from nanproof.integrations.huggingface._tokenizer import keep_tokenizer
from nanproof.report.folder._tokens import find


def test_a_report_decodes_what_the_trainer_trained_on(tmp_path):
    """The file in the run's folder gives every id the word that the trainer's own tokenizer gives it."""
    trainer = tiny.sft(tmp_path, max_steps=1)
    protect(trainer)
    trainer.train()
    tokens = find(tmp_path / "nanproof")
    assert [tokens.text(i) for i in range(len(tiny.WORDS))] == tiny.WORDS
    assert tokens.hint == ""


class Trainer:
    """As much of a trainer as is asked for its tokenizer."""

    def __init__(self, processing_class, first=True):
        self.processing_class, self._first = processing_class, first

    def is_world_process_zero(self):
        return self._first


class Breaks:
    @property
    def backend_tokenizer(self):
        raise RuntimeError("no")


class Processor:
    tokenizer = tiny.TOKENIZER


def test_what_cannot_be_written_is_left(tmp_path):
    """No tokenizer, a slow one, one that raises, no folder, another rank: nothing is written, and nothing is raised."""
    for trainer, folder in [
        (Trainer(None), tmp_path),
        (Trainer(object()), tmp_path),
        (Trainer(Breaks()), tmp_path),
        (Trainer(tiny.TOKENIZER), None),
        (Trainer(tiny.TOKENIZER), tmp_path / "missing"),
        (Trainer(tiny.TOKENIZER, first=False), tmp_path),
        (object(), tmp_path),
    ]:
        keep_tokenizer(trainer, folder)
    assert list(tmp_path.iterdir()) == []
    keep_tokenizer(Trainer(Processor()), tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]["w0"] == 3
