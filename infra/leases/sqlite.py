"""Leases in a small SQLite file, for a store on a disk of one machine."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path

from infra.errors import Problem
from infra.leases.table import Holder, TableAway, TableMoved

_IN_USE, _MOVED = 0, 1
"""Values of SQLite's `user_version`: whether leases are still here. Each transaction that takes one reads it."""
_BUSY_S = 60


class SqliteTable:
    poll_s = 0.25

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._changing() as table:
            table.execute(
                "CREATE TABLE IF NOT EXISTS leases (key TEXT PRIMARY KEY, token TEXT, host TEXT, pid INT,"
                " pid_started REAL, work_group INT, renewed REAL)"
            )

    def take(self, key: str, mine: Holder, is_free: Callable[[Holder], bool]) -> tuple[bool, Holder | None]:
        with self._changing() as table:
            table.execute("BEGIN IMMEDIATE")
            self._refuse_if_moved(table)
            current = _read(table, key)
            if current is not None and not is_free(current):
                return False, current
            table.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)", (key, *astuple(mine)))
        return True, current

    def read(self, key: str) -> Holder | None:
        with self._changing() as table:
            return _read(table, key)

    def rows(self) -> list[tuple[str, Holder]]:
        with self._changing() as table:
            return _rows(table)

    def renew(self, key: str, token: str, group: int | None = None) -> bool:
        with self._changing() as table:
            changed = table.execute(
                "UPDATE leases SET renewed = ?, work_group = coalesce(?, work_group) WHERE key = ? AND token = ?",
                (time.time(), group, key, token),
            )
            return changed.rowcount == 1

    def delete(self, key: str, token: str) -> None:
        with self._changing() as table:
            table.execute("DELETE FROM leases WHERE key = ? AND token = ?", (key, token))

    def check(self) -> None:
        """It was there when it was opened."""

    def reference(self) -> Mapping[str, str]:
        return {"sqlite": str(self.path)}

    def leave(self, move: Callable[[list[tuple[str, Holder]]], bool]) -> None:
        """Give the leases up for another table, unless that was done before.

        move: called with all leases, which cannot change meanwhile; copies them there and returns True if it did. From
        then on this table holds no leases, and none can be taken here. If it returns False or raises, nothing changes.
        """
        with self._changing() as table:
            table.execute("BEGIN IMMEDIATE")
            if self._is_here(table) and move(_rows(table)):
                table.execute("DELETE FROM leases")
                table.execute(f"PRAGMA user_version = {_MOVED}")

    def _is_here(self, table: sqlite3.Connection) -> bool:
        return bool(table.execute("PRAGMA user_version").fetchone()[0] == _IN_USE)

    def _refuse_if_moved(self, table: sqlite3.Connection) -> None:
        if not self._is_here(table):
            message = "the leases of this store went to a PostgreSQL database while this process worked with this file"
            raise TableMoved(Problem("leases_elsewhere", str(self.path), message, "run again"))

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Connection whose changes are all committed at the end of the block, or none of them. Raises TableAway if
        another process holds the file: a process stopped in the middle of a write does so until it continues or is
        gone."""
        table = sqlite3.connect(self.path, timeout=_BUSY_S)
        try:
            with table:
                yield table
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            message = f"another process held this file for more than {_BUSY_S} s"
            fix = "end the process that holds it; it may be stopped"
            raise TableAway(Problem("leases_locked", str(self.path), message, fix)) from error
        finally:
            table.close()


def _read(table: sqlite3.Connection, key: str) -> Holder | None:
    row = table.execute(
        "SELECT token, host, pid, pid_started, work_group, renewed FROM leases WHERE key = ?", (key,)
    ).fetchone()
    return Holder(*row) if row else None


def _rows(table: sqlite3.Connection) -> list[tuple[str, Holder]]:
    query = "SELECT key, token, host, pid, pid_started, work_group, renewed FROM leases ORDER BY key"
    return [(row[0], Holder(*row[1:])) for row in table.execute(query)]
