"""Prefect's server, whose transactions on SQLite wait for their turn.

python -m infra.servers.prefect_server --host HOST --port PORT

Prefect begins its transactions as readers. One that reads and then writes fails at once, however long the timeout, when
another wrote in between (SQLITE_BUSY_SNAPSHOT), and the page answers "Service Unavailable". Here each takes the lock
for writing when it begins, and waits for it.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from prefect.server.database.configurations import AioSqliteConfiguration

from infra.secrets import HidingStream

_begin = AioSqliteConfiguration.begin_transaction


@asynccontextmanager
async def _begin_to_write(self: Any, session: Any, with_for_update: bool = False) -> AsyncGenerator[Any, None]:
    async with _begin(self, session, with_for_update=True) as transaction:
        yield transaction


if __name__ == "__main__":
    AioSqliteConfiguration.begin_transaction = _begin_to_write  # type: ignore[method-assign]
    # What it logs of a notice that did not arrive has the address in it.
    sys.stdout, sys.stderr = HidingStream(sys.stdout), HidingStream(sys.stderr)
    sys.argv = ["prefect", "server", "start", *sys.argv[1:]]
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
