"""Scratch folder in which the ranks of one node unpack compressed shards. No other node or training writes to it.

Nodes that train together share the stage's work folder, and in mosaicml-streaming one rank per node unpacks: two nodes
in one folder would read each other's partially written files. Each node therefore creates its own folder and holds a
lock on it. The kernel releases the lock however its holder dies, and the next training on this machine removes unlocked
folders.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import TextIO

from infra.run import Run
from training.core import ranks

_LOCK = ".lock"
_ROOM = 1.1  # of what is to be unpacked, for the shard that is on its way


@contextmanager
def node_scratch(run: Run, needed_bytes: int) -> Iterator[Path]:
    """Create a folder that only the ranks of this node share, and remove it afterwards. Every rank must enter it.

    It lies below the stage's work folder where one node trains. Several nodes take `launch.scratch`, by default the
    temporary folder of each machine ($TMPDIR) if that has room for `needed_bytes`, else the work folder too.
    """
    made, lock = _make(_parent(run, needed_bytes)) if ranks.local_rank() == 0 else (None, None)
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
    run.event("scratch", f"{gettempdir()} has no room to unpack the shards: they go to the shared {run.work_dir}")
    return run.work_dir / "shards"


def _make(parent: Path) -> tuple[Path, TextIO]:
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
