"""Follows a text file that another process writes."""

from __future__ import annotations

from pathlib import Path


class Tail:
    """The whole lines of a file that were added since the last look; a file that is not there yet has none."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        """from_end: leave out what is there already."""
        self._path = path
        self._position = path.stat().st_size if from_end and path.exists() else 0

    def lines(self) -> list[str]:
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._position)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole) + len(newline)
        return whole.decode("utf8", errors="replace").splitlines() if newline else []
