"""`python -m nanproof` is `nanproof`."""

from __future__ import annotations

from nanproof.cli import app

if __name__ == "__main__":
    app(prog_name="nanproof")
