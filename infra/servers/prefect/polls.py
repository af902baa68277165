"""Polls of workers for runs that are due, held while nothing can have become due.

Prefect's worker asks every second. Each time the server queries its database, and marks the worker's queues as polled.
Here a poll waits until a request changes a run, a deployment, a pool or a limit, and is answered right after that; so a
run that is started by hand reaches its worker at least as soon as before. A poll waits at most HOLD_S, since runs also
become due by time: workers ask for them PREFECT_WORKER_PREFETCH_SECONDS (10) ahead, and start them at their time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import MutableMapping
from typing import Any

from infra.servers.prefect.callers import READS, App, Receive, Scope, Send

HOLD_S = 4.0
SETTLED_S = 5.0
"""Seconds after a change during which no poll is held: one change often brings others, and a poll may have come just
before."""

_POLL = re.compile(r"/api/work_pools/[^/]+/get_scheduled_flow_runs")
_CHANGE = re.compile(
    r"/api/(flow_runs|deployments|work_pools|work_queues|concurrency_limits|v2/concurrency_limits|automations)(/.*)?"
)
_NO_CHANGE = frozenset({"filter", "count", "history", "paginate", "lateness", "heartbeat", "renew", "input"})
"""Last parts of paths whose requests read, although their method is POST, or make no run due."""


class HeldPolls:
    """An ASGI app whose workers wait for changes."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._changed = asyncio.Event()
        self._changed_at = float("-inf")
        self._polled_at: dict[str, float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in READS:
            await self._app(scope, receive, send)
        elif _POLL.fullmatch(scope["path"]):
            await self._poll(scope, receive, send)
        else:
            try:
                await self._app(scope, receive, send)
            finally:
                if makes_due(scope["path"]):
                    self._change()

    def _change(self) -> None:
        self._changed_at = _now()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _poll(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        before, self._polled_at[path] = self._polled_at.get(path, float("-inf")), _now()
        # A change before the first poll of a worker that was away is not known.
        is_settled = _now() - self._changed_at > SETTLED_S and _now() - before < 2 * (HOLD_S + SETTLED_S)
        if not is_settled:
            await self._app(scope, receive, send)
            return
        messages: list[MutableMapping[str, Any]] = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        changed = asyncio.ensure_future(self._changed.wait())
        leaves = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({changed, leaves}, timeout=HOLD_S, return_when=asyncio.FIRST_COMPLETED)
            if leaves.done():
                return  # the worker ends
        finally:
            changed.cancel()
            leaves.cancel()
        self._polled_at[path] = _now()

        async def replay() -> MutableMapping[str, Any]:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)


def makes_due(path: str) -> bool:
    """Return True if a request to write may make a run due."""
    return bool(_CHANGE.fullmatch(path)) and path.rstrip("/").rpartition("/")[2] not in _NO_CHANGE


def _now() -> float:
    return asyncio.get_running_loop().time()
