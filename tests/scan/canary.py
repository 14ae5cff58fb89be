"""What must never be unpickled."""

from __future__ import annotations

import os


class Canary:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)
