"""Prefect's server, which takes no request of a foreign page, and whose transactions on SQLite wait for their turn.

python -m infra.servers.prefect.server --host HOST --port PORT [--root ROOT]

Prefect begins its transactions as readers. One that reads and then writes fails at once, however long the timeout, when
another wrote in between (SQLITE_BUSY_SNAPSHOT), and the page answers "Service Unavailable". Here each takes the lock
for writing when it begins, and waits for it.

Once an automation is stored, Prefect's event loop stands still until another thread has read it, while others on that
loop may hold what the reading waits for: the lock for writing, or the one for automations (PrefectHQ/prefect#23055).
Here the loop reads it itself, and goes on meanwhile.

Its migrations take six seconds of an empty SQLite database, and to write down which kinds of blocks there are takes two
to four: most of a server's start. So a new database begins as a copy of one that is through with them
(infra/servers/databases/empty.py).

On days when clocks change Prefect's dates of a cron schedule are early or a day early. See
infra/servers/prefect/cron.py.

Prefect looks at neither Host nor Origin, and takes JSON without a content type: a page in a browser on this machine
could have deployments made, and so commands run. See infra/servers/prefect/callers.py.

Its background services look less often than Prefect's own, and workers ask less often for runs that are due while no
request can have made one due. See infra/servers/prefect/background.py and infra/servers/prefect/polls.py.

With --root, the server of that store also ends flow runs whose process is gone. See infra/servers/prefect/lost_runs.py.
"""

from __future__ import annotations

import argparse
import asyncio
import runpy
import sys
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from hashlib import sha256
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import prefect
import prefect.server.models.block_registration as blocks
import uvicorn
from prefect.logging import get_logger
from prefect.server.api import server
from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration
from prefect.server.database.interface import PrefectDBInterface
from prefect.server.events.models import automations
from prefect.server.schemas.schedules import CronSchedule
from prefect.settings import get_current_settings
from sqlalchemy import make_url
from uvicorn.main import STARTUP_FAILURE

from infra.secrets import HidingStream
from infra.servers.asgi_server import BoundedBody, Server
from infra.servers.databases.empty import keep, take
from infra.servers.prefect.background import wake_less_often
from infra.servers.prefect.callers import OwnCallersOnly
from infra.servers.prefect.cron import cron_dates
from infra.servers.prefect.lost_runs import end_lost_runs
from infra.servers.prefect.polls import HeldPolls
from infra.servers.settings import Settings
from infra.store.layout import Layout

MOST_BODY_BYTES = 64_000_000
"""Prefect's client sends logs in batches of 4 MB; artifacts of ours are smaller."""

_create_db = PrefectDBInterface.create_db
_begin = AioSqliteConfiguration.begin_transaction
_register_blocks = blocks.run_block_auto_registration


@asynccontextmanager
async def _begin_to_write(self: Any, session: Any, with_for_update: bool = False) -> AsyncGenerator[Any, None]:
    async with _begin(self, session, with_for_update=True) as transaction:
        yield transaction


_reading: set[asyncio.Task[None]] = set()
"""Tasks that read automations; the event loop itself keeps no strong reference to them."""


def _read_later(reading: Coroutine[Any, Any, None]) -> None:
    """Replace `run_coro_as_sync` for an automation that has just been stored."""
    task = asyncio.get_running_loop().create_task(_read(reading))
    _reading.add(task)
    task.add_done_callback(_reading.discard)


async def _read(reading: Coroutine[Any, Any, None]) -> None:
    SQLITE_BEGIN_MODE.set(None)  # the mode of the transaction that stored it is for writing
    try:
        await reading
    except Exception:
        # Prefect checks every few seconds that it knows the stored ones.
        get_logger("stemma.server").exception("an automation that was stored could not be read")


class _NewDatabase:
    """Work of a starting server on its database, without the work that a copy saves.

    An existing database, and one that is not a SQLite file, are treated as Prefect treats them.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._has_blocks = False

    async def create(self, interface: PrefectDBInterface) -> None:
        """Replace `create_db`, which still runs, and has little to do if there was a copy."""
        path = _file_of(interface.database_config.connection_url)
        if path is None or path.exists():
            await _create_db(interface)
            return
        self._path = path
        registers_blocks = get_current_settings().server.register_blocks_on_start
        self._has_blocks = registers_blocks and take("prefect-with-blocks", _kinds_of_blocks(), path)
        copied = self._has_blocks or take("prefect", prefect.__version__, path)
        await _create_db(interface)
        if not copied:
            keep("prefect", prefect.__version__, path)

    async def register_blocks(self, session: Any) -> None:
        """Replace `run_block_auto_registration`, which nothing but `create` precedes."""
        if self._has_blocks:
            return
        await _register_blocks(session=session)
        if self._path is not None:
            keep("prefect-with-blocks", _kinds_of_blocks(), self._path)


def _kinds_of_blocks() -> str:
    """Return one version for the block types of Prefect and of its installed collections, from their versions."""
    collections = {
        (entry_point.name, entry_point.dist.version)
        for entry_point in entry_points(group="prefect.collections")
        if entry_point.dist
    }
    return f"{prefect.__version__}-{sha256(repr(sorted(collections)).encode()).hexdigest()[:12]}"


def _file_of(url: str) -> Path | None:
    parsed = make_url(url)
    return Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None


def _guard(host: str, port: int) -> None:
    """Put the rules of `Callers` before the served app, outside of its CORS and its API, and bound its requests.

    Prefect creates its app again to send notices, without a network and under another name: that one has no rules.
    """
    create_app, callers = server.create_app, Settings(host).callers(port)

    def guarded(*, final: bool = False, **options: Any) -> Any:
        app = create_app(final=final, **options)
        return OwnCallersOnly(BoundedBody(HeldPolls(app), MOST_BODY_BYTES), callers) if final else app

    server.create_app = guarded  # type: ignore[assignment]
    uvicorn.run = _run  # type: ignore[assignment]


def _run(app: Any, *, host: str, port: int, app_dir: str, **options: Any) -> None:
    """Replace `uvicorn.run` for an app that exists."""
    uvicorn_server = Server(app, host, port, **options)
    uvicorn_server.run()
    if not uvicorn_server.started:
        sys.exit(STARTUP_FAILURE)


if __name__ == "__main__":
    # No other options: some of them make Prefect start its app in separate processes, past the rules above.
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--root", type=Path)
    options = parser.parse_args()
    _guard(options.host, options.port)
    wake_less_often()
    AioSqliteConfiguration.begin_transaction = _begin_to_write  # type: ignore[method-assign]
    automations.run_coro_as_sync = _read_later  # type: ignore[assignment]
    CronSchedule._get_dates_generator = cron_dates  # type: ignore[assignment, method-assign]
    database = _NewDatabase()
    PrefectDBInterface.create_db = lambda self: database.create(self)  # type: ignore[method-assign]
    blocks.run_block_auto_registration = database.register_blocks
    # Its log messages about notices that did not arrive contain the address.
    sys.stdout, sys.stderr = HidingStream(sys.stdout), HidingStream(sys.stderr)
    if options.root is not None:
        end_lost_runs(Layout(options.root).runs)
    sys.argv = ["prefect", "server", "start", "--host", options.host, "--port", str(options.port)]
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
