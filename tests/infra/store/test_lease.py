"""Leases between real processes: one builder at a time, and nobody waits for the dead; in SQLite and in PostgreSQL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from infra.leases import table as lease_table
from infra.leases.lease import Leases
from infra.leases.postgres import PostgresTable
from infra.leases.sqlite import SqliteTable
from infra.leases.table import LEASE_S, Holder, LeaseTable
from infra.process.lifetime import PARENT_FD
from infra.servers.databases.database import Postgres
from tests.support.leases import change_leases
from tests.support.programs.command import REPOSITORY
from tests.support.programs.processes import wait_until

HOLD = """
import json, sys
from pathlib import Path
from infra.leases.lease import Leases
from infra.leases.place import opened
lease = Leases(opened(json.loads(sys.argv[1]))).acquire("sft/1")
print("held", flush=True)
sys.stdin.read()
lease.release()
"""

WITH_A_WORKER = """
import json, subprocess, sys
from infra.leases.lease import Leases
from infra.leases.place import opened
lease = Leases(opened(json.loads(sys.argv[1]))).acquire("sft/1")
worker = subprocess.Popen(["sleep", "100"], start_new_session=True)
lease.works_in(worker.pid)
print(worker.pid, flush=True)
sys.stdin.read()
"""

CLAIMED = """
import json, sys
from infra.leases.lease import LeaseClaim
LeaseClaim(**json.loads(sys.argv[1])).hold()
print("works", flush=True)
sys.stdin.read()
"""

COUNT = """
import json, sys
from pathlib import Path
from infra.leases.lease import Leases
from infra.leases.place import opened
leases, number = Leases(opened(json.loads(sys.argv[1]))), Path(sys.argv[2])
for _ in range(20):
    lease = leases.acquire("number/1")
    value = int(number.read_text())
    number.write_text(str(value + 1))
    lease.release()
"""


def start(code: str, table: LeaseTable, *arguments: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(table.reference()), *map(str, arguments)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture(params=["sqlite", "postgres"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> LeaseTable:
    if request.param == "sqlite":
        return SqliteTable(tmp_path / "leases.sqlite")
    return PostgresTable.made(Postgres(request.getfixturevalue("database")))


@pytest.fixture
def holder(table: LeaseTable) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lease of sft/1."""
    process = start(HOLD, table)
    assert said(process) == "held"
    yield process
    process.kill()
    process.wait()


def test_a_living_holder_is_waited_for_and_named(table: LeaseTable, holder: subprocess.Popen[str]) -> None:
    leases = Leases(table)
    told: list[Holder] = []
    assert leases.living() == ["sft/1"]
    assert leases.acquire("sft/1", on_wait=told.append, stop_if=lambda: True) is None
    assert [item.pid for item in told] == [holder.pid]


def test_the_lease_goes_to_who_waits_once_it_is_released(table: LeaseTable, holder: subprocess.Popen[str]) -> None:
    waiting = threading.Event()
    got: list[Holder | None] = []

    def wait() -> None:
        lease = Leases(table).acquire("sft/1", on_wait=lambda _: waiting.set())
        assert lease is not None
        got.append(lease.taken_from)
        lease.release()

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(30)
    assert holder.stdin is not None
    holder.stdin.close()
    thread.join(30)
    assert got == [None]
    assert Leases(table).living() == []


