"""A temporary folder that is removed with its process: by the process itself, or by the next one if it was killed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.process import current_process
from multiprocessing.util import Finalize
from pathlib import Path
from tempfile import gettempdir, mkdtemp

LOCK = "held.lock"
SOCKETS = "pymp"
IMPORTS = "stemma-imports"
"""Of servers that fork processes."""
WORKER = "stemma-worker"
"""Of the worker that `up` starts."""
LONGEST_SOCKET = 107
"""Bytes that the path of a socket may have."""
LONGEST_HOST = 16
"""Longer names of hosts are hashed in the names of folders."""


@contextmanager
def held_folder(name: str) -> Iterator[Path]:
    """A new folder `<name>-<host>-…` of the user alone in the folder for temporary files; gone after the block.

    First those of this name go that processes of this user on this machine left behind. A folder is held by a lock in
    it, which the kernel lets go of when its process, and all that were forked from it, are gone: a number of a process
    might be another's by then.
    """
    remove_left(name)
    owner = os.getpid()
    folder = Path(mkdtemp(prefix=_start(name)))
    descriptor = os.open(folder / f".{LOCK}", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Only now, since a lock that is not held yet would be taken for an abandoned one.
        os.rename(folder / f".{LOCK}", folder / LOCK)
        yield folder
    finally:
        if os.getpid() == owner:  # a forked process closes this generator too, when it frees its memory
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def hold_sockets() -> None:
    """Let multiprocessing make its sockets in a held folder, in this process and those that it starts.

    A loader's worker, for one, hands tensors over by a socket. The folder `pymp-…` that it has by default stays for
    good where the process is killed.
    """
    held = ExitStack()
    folder = held.enter_context(held_folder(SOCKETS))
    if len(os.fsencode(folder / "listener-12345678")) > LONGEST_SOCKET:
        held.close()
        return
    # Where `multiprocessing.util.get_temp_dir` keeps the folder that it made; children inherit it.
    current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]
    Finalize(None, held.close, exitpriority=-100)  # as multiprocessing itself: after the processes that use it


def _start(name: str) -> str:
    host = socket.gethostname()
    if len(host) > LONGEST_HOST:
        host = hashlib.blake2b(host.encode(), digest_size=LONGEST_HOST // 2).hexdigest()
    return f"{name}-{host}-"


def remove_left(name: str) -> None:
    """Remove the folders of this name whose lock no process holds. Keep folders without a lock, folders of other users,
    and links."""
    for leftover in Path(gettempdir()).glob(f"{_start(name)}*"):
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
