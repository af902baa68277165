"""Sandboxes for Python code that models write: bubblewrap, or namespaces of Linux that this project enters itself.

Each program gets its own sandbox. In it there are no other processes, no network, no files but Python's, its packages'
and the system's libraries (to read), and two empty folders of a bounded size that are removed with it. All processes
that it starts end with it. `training.sandbox.process` runs inside and sets the limits.
"""

from __future__ import annotations

import functools
import marshal
import os
import platform
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

from infra.errors import stage_error
from infra.process.lifetime import signal_group

Kind = Literal["bubblewrap", "namespaces", "none"]
SandboxChoice = Literal["auto", "bubblewrap", "namespaces", "none"]
KEY = "launch.sandbox"

MEMORY_BYTES = 2**30
"""Address space of a process, enough for numpy, and memory of all processes of a sandbox together."""
FILE_BYTES = 2**26
"""Size of a file, and of all files together in each of the folders that may be written to."""
FILES = 4096
"""Files in each of these folders."""
PROCESSES = 64
"""Processes and threads of a sandbox."""
_DESCRIPTORS = 128
_FOLDERS = ("/tmp", "/dev/shm")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/nix/store")
_INSIDE = Path(__file__).with_name("process.py")
_TRIAL, _TRIAL_S = Path(__file__).with_name("trial.py"), 30.0
_LONGEST = 4096
LONGEST_LINE = 1 << 20
"""Bytes of a line of a `SandboxDialogue`."""
_UNLIMITED_S = 2**31
_NETWORK_FILES = tuple(map(Path, ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/pki")))
"""Needed to look up names of hosts and to check certificates."""
_END_S = 10.0
"""Seconds that killed processes have to end."""

# On all processors: io_uring_setup, open_tree, move_mount, fsopen, fsconfig, fsmount, pidfd_getfd, process_madvise,
# mount_setattr, memfd_secret.
_CLONE3, _REFUSED = 435, (425, 428, 429, 430, 431, 432, 438, 440, 442, 447)
_CALLS: Mapping[str, Mapping[str, Any]] = {
    # ptrace, process_vm_readv and _writev, kcmp, unshare, setns, mount, umount2, pivot_root, chroot, bpf,
    # perf_event_open, userfaultfd, add_key, request_key, keyctl, open_by_handle_at; and memory that no limit counts:
    # memfd_create, shmget, msgget.
    "x86_64": {
        "architecture": 0xC000003E,
        "clone": 56,
        "socket": 41,
        "refused": [101, 310, 311, 312, 272, 308, 165, 166, 155, 161, 321, 298, 323, 248, 249, 250, 304, 319, 29, 68],
    },
    "aarch64": {
        "architecture": 0xC00000B7,
        "clone": 220,
        "socket": 198,
        "refused": [117, 270, 271, 272, 97, 268, 40, 39, 41, 51, 280, 241, 282, 217, 218, 219, 265, 279, 194, 186],
    },
}
"""Numbers of the system calls that are refused in a sandbox, by processor."""


class SandboxOutcome(NamedTuple):
    """The output of a program through its pipe, at most 4 KiB, and its sandbox's error message. ended: by itself, in
    time."""

    written: bytes
    complaint: str
    ended: bool


def run(kind: Kind, program: Path, question: Mapping[str, Any], timeout_s: float) -> SandboxOutcome:
    """Run the program's `main(question, answer)` until it ends, at most `timeout_s` seconds. All processes that it
    started have ended too, except for `none`, where those that left its process group continue.

    Args:
        question: values that `marshal` can write.
    """
    readable, links = _view(program)
    limits = _limits(readable, links, int(timeout_s) + 2)
    with ExitStack() as ending:
        # Request by a file, answer by a pipe: the process inherits nothing else.
        request, complaint = (ending.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        request.write(marshal.dumps({**limits, **question}))
        request.seek(0)
        folder = None
        if kind == "none":
            folder = tempfile.TemporaryDirectory(prefix="stemma-tests-", ignore_cleanup_errors=True)
            ending.enter_context(folder)
        home = folder.name if folder else _FOLDERS[0]
        read_end, write_end = os.pipe()
        ending.callback(os.close, read_end)
        try:
            process = subprocess.Popen(
                _command(kind, program, readable, links),
                stdin=request,
                stdout=write_end,
                stderr=complaint,
                cwd=home,
                env=_environment(home),
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        try:
            ended = _wait(process.pid, timeout_s)
        finally:
            # Also the processes that it started, and before its folder is removed.
            signal_group(process.pid, signal.SIGKILL)
            process.wait()
        complaint.seek(0)
        message = complaint.read(2000).decode(errors="replace").strip()
        return SandboxOutcome(_written(read_end), message, ended)


class SandboxDialogue:
    """A program in a sandbox that reads and writes lines until it is ended: `main(question, answer)` reads from the
    descriptor `question["lines"]` and writes to `answer`. It ends with the thread that started it.

    Args:
        question: values that `marshal` can write.
        readable: further files and folders that it can read.
        memory: bytes that its processes may use together.
        network: connections are possible.

    Attributes:
        complaint: of the sandbox or of Python, once it has ended.
    """

    def __init__(
        self,
        kind: Kind,
        program: Path,
        question: Mapping[str, Any],
        readable: Sequence[Path] = (),
        memory: int = MEMORY_BYTES,
        *,
        network: bool = False,
    ) -> None:
        shown, links = _view(program, (*readable, *(_NETWORK_FILES if network else ())))
        limits = _limits(shown, links, _UNLIMITED_S) | {"memory": memory, "network": network}
        self.complaint = ""
        self._pending = b""
        self._ending = ExitStack()
        request, self._errors = (self._ending.enter_context(file()) for file in [tempfile.TemporaryFile] * 2)
        home = _FOLDERS[0]
        if kind == "none":
            folder = tempfile.TemporaryDirectory(prefix="stemma-environment-", ignore_cleanup_errors=True)
            home = self._ending.enter_context(folder)
        lines, self._to = os.pipe()
        self._from, answer = os.pipe()
        self._ending.callback(os.close, self._to)
        self._ending.callback(os.close, self._from)
        try:
            request.write(marshal.dumps({**limits, **question, "lines": lines}))
            request.seek(0)
            self._process = subprocess.Popen(
                _command(kind, program, shown, links, network=network),
                stdin=request,
                stdout=answer,
                stderr=self._errors,
                cwd=home,
                env=_environment(home),
                pass_fds=[lines],
                start_new_session=True,
            )
        except BaseException:
            self._ending.close()
            raise
        finally:
            os.close(lines)
            os.close(answer)

    def send(self, line: bytes, timeout_s: float) -> bytes | None:
        """Send a line and return the next one; None where the program ended, TimeoutError where it takes longer."""
        try:
            self._write(line + b"\n", deadline := time.monotonic() + timeout_s)
        except (BrokenPipeError, ValueError):
            return None
        return self._line(deadline)

    def _write(self, data: bytes, deadline: float) -> None:
        os.set_blocking(self._to, False)
        waiting = select.poll()
        waiting.register(self._to, select.POLLOUT)
        while data:
            if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            data = data[os.write(self._to, data) :]

    def _line(self, deadline: float) -> bytes | None:
        waiting = select.poll()
        waiting.register(self._from, select.POLLIN | select.POLLHUP)
        while b"\n" not in self._pending:
            if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            data = os.read(self._from, 1 << 16)
            if not data or len(self._pending) > LONGEST_LINE:
                return None
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def end(self) -> None:
        """Kill all of its processes, except for `none` those that left its process group."""
        signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._errors.seek(0)
        self.complaint = self._errors.read(2000).decode(errors="replace").strip()
        self._ending.close()


def find(requested: SandboxChoice) -> Kind:
    """Return the sandbox that `launch.sandbox` names; with auto, the first of bubblewrap and namespaces that passes its
    trial on this machine. Raises StageError `no_sandbox` where none does."""
    if requested == "none":
        return "none"
    kinds: tuple[Kind, ...] = ("bubblewrap", "namespaces") if requested == "auto" else (requested,)
    refused = []
    for kind in kinds:
        if not (why := weakness(kind)):
            return kind
        refused.append(f"{kind}: {why}")
    message = f"expected a sandbox for the code in answers, and this machine has none ({'; '.join(refused)})"
    fix = "install bubblewrap and allow users to create namespaces, or set none to run this code with your permissions"
    raise stage_error("no_sandbox", KEY, message, fix)


def described(kind: Kind) -> str:
    """One sentence for the log."""
    if kind == "none":
        return (
            "code in answers runs without a sandbox, with the permissions of this process: it can read, write and "
            f"connect to what you can ({KEY} is none)"
        )
    return (
        f"code in answers runs in a sandbox ({kind}): no network, no other processes, no files of this machine but "
        f"Python's and the system's libraries; at most {PROCESSES} processes, {MEMORY_BYTES >> 20:,} MiB of memory and "
        f"{FILE_BYTES >> 20} MiB of files in each of {' and '.join(_FOLDERS)}"
    )


@functools.cache
def weakness(kind: Kind) -> str:
    """Return what a sandbox of this kind lacks on this machine; empty where it works."""
    if _calls() is None:
        return f"there is no list of system calls for {platform.machine()}"
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        return "there is no bwrap on the PATH"
    home = Path.home() if os.access(Path.home(), os.W_OK) else None
    with tempfile.NamedTemporaryFile(dir=home) as secret, socket.create_server(("127.0.0.1", 0)) as server:
        question = {"secret": secret.name, "port": server.getsockname()[1]}
        outcome = run(kind, _TRIAL, question, _TRIAL_S)
    if outcome.written == b"held":
        return ""
    return outcome.written.decode(errors="replace") or outcome.complaint or "the trial did not end"


def _wait(pid: int, timeout_s: float) -> bool:
    """Return True if the process ends in time; subprocess would poll 20 times a second."""
    descriptor = os.pidfd_open(pid)
    try:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        return bool(waiting.poll(timeout_s * 1000))
    finally:
        os.close(descriptor)


def _written(pipe: int) -> bytes:
    """Return the content of the pipe, once no process holds its other end; at once if none does."""
    written, deadline = b"", time.monotonic() + _END_S
    os.set_blocking(pipe, False)
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN | select.POLLHUP)
    while waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
        data = os.read(pipe, _LONGEST)
        if not data:
            break
        written = (written + data)[:_LONGEST]
    return written


def _limits(readable: Sequence[str], links: Sequence[tuple[str, str]], cpu_s: int) -> dict[str, Any]:
    """Return the limits that the program's process sets for itself before it runs anything else."""
    return {
        "parent": os.getpid(),
        "packages": _packages(),
        "memory": MEMORY_BYTES,
        "file_bytes": FILE_BYTES,
        "cpu_s": cpu_s,
        "files": FILES,
        "processes": PROCESSES,
        "descriptors": _DESCRIPTORS,
        "user": secrets.randbelow(1 << 24),
        "readable": readable,
        "links": links,
        "devices": _DEVICES,
        "folders": [(path, FILE_BYTES) for path in _FOLDERS],
        "calls": _calls(),
        "network": False,
    }


def _command(
    kind: Kind, program: Path, readable: Sequence[str], links: Sequence[tuple[str, str]], *, network: bool = False
) -> list[str]:
    wrapped = _wrapped(kind, readable, links, network=network)
    return [*wrapped, _python(), "-I", "-S", "-B", str(_INSIDE), kind, str(program)]


def _environment(home: str) -> dict[str, str]:
    return {"PATH": os.defpath, "HOME": home, "TMPDIR": home, "OMP_NUM_THREADS": "1"}


def _wrapped(
    kind: Kind, readable: Sequence[str], links: Sequence[tuple[str, str]], *, network: bool = False
) -> list[str]:
    """Return the command that makes the sandbox, where another program makes it."""
    if kind != "bubblewrap":
        return []
    command = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-ipc",
        "--unshare-pid",
        *(() if network else ("--unshare-net",)),
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    command += ["--die-with-parent", "--as-pid-1"]
    command += ["--size", "65536", "--tmpfs", "/dev"]
    for name in _DEVICES:
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for path in _FOLDERS:
        command += ["--perms", "1777", "--size", str(FILE_BYTES), "--tmpfs", path]
    # After the folders: an environment may be in one of them.
    for path in readable:
        for above in [*Path(path).parents][-2::-1]:  # bubblewrap lets no other user into those that it makes
            command += ["--perms", "0755", "--dir", str(above)]
        command += ["--ro-bind", path, path]
    for path, target in links:
        command += ["--symlink", target, path]
    return [*command, "--proc", "/proc", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", _FOLDERS[0], "--"]


def _python() -> str:
    """Return the interpreter itself: that of a virtual environment would look for the environment's settings."""
    return os.path.realpath(sys.executable)


@functools.cache
def _view(program: Path, further: tuple[Path, ...] = ()) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the paths that are readable in a sandbox, and links with their targets."""
    python = Path(_python())
    libraries = Path(os.__file__).parent
    needed = [python, libraries, *libraries.parent.glob("libpython*"), _INSIDE, program, *map(Path, _packages())]
    needed += [path for path in further if path.exists()]
    links = []
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            links.append((str(path), os.readlink(path)))
        elif path.exists():
            needed.append(path)
    visible: list[str] = []
    for path in sorted({Path(os.path.abspath(path)) for path in needed}):
        if not any(path.is_relative_to(above) for above in visible):
            visible.append(str(path))
    return visible, links


def _packages() -> list[str]:
    """Folders of installed packages, which the code may import from."""
    return [path for path in sys.path if path.endswith("-packages")]


def _calls() -> dict[str, Any] | None:
    calls = _CALLS.get(platform.machine())
    return {**calls, "clone3": _CLONE3, "refused": [*calls["refused"], *_REFUSED]} if calls else None