def test_a_killed_holders_lease_is_taken_over_at_once(table: LeaseTable, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    leases = Leases(table)
    assert leases.living() == []
    lease = leases.acquire("sft/1", stop_if=lambda: True)
    assert lease is not None
    assert lease.taken_from is not None
    assert lease.taken_from.pid == holder.pid
    lease.release()


def test_nobody_takes_over_while_a_part_of_the_work_still_runs(table: LeaseTable) -> None:
    process = start(WITH_A_WORKER, table)
    worker = int(said(process))
    try:
        process.kill()
        process.wait()
        leases = Leases(table)
        assert leases.acquire("sft/1", stop_if=lambda: True) is None
    finally:
        os.killpg(worker, signal.SIGKILL)
    deadline = time.monotonic() + 30
    lease = leases.acquire("sft/1", stop_if=lambda: time.monotonic() > deadline)
    assert lease is not None
    lease.release()


def rewind(table: LeaseTable, seconds: float) -> None:
    """What a clock that jumps ahead makes of a lease, or its holder's sleep."""
    change_leases(table, f"renewed = renewed - {seconds}")


def test_neither_a_clock_nor_a_stop_takes_a_lease_from_who_lives_here(
    table: LeaseTable, holder: subprocess.Popen[str]
) -> None:
    holder.send_signal(signal.SIGSTOP)
    rewind(table, 1000 * LEASE_S)
    leases = Leases(table)
    assert leases.living() == ["sft/1"]
    told: list[Holder] = []
    polls = iter([False, False, True])
    assert leases.acquire("sft/1", on_wait=told.append, stop_if=lambda: next(polls)) is None
    assert [item.pid for item in told] == [holder.pid]


def test_a_stopped_group_whose_starter_was_killed_is_ended_and_taken_over(table: LeaseTable) -> None:
    process = start(
        WITH_A_WORKER.replace("start_new_session=True", f"start_new_session=True, env={{'{PARENT_FD}': '9'}}"), table
    )
    worker = int(said(process))
    os.killpg(worker, signal.SIGSTOP)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    lease = Leases(table).acquire("sft/1", stop_if=lambda: time.monotonic() > deadline)
    assert lease is not None
    lease.release()


def elsewhere(table: LeaseTable, key: str, age_s: float) -> None:
    renewed = time.time() - age_s
    table.take(key, Holder("token", "another-host", 1, 0.0, 0, renewed), lambda holder: True)
    change_leases(table, f"renewed = {renewed}", key)


def test_a_holder_elsewhere_is_dead_once_it_was_seen_not_to_renew(
    table: LeaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_table, "WATCHED_S", 0.0)
    leases = Leases(table)
    elsewhere(table, "old/1", LEASE_S + 1)
    elsewhere(table, "new/1", LEASE_S / 2)
    assert leases.living() == ["new/1"]
    assert leases.acquire("new/1", stop_if=lambda: True) is None
    assert leases.acquire("old/1", stop_if=lambda: True) is None, "one look tells nothing"
    polls = iter([False, False, True])
    lease = leases.acquire("old/1", stop_if=lambda: next(polls))
    assert lease is not None
    lease.release()


def test_a_holder_elsewhere_whose_clock_is_behind_keeps_what_it_renews(
    table: LeaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_table, "WATCHED_S", 0.0)
    ages = iter([1000.0, 999.0, 998.0, 997.0])

    def renewed_again() -> bool:
        age = next(ages, None)
        if age is not None:
            elsewhere(table, "sft/1", age)
        return age is None

    leases = Leases(table)
    renewed_again()
    assert leases.acquire("sft/1", stop_if=renewed_again) is None


def test_a_holder_elsewhere_whose_clock_is_ahead_is_dead_after_as_long(
    table: LeaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_table, "LEASE_S", 0.3)
    leases = Leases(table)
    elsewhere(table, "sft/1", -1000)
    deadline = time.monotonic() + 30
    lease = leases.acquire("sft/1", stop_if=lambda: time.monotonic() > deadline)
    assert lease is not None
    lease.release()


def test_who_works_for_a_stopped_holder_renews_and_ends_once_the_lease_is_lost(
    table: LeaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_table, "HEARTBEAT_S", 3600.0)  # the holder itself is silent
    lease = Leases(table).acquire("sft/1")
    assert lease is not None
    code = "import infra.leases.table as table\ntable.HEARTBEAT_S = 0.05\n" + CLAIMED
    process = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(asdict(lease.claim))],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert said(process) == "works"
        rewind(table, 1000.0)
        wait_until(lambda: (found := table.read("sft/1")) and time.time() - found.renewed < 100)
        assert process.poll() is None
        change_leases(table, "token = 'somebody else'")
        assert process.wait(30) == -signal.SIGKILL
        assert not lease.still_held()
    finally:
        process.kill()
        process.communicate()
        lease.release()


def test_a_number_that_has_another_process_by_now_is_not_taken_for_the_holder(table: LeaseTable) -> None:
    leases = Leases(table)
    lease = leases.acquire("sft/1")
    assert lease is not None
    change_leases(table, "pid_started = pid_started - 1000, work_group = 0")
    assert leases.living() == []
    lease.release()


def test_a_lease_that_was_taken_away_cannot_be_renewed_or_released(table: LeaseTable) -> None:
    leases = Leases(table)
    lease = leases.acquire("sft/1")
    assert lease is not None
    change_leases(table, "token = 'somebody else'")
    assert not table.renew("sft/1", "the old token")
    assert not lease.still_held()
    lease.release()
    assert leases.living() == ["sft/1"]


def test_four_processes_never_hold_one_lease_at_once(table: LeaseTable, tmp_path: Path) -> None:
    number = tmp_path / "number"
    number.write_text("0")
    processes = [start(COUNT, table, number) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert number.read_text() == "80"
    for process in processes:
        process.communicate()
