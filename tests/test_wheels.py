"""What a user installs: the library's wheel holds the library and no recipe, and the recipes' wheel joins it."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import nanproof

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Both wheels, built from this tree without the network."""
    out = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(out), str(ROOT), str(ROOT / "recipes")], check=True, timeout=120)
    return {path.name.split("-")[0]: path for path in out.glob("*.whl")}


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory):
    """A call of `nanproof` where some of the wheels are installed, beside everything that this environment has but nanproof."""
    folder = tmp_path_factory.mktemp("installed")
    others = folder / "others"
    others.mkdir()
    for packages in site.getsitepackages():
        for path in Path(packages).iterdir():
            if "nanproof" not in path.name and not path.name.endswith(".pth"):
                (others / path.name).symlink_to(path)

    def nanproof_(names, *arguments, cwd=folder):
        there = folder / "-".join(names)
        if not there.exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(there)]
            subprocess.run([*command, *(str(wheels[name]) for name in names)], check=True, timeout=120)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(there), str(others)]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-S", "-m", "nanproof", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=600)

    return nanproof_


def test_the_library_holds_all_of_itself_and_no_recipe(wheels):
    with zipfile.ZipFile(wheels["nanproof"]) as archive:
        inside = {name for name in archive.namelist() if name.startswith("nanproof/")}
        options = [name for name in inside if name.endswith(".py") and b"latent-dlm" in archive.read(name)]
    source = Path(nanproof.__file__).parent
    files = {path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert inside == {str(path.relative_to(source.parent)) for path in files}
    assert {name for name in inside if "recipe" in name or name.endswith((".yaml", ".gz"))} == {"nanproof/cli/_recipe.py"}
    assert options == []


def test_the_recipes_hold_their_data(wheels):
    with zipfile.ZipFile(wheels["nanproof_recipes"]) as archive:
        inside = archive.namelist()
    for name in ("configs/tiny.yaml", "configs/base.yaml", "assets/docstrings.txt.gz", "assets/compare.html", "LICENSE"):
        assert any(found.endswith(name) for found in inside), name


def test_without_the_recipes_one_line_says_how_to_get_them(installed):
    for arguments in (["recipe"], ["recipe", "--help"], ["recipe", "latent-dlm", "compare"]):
        done = installed(["nanproof"], *arguments)
        assert done.returncode == 2, done.stderr
        assert done.stdout == "" and len(done.stderr.splitlines()) == 1
        assert "pip install nanproof-recipes" in done.stderr
    assert "recipe" in installed(["nanproof"], "--help").stdout


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel(installed, tmp_path):
    done = installed(["nanproof"], "demo", "--steps", "60", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_with_the_recipes_their_commands_are_there(installed, tmp_path):
    done = installed(["nanproof", "nanproof_recipes"], "recipe", "--help")
    assert done.returncode == 0 and all(name in done.stdout for name in ("latent-dlm", "units-sft", "vlm-grpo"))
    arguments = ["recipe", "units-sft", "data", "--train", "4", "--valid", "2", "--out", str(tmp_path), "--json"]
    done = installed(["nanproof", "nanproof_recipes"], *arguments)
    assert done.returncode == 0 and json.loads(done.stdout)["questions"] == {"train": 4, "valid": 2}


@pytest.mark.slow
def test_a_recipe_compares_its_arms_from_the_wheels(installed, tmp_path):
    arguments = ["recipe", "latent-dlm", "compare", "--seeds", "0", "--out", str(tmp_path), "--json"]
    done = installed(["nanproof", "nanproof_recipes"], *arguments)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "comparison.html").is_file()
