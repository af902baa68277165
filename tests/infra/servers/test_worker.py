"""What our worker does in another way than Prefect's."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from prefect.client.orchestration import PrefectClient
from prefect.runner._state_proposer import StateProposer
from prefect.states import AwaitingRetry, Cancelled, Cancelling

from infra.servers.prefect.worker import unless_ended

pytestmark = pytest.mark.cluster


def test_a_retry_right_after_cancel_is_not_taken_back(prefect_url: str) -> None:
    propose: Any = unless_ended(StateProposer.propose_cancelled)

    async def states(url: str) -> list[str]:
        """Of a run that ended and was asked for again before the worker came to it; and of one that only it can end."""
        found = []
        async with PrefectClient(f"{url}") as client:
            flow = await client.create_flow_from_name("retried after cancel")
            for after in ((Cancelled(), AwaitingRetry()), ()):
                made = await client.request("POST", "/flow_runs/", json={"flow_id": str(flow)})
                run = made.json()["id"]
                await client.set_flow_run_state(run, Cancelling(), force=True)
                asked = await client.read_flow_run(run)
                for state in after:
                    await client.set_flow_run_state(run, state, force=True)
                assert await propose(StateProposer(client=client), asked)
                state_now = (await client.read_flow_run(run)).state
                assert state_now
                found.append(state_now.name)
        return found

    # Of the session's server, which has no worker.
    assert anyio.run(states, prefect_url) == ["AwaitingRetry", "Cancelled"]
