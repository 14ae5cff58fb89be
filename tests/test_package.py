"""The house rules: public names, the direction of imports, and what importing costs."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest

import nanproof

SRC = Path(nanproof.__file__).parent
RECIPES = SRC.parents[1] / "recipes" / "src" / "nanproof_recipes"
LAYERS = (
    ("_records", "_wording", "_text", "_access", "_sound", "files"),
    ("_errors",),
    ("logs",),
    ("_policy",),
    ("core",),
    ("scan",),
    ("observe",),
    ("explain",),
    ("recover",),
    ("numerics",),
    ("probes",),
    ("_preflight",),
    ("_assembly", "_guard"),
    ("integrations", "_sampling"),
    ("report",),
    ("watch",),
    ("cli",),
)
"""A module imports from its own layer or an earlier one."""

THEIRS = {
    "_version": "torch.Tensor",
    "_values": "torch.Tensor",
    "_modules": "torch.nn.Module",
    "_buffers": "torch.nn.Module",
    "_parameters": "torch.nn.Module",
    "_scale": "torch.amp.GradScaler",
    "_optimizers": "accelerate.Accelerator",
    "_schedulers": "accelerate.Accelerator",
}
"""Private names that modules of ours have too, and that are reached for on objects of somebody else."""

SENTENCES = ("message", "outcome", "evidence", "fix", "remedy", "description")
"""Attributes that hold sentences for people."""
READS = set("split rsplit partition rpartition startswith endswith replace find index count strip lower upper".split())
READS |= set("removeprefix removesuffix match search fullmatch".split())


@cache
def parsed(path):
    """Parsed once: several rules are about the same files."""
    return ast.parse(path.read_text())


def modules():
    return {path: parsed(path) for path in sorted(SRC.rglob("*.py"))}


def layer(name):
    return next(i for i, names in enumerate(LAYERS) if name in names)


PUBLIC_MODULES = {
    "nanproof",
    "nanproof.cli",
    "nanproof.integrations.lightning",
    "nanproof.integrations.transformers",
    "nanproof.numerics.generation",
    "nanproof.numerics.losses",
    "nanproof.numerics.precision",
    "nanproof.numerics.rl",
}
"""What users import. Every other module begins with an underscore; a folder that is not named here has no names of its own."""


def test_the_public_names():
    assert sorted(nanproof.__all__) == [
        "AlreadyGuarded",
        "BadLogits",
        "Checkpoints",
        "Diagnosis",
        "Forecast",
        "Guard",
        "GuardedSampling",
        "Incident",
        "NanproofError",
        "Observe",
        "Observed",
        "Policy",
        "ProtectedRun",
        "RefusedFile",
        "ScanReport",
        "StepRecord",
        "TrainingHalted",
        "UnsupportedError",
        "UsageError",
        "call_again",
        "diagnose",
        "first_bad",
        "load",
        "preflight",
        "protect",
        "read_forecasts",
        "read_incidents",
        "read_steps",
        "scan",
    ]
    assert all(getattr(nanproof, name).__name__.removeprefix("nanproof.") == name for name in nanproof.__all__)
    assert set(dir(nanproof)) >= set(nanproof.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = nanproof.nonsense


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "nanproof.integrations.transformers",
            "ActivationMonitorCallback GradientMonitorCallback GradientMonitoringCallback LossCheckCallback replay_loss "
            "safe_compute_loss",
        ),
        ("nanproof.integrations.lightning", "NanproofCallback"),
        ("nanproof.numerics.generation", "BadLogits BadRow NumericalStabilityLogitsProcessor TemperatureLogitsWarper"),
        (
            "nanproof.numerics.losses",
            "Supervision check_supervised masked_cross_entropy masked_mse supervised_tokens weighted_sum",
        ),
        ("nanproof.numerics.precision", "Ask Precision Problem cast_trainable choose problems"),
        (
            "nanproof.numerics.rl",
            "Advantages KL Ratio Signals clamped_kl group_advantages kl log_ratio masked_mean ratio",
        ),
    ],
)
def test_the_names_of_the_public_modules(module, names):
    found = importlib.import_module(module)
    assert sorted(found.__all__) == names.split()
    assert all(hasattr(found, name) for name in found.__all__)


def test_modules_that_are_not_public_say_so():
    """By an underscore; a folder says what it is for."""
    for path in SRC.rglob("*.py"):
        name = ".".join(["nanproof", *path.relative_to(SRC).with_suffix("").parts]).removesuffix(".__init__")
        assert path.name == "__init__.py" or path.stem.startswith("_") or name in PUBLIC_MODULES, name


def test_rooms_are_small_and_described():
    """At most 13 files a folder, two levels deep; the folder's docstring names each of its modules and folders."""
    for folder in {path.parent for path in SRC.rglob("*.py")} | {path.parent for path in RECIPES.rglob("*.py")}:
        place = folder.relative_to(SRC if folder.is_relative_to(SRC) else RECIPES)
        files = list(folder.glob("*.py"))
        assert len(files) <= 13, place
        assert len(place.parts) <= 2, place
        if folder == SRC:
            continue
        said = ast.get_docstring(parsed(folder / "__init__.py")) or ""
        inside = [p.stem for p in files if p.stem != "__init__"] + [p.parent.name for p in folder.glob("*/__init__.py")]
        assert [name for name in inside if f"`{name}`" not in said and f"`{name}/`" not in said] == [], place


