"""The Triton kernels say what plain torch says, in Triton's interpreter: no GPU is needed, only Triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton, for its interpreter")


@pytest.mark.parametrize("what", ["numbers", "layouts", "launches", "written"])
def test_kernels_in_the_interpreter(what):
    program = Path(__file__).with_name("interpreted.py")
    done = subprocess.run([sys.executable, str(program), what], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0 and "as plain torch" in done.stdout, done.stderr[-3000:]
