"""A relay under test: a real process, forked from a server of the test session that has imported MLflow.

That server forks what else needs MLflow, too."""

from __future__ import annotations

import os
import signal
import sys
from functools import cache
from pathlib import Path

from infra.lineage import migrations
from infra.process.lifetime import die_with_parent
from infra.servers.environment import server_environ
from tests.support.programs.command import REPOSITORY, session_folder
from tests.support.programs.forked import SessionServer
from tests.support.programs.forked_call import ForkedCall

_IMPORTS = ["infra.lineage.relay", "infra.lineage.delivery", "mlflow.store.tracking.sqlalchemy_store"]


@cache
def _server() -> SessionServer:
    return SessionServer(server_environ({}), session_folder())


@cache
def _line() -> tuple[int, int]:
    """A pipe that breaks with the test worker."""
    return os.pipe()


class RelayProcess:
    """It dies with the test worker.

    lock_timeout_s: how long it waits for a database that somebody else has locked."""

    def __init__(self, root: Path, mode: str = "--follow", lock_timeout_s: float = migrations.LOCK_TIMEOUT_S) -> None:
        self.log = root.with_name(f"{root.name}.relay.log")  # a store holds no other files
        arguments = [__name__, str(root), mode, str(lock_timeout_s)]
        with open(self.log, "ab") as output:
            self.process = _server().start(_IMPORTS, arguments, REPOSITORY, output.fileno(), _line()[0], lambda: False)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def make_store(root: Path) -> None:
    """A store whose MLflow database is new, made by a process that is forked from that server."""
    call = ForkedCall(_server(), _IMPORTS, _make_store, root)
    try:
        assert call.wait() == 0
    finally:
        call.kill()


def _make_store(root: Path) -> None:
    from infra.lineage.delivery import Delivery
    from infra.lineage.ledger import Ledger
    from infra.lineage.tracking import database_uri

    Delivery(root, database_uri(root), Ledger(root))


def main(root: str, mode: str, lock_timeout_s: str) -> int:
    """The forked process."""
    die_with_parent()
    from infra.lineage import relay

    migrations.LOCK_TIMEOUT_S = float(lock_timeout_s)
    sys.argv = ["infra.lineage.relay", root, mode]
    relay.main()
    return 0
