"""Retry policy of stages: which failures are worth another try, and the wait before it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from infra.errors import StemmaError

MACHINE_FAULTS = frozenset(
    {
        "killed",
        "lease_lost",
        "source_unreachable",
        # Leases: the server was away for longer than a builder waits.
        "database_unreachable",
        "leases_locked",
        # Errors raised by a library: see `tasks.processes.failures`.
        "device_fault",
        "ranks_disconnected",
        "hang",
        # Clusters: see `infra.launch`.
        "node_lost",
        "too_few_hosts",
        "job_cancelled",
        "preempted",
        "scheduler_unreachable",
        # Others that shared the machine may have ended by then; and a microbatch that was too large is halved.
        "out_of_memory",
        "microbatch_halved",
    }
)
"""Codes of problems that the same work on the same data may not meet again. They exclude a GPU that is too small for
its work (`device_out_of_memory`)."""

FACTOR = 4.0
JITTER = 0.2
"""Many runs that lose one server must not all come back in the same second."""

POLL_S = 0.2


def worth_another_try(error: StemmaError) -> bool:
    return bool(error.problems) and all(problem.code in MACHINE_FAULTS for problem in error.problems)


def back_off_s(attempt: int, first_s: float) -> float:
    """Seconds to wait after attempt 1, 2, …: for first_s = 10 these are 10, 40, 160, each give or take a fifth."""
    return first_s * FACTOR ** (attempt - 1) * random.uniform(1 - JITTER, 1 + JITTER)


def wait(seconds: float, is_cancelled: Callable[[], bool]) -> bool:
    """Wait, and return True unless the run was cancelled meanwhile."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if is_cancelled():
            return False
        time.sleep(min(POLL_S, max(0.0, end - time.monotonic())))
    return not is_cancelled()
