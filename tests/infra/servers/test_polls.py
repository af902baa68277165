"""Polls of workers on Prefect's server: held while nothing changes, answered right after a change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from infra.servers.prefect import polls
from infra.servers.prefect.intervals import INTERVALS, intervals, retention
from infra.servers.prefect.polls import HeldPolls, makes_due

POLL = "/api/work_pools/stemma/get_scheduled_flow_runs"
CREATE = "/api/deployments/1/create_flow_run"
BODY = b'{"limit": 3}'


class Server:
    """An app that records its requests, behind the polls. Each request is a task."""

    def __init__(self) -> None:
        self.served: list[tuple[str, bytes]] = []
        self.app = HeldPolls(self._serve)

    async def _serve(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        self.served.append((scope["path"], (await receive())["body"]))

    def request(self, path: str, leaves: asyncio.Event | None = None) -> asyncio.Task[None]:
        messages = [{"type": "http.request", "body": BODY, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await (leaves or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None: ...

        async def serve() -> None:
            await self.app({"type": "http", "method": "POST", "path": path}, receive, send)

        return asyncio.create_task(serve())

    async def hold(self, leaves: asyncio.Event | None = None) -> asyncio.Task[None]:
        """Return a poll that is held. The first poll of a worker never is."""
        await self.request(POLL)
        poll = self.request(POLL, leaves)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not poll.done() and self.served == [(POLL, BODY)]
        return poll


def test_a_held_poll_is_answered_right_after_a_run_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polls, "HOLD_S", 3600)

    async def scenario() -> None:
        server = Server()
        poll = await server.hold()
        await server.request("/api/flow_runs/filter")
        await server.request("/api/work_pools/stemma/workers/heartbeat")
        assert not poll.done()
        await server.request(CREATE)
        await poll
        assert server.served[-2:] == [(CREATE, BODY), (POLL, BODY)]
        await server.request(POLL)  # what that change brings may come a little later

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_poll_is_held_for_a_bounded_time_and_no_longer_than_its_worker_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def passes() -> None:
        monkeypatch.setattr(polls, "HOLD_S", 0.01)
        server = Server()
        await server.request(POLL)
        await server.request(POLL)
        assert len(server.served) == 2

    async def leaves() -> None:
        monkeypatch.setattr(polls, "HOLD_S", 3600)
        server, has_left = Server(), asyncio.Event()
        poll = await server.hold(has_left)
        has_left.set()
        await poll
        assert len(server.served) == 1

    for scenario in (passes, leaves):
        asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize(
    ("path", "is_change"),
    [
        ("/api/flow_runs/", True),
        ("/api/flow_runs/1/set_state", True),
        ("/api/flow_runs/1/resume", True),
        ("/api/deployments/", True),
        ("/api/work_pools/stemma/queues/default", True),
        ("/api/deployments/filter", False),
        ("/api/flow_runs/count", False),
        ("/api/v2/concurrency_limits/leases/1/renew", False),
        ("/api/logs/", False),
        ("/api/artifacts/1", False),
    ],
)
def test_requests_that_may_make_a_run_due(path: str, is_change: bool) -> None:
    assert makes_due(path) == is_change


def test_intervals_are_those_of_the_installed_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that Prefect renames would be ignored silently."""
    from prefect.settings.context import get_current_settings
    from prefect.settings.models.root import Settings

    def read(settings: Any) -> list[float]:
        values = []
        for row in INTERVALS:
            service = row.variable.removeprefix("SERVICES_").removesuffix("_LOOP_SECONDS").lower()
            recent = service == "scheduler_recent_deployments"
            section = getattr(settings.server.services, "scheduler" if recent else service)
            values.append(section.recent_deployments_loop_seconds if recent else section.loop_seconds)
        return values

    assert read(get_current_settings()) == [row.prefect for row in INTERVALS]
    for name, value in intervals().items():
        monkeypatch.setenv(name, value)
    changed = Settings()
    assert read(changed) == [row.seconds for row in INTERVALS]
    assert changed.server.events.proactive_granularity.total_seconds() == 20

    vacuum = changed.server.services.db_vacuum
    assert vacuum.enabled_vacuum_types == {"events"}
    for name, value in retention(1).items():
        monkeypatch.setenv(name, value)
    changed = Settings()
    vacuum = changed.server.services.db_vacuum
    assert vacuum.enabled_vacuum_types == {"events", "flow_runs"}
    assert vacuum.retention_period.days == changed.server.events.retention_period.days == 1
