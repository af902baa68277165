"""Client of the fork server (`infra.process.fork_server`), which forks processes with their imports done."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from infra.io.json import parse_own_json
from infra.process.fork_server import LARGEST_REQUEST, Start
from infra.process.held_folder import IMPORTS, held_folder
from infra.process.lifetime import PARENT_FD
from infra.project import PROJECT

POLL_S = 0.1


class NotForkedError(Exception):
    """A fork server could not, or should not, start the process; the message gives the reason."""


class Process(Protocol):
    """A process that we started. `poll` and `wait` return its exit code, negative for a signal, as in `subprocess`."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...


class ForkServer:
    """A running fork server. It ends with `close`, and by itself when this process is gone.

    environment: of the server and so of all processes that it forks; libraries read most of it when they are imported.
    inherited: descriptors that all of these processes have open too.
    own_sessions: if True, the server and each process that it forks lead their own sessions; else all are in the group
        of this process.
    """

    def __init__(
        self, environment: Mapping[str, str], inherited: Sequence[int] = (), own_sessions: bool = True
    ) -> None:
        self.environment = dict(environment)
        self._own_sessions = own_sessions
        self._requests, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read_end, self._parent_pipe = os.pipe()
        # torch makes a folder during its import, and a server that is killed does not remove it.
        self._held = ExitStack()
        temporary = self._held.enter_context(held_folder(IMPORTS))
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "infra.process.fork_server",
                    str(server_end.fileno()),
                    str(read_end),
                    str(temporary),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=own_sessions,
                pass_fds=[server_end.fileno(), read_end, *inherited],
                cwd=PROJECT,
                # The forked have it in /proc as well, by which they are known for ours.
                env={**environment, PARENT_FD: str(read_end)},
            )
        finally:
            server_end.close()
            os.close(read_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def requests(self) -> int:
        """The descriptor that it is asked on."""
        return self._requests.fileno()

    def expect(self, modules: Iterable[str]) -> None:
        """Ask the server to import these modules while no process is requested."""
        names = list(modules)
        if names:
            self._send({"expect": names})

    def start(
        self,
        modules: Sequence[str],
        argv: Sequence[str],
        cwd: Path,
        output: int,
        parent: int,
        stop: Callable[[], bool],
        set: Mapping[str, str] = {},
    ) -> Forked:
        """Start a process, which runs as if by `python -m argv…`.

        Args:
            modules: imported first.
            output: the descriptor for stdout and stderr.
            parent: the read end of a pipe, see `infra.process.lifetime.die_with_parent`.
            stop: asked while the server still imports.
            set: variables besides the server's.

        Raises NotForkedError.
        """
        own_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            request = Start(list(modules), list(argv), str(cwd), dict(set), self._own_sessions)
            self._send(asdict(request), server_end.fileno(), output, parent)
        except NotForkedError:
            own_end.close()
            raise
        finally:
            server_end.close()
        while not _readable(own_end, POLL_S):
            if stop():
                own_end.close()
                raise NotForkedError("it was cancelled before it began")
        data, descriptors, _, _ = _receive(own_end, 1)
        answer: dict[str, Any] = parse_own_json(data) if data else {"refused": "the fork server has ended"}
        if "refused" in answer:
            own_end.close()
            raise NotForkedError(answer["refused"])
        return Forked(answer["pid"], own_end, *descriptors)

    def close(self) -> None:
        """End the server, even while it works; the processes that it forked continue."""
        self._requests.close()
        os.close(self._parent_pipe)
        self._process.kill()
        self._process.wait()
        self._held.close()

    def _send(self, message: Mapping[str, Any], *descriptors: int) -> None:
        data = json.dumps(message).encode()
        if len(data) > LARGEST_REQUEST:
            raise NotForkedError("the request is too long")
        try:
            socket.send_fds(self._requests, [data], list(descriptors))
        except OSError as error:
            raise NotForkedError("the fork server has ended") from error


class Forked:
    """A process that a fork server started. It is not our child, so the server reports its exit code."""

    LOST = -signal.SIGKILL
    """Exit code if the server was gone before it could report one: most likely both were killed."""

    def __init__(self, pid: int, channel: socket.socket, pidfd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._channel = channel
        self._pidfd = pidfd
        self._server_lost = False

    def fileno(self) -> int:
        """Return the descriptor that is readable once the process has ended."""
        return self._pidfd if self._server_lost else self._channel.fileno()

    def poll(self) -> int | None:
        self._update(0.0)
        return self.returncode

    def wait(self) -> int:
        """Wait for the end, and release the process's number, which no other process gets before."""
        while self.returncode is None:
            self._update(None)
        self._channel.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        return self.returncode

    def _update(self, timeout_s: float | None) -> None:
        if self.returncode is not None:
            return
        if not self._server_lost and _readable(self._channel, timeout_s):
            data = _receive(self._channel, 0)[0]
            if data:
                self.returncode = int(parse_own_json(data)["code"])
            self._server_lost = not data
        if self._server_lost and _readable(self._pidfd, timeout_s):
            self.returncode = self.LOST


def _receive(channel: socket.socket, descriptors: int) -> tuple[bytes, list[int], int, Any]:
    try:
        return socket.recv_fds(channel, LARGEST_REQUEST, descriptors)
    except ConnectionError:
        return b"", [], 0, None


def _readable(file: socket.socket | int, timeout_s: float | None) -> bool:
    waiting = select.poll()
    waiting.register(file, select.POLLIN)
    return bool(waiting.poll(None if timeout_s is None else timeout_s * 1000))
