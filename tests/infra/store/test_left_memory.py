"""Shared memory of a killed training goes with the work that names it, a living process's stays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from infra.errors import StageError
from infra.store import left_memory
from infra.store.left_memory import NUMBERS, remove_memory
from tasks.processes.exits import diagnose_exit
from tests.support.services.small_disk import small_disk
from training.data.node_storage import own_shared_memory


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


def test_a_small_shared_memory_is_named_before_and_after_it_ends_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first write beyond the room ends the process by SIGBUS, without a word."""
    with small_disk(tmp_path / "shm", "64k") as small:
        monkeypatch.setattr(left_memory, "MEMORY", small)
        said = r"expected 1 MB .*0\.1 MB free of 0\.1"
        with pytest.raises(StageError, match=said) as caught, own_shared_memory(tmp_path):
            pass
        assert caught.value.problems[0].code == "no_shared_memory" and "--shm-size" in caught.value.problems[0].fix
        died = diagnose_exit("pretrain", -signal.SIGBUS, out_of_memory=False)
    assert died.code == "no_shared_memory" and "0.1 MB free" in died.message and "--shm-size" in str(died.fix)