def test_the_recipes_use_private_names_of_the_library_in_one_file():
    """`nanproof_recipes.library` is the door; everything else imports public names."""
    for path in RECIPES.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nanproof" and path.stem != "library":
                assert node.module in PUBLIC_MODULES, f"{path.relative_to(RECIPES)}:{node.lineno} {node.module}"
                assert not any(name.name.startswith("_") and name.name != "__version__" for name in node.names)


def test_the_library_holds_no_recipe():
    for path in SRC.rglob("*.py"):
        assert imported_by(path, {"nanproof_recipes"}) == set(), path


@pytest.mark.parametrize(("folder", "not_from"), [("tests", "benchmarks"), ("benchmarks", "tests"), ("zoo", "tests benchmarks")])
def test_tests_and_benchmarks_do_not_import_each_other(folder, not_from):
    """Both import `zoo` and `tools`."""
    for path in (SRC.parents[1] / folder).rglob("*.py"):
        assert imported_by(path, set(not_from.split())) == set(), path


def imported_by(path, packages):
    """Which of the packages a file imports from. A file that does not contain their names need not be parsed."""
    if not any(name in path.read_text() for name in packages):
        return set()
    return {name.split(".")[0] for node in ast.walk(parsed(path)) for name in _modules_of(node)} & packages


def _modules_of(node):
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


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
    assert {"remedy", "restored_step", "restored_from", "left_out", "cap", "same_as"} <= fields
    names = {**vars(nanproof._guard), "ProtectedRun": object}
    hints = get_type_hints(nanproof.Guard.__init__), get_type_hints(nanproof.protect, names)
    assert all(h["checkpoints"] == nanproof.Checkpoints | None for h in hints)
    assert all(h["observe"] == nanproof.Observe | bool | None for h in hints)
    assert {"max_consecutive_skips", "max_skip_rate", "at_cap", "on_spike"} <= set(nanproof.Policy.__dataclass_fields__)


def imported(node):
    """The first part of every module of nanproof that a statement imports, also by `from nanproof import X`."""
    if isinstance(node, ast.Import):
        return [name.name.split(".")[1] for name in node.names if name.name.startswith("nanproof.")]
    if not isinstance(node, ast.ImportFrom) or not node.module or node.module.split(".")[0] != "nanproof":
        return []
    if "." in node.module:
        return [node.module.split(".")[1]]
    homes = nanproof._homes()
    named = [homes.get(name.name, name.name).split(".")[0] for name in node.names]
    return [name for name in named if name != "__version__"]


def test_imports_point_one_way():
    for path, tree in modules().items():
        place = path.relative_to(SRC).with_suffix("").parts[0]
        if place in ("__init__", "__main__"):
            continue
        for node in ast.walk(tree):
            for target in imported(node):
                assert layer(target) <= layer(place), f"{path.relative_to(SRC)}:{node.lineno} imports {target}"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from nanproof import Guard", ["_guard"]),
        ("from nanproof import _wording, Policy", ["_wording", "_policy"]),
        ("from nanproof.core._engine import Engine", ["core"]),
        ("import nanproof.cli", ["cli"]),
        ("from nanproof import __version__", []),
        ("import torch", []),
    ],
)
def test_every_way_to_import_is_seen(code, found):
    assert imported(ast.parse(code).body[0]) == found


def private(name):
    return name.startswith("_") and not name.startswith("__")


def is_module(package, name):
    """A private module of ours belongs to all of us; a private name in it to that module."""
    base = SRC.joinpath(*package.split(".")[1:], name)
    return base.is_dir() or base.with_suffix(".py").is_file()


