"""Shared memory: its free space, and segments left by a killed training, found by the record in its work folder.

Python's resource tracker does not outlive a SIGKILL of its group, and mosaicml-streaming's shared memory has no other
owner. `training.data.node_storage` writes the record and reads it where the work is continued; here it is for work
that is removed instead.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

RECORD = "shared_memory"
"""Records are called `shared_memory.<first rank of the node>.<host>`, and hold the first of their numbers."""
NUMBERS = 64
"""Numbers reserved for the datasets of one run; the first is NUMBERS times the process id of the node's first rank."""
MEMORY = Path("/dev/shm")
MORE_MEMORY = "give it more: docker run --shm-size=2g; in Kubernetes an emptyDir with medium: Memory at /dev/shm"


def free_memory() -> int:
    """Return the free bytes of shared memory; a large number if the system does not report them."""
    return psutil.disk_usage(str(MEMORY)).free if MEMORY.is_dir() else 2**40


def memory_room() -> str:
    """Return the free space of shared memory, for messages."""
    if not MEMORY.is_dir():
        return "no room that is known"
    usage = psutil.disk_usage(str(MEMORY))
    return f"{usage.free / 1e6:,.1f} MB free of {usage.total / 1e6:,.1f}"


def remove_memory(work: Path) -> None:
    """Remove the shared memory and the lock files of all records of this host below a work folder, but for those of a
    process that lives."""
    for record in work.glob(f"scratch/{RECORD}.*"):
        if record.name.split(".", 2)[2:] != [socket.gethostname()]:
            continue
        with suppress(OSError, ValueError):  # a record that a full disk cut short names nothing
            first = int(record.read_text(encoding="utf8"))
            if not psutil.pid_exists(first // NUMBERS):
                for leftover in _leftovers(first):
                    leftover.unlink(missing_ok=True)


def _leftovers(first: int) -> Iterator[Path]:
    for number in range(first, first + NUMBERS):
        for folder in (MEMORY, Path(tempfile.gettempdir())):
            yield from folder.glob(f"{number:06}_*")
