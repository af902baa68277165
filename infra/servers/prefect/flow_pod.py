"""Process of a pod that Prefect's Kubernetes worker starts for one flow run: it runs the flow run, and ends with it.

    PREFECT__FLOW_RUN_ID=… python -m infra.servers.foreground flow-run --root /store

In addition to `prefect flow-run execute`: if Kubernetes takes the pod away (an eviction, a pre-emption, a drained
node), the run is notified, has its time to save, and is then handed to the next pod. Prefect's own implementation
(PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR=reschedule) ends the container immediately.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import psutil

from infra.servers.prefect.worker import unless_ended


class Taken:
    """State of the pod, set once it is taken away: by SIGTERM, which only the first process of a container receives."""

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
    """Make the worker start another pod, unless the run reached its end, or a person cancelled it."""
    from uuid import UUID

    from prefect.client.orchestration import get_client
    from prefect.states import AwaitingRetry

    with get_client(sync_client=True) as client:
        states = sorted(client.read_flow_run_states(UUID(run_id)), key=lambda state: state.timestamp)
        is_cancelled = any(state.is_cancelling() for state in states[-2:])
        if not is_cancelled and not (states[-1].is_completed() or states[-1].is_failed()):
            # Forced, since a run that was asked to end has reported Cancelled.
            client.set_flow_run_state(UUID(run_id), AwaitingRetry(message="its pod was evicted"), force=True)


if __name__ == "__main__":
    main()
