"""The server of the leases goes away and comes back: builds go on, waiters wait on, nobody is taken for dead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import psycopg2
import pytest

from infra.leases import lease as lease_module
from infra.leases import table as lease_table
from infra.leases.lease import Lease, Leases
from infra.leases.postgres import PostgresTable
from infra.leases.table import Holder, TableAway
from infra.servers.databases.database import Postgres
from tests.support.leases import change_leases
from tests.support.programs.processes import wait_until


class Server:
    """A PostgreSQL whose database lets nobody in while it is away, as one that begins or ends."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._admin = url.rpartition("/")[0] + "/postgres"

    def go(self) -> None:
        self._do("ALTER DATABASE stemma ALLOW_CONNECTIONS false")
        self._do("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'stemma'")

    def come(self) -> None:
        self._do("ALTER DATABASE stemma ALLOW_CONNECTIONS true")

    def _do(self, command: str) -> None:
        with closing(psycopg2.connect(self._admin)) as connection:
            connection.autocommit = True
            connection.cursor().execute(command)


@pytest.fixture
def server(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(lease_table, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(PostgresTable, "poll_s", 0.05)
    running = Server(database)
    yield running
    running.come()


@pytest.fixture
def table(server: Server) -> PostgresTable:
    return PostgresTable.made(Postgres(server.url))


def elsewhere(table: PostgresTable) -> Lease:
    """A living holder as another machine sees it."""
    lease = Leases(table).acquire("sft/1")
    assert lease is not None
    change_leases(table, "host = 'another-host'")
    return lease


def test_an_outage_longer_than_a_lease_takes_nothing_from_who_lives(
    server: Server, table: PostgresTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiter saw no sign for longer than LEASE_S, but nobody could give one; it looks before the holder renews."""
    monkeypatch.setattr(lease_table, "LEASE_S", 8.0)
    monkeypatch.setattr(lease_table, "HEARTBEAT_S", 3.0)
    lease = elsewhere(table)
    away: list[str] = []
    looks = iter(range(1000))
    back = 0.0

    def watched() -> bool:
        """Waits as a builder does: a while with the server, longer than LEASE_S without, and until it saw a sign."""
        nonlocal back
        if next(looks) == 3:
            server.go()
            began = time.monotonic()
            wait_until(lambda: time.monotonic() - began > lease_table.LEASE_S + 0.5)
        elif away and not back:
            server.come()
            back = time.time()
        found = table.read("sft/1") if back else None
        return found is not None and found.renewed > back

    taken = Leases(table).acquire("sft/1", on_away=lambda error: away.append(error.problems[0].code), stop_if=watched)
    assert taken is None and away == ["database_unreachable"]
    assert not lease.lost.is_set() and lease.still_held()
    lease.release()


def test_a_builder_waits_for_the_server_before_it_commits(
    server: Server, table: PostgresTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = elsewhere(table)
    server.go()
    looks = iter([server.come])
    renew = PostgresTable.renew

    def renewed(*arguments: object) -> bool:
        """The real one; the server is back for the second look."""
        try:
            return renew(*arguments)  # type: ignore[arg-type]
        except TableAway:
            for come in looks:
                come()
            raise

    lease._released.set()  # only what the builder itself asks is counted
    lease._thread.join()
    monkeypatch.setattr(PostgresTable, "renew", renewed)
    assert lease.still_held()
    monkeypatch.undo()
    monkeypatch.setattr(lease_module, "PATIENCE_S", 0.2)
    server.go()
    with pytest.raises(TableAway, match="which cannot be reached"):
        lease.still_held()
    assert not lease.lost.is_set()


def test_what_is_released_meanwhile_is_free_once_the_server_is_back(server: Server, table: PostgresTable) -> None:
    """The same process may want it again: it must not wait for itself."""
    lease = elsewhere(table)
    change_leases(table, f"host = '{lease_table.this_machine()}'")
    server.go()
    lease.release()
    server.come()
    deadline = time.monotonic() + 60
    again = Leases(table).acquire("sft/1", stop_if=lambda: time.monotonic() > deadline)
    assert again is not None
    again.release()


def test_a_lease_that_was_taken_though_the_answer_was_lost_is_ours(table: PostgresTable) -> None:
    mine = Holder("token", lease_table.this_machine(), 1, 0.0, 0, time.time())
    assert table.take("sft/1", mine, lambda holder: False) == (True, None)
    assert table.take("sft/1", replace(mine, renewed=mine.renewed + 1), lambda holder: False) == (True, None)
    assert table.take("sft/1", replace(mine, token="another"), lambda holder: False) == (False, mine)


def test_whoever_stops_waiting_during_an_outage_leaves_no_lease_behind(
    server: Server, table: PostgresTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer was lost, and so nobody knows that it holds one."""
    take = PostgresTable.take

    def lost(*arguments: object) -> object:
        take(*arguments)  # type: ignore[arg-type]
        raise TableAway

    monkeypatch.setattr(PostgresTable, "take", lost)
    assert Leases(table).acquire("sft/1", stop_if=lambda: True) is None
    assert table.rows() == []


def test_two_who_find_the_same_dead_holder_do_not_both_take_over(table: PostgresTable) -> None:
    dead, here = Holder("dead", "another-host", 1, 0.0, 0, 0.0), lease_table.this_machine()
    table.take("sft/1", dead, lambda holder: False)
    first = Holder("first", here, 1, 0.0, 0, time.time())
    second = replace(first, token="second")

    def looked(holder: Holder) -> bool:
        """While the second looks, the first takes over."""
        assert table.take("sft/1", first, lambda other: True) == (True, dead)
        return True

    assert table.take("sft/1", second, looked) == (False, None)
    assert table.read("sft/1") == first


def test_a_holder_that_renews_while_it_is_looked_at_keeps_its_lease(table: PostgresTable) -> None:
    silent = Holder("silent", "another-host", 1, 0.0, 0, 0.0)
    table.take("sft/1", silent, lambda holder: False)
    mine = Holder("mine", lease_table.this_machine(), 1, 0.0, 0, time.time())
    assert table.take("sft/1", mine, lambda holder: table.renew("sft/1", "silent")) == (False, None)
    found = table.read("sft/1")
    assert found is not None and found.token == "silent"
