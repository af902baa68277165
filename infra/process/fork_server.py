"""A process that imports modules in advance and forks the processes that need them, which start in hundredths of a
second.

    python -m infra.process.fork_server REQUESTS PARENT [TEMPORARY]

REQUESTS is the descriptor of a socket on which `infra.process.forked.ForkServer` sends requests. PARENT is the
descriptor of a pipe that breaks when the starting process is gone. TEMPORARY is a folder for files that libraries write
while they are imported; the starting process removes it. Nothing here may start a thread: a fork keeps only the calling
thread, along with any locks that the other threads held. Before each fork the server checks for anything else that
makes a fork unsafe; if it finds something, it answers with a reason and forks no process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.io.json import parse_own_json
from infra.process.lifetime import PARENT_FD, leave
from infra.secrets import HidingStream

LARGEST_REQUEST = 1 << 16
DESCRIPTORS = 3
"""With each request: the socket to answer on, what stdout and stderr are to be, and the pipe of die_with_parent."""
_HARMLESS_THREADS = {"jemalloc_bg_thd"}
"""jemalloc, in pyarrow, handles forks by itself, and does its housekeeping without the thread in the child."""
_PR_SET_NAME = 15
SETTLE_S = 0.2
_SIGINT = signal.getsignal(signal.SIGINT)
"""As Python set it at its start: shells have jobs in the background ignore it. Libraries may change it."""


@dataclass(frozen=True)
class Start:
    """Instructions for a new process. modules: to import before the fork; argv: as `sys.argv`, the first a module that
    has a `main(argument…) -> exit code`; set: additional environment variables; own_session: True if it leads its own
    session, False if it is in the server's group."""

    modules: list[str]
    argv: list[str]
    cwd: str
    set: dict[str, str]
    own_session: bool = True


@dataclass(eq=False)
class _Child:
    pid: int
    pidfd: int
    channel: socket.socket
    has_ended: bool = False
    is_unheard: bool = False


class ServerProcess:
    """Serves requests one after the other, and imports the requested modules in between.

    parent: a descriptor that is none of a child's business.
    """

    def __init__(self, requests: socket.socket, parent: int) -> None:
        self._requests = requests
        self._parent = parent
        self._waiting: list[str] = []
        self._sources = _Sources()
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ, self._receive_request)
        self._children: set[_Child] = set()
        self._born: Start | None = None
        self._over = False

    def serve(self) -> Start | None:
        """Return the instructions in each forked process; None in the server, once no more requests can arrive."""
        while not self._over:
            for key, _ in self._selector.select(0 if self._waiting else None):
                key.data()
                if self._born is not None:
                    return self._born
            if self._waiting:
                self._import(self._waiting.pop(0))
        return None

    def _receive_request(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._requests, LARGEST_REQUEST, DESCRIPTORS)
        if not data:
            self._over = True
            return
        message = parse_own_json(data)
        if "expect" in message:
            self._waiting += [name for name in message["expect"] if name not in self._waiting]
            return
        answer, output, parent = descriptors
        try:
            self._start(Start(**message), socket.socket(fileno=answer), output, parent)
        finally:
            if self._born is None:
                os.close(output)
                os.close(parent)

    def _start(self, start: Start, channel: socket.socket, output: int, parent: int) -> None:
        for name in start.modules:
            self._import(name)
        given_up = bool(select.select([channel], [], [], 0)[0])  # nothing is ever sent on it, so it is closed
        if reason := "no process waits for it" if given_up else self._sources.changed() or unsafe():
            _send(channel, {"refused": reason})
            channel.close()
            return
        gc.freeze()  # existing objects are shared with the child as long as neither touches them
        pid = os.fork()
        if pid == 0:
            self._born = start
            self._leave(channel)
            _reset_process(start, output, parent)
            return
        child = _Child(pid, os.pidfd_open(pid), channel)
        self._children.add(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._report_exit(child))
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._close_client(child))
        _send(channel, {"pid": pid}, child.pidfd)

    def _leave(self, channel: socket.socket) -> None:
        """Close the server's descriptors in a child."""
        self._selector.close()
        self._requests.close()
        os.close(self._parent)
        channel.close()
        for child in self._children:
            child.channel.close()
            if not child.has_ended:
                os.close(child.pidfd)

    def _report_exit(self, child: _Child) -> None:
        """Report the exit code. The number stays taken until the client has heard it: it may still signal the group."""
        status = os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
        assert status is not None
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        child.has_ended = True
        _send(child.channel, {"code": status.si_status if status.si_code == os.CLD_EXITED else -status.si_status})
        self._reap(child)

    def _close_client(self, child: _Child) -> None:
        self._selector.unregister(child.channel)
        child.channel.close()
        child.is_unheard = True
        self._reap(child)

    def _reap(self, child: _Child) -> None:
        if child.has_ended and child.is_unheard:
            self._children.remove(child)
            os.waitpid(child.pid, 0)

    def _import(self, name: str) -> None:
        if name in sys.modules:
            return
        # Nearly everything that an import creates stays, so searching it for garbage is time lost: a tenth of torch's.
        gc.disable()
        try:
            # The process that needs the module meets the error again, where it can be reported.
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
        finally:
            gc.enable()
        self._sources.note()


