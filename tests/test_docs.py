"""What the documents say is true: figures, code, links."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_figures_are_the_measured_ones(path):
    """Also the catalogue: it is made from the classes."""
    from tables import filled

    text = path.read_text()
    assert filled(text) == text, "run: python benchmarks/tables.py"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.parametrize(
    "path",
    [
        ROOT / "README.md",
        *(ROOT / "docs" / f"{name}.md" for name in ("guard", "trainers", "observe", "explain", "recover", "heal", "scan")),
    ],
    ids=lambda p: p.name,
)
def test_python_in_the_documents_runs(path, tmp_path):
    """Every ```python block, in order, in one file: what a reader would paste."""
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)
    assert blocks
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(blocks))
    subprocess.run([sys.executable, "-W", "error", str(script)], check=True, cwd=tmp_path, timeout=120)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(path, tmp_path):
    subprocess.run([sys.executable, str(path)], check=True, cwd=tmp_path, timeout=120)
