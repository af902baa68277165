"""Room held back for the worst moment: given up when the disk is full, so that it can still be said what went wrong."""

from __future__ import annotations

import os
from pathlib import Path

BALLAST_BYTES = 1_000_000


class Ballast:
    """A file of BALLAST_BYTES that is there only to be removed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def take(self) -> None:
        """Fills the file; raises OSError if there is no room for it."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, BALLAST_BYTES)
        finally:
            os.close(descriptor)

    def give_up(self) -> None:
        self._path.unlink(missing_ok=True)
