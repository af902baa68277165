"""The worker's flow runs are forked, and are what Prefect would have started."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import prefect.runner.runner
import psutil
import pytest

from infra.servers.prefect import flow_runs
from infra.servers.prefect.flow_runs import ENGINE, FlowRuns
from tests.support.programs.command import environment
from tests.support.programs.processes import gone

COMMAND = [sys.executable, "-m", ENGINE]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlowRuns]:
    """What the worker would use, but its server imports no flows."""
    monkeypatch.setattr(flow_runs, "MODULES", ("infra.servers.prefect.flow_runs",))
    runs = FlowRuns(prefect.runner.runner.run_process)
    yield runs
    if runs._server is not None:
        runs._server.close()


class Status:
    """What anyio's task groups hand to a task; keeps the process."""

    def started(self, process: psutil.Process | None) -> None:
        self.process = process


def ended(runs: FlowRuns, folder: Path, command: list[str] = COMMAND, **variables: str) -> tuple[int, bool]:
    """The exit code of a run, and whether it was forked."""
    status = Status()

    def handle(process: Any) -> psutil.Process | None:
        with suppress(psutil.NoSuchProcess):  # a run without a right id may have ended by now
            return psutil.Process(process.pid)
        return None

    async def main() -> int:
        options = {"env": environment(**variables), "cwd": folder, "stream_output": True}
        process = await runs.run_process(command, task_status=status, task_status_handler=handle, **options)
        return int(process.returncode)

    code = anyio.run(main)
    assert status.process is None or gone(status.process)
    return code, runs._server is not None


def test_a_run_is_forked_with_variables_of_its_own(
    runs: FlowRuns, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for wrong in ("first", "second"):
        assert ended(runs, tmp_path, PREFECT__FLOW_RUN_ID=wrong) == (1, True)
    assert capfd.readouterr().out.count("Invalid flow run id") == 2


def test_a_run_that_is_to_be_started_otherwise_is_a_new_process(runs: FlowRuns, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit(7)"]
    assert ended(runs, tmp_path, command) == (7, False)


def test_a_run_with_variables_that_are_read_by_imports_is_a_new_process(runs: FlowRuns, tmp_path: Path) -> None:
    assert ended(runs, tmp_path, PREFECT__FLOW_RUN_ID="none") == (1, True)
    started: list[list[str]] = []

    async def start_new(command: list[str], **options: Any) -> Any:
        started.append(command)
        return await prefect.runner.runner.run_process(command, **options)

    runs._start_new = start_new
    assert ended(runs, tmp_path, PREFECT__FLOW_RUN_ID="none", PREFECT_LOGGING_LEVEL="DEBUG")[0] == 1
    assert started == [COMMAND]


def test_a_run_is_ended_with_the_worker_s_task(runs: FlowRuns, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        options = {"env": environment(PREFECT_API_URL=url, PREFECT__FLOW_RUN_ID="0" * 32), "cwd": tmp_path}
        found: list[psutil.Process] = []

        async def main() -> None:
            async with anyio.create_task_group() as group:

                async def run(*, task_status: Any) -> None:
                    def handle(process: Any) -> int:
                        found.append(psutil.Process(process.pid))
                        assert os.getpgid(process.pid) == os.getpgrp(), "it ends with the worker's group"
                        return int(process.pid)

                    ways = {"task_status": task_status, "task_status_handler": handle, "stream_output": True}
                    await runs.run_process(COMMAND, **ways, **options)

                await group.start(run)
                await anyio.to_thread.run_sync(silent.accept)  # the engine asks for its run, and waits
                group.cancel_scope.cancel()

        anyio.run(main)
        assert gone(found[0])
