"""Leases in PostgreSQL, for a store on a folder that several machines share, where SQLite's locks may not hold.

    leases.stores (id)                                              the stores whose leases are in this database
    leases.held   (store, key, token, host, pid, pid_started, work_group, renewed)

Each change is a single statement, so that none is incomplete and no lock outlives it, even if its process dies.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from infra.errors import StageError, stage_error
from infra.leases.table import Holder, TableAway
from infra.servers.databases.database import DATABASE, Postgres

# Not named after ourselves: a user `stemma` would have it on the search path of every program.
_MAKE = """
    SELECT pg_advisory_xact_lock(7814623905);
    CREATE SCHEMA IF NOT EXISTS leases;
    CREATE TABLE IF NOT EXISTS leases.stores (id text PRIMARY KEY, made timestamptz NOT NULL DEFAULT now());
    CREATE TABLE IF NOT EXISTS leases.held (
        store text NOT NULL REFERENCES leases.stores (id), key text NOT NULL, token text NOT NULL, host text NOT NULL,
        pid bigint NOT NULL, pid_started double precision NOT NULL, work_group bigint NOT NULL,
        renewed double precision NOT NULL, PRIMARY KEY (store, key))
"""
_COLUMNS = "token, host, pid, pid_started, work_group, renewed"
_ANSWER_S = 10
_OPTIONS = {
    # With HEARTBEAT_S less than WATCHED_S: once a server is back, holders renew before a waiter takes them for dead.
    "connect_timeout": 4,
    # A cut connection is noticed before anybody takes our lease over.
    "tcp_user_timeout": _ANSWER_S * 1000,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    # Times come back as exactly as they were written, whatever the server's settings.
    "options": f"-c statement_timeout={_ANSWER_S}s -c extra_float_digits=1",
    "application_name": "stemma leases",
}


class PostgresTable:
    """The leases of one store. A connection lasts for one call: a process that waits for hours holds none.

    store: its id in the database.
    """

    poll_s = 1.0

    def __init__(self, postgres: Postgres, store: str) -> None:
        self._postgres = postgres
        self.store = store

    @classmethod
    def made(cls, postgres: Postgres) -> PostgresTable:
        """Return a table for a store that has none in this database yet. Raises StageError."""
        table = cls(postgres, uuid.uuid4().hex)
        with table._cursor() as cursor:
            cursor.execute("SELECT to_regclass('leases.held')")
            if cursor.fetchone()[0] is None:  # who may not make a schema may still use one
                cursor.execute(_MAKE)
            cursor.execute("INSERT INTO leases.stores (id) VALUES (%s)", (table.store,))
        return table

    @property
    def place(self) -> str:
        """The database's URL without a password."""
        return self._postgres.public_url

    def take(self, key: str, mine: Holder, is_free: Callable[[Holder], bool]) -> tuple[bool, Holder | None]:
        row = (*astuple(mine), self.store, key)
        with self._cursor() as cursor:
            current = self._read(cursor, key)
            if current is not None and current.token == mine.token:
                return True, None  # it was ours already, and the answer that said so was lost
            if current is not None and not is_free(current):
                return False, current
            if current is None:
                cursor.execute(
                    f"INSERT INTO leases.held ({_COLUMNS}, store, key) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)"
                    " ON CONFLICT DO NOTHING",
                    row,
                )
            else:
                # Only if it has neither changed hands nor been renewed since.
                cursor.execute(
                    f"UPDATE leases.held SET ({_COLUMNS}) = (%s, %s, %s, %s, %s, %s)"
                    " WHERE store = %s AND key = %s AND token = %s AND renewed = %s",
                    (*row, current.token, current.renewed),
                )
            return (True, current) if cursor.rowcount == 1 else (False, None)

    def read(self, key: str) -> Holder | None:
        with self._cursor() as cursor:
            return self._read(cursor, key)

    def rows(self) -> list[tuple[str, Holder]]:
        with self._cursor() as cursor:
            self._check(cursor)  # a store that is unknown there would look like one without leases
            cursor.execute(f"SELECT key, {_COLUMNS} FROM leases.held WHERE store = %s ORDER BY key", (self.store,))
            return [(row[0], Holder(*row[1:])) for row in cursor.fetchall()]

    def renew(self, key: str, token: str, group: int | None = None) -> bool:
        with self._cursor() as cursor:
            cursor.execute(
                "UPDATE leases.held SET renewed = %s, work_group = coalesce(%s, work_group)"
                " WHERE store = %s AND key = %s AND token = %s",
                (time.time(), group, self.store, key, token),
            )
            return bool(cursor.rowcount == 1)

    def delete(self, key: str, token: str) -> None:
        with self._cursor() as cursor:
            cursor.execute(
                "DELETE FROM leases.held WHERE store = %s AND key = %s AND token = %s", (self.store, key, token)
            )

    def check(self) -> None:
        with self._cursor() as cursor:
            self._check(cursor)

    def reference(self) -> Mapping[str, str]:
        return {"postgres": self.place, "store": self.store, "url": self._url_file}

    @classmethod
    def referred(cls, reference: Mapping[str, str]) -> PostgresTable:
        """The table that `reference` is of. Where its URL cannot be read, libpq finds a password itself, or none."""
        try:
            url = Path(reference["url"]).read_text()
        except OSError:
            url = reference["postgres"]
        return cls(Postgres(url), reference["store"])

    @property
    def _url_file(self) -> str:
        """In-memory file with the whole URL, only for processes of this user: they read it by this name while this
        process lives. The environment of stages does not hold the URL, since every process that they start inherits it.
        """
        return f"/proc/{os.getpid()}/fd/{self._url_memory.fileno()}"

    @cached_property
    def _url_memory(self) -> IO[bytes]:
        file = os.fdopen(os.memfd_create("leases"), "wb")
        os.fchmod(file.fileno(), 0o600)
        file.write(self._postgres.url.encode())
        file.flush()
        return file

    def _read(self, cursor: Any, key: str) -> Holder | None:
        cursor.execute(f"SELECT {_COLUMNS} FROM leases.held WHERE store = %s AND key = %s", (self.store, key))
        row = cursor.fetchone()
        return Holder(*row) if row else None

    def _check(self, cursor: Any) -> None:
        cursor.execute("SELECT FROM leases.stores WHERE id = %s", (self.store,))
        if cursor.rowcount != 1:
            raise self._leases_elsewhere()

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        """Yield a cursor that runs each statement as one transaction. Raises TableAway if the server does not answer,
        and StageError `leases_elsewhere` if it does not know this store."""
        import psycopg2
        from psycopg2 import errors

        try:
            connection = self._postgres.connect(**_OPTIONS)
        except StageError as error:
            (problem,) = error.problems
            message = f"the leases of this store are in this database, which cannot be reached: {problem.message}"
            fix = f"check that PostgreSQL is running and that {DATABASE} is the same for all users of this store"
            raise TableAway(replace(problem, message=message, fix=fix)) from None
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                yield cursor
        except (errors.ForeignKeyViolation, errors.UndefinedTable, errors.InvalidSchemaName):
            raise self._leases_elsewhere() from None
        except (psycopg2.OperationalError, psycopg2.InterfaceError, psycopg2.InternalError) as error:
            # Among others: it shuts down, begins to, or is a copy that may not be written until it takes over.
            raise TableAway(*self._refused("database_unreachable", error, "is PostgreSQL up?").problems) from None
        except psycopg2.Error as error:
            fix = f"grant the user of {DATABASE} the right to create the schema `leases` and use its tables"
            raise self._refused("database_refused", error, fix) from None
        finally:
            connection.close()

    def _leases_elsewhere(self) -> StageError:
        message = "expected the leases of this store in this database, which does not contain them"
        fix = (
            f"set {DATABASE} to the database that .state/leases.json of the store names; if that one is gone, delete"
            " the files .state/leases.* when nothing runs on this store"
        )
        return stage_error("leases_elsewhere", self.place, message, fix)

    def _refused(self, code: str, error: Exception, fix: str) -> StageError:
        return stage_error(code, self.place, " ".join(str(error).split()), fix)
