"""Interface of the table of leases, which `infra.leases.lease` uses for any database."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from infra.errors import StageError
from infra.process.lifetime import group_alive, start_ticks, this_machine

LEASE_S = 60.0
HEARTBEAT_S = 5.0
WATCHED_S = 3 * HEARTBEAT_S
"""Seconds for which a waiter itself must see that a holder elsewhere is silent: clocks of two machines may differ."""


@dataclass(frozen=True)
class Holder:
    """The holder of a lease.

    host: `infra.process.lifetime.this_machine` of the holder. pid_started: in ticks since that machine started, which
    distinguishes a process from a later one with the same number. group: the process group that does the work, 0
    before it starts. renewed: Unix time, by the holder's clock.
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
        """True if the holder was on this machine and is gone; processes that it started may still run."""
        return self.is_here and start_ticks(self.pid) != self.pid_started


class TableAway(StageError):
    """The table does not answer now, and may later: locked by another process, its server down or out of reach."""


TABLE_ERRORS = (StageError, sqlite3.OperationalError)
"""Exceptions of a table that cannot be read or written, permanently or not."""


class LeaseTable(Protocol):
    """Table with at most one row per key. Each method is one transaction or none, and raises TableAway."""

    poll_s: float
    """Seconds between two looks while waiting for a lease."""

    def take(self, key: str, mine: Holder, is_free: Callable[[Holder], bool]) -> tuple[bool, Holder | None]:
        """Make `mine` the holder if there is none, or if `is_free` returns True for the current holder.

        Returns (True, the replaced holder, if any) or (False, the holder; None if it changed while we looked)."""

    def read(self, key: str) -> Holder | None: ...

    def rows(self) -> list[tuple[str, Holder]]:
        """Return all leases by key."""

    def renew(self, key: str, token: str, group: int | None = None) -> bool:
        """Record that the holder with this token lives, and its process group. Return False if it no longer holds the
        lease."""

    def delete(self, key: str, token: str) -> None: ...

    def check(self) -> None:
        """Raise StageError if no lease could be taken now."""

    def reference(self) -> Mapping[str, str]:
        """Return what a process of this machine needs to open the same table (`infra.leases.place.opened`); it holds
        no secret."""
