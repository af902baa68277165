"""Text files that another process writes: the lines that were added since the last look, and the last ones."""

from __future__ import annotations

from pathlib import Path


class Tail:
    """The complete lines that were added to a file since the last look; a file that does not exist yet has none."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        """Follow a file that grows.

        Args:
            path: the file, which may not exist yet.
            from_end: leave out existing lines.
        """
        self._path = path
        self._position = path.stat().st_size if from_end and path.exists() else 0

    def lines(self) -> list[str]:
        """Return the lines added since the last look. A file that a failing disk does not return now is read at the
        next look."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                complete, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return []
        self._position += len(complete) + len(newline)
        return complete.decode("utf8", errors="replace").splitlines() if newline else []


TAIL_BYTES = 20_000


def tail(log: Path, count: int) -> list[str]:
    """Return the last lines that are not blank; none if there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf8", errors="replace")
    except FileNotFoundError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def last_lines(log: Path, count: int = 4) -> str:
    """Return the last lines that are not blank, joined into one."""
    if not log.exists():
        return "it left no log"
    return " | ".join(line.strip() for line in tail(log, count)) or "its log is empty"