class _Sources:
    """The files of modules on PYTHONPATH, including the project's own, as they were when they were imported: a new
    process would run newer ones. Installed packages are not watched; they are the installer's responsibility."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, tuple[int, int] | None]] = {}
        self._watched = tuple(directory + os.sep for directory in _on_python_path())
        self.note()

    def note(self) -> None:
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if name not in self._seen and file and file.startswith(self._watched) and not file.startswith(_INSTALLED):
                self._seen[name] = file, _state(file)

    def changed(self) -> str:
        """Return why a fork would not run the code currently on the disk; empty if it would."""
        changed = [name for name, (file, state) in self._seen.items() if _state(file) != state]
        return f"the code of {changed[0]} has changed since the server imported it" if changed else ""


_INSTALLED = tuple({sysconfig.get_paths()[kind] + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")})


def _on_python_path() -> set[str]:
    return {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}


def _state(file: str) -> tuple[int, int] | None:
    try:
        info = os.stat(file)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size


def unsafe() -> str:
    """Why this process must not fork another that goes on to work; empty where it may.

    OpenBLAS, which numpy and scipy bring, has threads from its import on, ends them before a fork by itself and starts
    them again when they are needed: a first fork, of a process that ends at once, leaves the others to be seen.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialised, which does not survive a fork"
    if _every_process_hook():
        return "sitecustomize on PYTHONPATH may have to act in each new process"
    if not _threads():
        return ""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + SETTLE_S
    while (alive := _threads()) and time.monotonic() < deadline:
        time.sleep(0.005)  # one that has ended is still seen for a moment
    return f"threads of a library are alive: {', '.join(sorted(alive))}" if alive else ""


def _threads() -> set[str]:
    """The names of all threads but this one and those that mind no fork."""
    numbers = [number for number in os.listdir("/proc/self/task") if int(number) != os.getpid()]
    return {_thread_name(number) for number in numbers} - _HARMLESS_THREADS - {""}


def _thread_name(number: str) -> str:
    try:
        return Path(f"/proc/self/task/{number}/comm").read_text().strip()
    except OSError:
        return ""


def _every_process_hook() -> bool:
    """Return True if a file of the user runs at the start of each Python process, unless the file sets FORK_SAFE."""
    return any(
        os.path.dirname(os.path.abspath(module.__file__ or "")) in _on_python_path()
        and not getattr(module, "FORK_SAFE", False)
        for module in map(sys.modules.get, ("sitecustomize", "usercustomize"))
        if module is not None
    )


def _reset_process(start: Start, output: int, parent: int) -> None:
    """Give a forked process the state of a newly started one: session, signals, streams, environment, entropy."""
    if start.own_session:
        os.setsid()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # some libraries take a signal when they are imported
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, _SIGINT)
    with open(os.devnull, "rb") as null_device:
        os.dup2(null_device.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.set_inheritable(parent, True)
    os.environ.update({**start.set, PARENT_FD: str(parent)})
    tempfile.tempdir = None  # that of the server goes with the server
    os.chdir(start.cwd)
    sys.path[0] = start.cwd  # as of python -m
    sys.argv, sys.orig_argv = start.argv, [sys.executable, "-m", *start.argv]
    # `random` reseeds itself after a fork. A fresh process has its own entropy in these two.
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()
    gc.enable()
    name = " ".join(["stemma", *start.argv[1:]])[:15]
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _send(channel: socket.socket, message: dict[str, Any], *descriptors: int) -> None:
    """Send a message; the receiver may be gone already."""
    with contextlib.suppress(OSError):
        socket.send_fds(channel, [json.dumps(message).encode()], list(descriptors))


def _end_with(parent: int) -> None:
    """End this process when the pipe breaks: by a signal, since a thread that waits for it would make forks unsafe."""
    fcntl.fcntl(parent, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(parent, fcntl.F_GETFL)
    fcntl.fcntl(parent, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        if os.read(parent, 1) == b"":
            sys.exit()


def main(requests: int, parent: int, temporary: str | None = None) -> int:
    _end_with(parent)
    tempfile.tempdir = temporary
    # Libraries keep the stream that they find when they are imported.
    sys.stdout, sys.stderr = HidingStream(sys.stdout), HidingStream(sys.stderr)
    gc.disable()  # imports make hardly any garbage
    start = ServerProcess(socket.socket(fileno=requests), parent).serve()
    if start is None:
        return 0
    code: int = importlib.import_module(start.argv[0]).main(*start.argv[1:])
    return code


if __name__ == "__main__":
    leave(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
