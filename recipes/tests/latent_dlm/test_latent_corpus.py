"""Text of latent-dlm: what counts as a document, how it is split and cut, and that what ships is what it says."""

from __future__ import annotations

import gzip
import hashlib
import os
import random
from importlib.resources import files

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanproof import UsageError
from nanproof_recipes.latent_dlm.data import corpus
from nanproof_recipes.latent_dlm.data.corpus import END, IDS, MASK, OUT, PAD, decode, documents, split, windows
from nanproof_recipes.latent_dlm.data.docstrings import docstrings, main, pack

ASSETS = files("nanproof_recipes.latent_dlm.data") / "assets"
texts = st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=8)


def test_ids_are_bytes_and_three_more():
    assert (END, MASK, PAD, OUT, IDS) == (256, 257, 258, 257, 259)


def test_the_shipped_text_is_what_its_checksum_says():
    """Every document is clean text of 40 bytes or more, there once, in order; the file holds no time and no name."""
    packed = (ASSETS / corpus.SHIPPED).read_bytes()
    raw = gzip.decompress(packed)
    assert hashlib.sha256(raw).hexdigest() == corpus.SHA256
    assert packed[3:8] == bytes(5)  # no flags, so no name; time 0
    docs = documents(None)
    assert b"\f".join(docs) == raw and docs == sorted(set(docs)) and len(docs) > 6000 and len(raw) > 1_500_000
    assert min(map(len, docs)) >= 40
    assert all(c.isprintable() or c in "\n\t" for c in b"".join(docs).decode("utf-8"))


def test_the_notice_names_the_licence():
    notice = (ASSETS / "NOTICE.txt").read_text(encoding="utf-8")
    for part in (
        "Python Software Foundation",
        "LICENSE VERSION 2",
        "Python 3.11.7",
        "https://docs.python.org/3.11/license.html",
        "are retained",
    ):
        assert part in notice


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-9], lambda b: b[:5000] + b"\0\0" + b[5002:], lambda b: b"", lambda b: pack([b"other"])]
)
def test_a_damaged_shipped_text_is_refused(damage, tmp_path, monkeypatch):
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / corpus.SHIPPED).write_bytes(damage((ASSETS / corpus.SHIPPED).read_bytes()))
    monkeypatch.setattr(corpus, "files", lambda _: tmp_path)
    with pytest.raises(UsageError, match="missing or damaged"):
        documents(None)


def test_docstrings_are_found_without_running_anything(tmp_path):
    long = "This is said in a docstring that is long enough."
    (tmp_path / "a.py").write_text(
        f'"""Module.   {long}\n\n        Indented\n"""\nraise SystemExit\n'
        f'class A:\n    """Class. {long}"""\n    async def f(self):\n        """Inner. {long}\\f\\x1b[31m"""\n'
        f'def g():\n    """Too short."""\n    "No docstring. {long}"\n'
    )
    (tmp_path / "b.py").write_text(f'"""Twice. {long}"""\ndef f():\n    """Twice. {long}"""\n')
    (tmp_path / "broken.py").write_text("def (")
    for left_out in ("test", "pkg/tests", "idlelib", "lib2to3", "site-packages", "config-3.11"):
        folder = tmp_path / left_out
        folder.mkdir(parents=True)
        (folder / "c.py").write_text(f'"""Left out. {long}"""')
    wanted = [f"Class. {long}", f"Inner. {long}[31m", f"Module.   {long}\n\nIndented", f"Twice. {long}"]
    assert docstrings(tmp_path) == [text.encode() for text in wanted]


def test_packing_gives_the_same_bytes_again(tmp_path):
    assert pack([b"one", b"two"]) == pack([b"one", b"two"]) and gzip.decompress(pack([b"one", b"two"])) == b"one\ftwo"
    with pytest.raises(UsageError, match="OUT"):
        main([])


def test_a_file_is_a_document_unless_form_feeds_separate_more(tmp_path):
    one, many = tmp_path / "one.md", tmp_path / "many"
    one.write_bytes(b"first\n\nsecond \xff\xfe")  # not UTF-8
    many.write_bytes(b"\fa\n\f \n\fb\f")
    assert documents(one) == documents(str(one)) == [b"first\n\nsecond \xff\xfe"]
    assert documents(many) == [b"a\n", b"b"]


