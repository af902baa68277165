"""Leases: of several builders that want the same artifact, one builds it; a dead one's lease is taken over.

The lease is a row in a small SQLite file, changed only inside a write transaction, so two builders cannot both get it.
Its holder renews it every HEARTBEAT_S; one that has not been renewed for LEASE_S may be taken over by anyone. On the
holder's own machine there is no need to wait that long: once the holder and the processes it started are gone, so is
its claim.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from infra.process import group_alive, started_at

LEASE_S = 60.0
HEARTBEAT_S = 5.0
POLL_S = 0.25


@dataclass(frozen=True)
class Holder:
    """Who holds a lease. `pid_started` tells a process from a later one with the same number; `group` is the process
    group that does the work, 0 before it starts."""

    token: str
    host: str
    pid: int
    pid_started: float
    group: int
    renewed: float

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_dead(self, now: float) -> bool:
        if now - self.renewed > LEASE_S:
            return True
        if self.host != socket.gethostname():
            return False
        return started_at(self.pid) != self.pid_started and not group_alive(self.group)


class Lease:
    """A lease that is held; renewed in the background until `release`."""

    def __init__(self, leases: Leases, key: str, token: str, taken_from: Holder | None) -> None:
        self.key = key
        self.taken_from = taken_from
        self.lost = threading.Event()
        self._leases = leases
        self._token = token
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"lease {key}", daemon=True)
        self._thread.start()

    def works_in(self, group: int) -> None:
        """Says which process group does the work, so that nobody takes over while a part of it still runs."""
        self._leases.update(self.key, self._token, group=group)

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        self._leases.delete(self.key, self._token)

    def _renew(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            if not self._leases.update(self.key, self._token):
                self.lost.set()
                return


class Leases:
    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(self._connect()) as table, table:
            table.execute(
                "CREATE TABLE IF NOT EXISTS leases (key TEXT PRIMARY KEY, token TEXT, host TEXT, pid INT,"
                " pid_started REAL, work_group INT, renewed REAL)"
            )

    def acquire(
        self,
        key: str,
        *,
        on_wait: Callable[[Holder], None] = lambda holder: None,
        stop_if: Callable[[], bool] = lambda: False,
    ) -> Lease | None:
        """Waits until the lease is ours; None if `stop_if` said to stop waiting. `on_wait` is told once a holder."""
        told = ""
        while True:
            taken, holder = self._try(key)
            if taken is not None:
                return Lease(self, key, taken, holder)
            if holder is not None and holder.token != told:
                told = holder.token
                on_wait(holder)
            if stop_if():
                return None
            time.sleep(POLL_S)

    def holder(self, key: str) -> Holder | None:
        with closing(self._connect()) as table:
            return self._read(table, key)

    def living(self) -> list[str]:
        """The keys of all leases whose holders live."""
        with closing(self._connect()) as table:
            keys = [key for (key,) in table.execute("SELECT key FROM leases ORDER BY key")]
            holders = [(key, self._read(table, key)) for key in keys]
        now = time.time()
        return [key for key, holder in holders if holder is not None and not holder.is_dead(now)]

    def update(self, key: str, token: str, group: int | None = None) -> bool:
        """Renews the lease; False if somebody else has it by now."""
        with closing(self._connect()) as table, table:
            changed = table.execute(
                "UPDATE leases SET renewed = ?, work_group = coalesce(?, work_group) WHERE key = ? AND token = ?",
                (time.time(), group, key, token),
            )
            return changed.rowcount == 1

    def delete(self, key: str, token: str) -> None:
        with closing(self._connect()) as table, table:
            table.execute("DELETE FROM leases WHERE key = ? AND token = ?", (key, token))

    def _try(self, key: str) -> tuple[str | None, Holder | None]:
        """(our token, the dead holder it was taken from) or (None, the living holder)."""
        with closing(self._connect()) as table:
            table.execute("BEGIN IMMEDIATE")
            holder = self._read(table, key)
            if holder is not None and not holder.is_dead(time.time()):
                table.rollback()
                return None, holder
            token = uuid.uuid4().hex
            row = (key, token, socket.gethostname(), os.getpid(), started_at(os.getpid()), 0, time.time())
            table.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            table.commit()
            return token, holder

    @staticmethod
    def _read(table: sqlite3.Connection, key: str) -> Holder | None:
        row = table.execute(
            "SELECT token, host, pid, pid_started, work_group, renewed FROM leases WHERE key = ?", (key,)
        ).fetchone()
        return Holder(*row) if row else None

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=60)
