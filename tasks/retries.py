"""Which failures are worth another try, and when: faults of machines, never of config or data."""

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
        # Of what a library raised: see `tasks.failures`.
        "device_fault",
        "ranks_disconnected",
        "hang",
        # Others that shared the machine may have ended by then; and a microbatch that was too large is halved.
        "out_of_memory",
        "microbatch_halved",
    }
)
"""Codes of problems that the same work on the same data may not meet again. A GPU that is too small for what it was
told to compute (`device_out_of_memory`) is none."""

FACTOR = 4.0
JITTER = 0.2
"""Many runs that lose one server must not all come back in the same second."""

POLL_S = 0.2


def worth_another_try(error: StemmaError) -> bool:
    return bool(error.problems) and all(problem.code in MACHINE_FAULTS for problem in error.problems)


def back_off_s(attempt: int, first_s: float) -> float:
    """How long to wait after attempt 1, 2, …: for 10 s first, 10 s, 40 s, 160 s, each give or take a fifth."""
    return first_s * FACTOR ** (attempt - 1) * random.uniform(1 - JITTER, 1 + JITTER)


def wait(seconds: float, is_cancelled: Callable[[], bool]) -> bool:
    """Waits, and says whether nobody cancelled meanwhile."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if is_cancelled():
            return False
        time.sleep(min(POLL_S, max(0.0, end - time.monotonic())))
    return not is_cancelled()
