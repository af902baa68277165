"""Leases of a store changed behind their holders' backs."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg2

from infra.leases.table import LeaseTable


def change_leases(table: LeaseTable, assignments: str, key: str = "%") -> None:
    """assignments: as in SQL. key: of the leases to change, a pattern as for LIKE."""
    reference = table.reference()
    if "sqlite" in reference:
        with closing(sqlite3.connect(reference["sqlite"])) as connection, connection:
            connection.execute(f"UPDATE leases SET {assignments} WHERE key LIKE ?", (key,))
        return
    with closing(psycopg2.connect(Path(reference["url"]).read_text())) as connection, connection:
        query = f"UPDATE leases.held SET {assignments} WHERE store = %s AND key LIKE %s"
        connection.cursor().execute(query, (reference["store"], key))
