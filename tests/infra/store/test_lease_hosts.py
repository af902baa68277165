"""Two machines, one shared folder, leases in PostgreSQL: one builds, and a lost or cut off builder is taken over from.

Each machine is a network namespace with processes and a name of its own, so that neither can look after the other's.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs.command import environment
from tests.support.programs.processes import wait_until
from tests.support.services.namespaces import Network, network
from tests.support.services.postgres import postgres

pytestmark = pytest.mark.cluster

BUILD = """
import os, sys, time
from pathlib import Path
from infra.leases import table as lease_table
from infra.store.store import Store
from tests.support.artifacts import make_artifact

root, go, short = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
if short:
    lease_table.LEASE_S, lease_table.WATCHED_S, lease_table.HEARTBEAT_S = short, short / 2, short / 20
store = Store(root)
store.leases.check()

def say(word):
    print(word, flush=True)

say("ready")
lease = store.leases.acquire("clean/1", on_wait=lambda holder: say(f"waits for {holder}"))
if lease.taken_from is not None:
    say(f"took over from {lease.taken_from}")
if list(store.manifests("clean")):
    say("reused")
else:
    say("builds")
    while not go.exists() and not lease.lost.is_set():
        time.sleep(0.02)
    if lease.still_held():
        make_artifact(store, "clean", {"a": os.uname().nodename})
        say("built")
    else:
        say("lost its lease")
lease.release()
"""


class Machine:
    """A builder on a host, and what it says."""

    def __init__(self, hosts: Network, host: str, url: str, folder: Path, short: float = 0.0) -> None:
        self.host = host
        self.go = folder / f"go.{host}"
        arguments = [str(folder / "store"), str(self.go), str(short)]
        self._said = folder / f"said.{host}"
        with self._said.open("w") as output:
            self._process = subprocess.Popen(
                [*hosts.machine(host), sys.executable, "-c", BUILD, *arguments],
                env=environment(STEMMA_DATABASE_URL=url),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    def wait_for(self, *words: str) -> str:
        """The first of these that it says."""

        def heard() -> str | None:
            assert "Traceback" not in self.said, self.said
            return next((word for word in words if word in self.said), None)

        return str(wait_until(heard))

    def ended(self) -> int:
        return self._process.wait(120)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    with network(3) as made:
        yield made


@pytest.fixture(scope="module")
def database(hosts: Network) -> Iterator[str]:
    """On the third host."""
    with postgres(on=(hosts, hosts.hosts[2])) as url:
        yield url


def started(hosts: Network, database: str, folder: Path, short: float = 0.0) -> tuple[Machine, Machine]:
    """Two machines that want the same artifact: the one that builds it, and the one that waits."""
    both = [Machine(hosts, host, database, folder, short) for host in hosts.hosts[:2]]
    builder, waiter = sorted(both, key=lambda one: one.wait_for("builds", "waits for") != "builds")
    waiter.wait_for(f"waits for process 1 on host-{builder.host}")
    assert "builds" not in waiter.said
    return builder, waiter


def artifacts(folder: Path) -> list[str]:
    return [path.read_text() for path in (folder / "store" / "clean").glob("*/a")]


def test_of_two_machines_one_builds_and_the_other_reuses(hosts: Network, database: str, tmp_path: Path) -> None:
    builder, waiter = started(hosts, database, tmp_path)
    builder.go.touch()
    assert (builder.ended(), waiter.ended()) == (0, 0), (builder.said, waiter.said)
    assert builder.said.split("\n")[-2] == "built" and waiter.said.split("\n")[-2] == "reused"
    assert "took over" not in waiter.said and artifacts(tmp_path) == [f"host-{builder.host}"]


def test_what_a_lost_machine_was_building_is_built_by_the_other(hosts: Network, database: str, tmp_path: Path) -> None:
    builder, waiter = started(hosts, database, tmp_path, short=8.0)
    hosts.lose(builder.host)
    try:
        waiter.go.touch()
        assert waiter.ended() == 0, waiter.said
        builder.ended()
    finally:
        hosts.heal(builder.host)
    assert f"took over from process 1 on host-{builder.host}" in waiter.said and "built" not in builder.said
    assert artifacts(tmp_path) == [f"host-{waiter.host}"]


def test_a_machine_that_is_cut_off_and_comes_back_commits_nothing(
    hosts: Network, database: str, tmp_path: Path
) -> None:
    builder, waiter = started(hosts, database, tmp_path, short=8.0)
    hosts.cut(builder.host)
    try:
        waiter.wait_for("took over")
        builder.go.touch()  # it is done, and has to know whether it may commit
        waiter.go.touch()
        assert waiter.ended() == 0, waiter.said
        assert "lost" not in builder.said and "built" not in builder.said, "nobody told it"
    finally:
        hosts.heal(builder.host)
    assert builder.ended() == 0, builder.said
    assert builder.said.split("\n")[-2] == "lost its lease"
    assert artifacts(tmp_path) == [f"host-{waiter.host}"]
