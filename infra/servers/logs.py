"""The end of a log, for the error or page that says what went wrong."""

from __future__ import annotations

from pathlib import Path

TAIL_BYTES = 20_000


def tail(log: Path, count: int) -> list[str]:
    """The last lines that say something; none if there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf8", errors="replace")
    except FileNotFoundError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def last_lines(log: Path, count: int = 4) -> str:
    """The last lines that say something, joined into one."""
    if not log.exists():
        return "it left no log"
    return " | ".join(line.strip() for line in tail(log, count)) or "its log is empty"
