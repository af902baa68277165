"""Worker that waits for the Prefect server of PREFECT_API_URL, then serves a pool, which it makes if there is none.

python -m infra.servers.prefect.worker stemma ROOT
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from infra.process.held_folder import WORKER, held_folder
from infra.servers.http import answers, misdirected
from infra.servers.prefect.run_ends import recorded_end
from infra.store.layout import Layout


def main(pool: str, root: str) -> None:
    # Imported while the server starts, since this takes seconds.
    import prefect.cli.worker
    import prefect.runner._state_proposer
    import prefect.runner.runner
    import prefect.workers.process

    from infra.servers.prefect.flow_runs import FlowRuns

    health = f"{os.environ['PREFECT_API_URL']}/health"
    while not answers(health):
        # Waiting would not change this answer.
        if message := misdirected(health):
            sys.exit(f"{health}: {message}")
        time.sleep(0.1)
    runner: Any = prefect.runner.runner
    runner.run_process = FlowRuns(runner.run_process).run_process
    proposer: Any = prefect.runner._state_proposer.StateProposer
    proposer.propose_cancelled = unless_ended(proposer.propose_cancelled)
    proposer.propose_crashed = unless_recorded(proposer.propose_crashed, Layout(Path(root)).runs)
    worker: Any = prefect.workers.process.ProcessWorker
    worker._propose_crashed_state = unless_retried(worker._propose_crashed_state)
    sys.argv = ["prefect", "worker", "start", "--pool", pool, "--type", "process", "--name", os.uname().nodename]
    # Prefect leaves folders among the temporary files.
    with held_folder(WORKER) as folder:
        tempfile.tempdir = str(folder)
        prefect.cli.app()


def unless_ended(propose_cancelled: Callable[..., Awaitable[bool]]) -> Callable[..., Awaitable[bool]]:
    """Return a `propose_cancelled` that does nothing for a run that is neither running nor being cancelled any more.

    Our flows report themselves that they were cancelled, as they end. Prefect's worker reports it a second time after
    it has loaded the flow to look for its hooks, seconds later, and would undo a Retry that was pressed since.
    """

    async def propose(self: Any, flow_run: Any, *args: Any, **options: Any) -> bool:
        now = await self._client.read_flow_run(flow_run.id)
        is_open = now.state is None or now.state.is_cancelling() or now.state.is_running()
        if is_open and not is_later_attempt(now, flow_run):
            return await propose_cancelled(self, flow_run, *args, **options)
        return True

    return propose


def unless_retried(propose_crashed: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a `_propose_crashed_state` that does nothing for a run that has ended, or was retried since."""

    async def propose(self: Any, flow_run: Any, *args: Any, **options: Any) -> Any:
        if has_ended_or_retried(await self.client.read_flow_run(flow_run.id), flow_run):
            return None
        return await propose_crashed(self, flow_run, *args, **options)

    return propose


def has_ended_or_retried(now: Any, judged: Any) -> bool:
    """Return True if a crash of the attempt that the worker judges is no news. The server would refuse the crash of a
    run that has ended, but a retry may come between the answer of the server and the report."""
    return (now.state is not None and now.state.is_final()) or is_later_attempt(now, judged)


def is_later_attempt(now: Any, judged: Any) -> bool:
    """Return True if a flow run was retried since the worker read it: an end of that attempt is no end of the run.

    Args:
        now: The flow run as the server has it.
        judged: The flow run as the worker read it, before its process started or while it was being cancelled.
    """
    has_begun = judged.state is not None and not (judged.state.is_pending() or judged.state.is_scheduled())
    attempts = judged.run_count + (not has_begun)
    if now.run_count > attempts:
        return True
    if now.state is None:
        return False
    return now.state.is_scheduled() or (now.state.is_pending() and now.run_count == attempts)


def unless_recorded(propose_crashed: Callable[..., Awaitable[Any]], runs: Path) -> Callable[..., Awaitable[Any]]:
    """Return a `propose_crashed` that reports the recorded end of a run if there is one.

    The process of a run that could not report its end, because the server was away, fails. Prefect's worker would
    report the run as crashed once the server is back; the journal has its end.
    """

    async def propose(self: Any, flow_run: Any, *args: Any, **options: Any) -> Any:
        from prefect.client.schemas.objects import State, StateType

        now = await self._client.read_flow_run(flow_run.id)
        if has_ended_or_retried(now, flow_run):
            return None
        state = now.state
        end = recorded_end(runs, str(flow_run.id), state.timestamp) if state and not state.is_final() else None
        if end is None:
            return await propose_crashed(self, flow_run, *args, **options)
        ended: State[Any] = State(type=StateType[end.type], message=end.message)
        return (await self._client.set_flow_run_state(flow_run.id, ended, force=True)).state

    return propose


if __name__ == "__main__":
    main(*sys.argv[1:])
