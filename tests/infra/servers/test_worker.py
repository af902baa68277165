"""What our worker does in another way than Prefect's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import State
from prefect.runner._state_proposer import StateProposer
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Failed, Pending, Running

from infra.servers.prefect.worker import unless_ended, unless_recorded

pytestmark = pytest.mark.cluster


def test_a_retry_is_not_taken_back_by_the_end_of_the_attempt_before(prefect_url: str, tmp_path: Path) -> None:
    """The worker judges an attempt after its process is gone: of runs that were retried before, are about to begin
    again, or run again by then; and of runs that only the worker can end."""
    cancel: Any = unless_ended(StateProposer.propose_cancelled)
    crash: Any = unless_recorded(StateProposer.propose_crashed, tmp_path / "runs")
    retried = (AwaitingRetry(), Pending(), Running())

    async def states(url: str) -> list[list[str]]:
        names: list[list[str]] = []
        async with PrefectClient(f"{url}") as client:
            flow = await client.create_flow_from_name("a-pipeline")

            async def state_after(before: Sequence[State], judge: Any, after: Sequence[State], options: Any) -> str:
                made = await client.request("POST", "/flow_runs/", json={"flow_id": str(flow)})
                run = made.json()["id"]
                for state in before:
                    await client.set_flow_run_state(run, state, force=True)
                judged = await client.read_flow_run(run)
                for state in after:
                    await client.set_flow_run_state(run, state, force=True)
                await judge(StateProposer(client=client), judged, **options)
                state_now = (await client.read_flow_run(run)).state
                assert state_now
                return state_now.name

            cancelled, failed = [Running(), Cancelling()], [Pending()]
            for number in range(len(retried) + 1):
                after: list[State] = [Cancelled(), *retried[:number]] if number else []
                names.append([await state_after(cancelled, cancel, after, {})])
                after = [Running(), Failed(), *retried[:number]] if number else [Running()]
                names[-1].append(await state_after(failed, crash, after, {"message": "exit code 1"}))
        return names

    # Of the session's server, which has no worker.
    expected = [["Cancelled", "Crashed"], *([state.name, state.name] for state in retried)]
    assert anyio.run(states, prefect_url) == expected
