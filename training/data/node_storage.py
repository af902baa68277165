"""Storage that the ranks of one node share while they read shards: a scratch folder and shared memory.

The folder takes compressed shards that are unpacked and remote ones that are fetched. Nodes that train together share
the stage's work folder, and in mosaicml-streaming one rank per node unpacks: two nodes in one folder would read each
other's partially written files. Each node therefore creates its own folder and holds a lock on it. The kernel releases
the lock however its holder dies, and the next training on this machine removes unlocked folders.

Streaming numbers its shared memory from 0 for all processes on the machine, and its `clean_stale_shared_memory` deletes
everything it finds there, including the memory of a live process. We start from a number that only this process uses,
and record it in the work folder: the process that continues the work cleans up after a killed predecessor.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import TextIO

from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, SHM_TO_CLEAN
from streaming.base.shared import prefix as streaming_prefix

from infra.errors import stage_error
from infra.run import Run
from infra.store.left_memory import MEMORY, MORE_MEMORY, NUMBERS, RECORD, free_memory, memory_room
from training.core import ranks

_LOCK = ".lock"
_ROOM = 1.1  # of what is to be unpacked, for the shard that is on its way
_LEAST_BYTES = 1_000_000


@contextmanager
def node_storage(run: Run, needed_bytes: int) -> Iterator[Path]:
    """Give the ranks of this node a scratch folder and shared memory, and remove both afterwards. Every rank must enter
    it. Raises StageError `no_shared_memory`.

    Args:
        needed_bytes: room that the folder needs.
    """
    with node_scratch(run, needed_bytes) as folder, own_shared_memory(run.work_dir):
        yield folder


@contextmanager
def node_scratch(run: Run, needed_bytes: int) -> Iterator[Path]:
    """Create a folder that only the ranks of this node share, and remove it afterwards. Every rank must enter it.

    It lies below the stage's work folder where one node trains. Several nodes take `launch.scratch`, by default the
    temporary folder of each machine ($TMPDIR) if that has room for `needed_bytes`, else the work folder too.
    """
    made, lock = _make_folder(_parent(run, needed_bytes)) if ranks.local_rank() == 0 else (None, None)
    folder = ranks.gather(made)[ranks.first_of_node()]
    assert folder is not None
    try:
        yield folder
        ranks.wait_for_all()
    finally:
        if made is not None and lock is not None:
            shutil.rmtree(made, ignore_errors=True)
            lock.close()


def _parent(run: Run, needed_bytes: int) -> Path:
    ours = f"stemma-{os.getuid()}"
    if run.launch.scratch is not None:
        return Path(run.launch.scratch) / ours
    if ranks.world_size() == ranks.local_world_size():
        return run.work_dir / "shards"
    if shutil.disk_usage(gettempdir()).free > _ROOM * needed_bytes:
        return Path(gettempdir()) / ours
    run.event(
        "scratch", f"{gettempdir()} has no room to unpack the shards, so they are unpacked to the shared {run.work_dir}"
    )
    return run.work_dir / "shards"


def _make_folder(parent: Path) -> tuple[Path, TextIO]:
    """A new folder and the lock on it, after what killed trainings of this machine left there was removed."""
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    start = f"{socket.gethostname()}-"
    # Without this lock a new folder could be taken for a left one before its own lock is held.
    with (parent / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in parent.glob(f"{start}*"):
            try:
                found = (left / _LOCK).open("w")
            except FileNotFoundError:  # its training has just ended
                continue
            with found as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                shutil.rmtree(left, ignore_errors=True)
        folder = Path(mkdtemp(prefix=start, dir=parent))
        held = (folder / _LOCK).open("w")
        fcntl.flock(held, fcntl.LOCK_EX)
    return folder, held


@contextmanager
def own_shared_memory(work_dir: Path) -> Iterator[None]:
    """Give datasets of this node's ranks unique names within this context; afterwards all of their memory is freed.

    Every rank must enter it. Raises StageError `no_shared_memory` if /dev/shm is nearly full: the first write would end
    the process by SIGBUS, without an error message.
    """
    if free_memory() < _LEAST_BYTES:
        message = f"expected {_LEAST_BYTES // 10**6} MB for data that processes share, it has {memory_room()}"
        raise stage_error("no_shared_memory", str(MEMORY), message, MORE_MEMORY)
    # Of all nodes that share the work folder, also of two that go by one name.
    host = socket.gethostname()
    record = work_dir / f"{RECORD}.{ranks.first_of_node()}.{host}"
    first = NUMBERS * ranks.gather(os.getpid())[ranks.first_of_node()]
    if ranks.local_rank() == 0:
        for left in work_dir.glob(f"{RECORD}.*"):
            if left.name.split(".", 2)[2:] == [host]:
                with suppress(FileNotFoundError):  # another node of that name was quicker
                    _free(int(left.read_text()))
                    left.unlink()
        _free(first)  # a dead process may have had our number
    ranks.wait_for_all()
    if ranks.local_rank() == 0:
        record.write_text(str(first))
    ranks.wait_for_all()
    before = streaming_prefix._each_prefix_int
    streaming_prefix._each_prefix_int = lambda: itertools.count(first)
    try:
        yield
        ranks.wait_for_all()
    finally:
        streaming_prefix._each_prefix_int = before
        if ranks.local_rank() == 0:
            _free(first)
            record.unlink(missing_ok=True)


def _free(first: int) -> None:
    for place in range(first, first + NUMBERS):
        for name in SHM_TO_CLEAN:
            try:
                memory = SharedMemory(f"{place:06}_{name}")
            except FileNotFoundError:
                continue
            memory.close()
            memory.unlink()
        for name in (BARRIER_FILELOCK, CACHE_FILELOCK):
            (Path(gettempdir()) / f"{place:06}_{name}").unlink(missing_ok=True)
