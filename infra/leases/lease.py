"""Leases: if several builders want the same artifact, one builds it; the lease of a dead builder is taken over.

A lease is a row of a table (`infra.leases.table`), in SQLite or PostgreSQL. The row changes atomically, so two builders
cannot both get the lease. On its own machine, a holder keeps the lease until the holder and the processes it started
are gone, whatever the clock says; this includes a stopped builder and a laptop that slept. Another machine can only see
that a holder renews: the holder, and the process that works for it, renew every HEARTBEAT_S, and the lease of a holder
that was silent for LEASE_S may be taken over. A holder that wakes up after that finds its lease gone, ends the work,
and commits nothing.

While the table does not answer, no lease can be taken over: builders continue, and waiting builders keep waiting.
Silence is measured again from the table's next answer, since no holder could renew either.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from infra.leases import table as lease_table
from infra.leases.place import opened
from infra.leases.table import TABLE_ERRORS, Holder, LeaseTable, TableAway
from infra.process.lifetime import end_orphans, signal_group, start_ticks, this_machine

PATIENCE_S = 300.0
"""Seconds that a builder waits for the table's answer when it has to know that it still holds its lease."""


class Lease:
    """A lease that is held; renewed in the background until `release`."""

    def __init__(self, table: LeaseTable, key: str, token: str, taken_from: Holder | None) -> None:
        self.key = key
        self.taken_from = taken_from
        self.lost = threading.Event()
        self._table = table
        self._token = token
        self._group: int | None = None
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"lease {key}", daemon=True)
        self._thread.start()

    def works_in(self, group: int) -> None:
        """Record the process group that does the work, so that no builder takes over while a part of it still runs."""
        self._group = group
        with _ignore_table_errors():  # with the next renewal
            self._table.renew(self.key, self._token, group)

    @property
    def claim(self) -> LeaseClaim:
        return LeaseClaim(self._table.reference(), self.key, self._token)

    def still_held(self) -> bool:
        """Return True if the lease is still ours; for use right before an action that only the holder may take. Raises
        TableAway after PATIENCE_S without an answer."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._table.renew(self.key, self._token)
            except TableAway:
                if time.monotonic() > deadline:
                    raise
            time.sleep(self._table.poll_s)

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        _give_up(self._table, self.key, self._token)

    def _renew(self) -> None:
        _renew(self._table, self.key, self._token, self._released, lambda: self._group)
        if not self._released.is_set():
            self.lost.set()


@dataclass(frozen=True)
class LeaseClaim:
    """Data with which a process that works for a holder renews its lease: the holder may be stopped while the work
    continues. It is for processes on the holder's machine.

    table: its `reference`, which holds no secret.
    """

    table: Mapping[str, str]
    key: str
    token: str

    def hold(self) -> None:
        """Renew the lease in the background, and kill this whole process group once another holder has it."""
        table = opened(self.table)

        def hold() -> None:
            _renew(table, self.key, self.token, threading.Event(), lambda: None)
            signal_group(os.getpgrp(), signal.SIGKILL)

        threading.Thread(target=hold, name="lease", daemon=True).start()


def _renew(table: LeaseTable, key: str, token: str, released: threading.Event, group: Callable[[], int | None]) -> None:
    """Renew a lease every HEARTBEAT_S until it is released or lost. A table that does not answer, or is on a full
    disk, does not lose the lease: the next renewal may succeed."""
    while not released.wait(lease_table.HEARTBEAT_S):
        with _ignore_table_errors():
            if not table.renew(key, token, group()):
                return


def _give_up(table: LeaseTable, key: str, token: str) -> None:
    """Delete a row of ours. A finished build must not fail because of this, so if the table cannot be written, the
    deletion is retried in the background: this process may want the same lease again. A remaining row counts as free
    once this process is gone."""

    def later() -> None:
        while True:
            time.sleep(lease_table.HEARTBEAT_S)
            with _ignore_table_errors():
                table.delete(key, token)
                return

    try:
        table.delete(key, token)
    except TABLE_ERRORS:
        threading.Thread(target=later, name=f"release {key}", daemon=True).start()


def _ignore_table_errors() -> suppress:
    return suppress(*TABLE_ERRORS)


class Leases:
    """The leases of a store: at most one holder per key, `stage/fingerprint`."""

    def __init__(self, table: LeaseTable) -> None:
        self.table = table

    def acquire(
        self,
        key: str,
        *,
        on_wait: Callable[[Holder], None] = lambda holder: None,
        on_away: Callable[[TableAway], None] = lambda error: None,
        stop_if: Callable[[], bool] = lambda: False,
    ) -> Lease | None:
        """Wait until the lease is ours; return None if `stop_if` returned True. `on_wait` is called once per holder,
        `on_away` once if the table does not answer."""
        pid, token, announced, was_unreachable = os.getpid(), uuid.uuid4().hex, "", False
        watch = _Watch()
        while True:
            candidate = Holder(token, this_machine(), pid, start_ticks(pid) or 0, 0, time.time())
            try:
                acquired, holder = self.table.take(
                    key, candidate, lambda current: current.is_dead(watch.silent_s(current))
                )
            except TableAway as error:
                watch.forget()
                acquired, holder = False, None
                if not was_unreachable:
                    on_away(error)
                was_unreachable = True
            if acquired:
                return Lease(self.table, key, token, holder)
            if holder is not None and holder.is_orphaned:
                end_orphans(holder.group)
            if holder is not None and holder.token != announced:
                announced = holder.token
                on_wait(holder)
            if stop_if():
                if was_unreachable:  # it may be ours all the same, and only the answer that said so was lost
                    _give_up(self.table, key, token)
                return None
            time.sleep(self.table.poll_s)

    def check(self) -> None:
        """Raise StageError if no lease could be taken now: `acquire` would wait for the table."""
        self.table.check()

    def seem_dead(self, keys: Collection[str]) -> set[str]:
        """Those of these leases whose holders are gone, or elsewhere and silent: for LEASE_S by the clocks, and for
        WATCHED_S, which it takes to see that, while we watch. A lease that is released is none of them."""
        started, undecided = time.monotonic(), set(keys)
        signs: dict[str, tuple[str, float] | None] = {}
        dead: set[str] = set()
        while undecided:
            rows = dict(self.table.rows())
            watched_s = time.monotonic() - started
            for key in sorted(undecided):
                holder = rows.get(key)
                sign = (holder.token, holder.renewed) if holder else None
                if holder is None or not holder.is_dead() or sign != signs.setdefault(key, sign):
                    undecided.remove(key)
                elif holder.is_here or watched_s > lease_table.WATCHED_S:
                    undecided.remove(key)
                    dead.add(key)
            if undecided:
                time.sleep(self.table.poll_s)
        return dead

    def living(self) -> list[str]:
        """Return the keys of all leases whose holders live."""
        return [key for key, holder in self.table.rows() if not holder.is_dead()]


class _Watch:
    """Time since which one waiter sees the same sign of life of a holder."""

    def __init__(self) -> None:
        self._sign: tuple[str, float] | None = None
        self._since = 0.0

    def silent_s(self, holder: Holder) -> float:
        sign, now = (holder.token, holder.renewed), time.monotonic()
        if sign != self._sign:
            self._sign, self._since = sign, now
        return now - self._since

    def forget(self) -> None:
        """Discard the last sign: no holder could be seen or renew, so the time until now does not count as silence."""
        self._sign = None
