"""The memory of a process: its peak, and a real limit on it by a control group of its own, which needs root."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.programs.processes import wait_until

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


def own_peak_mb() -> float:
    """The most that this process ever held. Not ru_maxrss: that begins with the peak of the process that started it."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1000


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Path]:
    """A control group with that limit; `confine` puts processes into it. Skips the test where none can be made."""
    parent, key = (V1, "memory.limit_in_bytes") if V1.is_dir() else (V2, "memory.max")
    procs = "cgroup.procs"
    group = parent / f"stemma-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / key).write_text(str(limit_bytes))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        yield group / procs
    finally:
        wait_until(lambda: not (group / procs).read_text().split(), timeout_s=30)
        group.rmdir()


def confine(process: psutil.Process, group: Path) -> None:
    """What the process allocates from now on counts against the group's limit."""
    group.write_text(str(process.pid))
