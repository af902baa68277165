"""Commands under test that begin with their imports done: forked from a server of the test worker, as stages are.

A `stemma run` imports for four seconds and its fork servers for up to twenty more; of the hundreds of commands that the
tests wait for, each is a process of its own still, in a session of its own, with the streams, environment and exit code
that it would have. Those that a test kills, signals or starts beside each other are new processes (`command.start`).
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.start import CONSOLE_LEVEL
from infra.forked import ForkServer
from infra.process import PARENT_FD
from infra.servers.environment import OFFLINE, QUIET

# What a process can be told after its imports: all else has to be as it was when the server began.
_TOLD_LATER = "STEMMA_"
_COMMAND = ["cli.commands", "cli.run", "cli.check", "cli.status", "flows.pipeline", "tests.forked"]
_STAGES = "STEMMA_TEST_STAGE_SERVERS"
"""In a forked command: number and environment of the request sockets of the servers that its stages may share."""


class CommandServer:
    """Forks commands that are to run in an environment like `environment`, and shares the servers of their stages."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = _at_work(environment)
        self._stages = [ForkServer(variables) for variables in _stage_environments(self._environment)]
        sockets = [(server.requests, server.environment) for server in self._stages]
        self._folder = tempfile.TemporaryDirectory(prefix="stemma-commands-")
        known = Path(self._folder.name) / "stages.json"
        known.write_text(json.dumps(sockets))
        self._server = ForkServer({**self._environment, _STAGES: str(known)}, [number for number, _ in sockets])
        self._server.expect(_COMMAND)
        self._line, self._ours = os.pipe()
        atexit.register(self.close)

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether a command with this environment may be forked."""
        different = _at_work(environment).items() ^ self._environment.items()
        return all(name.startswith(_TOLD_LATER) for name, _ in different)

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> tuple[int, str, str]:
        """The exit code, stdout and stderr of `stemma ARGUMENTS`. Raises NotForkedError, TimeoutError."""
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            out, err, asked = (Path(folder) / name for name in ("stdout", "stderr", "request.json"))
            asked.write_text(json.dumps({"arguments": arguments, "environment": dict(environment), "stdout": str(out)}))
            with open(err, "wb") as output:
                argv = ["tests.forked", str(asked)]
                process = self._server.start(_COMMAND, argv, Path.cwd(), output.fileno(), self._line, lambda: False)
            deadline = time.monotonic() + timeout_s
            while process.poll() is None:
                if time.monotonic() > deadline:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    raise TimeoutError(err.read_text(errors="replace"))
                time.sleep(0.01)
            return process.wait(), out.read_text(), err.read_text(errors="replace")

    def close(self) -> None:
        self._server.close()
        for server in self._stages:
            server.close()
        self._folder.cleanup()


class SharedForkServer(ForkServer):
    """In a forked command, what a run takes for its own fork server: the test worker's, where it has one that fits."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        for number, theirs in json.loads(Path(os.environ[_STAGES]).read_text()):
            different = environment.items() ^ theirs.items()
            if all(name.startswith(_TOLD_LATER) and name in environment for name, _ in different):
                self.environment = dict(environment)
                self._later = {name: environment[name] for name, _ in different}
                self._requests = socket.socket(fileno=os.dup(number))
                self._shared = True
                return
        self._shared = False
        super().__init__(environment)

    def start(self, *arguments: Any, **options: Any) -> Any:
        return super().start(*arguments, **options, **({"set": self._later} if self._shared else {}))

    def close(self) -> None:
        if self._shared:
            self._requests.close()
        else:
            super().close()


def _at_work(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command once it has set what it sets before it imports Prefect."""
    return {CONSOLE_LEVEL: "CRITICAL", **environment, **QUIET, **OFFLINE}


def _stage_environments(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Those of stages that keep their memory and of those that do not, as a command with this environment has them."""
    from infra.launch.config import LaunchConfig
    from tasks.environment import stage_environment

    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        return [stage_environment(LaunchConfig(), keeps) for keeps in (False, True)]
    finally:
        os.environ.clear()
        os.environ.update(before)


def main(path: str) -> int:
    """The forked process: becomes the command. path: of the request."""
    asked = json.loads(Path(path).read_text())
    shared = os.environ[_STAGES]
    os.environ.clear()
    os.environ.update({**asked["environment"], _STAGES: shared})
    os.environ.pop(PARENT_FD, None)
    import tasks.warm_start
    from cli.main import main as command

    tasks.warm_start.ForkServer = SharedForkServer  # type: ignore[misc]
    sys.argv = ["stemma", *asked["arguments"]]
    with open(asked["stdout"], "wb") as stdout:
        os.dup2(stdout.fileno(), 1)
    command()
    return 0
