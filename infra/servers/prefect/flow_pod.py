"""The process of a pod that Prefect's Kubernetes worker starts for one flow run: runs it, and ends with it.

    PREFECT__FLOW_RUN_ID=… python -m infra.servers.foreground flow-run --root /store

Beside what `prefect flow-run execute` does: where Kubernetes takes the pod away (an eviction, a pre-emption, a node
that is drained), the run is told, has its time to save, and is then handed to the next pod. Prefect's own way of doing
that (PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR=reschedule) ends the container at once.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import psutil

from infra.servers.prefect.worker import unless_ended


class Taken:
    """Whether the pod is taken away: SIGTERM, which reaches the first process of a container alone."""

    def __init__(self) -> None:
        self.is_set = False

    def hear(self, *_: Any) -> None:
        self.is_set = True
        for child in psutil.Process().children():
            child.terminate()


def main() -> None:
    import prefect.cli
    import prefect.runner._state_proposer

    run_id = os.environ["PREFECT__FLOW_RUN_ID"]
    proposer: Any = prefect.runner._state_proposer.StateProposer
    proposer.propose_cancelled = unless_ended(proposer.propose_cancelled)
    taken = Taken()
    signal.signal(signal.SIGTERM, taken.hear)
    sys.argv = ["prefect", "flow-run", "execute", run_id]
    try:
        prefect.cli.app()
    finally:
        if taken.is_set:
            hand_on(run_id)


def hand_on(run_id: str) -> None:
    """Has the worker start another pod, unless the run came to its end, or a person cancelled it."""
    from uuid import UUID

    from prefect.client.orchestration import get_client
    from prefect.states import AwaitingRetry

    with get_client(sync_client=True) as client:
        states = sorted(client.read_flow_run_states(UUID(run_id)), key=lambda state: state.timestamp)
        is_cancelled = any(state.is_cancelling() for state in states[-2:])
        if not is_cancelled and not (states[-1].is_completed() or states[-1].is_failed()):
            # Forced, since a run that was told to end has said Cancelled.
            client.set_flow_run_state(UUID(run_id), AwaitingRetry(message="its pod was taken away"), force=True)


if __name__ == "__main__":
    main()
