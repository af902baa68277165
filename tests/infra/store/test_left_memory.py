"""Shared memory of a killed training goes with the work that names it, a living process's stays."""

from __future__ import annotations

import os
import socket
import subprocess
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from infra.store.left_memory import NUMBERS, remove_memory


def record(work: Path, pid: int, host: str = socket.gethostname()) -> SharedMemory:
    """Shared memory of a process, and its record in the work folder."""
    (work / "scratch").mkdir(parents=True, exist_ok=True)
    first = NUMBERS * pid
    (work / "scratch" / f"shared_memory.0.{host}").write_text(str(first))
    memory = SharedMemory(f"{first + 3:06}_locals", create=True, size=16)
    memory.close()
    return memory


def test_memory_of_a_dead_process_goes_and_that_of_a_living_one_or_of_another_host_stays(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, living = record(tmp_path / "dead", ended.pid), record(tmp_path / "living", os.getpid())
    (tmp_path / "elsewhere" / "scratch").mkdir(parents=True)
    (tmp_path / "elsewhere" / "scratch" / "shared_memory.0.another-host").write_text(str(NUMBERS * os.getpid()))
    try:
        for work in ("dead", "living", "elsewhere"):
            remove_memory(tmp_path / work)
        assert not Path("/dev/shm", dead.name).exists() and Path("/dev/shm", living.name).exists()
    finally:
        living.unlink()
