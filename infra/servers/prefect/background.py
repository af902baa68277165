"""Queue of the background services in Prefect's server, which waits for work instead of looking for it.

Prefect runs its services as tasks of docket, a queue that is made for many machines around one Redis. Its worker looks
for due tasks and for new ones four times per second each, for cancelled ones ten times, and announces itself every two
seconds. Here the queue lives in the server's memory and has one worker: new tasks wake it, and no task is cancelled.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import docket
from prefect.server.api import background_workers, server

from infra.servers.prefect.lost_runs import LOOK_EVERY_S

NEW_TASKS_S = 1.0
"""Seconds after which the worker stops waiting for a new task and looks after the others; a new task ends the wait."""
TASKS_AT_ONCE = 25
"""More than the 10 of Prefect's worker, since a full worker waits NEW_TASKS_S before it looks for a free place."""
DUE_TASKS_S = min(1.0, LOOK_EVERY_S / 2)
"""Seconds between two looks for tasks whose time has come: their delay beyond the interval of their service."""
HEARTBEAT_S = 60.0


class _Worker(docket.Worker):
    """The only worker of a queue in memory."""

    async def _cancellation_listener(self) -> None:
        """Replace the listener for cancelled tasks: Prefect's server cancels none."""
        session = self._processing_session
        if session is not None:
            session.cancellation_ready.set()
            await session.stopping.wait()


def wake_less_often() -> None:
    """Replace the queue and the worker that Prefect's server creates when it starts."""
    queue: Any = partial(docket.Docket, heartbeat_interval=timedelta(seconds=HEARTBEAT_S))
    worker: Any = partial(
        _Worker,
        concurrency=TASKS_AT_ONCE,
        minimum_check_interval=timedelta(seconds=NEW_TASKS_S),
        scheduling_resolution=timedelta(seconds=DUE_TASKS_S),
    )
    server.Docket = queue  # type: ignore[misc]
    background_workers.Worker = worker  # type: ignore[misc]
