"""Leases: of several builders that want the same artifact, one builds it; a dead one's lease is taken over.

The lease is a row in a small SQLite file, changed only inside a write transaction, so two builders cannot both get it.
On the holder's own machine it keeps it until it and the processes it started are gone, whatever the clock says: so does
a stopped builder, or a laptop that slept. From another machine all that can be seen is that a holder renews: it does so
every HEARTBEAT_S, as does the process that works for it, and one that was silent for LEASE_S may be taken over. Whoever
wakes up after that finds its lease gone, ends the work, and commits nothing.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from infra.process import end_orphans, group_alive, signal_group, start_ticks, this_machine

LEASE_S = 60.0
HEARTBEAT_S = 5.0
WATCHED_S = 3 * HEARTBEAT_S
"""So long a waiter itself must see that a holder elsewhere is silent: clocks of two machines need not agree."""
POLL_S = 0.25


@dataclass(frozen=True)
class Holder:
    """Who holds a lease.

    host: `infra.process.this_machine` of the holder. pid_started: in ticks since that machine started, which tells a
    process from a later one with the same number. group: the process group that does the work, 0 before it starts.
    renewed: Unix time, by the holder's clock.
    """

    token: str
    host: str
    pid: int
    pid_started: float
    group: int
    renewed: float

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.partition(' ')[0]}"

    @property
    def is_here(self) -> bool:
        return self.host == this_machine()

    def is_dead(self, silent_s: float | None = None) -> bool:
        """silent_s: for how long the asker itself has seen it not renew; without, the clocks have to do."""
        if self.is_here:
            return self.is_orphaned and not group_alive(self.group)
        age_s = time.time() - self.renewed
        if silent_s is None:
            return age_s > LEASE_S
        return silent_s > LEASE_S or (age_s > LEASE_S and silent_s > WATCHED_S)

    @property
    def is_orphaned(self) -> bool:
        """Whether the holder itself is gone, on this machine; what it started may still run."""
        return self.is_here and start_ticks(self.pid) != self.pid_started


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

    @property
    def claim(self) -> Claim:
        return Claim(str(self._leases.path), self.key, self._token)

    def still_held(self) -> bool:
        """Asks, right before something that only the holder may do."""
        return self._leases.update(self.key, self._token)

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        # What was built is not to fail by this: a row that stays is nobody's once this process is gone.
        with suppress(sqlite3.OperationalError):
            self._leases.delete(self.key, self._token)

    def _renew(self) -> None:
        _renew(self._leases, self.key, self._token, self._released)
        if not self._released.is_set():
            self.lost.set()


@dataclass(frozen=True)
class Claim:
    """What a process that works for a holder needs to renew its lease: the holder may be stopped while the work goes
    on."""

    leases: str
    key: str
    token: str

    def hold(self) -> None:
        """Renews it in the background, and ends this whole process group once somebody else has it."""

        def hold() -> None:
            _renew(Leases(Path(self.leases)), self.key, self.token, threading.Event())
            signal_group(os.getpgrp(), signal.SIGKILL)

        threading.Thread(target=hold, name="lease", daemon=True).start()


def _renew(leases: Leases, key: str, token: str, released: threading.Event) -> None:
    """Renews a lease every HEARTBEAT_S until it is released or lost. A table that is locked, or on a full disk, is no
    loss: what was not written this time is written the next."""
    while not released.wait(HEARTBEAT_S):
        try:
            if not leases.update(key, token):
                return
        except sqlite3.OperationalError:
            continue


class Leases:
    def __init__(self, path: Path) -> None:
        self.path = path
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
        message = ""
        watch = _Watch()
        while True:
            try:
                taken, holder = self._try(key, watch)
            except sqlite3.OperationalError as error:
                # Whoever was stopped in the middle of a write holds the table until it goes on, or is gone.
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    raise
                taken, holder = None, None
            if taken is not None:
                return Lease(self, key, taken, holder)
            if holder is not None and holder.is_orphaned:
                end_orphans(holder.group)
            if holder is not None and holder.token != message:
                message = holder.token
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
        return [key for key, holder in holders if holder is not None and not holder.is_dead()]

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

    def _try(self, key: str, watch: _Watch) -> tuple[str | None, Holder | None]:
        """(our token, the dead holder it was taken from) or (None, the living holder)."""
        with closing(self._connect()) as table:
            table.execute("BEGIN IMMEDIATE")
            holder = self._read(table, key)
            if holder is not None and not holder.is_dead(watch.silent_s(holder)):
                table.rollback()
                return None, holder
            token = uuid.uuid4().hex
            row = (key, token, this_machine(), os.getpid(), start_ticks(os.getpid()), 0, time.time())
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
        return sqlite3.connect(self.path, timeout=60)


class _Watch:
    """Since when one waiter sees the same sign of life of a holder."""

    def __init__(self) -> None:
        self._sign: tuple[str, float] | None = None
        self._since = 0.0

    def silent_s(self, holder: Holder) -> float:
        sign, now = (holder.token, holder.renewed), time.monotonic()
        if sign != self._sign:
            self._sign, self._since = sign, now
        return now - self._since