def own_private_names(tree):
    """Private names that a module gives to something."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if private(name)}


def reaches(trees):
    """(path, line, name) of every use of a private name that another module of ours defines, subclasses included."""
    own = {path: own_private_names(tree) for path, tree in trees.items()}
    ours = set().union(*own.values())
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and private(node.attr) and node.attr in ours - own[path] - THEIRS.keys():
                yield path, node.lineno, node.attr
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanproof"):
                names = (name.name for name in node.names if private(name.name) and not is_module(node.module, name.name))
                yield from ((path, node.lineno, name) for name in names)


def test_no_module_uses_a_private_name_of_another():
    assert [f"{path.relative_to(SRC)}:{line} {name}" for path, line, name in reaches(modules())] == []


def test_a_private_door_would_be_found():
    """In somebody else's object, in a subclass, and by import."""
    library = ast.parse("class A:\n    def __init__(self):\n        self._x = 1\n    def _y(self): ...")
    for user in ("def f(a): return a._x", "class B(A):\n    def g(self): return self._y()", "from nanproof.a import _z"):
        assert len(list(reaches({"a": library, "b": ast.parse(user)}))) == 1
    assert (
        list(reaches({"a": library, "b": ast.parse("class C:\n    def h(self):\n        self._x = 2\n        return self._x")}))
        == []
    )


def sentence(node):
    """Whether an expression is a sentence for people: an attribute that holds one, or `str(incident)` and the like."""
    if isinstance(node, ast.Attribute):
        return node.attr in SENTENCES
    named = ("incident", "diagnosis", "forecast")
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "str"
        and any(isinstance(arg, ast.Name) and arg.id in named for arg in node.args)
    )


def inspections(tree):
    """Lines that look into a sentence: by a method of strings, by `in`, by comparing it, by cutting it, or by a pattern."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS:
            if sentence(node.func.value) or any(sentence(arg) for arg in node.args):
                yield node.lineno
        elif isinstance(node, ast.Compare):
            inside = [right for op, right in zip(node.ops, node.comparators, strict=True) if isinstance(op, (ast.In, ast.NotIn))]
            same = [node.left, *node.comparators] if any(isinstance(op, (ast.Eq, ast.NotEq)) for op in node.ops) else []
            constant = any(isinstance(x, (ast.Constant, ast.JoinedStr)) and x is not None for x in [node.left, *node.comparators])
            if any(sentence(x) for x in inside) or (constant and any(sentence(x) for x in same)):
                yield node.lineno
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            several = isinstance(node.value, ast.Attribute) and node.value.attr == "evidence"  # a list of sentences
            if sentence(node.value) and not several:
                yield node.lineno


def test_no_code_looks_into_a_message():
    """A decision is data. What is said about it is for people: nothing is decided by it."""
    found = [f"{path.relative_to(SRC)}:{line}" for path, tree in modules().items() for line in inspections(tree)]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        '"; healed: " in incident.message',
        'incident.message.split("; ")',
        'one.message.endswith("normal again")',
        "re.search(pattern, incident.outcome)",
        'incident.message == "the loss is nan"',
        "incident.message[:20]",
        '"rewound" in str(incident)',
    ],
)
def test_a_look_into_a_message_would_be_found(code):
    assert list(inspections(ast.parse(code))) == [1]


def test_files_say_why_they_exist():
    for path, tree in modules().items():
        assert ast.get_docstring(tree), f"{path} does not say why it exists"


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


def test_both_distributions_have_one_version():
    """The recipes use private parts of the library, so they pin it."""
    import nanproof_recipes

    pinned = (RECIPES.parents[1] / "pyproject.toml").read_text()
    assert nanproof_recipes.__version__ == nanproof.__version__ and f'"nanproof=={nanproof.__version__}"' in pinned


@pytest.mark.parametrize(
    "before", ["", "import nanproof.scan; ", "from nanproof import scan; ", "import nanproof.scan as s; s([f]); "]
)
def test_scan_is_a_function_whatever_was_imported_before(before, tmp_path):
    """`scan` names a function and the package it lives in. It can be called, and pickled for a pool, in any order."""
    (tmp_path / "empty.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    code = f"import sys, pickle, nanproof; f = sys.argv[1]; {before}"
    code += "assert nanproof.scan([f]).status == 'clean' == pickle.loads(pickle.dumps(nanproof.scan))([f]).status"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "empty.safetensors")], check=True)


def test_errors_are_named_as_they_are_imported_and_survive_a_pickle():
    incident = nanproof.Incident(step=1, kind="nonfinite-loss", action="halted", loss=None, grad_norm=None)
    error = pickle.loads(pickle.dumps(nanproof.TrainingHalted("the cap", incident)))
    assert str(error) == "the cap" and error.incident == incident
    assert f"{type(error).__module__}.{type(error).__name__}" == "nanproof.TrainingHalted"
