"""Names of mosaicml-streaming's shared memory: our own for each process, cleaned after a killed predecessor.

Streaming numbers its shared memory from 0 for all processes on the machine, and its `clean_stale_shared_memory` deletes
everything it finds there, including the memory of a live process. We start from a number that only this process uses,
and record it in the work folder: the process that continues the work cleans up after a killed predecessor.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from tempfile import gettempdir

from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, SHM_TO_CLEAN
from streaming.base.shared import prefix as streaming_prefix

from infra.errors import stage_error
from infra.store.left_memory import MEMORY, MORE_MEMORY, NUMBERS, RECORD, free_memory, memory_room
from training.core import ranks

LEAST_BYTES = 1_000_000


@contextmanager
def own_shared_memory(work_dir: Path) -> Iterator[None]:
    """Give datasets of this node's ranks unique names within this context; afterwards all of their memory is freed.

    Every rank must enter it. Raises StageError `no_shared_memory` if /dev/shm is nearly full: the first write would end
    the process by SIGBUS, without an error message.
    """
    if free_memory() < LEAST_BYTES:
        message = f"expected {LEAST_BYTES // 10**6} MB for data that processes share, it has {memory_room()}"
        raise stage_error("no_shared_memory", str(MEMORY), message, MORE_MEMORY)
    # Of all nodes that share the work folder, also of two that go by one name.
    host = socket.gethostname()
    record = work_dir / f"{RECORD}.{ranks.first_of_node()}.{host}"
    first = NUMBERS * ranks.gather(os.getpid())[ranks.first_of_node()]
    if ranks.local_rank() == 0:
        for left in work_dir.glob(f"{RECORD}.*"):
            if left.name.split(".", 2)[2:] == [host]:
                with suppress(FileNotFoundError):  # another node of that name was quicker
                    _clean(int(left.read_text()))
                    left.unlink()
        _clean(first)  # a dead process may have had our number
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
            _clean(first)
            record.unlink(missing_ok=True)


def _clean(first: int) -> None:
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
