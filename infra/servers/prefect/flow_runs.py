"""Flow runs that start with their imports done.

Prefect's worker starts `python -m prefect.engine` for each run, which spends four seconds and more on imports. Here it
forks the engine instead, from a server that it starts with its first run. A run that differs from the start of the
server (a custom command, other variables, code that has changed) gets a new process.
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

from infra.process.forked import Forked, ForkServer, NotForkedError
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
"""Modules that the engine and the flows of our deployments import."""
POLL_S = 2.0
"""Seconds after which a run whose end was not reported is looked at."""


class FlowRuns:
    """Starts flow runs in the process group of the worker, to whose output they write, as Prefect does.

    start_new: Prefect's own function, for runs that cannot be forked.
    """

    def __init__(self, start_new: Callable[..., Any]) -> None:
        self._start_new = start_new
        self._server: ForkServer | None = None
        self._lock = threading.Lock()
        # A run outlives its worker, like one that Prefect starts, so this pipe is not watched.
        self._parent, self._worker = os.pipe()

    async def run_process(
        self, command: list[str], *, task_status: Any, task_status_handler: Callable[[Any], Any], **options: Any
    ) -> Any:
        """Replace `prefect.runner.runner.run_process`: run a flow run and return its process, which has ended."""
        try:
            process = await anyio.to_thread.run_sync(partial(self._fork, command, **options))
        except NotForkedError:
            options |= {"task_status": task_status, "task_status_handler": task_status_handler}
            return await self._start_new(command, **options)
        task_status.started(task_status_handler(process))
        try:
            await _end_of(process)
        finally:
            if process.poll() is None:  # the worker is ending
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
                with anyio.CancelScope(shield=True):
                    await _end_of(process)
            process.wait()
        return process

    def _fork(self, command: list[str], env: Mapping[str, str], cwd: Path | str, stream_output: bool) -> Forked:
        """Fork a flow run. Raises NotForkedError for a run that needs a new process."""
        if command[1:] != ["-m", ENGINE] or not stream_output:
            raise NotForkedError("it is started in another way")
        # They are another for each run, and the engine reads them after its imports.
        its_own = {name: value for name, value in env.items() if name.startswith(OF_ONE_RUN)}
        variables = {name: value for name, value in env.items() if name not in its_own}
        with self._lock:
            if self._server is None:
                self._server = ForkServer(variables, own_sessions=False)
        if self._server.environment != variables:
            raise NotForkedError("it has other variables")
        output, argv = sys.stdout.fileno(), ["infra.servers.prefect.flow_runs"]
        return self._server.start(MODULES, argv, Path(cwd), output, self._parent, lambda: False, its_own)


async def _end_of(process: Forked) -> None:
    while process.poll() is None:
        with anyio.move_on_after(POLL_S):
            await anyio.wait_readable(process)


def main() -> int:
    """Run `python -m prefect.engine` in the forked process."""
    os.environ.pop(PARENT_FD)
    # runpy warns about running a module that is already imported. Its functions hold no state that a second copy needs.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    runpy.run_module(ENGINE, run_name="__main__", alter_sys=True)
    return 0
