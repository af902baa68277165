"""Flow runs that begin with their imports done.

Prefect's worker starts `python -m prefect.engine` for each run, which imports for four seconds and more. Here it forks
the engine instead, from a server that it starts with its first run. Whatever a run has that the server did not begin
with (a command of its own, other variables, code that has changed) makes it a new process.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from infra.process.forked import ForkServer, NotForkedError, Process
from infra.process.lifetime import PARENT_FD
from infra.servers.environment import OF_ONE_RUN

ENGINE = "prefect.engine"
MODULES = (
    "prefect.flow_engine",
    "fastapi.encoders",
    "flows.pipeline",
    "flows.stage",
    "infra.servers.prefect.flow_runs",
)
"""What the engine imports, and what the flows of our deployments do."""
POLL_S = 0.1


class FlowRuns:
    """Starts flow runs in the process group of the worker, to whose output they write, as Prefect does.

    start_new: Prefect's own way, for what cannot be forked.
    """

    def __init__(self, start_new: Callable[..., Any]) -> None:
        self._start_new = start_new
        self._server: ForkServer | None = None
        self._lock = threading.Lock()
        # A run outlives its worker, as one that Prefect starts: nobody watches this pipe.
        self._parent, self._worker = os.pipe()

    async def run_process(
        self, command: list[str], *, task_status: Any, task_status_handler: Callable[[Any], Any], **options: Any
    ) -> Any:
        """In place of `prefect.runner.runner.run_process`: returns the process, which has ended."""
        try:
            process = await anyio.to_thread.run_sync(partial(self._fork, command, **options))
        except NotForkedError:
            options |= {"task_status": task_status, "task_status_handler": task_status_handler}
            return await self._start_new(command, **options)
        task_status.started(task_status_handler(process))
        try:
            await _end_of(process)
        finally:
            if process.poll() is None:  # the worker is to end
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
                with anyio.CancelScope(shield=True):
                    await _end_of(process)
            process.wait()
        return process

    def _fork(self, command: list[str], env: Mapping[str, str], cwd: Path | str, stream_output: bool) -> Process:
        """Raises NotForkedError for one that is to be a new process."""
        if command[1:] != ["-m", ENGINE] or not stream_output:
            raise NotForkedError("it is started in a way of its own")
        # They are another for each run, and the engine reads them after its imports.
        its_own = {name: value for name, value in env.items() if name.startswith(OF_ONE_RUN)}
        others = {name: value for name, value in env.items() if name not in its_own}
        with self._lock:
            if self._server is None:
                self._server = ForkServer(others, own_sessions=False)
        if self._server.environment != others:
            raise NotForkedError("it has variables of its own")
        output, argv = sys.stdout.fileno(), ["infra.servers.prefect.flow_runs"]
        return self._server.start(MODULES, argv, Path(cwd), output, self._parent, lambda: False, its_own)


async def _end_of(process: Process) -> None:
    while process.poll() is None:
        await anyio.sleep(POLL_S)


def main() -> int:
    """The forked process: `python -m prefect.engine`."""
    os.environ.pop(PARENT_FD)
    # As a rule nobody runs a module that is imported already. Its functions hold nothing that the second copy misses.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    runpy.run_module(ENGINE, run_name="__main__", alter_sys=True)
    return 0
