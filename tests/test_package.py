"""The house rules: public names, the direction of imports, and what importing costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import nanproof

SRC = Path(nanproof.__file__).parent
LAYERS = [
    "records",
    "errors",
    "logs",
    "policy",
    "core",
    "observe",
    "explain",
    "recover",
    "numerics",
    "preflight",
    "guard",
    "integrations",
    "report",
    "watch",
    "recipes",
    "cli",
]
"""A module imports from its own layer or an earlier one."""


def test_the_public_names():
    assert sorted(nanproof.__all__) == [
        "Checkpoints",
        "Diagnosis",
        "Forecast",
        "Guard",
        "Incident",
        "NanproofError",
        "Observe",
        "Policy",
        "StepRecord",
        "TrainingHalted",
        "UnsupportedError",
        "UsageError",
        "diagnose",
        "preflight",
        "protect",
    ]
    assert all(getattr(nanproof, name).__name__ == name for name in nanproof.__all__)
    assert set(dir(nanproof)) >= set(nanproof.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = nanproof.nonsense


def test_the_signatures_other_programs_are_written_against():
    guard = inspect.signature(nanproof.Guard)
    assert list(guard.parameters) == [
        "model",
        "optimizer",
        "loss_fn",
        "max_norm",
        "scaler",
        "scheduler",
        "policy",
        "run_dir",
        "checkpoints",
        "observe",
    ]
    assert guard.parameters["max_norm"].default == 1.0
    assert all(p.kind is p.KEYWORD_ONLY for name, p in guard.parameters.items() if name not in ("model", "optimizer"))
    for name in ("backward", "step", "train_step", "close", "history", "path", "state_dict", "load_state_dict", "resume", "wrap"):
        assert hasattr(nanproof.Guard, name)
    fields = set(nanproof.Incident.__dataclass_fields__)
    assert {"step", "kind", "action", "loss", "grad_norm", "culprits", "rank", "diagnosis", "bundle"} <= fields
    assert {"max_consecutive_skips", "max_skip_rate", "at_cap", "on_spike"} <= set(nanproof.Policy.__dataclass_fields__)


def test_imports_point_one_way():
    for path in SRC.rglob("*.py"):
        place = path.relative_to(SRC).with_suffix("").parts[0]
        if place in ("__init__", "__main__"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.startswith("nanproof."):
                    target = name.split(".")[1]
                    target, place = ("records" if x == "wording" else x for x in (target, place))  # one layer
                    assert LAYERS.index(target) <= LAYERS.index(place), f"{path.name} imports {name}"


def test_files_stay_readable():
    for path in SRC.rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 500, path
        assert ast.get_docstring(ast.parse(text)), f"{path} does not say why it exists"


@pytest.mark.parametrize(
    "code",
    [
        "import nanproof",
        "from nanproof import Incident, Policy, StepRecord, TrainingHalted",
        "import nanproof.cli",
        "from typer.testing import CliRunner as R; import nanproof.cli as c; assert R().invoke(c.app, ['--help']).exit_code == 0",
    ],
)
def test_torch_is_not_imported_before_it_is_needed(code):
    check = "import sys; bad = [m for m in ('torch', 'numpy', 'transformers') if m in sys.modules]; assert not bad, bad"
    subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=True)


def test_the_guard_imports_no_framework():
    check = "bad = [m for m in ('transformers', 'lightning', 'accelerate', 'deepspeed') if m in sys.modules]; assert not bad, bad"
    subprocess.run([sys.executable, "-c", f"import sys; from nanproof import Guard; {check}"], check=True)


def test_the_version_is_in_one_place():
    from importlib.metadata import version

    assert version("nanproof") == nanproof.__version__
