"""Lifetime of processes that we start: checks that they live, joint end of groups, and end with their parent.

python -m infra.process.lifetime MODULE …   runs a module as a program that dies with its parent, see `die_with_parent`
"""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TextIO

import psutil

GRACE_S = 8.0
PARENT_FD = "STEMMA_PARENT_FD"
_PDEATHSIG = 1


def leave(code: int) -> None:
    """End this process as the interpreter does, but without finalizing the interpreter.

    During finalization threads of libraries still run. One that returns from native code can abort a program that has
    done its work, with exit code -6; others print long reports of what they have not released.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # the reader has gone; the interpreter has its own code for that
        sys.exit(code)
    os._exit(code)


def started_at(pid: int) -> float | None:
    """Return the time at which a process started (Unix time); None if it is gone.

    Setting the clock moves it: `start_ticks` distinguishes a process from a later one with the same number.
    """
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def start_ticks(pid: int) -> int | None:
    """Return the start of a process in clock ticks since its machine started: no change of the clock moves it.

    None if it is gone.
    """
    try:
        # The second field is the program's name in parentheses, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def this_machine() -> str:
    """Return a key of the machine on which a process number is valid: the host's name, its boot, and its process
    number namespace (each container on a machine has its own)."""
    return f"{socket.gethostname()} {this_boot()}"


def this_boot() -> str:
    """The same without the host's name, which another network may change."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def group_alive(group: int) -> bool:
    """Return True while any process of the group lives; a zombie does not count."""
    if group <= 0:
        return False
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return False


def wait_for_end(pid: int, seconds: float) -> None:
    """Wait until a process ends, or until the time has passed."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # it has been reaped, or the system does not support this
        time.sleep(min(seconds, 0.05))
        return
    try:
        ended = select.poll()  # select takes no descriptors from 1,024 on
        ended.register(descriptor, select.POLLIN)
        ended.poll(1000 * seconds)
    finally:
        os.close(descriptor)


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process group that we started; do nothing if it is gone."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def end_group(group: int, has_ended: Callable[[], bool], grace_s: float = GRACE_S) -> None:
    """Send SIGTERM to the whole group, and SIGKILL after `grace_s` seconds to the processes that are left."""
    signal_group(group, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and not has_ended():
        time.sleep(0.05)
    signal_group(group, signal.SIGKILL)


def end_orphans(group: int) -> None:
    """SIGKILL to what is left of a group whose parent is gone. It ends by itself (`die_with_parent`), but not while it
    is stopped; only processes that were started with PARENT_FD are ours."""
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and PARENT_FD in process.environ():
                process.kill()
        except (ProcessLookupError, psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def die_with_parent() -> None:
    """End this process and its group as soon as the process that started it is gone.

    PARENT_FD names the read end of a pipe whose write end only the parent holds, so that it breaks however the parent
    dies, even by SIGKILL. In a process that was started without PARENT_FD this does nothing.
    """
    descriptor = os.environ.get(PARENT_FD)
    if descriptor is None:
        return

    def watch() -> None:
        os.read(int(descriptor), 1)
        signal_group(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    die_with_parent()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def serve_parent() -> tuple[BinaryIO, TextIO]:
    """Return the pipes of a process that answers questions of its parent, and end with the parent.

    The kernel kills this process too when its parent ends, since the thread of `die_with_parent` stops while native
    code holds the interpreter. Ctrl-C is left to the parent. What is printed goes to stderr.

    Returns:
        The questions, and the stream for answers.
    """
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return questions, answers
