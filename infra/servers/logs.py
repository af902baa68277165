"""The end of a server's log, for the error that says why it did not start."""

from __future__ import annotations

from pathlib import Path

TAIL_BYTES = 20_000


def last_lines(log: Path, count: int = 4) -> str:
    """The last lines that say something, joined into one."""
    try:
        text = log.read_bytes()[-TAIL_BYTES:].decode("utf8", errors="replace")
    except FileNotFoundError:
        return "it left no log"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-count:]) or "its log is empty"
