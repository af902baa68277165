"""Leases in a small SQLite file, for a store on a disk of one machine."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from types import UnionType
from typing import Any

from infra.errors import Problem
from infra.io.tables import damaged, is_damaged
from infra.leases.table import Holder, TableAway

_BUSY_S = 60
LOST = (
    "when nothing runs on this store, delete it: it only records the claims of running builds, which prevent "
    "duplicate builds"
)
_TYPES: tuple[type | UnionType, ...] = (str, str, int, int | float, int, int | float)


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
            current = self._read(table, key)
            if current is not None and not is_free(current):
                return False, current
            table.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)", (key, *astuple(mine)))
        return True, current

    def read(self, key: str) -> Holder | None:
        with self._changing() as table:
            return self._read(table, key)

    def rows(self) -> list[tuple[str, Holder]]:
        with self._changing() as table:
            query = "SELECT key, token, host, pid, pid_started, work_group, renewed FROM leases ORDER BY key"
            return [(str(row[0]), self._holder(row[1:])) for row in table.execute(query)]

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

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Connection whose changes are all committed at the end of the block, or none of them. Raises TableAway if
        another process holds the file: a process stopped in the middle of a write does so until it continues or is
        gone."""
        table = sqlite3.connect(self.path, timeout=_BUSY_S)
        try:
            with table:
                yield table
        except sqlite3.DatabaseError as error:
            if is_damaged(error):
                raise damaged(self.path, str(error), LOST) from error
            if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_BUSY:
                raise
            message = f"another process held this file for more than {_BUSY_S} s"
            fix = "end the process that holds it; it may be stopped"
            raise TableAway(Problem("leases_locked", str(self.path), message, fix)) from error
        finally:
            table.close()

    def _read(self, table: sqlite3.Connection, key: str) -> Holder | None:
        row = table.execute(
            "SELECT token, host, pid, pid_started, work_group, renewed FROM leases WHERE key = ?", (key,)
        ).fetchone()
        return self._holder(row) if row else None

    def _holder(self, row: Sequence[Any]) -> Holder:
        """The holder in a row. A cell of SQLite may have any type, whatever its column has."""
        if not all(isinstance(value, kind) for value, kind in zip(row, _TYPES, strict=True)):
            raise damaged(self.path, "a lease is not as expected", LOST)
        return Holder(*row)