def test_a_folder_is_read_in_order_without_what_is_no_text(tmp_path, caplog):
    """Hidden files and folders are passed over; what is left out for another reason is named in the log."""
    for name, text in {
        "b.txt": b"b",
        "a/z": b"z",
        "a/c.rst": b"c",
        ".hidden": b"no",
        ".git/config": b"no",
        "a/binary.bin": b"no\0no",
        "empty": b"",
        "late.bin": b"x" * 8192 + b"\0",
        "\x1b[31m.bin": b"\0",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    with caplog.at_level("WARNING", "nanproof"):
        found = documents(tmp_path)
    assert found == [b"c", b"z", b"b", b"x" * 8192 + b"\0"]
    said = sorted(record.getMessage().rpartition("/")[2] for record in caplog.records)
    assert said == [
        "\\x1b[31m.bin was left out: binary",
        "binary.bin was left out: binary",
        "dangling was left out: not a file",
        "pipe was left out: not a file",
    ]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_left_out(tmp_path, caplog):
    (tmp_path / "open").write_bytes(b"text")
    (tmp_path / "shut").write_bytes(b"text")
    (tmp_path / "shut").chmod(0)
    assert documents(tmp_path) == [b"text"] and "shut was left out" in caplog.text


def test_links_that_run_in_a_circle_end(tmp_path):
    """A linked folder is read, and each folder once."""
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "far").mkdir()
    (tmp_path / "root" / "a" / "text").write_bytes(b"near")
    (tmp_path / "far" / "text").write_bytes(b"far")
    (tmp_path / "root" / "a" / "up").symlink_to(tmp_path / "root")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "back").symlink_to(tmp_path / "root")
    (tmp_path / "root" / "self").symlink_to(tmp_path / "root" / "self")
    assert documents(tmp_path / "root") == [b"near", b"far"]


def test_nothing_to_read_is_an_error(tmp_path):
    (tmp_path / "binary").write_bytes(b"\0")
    for source in (tmp_path, tmp_path / "binary"):
        with pytest.raises(UsageError, match="no text was found"):
            documents(source)
    for source in (tmp_path / "nowhere", "a\0b", "x" * 5000):
        with pytest.raises(UsageError, match="is not there"):
            documents(source)


@settings(max_examples=100)
@given(texts, st.floats(0.01, 0.99), st.integers(0, 5), st.randoms())
def test_a_split_depends_on_texts_alone_and_shares_none(docs, share, seed, chance):
    unique = set(docs)
    if len(unique) == 1 and len(docs[0]) == 1:
        with pytest.raises(UsageError, match="too little text"):
            split(docs, share, seed)
        return
    train, valid = split(docs, share, seed)
    assert train and valid
    if len(unique) == 1:
        assert train[0] + valid[0] == docs[0]
    else:
        assert set(train) | set(valid) == unique and len(train) + len(valid) == len(unique)
        assert len(valid) == min(max(round(len(unique) * share), 1), len(unique) - 1)
    shuffled = [*docs, docs[0]]
    chance.shuffle(shuffled)
    assert split(shuffled, share, seed) == (train, valid)


def test_another_seed_splits_otherwise():
    docs = documents(None)
    parts = {seed: set(split(docs, 0.05, seed)[1]) for seed in (0, 1)}
    assert len(parts[0]) == len(parts[1]) == round(0.05 * len(docs)) and len(parts[0] & parts[1]) < len(parts[0]) / 4
    for share in (0, 1, float("nan")):
        with pytest.raises(UsageError, match="valid_share"):
            split(docs, share, 0)
    with pytest.raises(UsageError, match="too little text"):
        split([], 0.5, 0)


@settings(max_examples=150)
@given(st.lists(st.binary(max_size=20), max_size=6), st.integers(1, 12), st.booleans())
def test_windows_hold_every_byte_once(docs, length, packed):
    """Compared with lists that are joined and cut by hand."""
    pieces = [[token for text in docs for token in [*text, END]]] if packed else [[*text, END] for text in docs]
    rows = [piece[i : i + length] for piece in pieces for i in range(0, len(piece), length)]
    wanted = [row + [PAD] * (length - len(row)) for row in rows]
    found = windows(docs, length, packed)
    assert found.dtype == torch.int64 and found.shape == (len(wanted), length) and found.tolist() == wanted


def test_windows_leave_the_texts_as_they_were():
    text = bytes(range(256))
    windows([text], 16, True).fill_(0)
    assert text == bytes(range(256))
    with pytest.raises(UsageError, match="text_length=0"):
        windows([text], 0, True)


@settings(deadline=None)
@given(st.text(max_size=40), st.booleans())
def test_text_comes_back(text, packed):
    ids = windows([text.encode("utf-8", "ignore")], 16, packed).reshape(-1)
    assert decode(ids) == decode(ids.tolist()) == text.encode("utf-8", "ignore").decode()
    assert decode(ids, past_end=True) == decode(ids) + "\n"


def test_ids_that_are_no_bytes_are_shown():
    ids = [*"né".encode(), MASK, 0xC3, MASK, PAD, END, *b"on", END]
    assert decode(ids) == "né\u2591\ufffd\u2591"
    assert decode(torch.tensor(ids), past_end=True) == "né\u2591\ufffd\u2591\non\n"
    for wrong in (-1, IDS):
        with pytest.raises(UsageError, match="no id"):
            decode([wrong])


def test_every_byte_can_be_decoded():
    chance = random.Random(0)
    for _ in range(200):
        raw = chance.randbytes(30)
        assert decode(list(raw)) == raw.decode("utf-8", "replace")
