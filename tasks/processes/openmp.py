"""Wait policy of a stage's threads: awake for a moment while no other process wants the cores, else asleep.

The products of a small model take no longer than it takes to wake a thread, so that threads which stay awake train a
fifth faster. But where two processes share the cores, a waiting thread that stays awake blocks the core of the thread
that it waits for, and both processes take several times as long.

GNU's OpenMP, which torch computes with, reads once how long threads stay awake (GOMP_SPINCOUNT). If it is also set to
passive, it lets them sleep at once while a process has more threads than there are cores. So while other processes are
busy, this module keeps a second, idle group of threads.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
AWAKE = "GOMP_SPINCOUNT"
ROUNDS = 20_000
"""Rounds of waiting, some tenths of a millisecond: more were no faster."""
LOOK_S = 0.5
"""Seconds between two checks for busy processes."""
BUSY, BUSY_A_CORE = 0.5, 0.01
"""Cores that others keep busy, from which on they count: more than servers do, and so much for each core, since the
kernel counts time by ticks."""
_ENTRIES_A_THREAD = 1 << 16
"""Entries per thread of a tensor that is filled by all threads."""
_MACHINE, _OWN_PROCESS = Path("/proc/stat"), Path("/proc/self/stat")


def wait_policy(threads: int, watches: bool) -> dict[str, str]:
    """The environment of a process with this number of threads.

    Args:
        watches: True if it calls `watch_others`.
    """
    # With fewer threads than cores a second group as large would not be too many.
    stays_awake = watches and 1 < threads == cores() and _MACHINE.exists()
    return PASSIVE | ({AWAKE: str(ROUNDS)} if stays_awake else {})


def watch_others() -> None:
    """If threads of this process stay awake, watch until it ends whether they may."""
    if os.environ.pop(AWAKE, None) and "torch" in sys.modules:  # not for its child processes, which do not watch others
        threading.Thread(target=_watch, name="watch others", daemon=True).start()


def cores() -> int:
    """Return the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _watch() -> None:
    wait, least = threading.Event().wait, BUSY + BUSY_A_CORE * (os.cpu_count() or 1)
    idle: threading.Event | None = _begin_idle_threads()
    before = _others_s()
    while not wait(LOOK_S):
        now = _others_s()
        are_busy, before = now - before > least * LOOK_S, now
        if are_busy and idle is None:
            idle = _begin_idle_threads()
        elif not are_busy and idle is not None:
            idle.set()
            idle = None


def _begin_idle_threads() -> threading.Event:
    """Start as many threads as compute; they end when the returned event is set."""
    import torch

    over, started = threading.Event(), threading.Event()

    def work() -> None:
        torch.zeros(_ENTRIES_A_THREAD * torch.get_num_threads())  # OpenMP makes a group for each thread that asks it
        started.set()
        over.wait()

    threading.Thread(target=work, name="idle", daemon=True).start()
    started.wait()
    return over


def _others_s() -> float:
    """Seconds for which processes other than this one have kept the machine's cores busy."""
    user, nice, system, _, _, irq, soft_irq, *_ = map(int, _MACHINE.read_text().split("\n", 1)[0].split()[1:])
    own_user, own_system = map(int, _OWN_PROCESS.read_text().rpartition(")")[2].split()[11:13])
    return (user + nice + system + irq + soft_irq - own_user - own_system) / os.sysconf("SC_CLK_TCK")
