"""The door to nanproof's private modules: complete, and cheap to import."""

from __future__ import annotations

import subprocess
import sys

import torch

from nanproof_recipes import library


def test_every_name_is_there():
    assert all(hasattr(library, name) for name in library.__all__)


def test_importing_it_imports_neither_torch_nor_the_command_line():
    check = "bad = [m for m in ('torch', 'numpy', 'nanproof.cli') if m in sys.modules]; assert not bad, bad"
    subprocess.run([sys.executable, "-c", f"import sys, nanproof_recipes.library; {check}"], check=True)


def test_the_environment_names_versions_and_device():
    found = library.environment(torch.device("cpu"))
    assert found["device"] == "cpu" and found["device_name"] == library.device_name(torch.device("cpu"))
    assert found["versions"]["torch"] == str(torch.__version__)


def test_what_doctor_finds_in_a_log(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f'{{"step": {i}, "loss": {"NaN" if i > 2 else 1.0 - i / 10}}}\n' for i in range(8)), encoding="utf-8")
    assert any("nan" in line.lower() or "finite" in line.lower() for line in library.findings(log))
