"""A temporary folder that is removed with its process: by the process itself, or by the next one if it was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir, mkdtemp

LOCK = "held.lock"


@contextmanager
def held_folder(name: str) -> Iterator[Path]:
    """A new folder `<name>-<host>-…` of the user alone in the folder for temporary files; gone after the block.

    First those of this name go that processes of this user on this machine left behind. A folder is held by a lock in
    it, which the kernel lets go of when its process, and all that were forked from it, are gone: a number of a process
    might be another's by then.
    """
    start = f"{name}-{socket.gethostname()}-"
    _remove_left(Path(gettempdir()), start)
    folder = Path(mkdtemp(prefix=start))
    descriptor = os.open(folder / f".{LOCK}", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Only now, since a lock that is not held yet would be taken for an abandoned one.
        os.rename(folder / f".{LOCK}", folder / LOCK)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_left(parent: Path, start: str) -> None:
    """Remove the folders whose lock no process holds. Keep folders without a lock, folders of other users, and
    links."""
    for leftover in parent.glob(f"{start}*"):
        try:
            info = leftover.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                continue
            descriptor = os.open(leftover / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # no lock yet, or gone with its process just now
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
        except OSError:  # a process holds it
            continue
        finally:
            os.close(descriptor)
