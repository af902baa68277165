"""Commands under test that begin with their imports done: forked from a server of the test worker, as stages are.

A `stemma run` imports for four seconds and its fork servers for up to twenty more; of the hundreds of commands that the
tests start, each is a process of its own still, in a session of its own, with the streams, environment and exit code
that it would have, and can be signalled and killed like any other.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from flows.start import CONSOLE_LEVEL
from infra.forked import ForkServer, Process
from infra.process import PARENT_FD, die_with_parent
from infra.servers.environment import OFFLINE, QUIET

_PREFECTS = (
    "PREFECT_API_URL",
    "PREFECT_UI_URL",
    "PREFECT_HOME",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE",
    "PREFECT_API_AUTH_STRING",
)
"""Those of Prefect's settings that commands are given or set themselves. It reads them when it is imported, and in a
forked command whenever they have changed."""
# What a process can be told after its imports: all else has to be as it was when the server began.
_TOLD_LATER = ("STEMMA_", "PYTEST_CURRENT_TEST", *_PREFECTS)
_COMMAND = ["cli.commands", "cli.run", "cli.check", "cli.status", "flows.pipeline", "tests.forked"]
ENGINE = "prefect.engine"
"""In place of a command of ours, with the id of a flow run: what Prefect's worker starts for it."""
_STAGES = "STEMMA_TEST_STAGE_SERVER"
"""In a forked command: a file with the number of the request socket of the server that its stages share, and its
environment."""
_AS_IT_COMES = {"GLIBC_TUNABLES"}
"""What a stage may have otherwise than here: how glibc keeps memory changes no result, and one server then imports for
all stages what two would import each."""


class ForkedCommand:
    """A command that was forked. It has what tests use of `subprocess.Popen`, and ends with its test worker."""

    def __init__(self, process: Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self.pid = process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self._process.poll()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """stdout and stderr once it has ended; no stderr where that went elsewhere. Raises TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("stemma", timeout or 0.0)
            time.sleep(0.01)
        self._process.wait()
        return _text(self._folder / "stdout"), _text(self._folder / "stderr")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf8", errors="replace") if path.exists() else ""


class CommandServer:
    """Forks commands that are to run in an environment like `environment`.

    stages: the server that their stages share.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = _as_at_import(environment)
        self.stages = ForkServer(_environment_of_stages(self._environment))
        self._folder = tempfile.TemporaryDirectory(prefix="stemma-commands-")
        self._line, self._ours = os.pipe()
        atexit.register(self.close)

    @cached_property
    def _server(self) -> ForkServer:
        known = Path(self._folder.name) / "stages.json"
        known.write_text(json.dumps((self.stages.requests, self.stages.environment)))
        server = ForkServer({**self._environment, _STAGES: str(known)}, [self.stages.requests])
        server.expect(_COMMAND)
        return server

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether a command with this environment may be forked."""
        return _as_at_import(environment) == self._environment

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path | None, stderr: int | None
    ) -> ForkedCommand:
        """`stemma ARGUMENTS`. stderr: the descriptor to write that to. Raises NotForkedError."""
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        asked = folder / "request.json"
        asked.write_text(
            json.dumps({"arguments": arguments, "environment": dict(environment), "stdout": str(folder / "stdout")})
        )
        with open(os.dup(stderr) if stderr is not None else folder / "stderr", "wb") as output:
            argv = ["tests.forked", str(asked)]
            process = self._server.start(_COMMAND, argv, cwd or Path.cwd(), output.fileno(), self._line, lambda: False)
        return ForkedCommand(process, folder)

    def close(self) -> None:
        if "_server" in vars(self):
            self._server.close()
        self.stages.close()
        self._folder.cleanup()


class SharedForkServer(ForkServer):
    """In a forked command, what a run takes for its own fork server: the test worker's, where that fits."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        number, theirs = json.loads(Path(os.environ[_STAGES]).read_text())
        different = {name for name, _ in environment.items() ^ theirs.items()} - _AS_IT_COMES
        self._shared = all(name.startswith(_TOLD_LATER) and name in environment for name in different)
        if self._shared:
            self.environment = dict(environment)
            self._own_sessions = True
            self._later = {name: environment[name] for name in different}
            self._requests = socket.socket(fileno=os.dup(number))
        else:
            super().__init__(environment)

    def start(self, *arguments: Any, **options: Any) -> Any:
        return super().start(*arguments, **options, **({"set": self._later} if self._shared else {}))

    def close(self) -> None:
        if self._shared:
            self._requests.close()
        else:
            super().close()


def _as_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment that a command has set before it imports, without what it can be told later."""
    at_work = {CONSOLE_LEVEL: "CRITICAL", **environment, **QUIET, **OFFLINE}
    return {name: value for name, value in at_work.items() if not name.startswith(_TOLD_LATER)}


def _environment_of_stages(environment: Mapping[str, str]) -> dict[str, str]:
    """That of the stages of a command with this environment."""
    from infra.launch.config import LaunchConfig
    from tasks.environment import stage_environment

    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        return stage_environment(LaunchConfig(), keeps_memory=True)
    finally:
        os.environ.clear()
        os.environ.update(before)


def main(path: str) -> int:
    """The forked process: becomes the command. path: of the request."""
    die_with_parent()
    asked = json.loads(Path(path).read_text())
    shared = os.environ[_STAGES]
    os.environ.clear()
    os.environ.update({**asked["environment"], _STAGES: shared})
    os.environ.pop(PARENT_FD, None)  # it names a descriptor that is open here, and not in what the command starts
    import tasks.warm_start
    from cli.main import main as command

    _read_prefects_settings_when_they_change()
    tasks.warm_start.ForkServer = SharedForkServer  # type: ignore[misc]
    sys.argv = ["stemma", *asked["arguments"]]
    with open(asked["stdout"], "wb") as stdout:
        os.dup2(stdout.fileno(), 1)
    if asked["arguments"][0] == ENGINE:
        from flows.execution import ON_WORKER

        sys.argv = asked["arguments"]
        os.environ[ON_WORKER] = sys.argv[1]
        runpy.run_module(ENGINE, run_name="__main__", alter_sys=True)
    else:
        command()
    return 0


def _read_prefects_settings_when_they_change() -> None:
    """A command sets some of them before it imports Prefect, which here is long done."""
    import prefect.context
    from prefect.context import SettingsContext

    get = SettingsContext.__dict__["get"].__func__
    known: dict[str, str | None] = {}

    def anew(kind: type[SettingsContext]) -> SettingsContext | None:
        now = {name: os.environ.get(name) for name in _PREFECTS}
        if now != known:
            known.update(now)  # first: whoever reads them asks for them
            prefect.context.refresh_global_settings_context()
        found: SettingsContext | None = get(kind)
        return found

    SettingsContext.get = classmethod(anew)  # type: ignore[method-assign, assignment]
