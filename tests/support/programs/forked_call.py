"""A function of a test in a process of its own, which may be signalled and killed: forked with its imports done."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tests.support.programs.command
from infra.process.forked import ForkServer
from infra.process.lifetime import die_with_parent
from tests.support.programs.command import REPOSITORY


class ForkedCall:
    """`function(*arguments)` in a session of its own; it dies with the test worker.

    server: forks it, once it has imported `modules`. What goes in and comes back must be possible to pickle.
    """

    def __init__(
        self, server: ForkServer, modules: Sequence[str], function: Callable[..., Any], *arguments: Any
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stemma-call-")
        asked = Path(self._folder.name) / "asked"
        self._returned = Path(self._folder.name) / "returned"
        asked.write_bytes(pickle.dumps((function, arguments)))
        argv = [__name__, str(asked), str(self._returned)]
        self._process = server.start(modules, argv, REPOSITORY, sys.__stderr__.fileno(), _line()[0], lambda: False)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """`poll` after its end, or after so many seconds, by default `tests.support.programs.command.patience_s`."""
        deadline = time.monotonic() + (timeout_s or tests.support.programs.command.patience_s)
        while (code := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        """Ends it and what it started, and removes what it left of the call."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()

    def returned(self) -> Any:
        """What the function returned. Raises EOFError where it did not."""
        if not self._returned.exists():
            raise EOFError(f"process {self.pid} ended with {self.poll()} and returned nothing")
        return pickle.loads(self._returned.read_bytes())


@cache
def _line() -> tuple[int, int]:
    """A pipe that breaks with the test worker."""
    return os.pipe()


def main(asked: str, returned: str) -> int:
    """The forked process."""
    die_with_parent()
    function, arguments = pickle.loads(Path(asked).read_bytes())
    answer = pickle.dumps(function(*arguments))
    unfinished = Path(f"{returned}.unfinished")
    unfinished.write_bytes(answer)
    unfinished.rename(returned)
    return 0
