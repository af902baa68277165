"""Reasons why a stage's process ended without a result, as far as the system reports them."""

from __future__ import annotations

import signal
from pathlib import Path

from infra.errors import Problem
from infra.store.left_memory import MORE_MEMORY, memory_room

_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
VMSTAT = Path("/proc/vmstat")
NO_ROOM = 120
"""Python's own exit code where it cannot write out what was printed, and that of a stage's process that cannot write
how it ended: its files had no room."""
READ_ONLY, BROKEN = 121, 122
"""Exit codes of a stage's process that cannot write how it ended, because the disk became read-only, or failed."""


def out_of_memory_kills() -> int:
    """Number of processes the kernel has killed for lack of memory since it started; 0 if it does not report it."""
    try:
        lines = VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(maxsplit=1) for line in lines)
    return int(counts.get("oom_kill", 0))


def diagnose_exit(node: str, code: int, out_of_memory: bool) -> Problem:
    """The problem to report for a stage's process that ended with `code` (negative: by that signal) without an outcome.

    Args:
        out_of_memory: True if the kernel killed processes for want of memory while it ran.
    """
    log = f"stemma logs {node}"
    if code == READ_ONLY:
        message = "its process could not write its result: the disk is read-only"
        return Problem("not_permitted", node, message, "make the disk writable, and run again to continue")
    if code == BROKEN:
        message = "its process could not read or write its files: the disk failed"
        return Problem("disk_failed", node, message, "examine the disk (dmesg, smartctl), and run again to continue")
    if code == -signal.SIGKILL and out_of_memory:
        return Problem(
            "out_of_memory",
            node,
            "the kernel killed it: the machine or its container ran out of memory",
            f"lower launch.microbatch, set launch.stages_at_once: 1, or use a larger machine; {log}",
        )
    if code == -signal.SIGBUS:
        return Problem(
            "no_shared_memory",
            node,
            "its process was killed by SIGBUS, as by the first write to memory that there is no room for: /dev/shm, "
            f"through which a training's processes share data, has {memory_room()}",
            f"{MORE_MEMORY}, and check if a disk is full; {log}",
        )
    if code < 0:
        name = signal.Signals(-code).name
        whence = ", sent from outside" if -code in _FROM_OUTSIDE else ", because of a bug or a hardware fault"
        return Problem("killed", node, f"its process was killed by {name}{whence}", f"run again; {log}")
    return Problem("crashed", node, f"its process ended with exit code {code} and no result", log)
