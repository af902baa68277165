"""Location of a store's leases: PostgreSQL if one is configured, else a SQLite file. The store records it.

<root>/.state/leases.json     {"database": "sqlite"}, or {"database": its URL without password, "store": our id in it}
<root>/.state/leases.sqlite   leases in SQLite

For a root on an object store the file is <url>/leases.json, and PostgreSQL is required: SQLite serves one machine.

All processes that use a store must see the same leases, or two would build one artifact. So the file decides, not the
environment of a process: the first process that opens a store writes it, and a process that cannot reach the database
named there is refused. To move the leases, a person who knows that nothing runs on the store deletes `leases.*`: the
next run chooses again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.errors import ConfigError, Problem, StageError, stage_error
from infra.io.files import sync
from infra.io.json import parse_own_json
from infra.io.s3 import read_object
from infra.io.s3_write import put_if
from infra.io.tables import check as check_table
from infra.io.tables import damaged, in_words, read_state
from infra.leases.postgres import PostgresTable
from infra.leases.sqlite import LOST, SqliteTable
from infra.leases.table import LeaseTable
from infra.servers.databases.database import DATABASE, EXPECTED, SQLITE, Postgres, database, requested_database
from infra.servers.settings import settings_of
from infra.store.layout import Layout

_LOST_PLACE = "when nothing runs on this store, delete the files .state/leases.*: they record builds in progress"


@dataclass(frozen=True)
class LeaseDatabase:
    """database: `sqlite`, or a PostgreSQL URL without password. store: the store's id in that database."""

    database: str
    store: str = ""


def opened(reference: Mapping[str, str]) -> LeaseTable:
    """The table that `LeaseTable.reference` is of."""
    return SqliteTable(Path(reference["sqlite"])) if "sqlite" in reference else PostgresTable.referred(reference)


def table(layout: Layout) -> LeaseTable:
    """Return the leases of a store, which is given a place for them if it has none.

    Raises StageError: `database_unreachable` if that is a PostgreSQL that refuses the connection, `leases_elsewhere`
    if the environment names another place; ConfigError for an invalid URL.
    """
    if layout.url:
        return _table_of_url(layout)
    record, target = _recorded(layout), configured(layout)
    if record is None:
        # Leases that a version without this file left, or holds now, are in SQLite.
        if target is None or _file(layout).exists():
            record = _record_first(layout, LeaseDatabase(SQLITE))
        else:
            postgres_table = PostgresTable.made(target)
            record = _record_first(layout, LeaseDatabase(postgres_table.place, postgres_table.store))
    if record.database != SQLITE:
        return _in_postgres(record)
    if target is not None:
        raise _in_sqlite_already(target)
    return _in_sqlite(layout)


def existing(layout: Layout) -> LeaseTable | None:
    """Return the leases of a store for a reader: nothing is created, and the result is None if there are none yet."""
    record = _recorded(layout)
    if record is not None and record.database != SQLITE:
        return _in_postgres(record)
    return _in_sqlite(layout) if not layout.url and _file(layout).exists() else None


def configured(layout: Layout) -> Postgres | None:
    """Return the PostgreSQL that the environment names, else the one that `up` uses for this store's servers."""
    url = requested_database()
    if url is not None:
        return None if url == SQLITE else Postgres(url)
    return settings_of(layout.root).postgres


def needs_server(layout: Layout) -> bool:
    """Return True if a server has to answer before a lease of this store can be taken.

    Raises ConfigError `leases_need_postgres` for a root on an object store for which no PostgreSQL is named.
    """
    record = _recorded(layout)
    if layout.url and record is None and configured(layout) is None:
        message = f"{layout.url} is a root on an object store: its leases, which prevent duplicate builds,"
        fix = f"set {DATABASE} to a database that all machines reach, {EXPECTED.partition(',')[0]}"
        raise ConfigError(Problem("leases_need_postgres", DATABASE, f"{message} must be in PostgreSQL", fix))
    return configured(layout) is not None or (record is not None and record.database != SQLITE)


def check(layout: Layout) -> None:
    """Raise StageError or ConfigError if a run could take no lease now. Nothing is created."""
    needs_server(layout)
    record, target = _recorded(layout), configured(layout)
    if record is not None and record.database != SQLITE:
        _in_postgres(record).check()
    elif target is not None:
        if record is not None or (not layout.url and _file(layout).exists()):
            raise _in_sqlite_already(target)
        target.connect().close()


def _table_of_url(layout: Layout) -> LeaseTable:
    needs_server(layout)
    record, target = _recorded(layout), configured(layout)
    if record is None:
        assert target is not None
        postgres_table = PostgresTable.made(target)
        put_if(_as_text(LeaseDatabase(postgres_table.place, postgres_table.store)).encode(), _place_url(layout), None)
        record = _recorded(layout)
        assert record is not None
    return _in_postgres(record)


def _in_sqlite(layout: Layout) -> SqliteTable:
    file = _file(layout)
    check_table(file, LOST)
    with in_words(file, LOST):
        return SqliteTable(file)


def _in_sqlite_already(target: Postgres) -> StageError:
    fix = (
        f"when nothing runs on this store, delete the files .state/leases.*; to stay with SQLite, set {DATABASE} to"
        f" {SQLITE}"
    )
    message = f"the leases of this store are in SQLite, but the configured database is {target.public_url}"
    return stage_error("leases_elsewhere", DATABASE, message, fix)


def _in_postgres(record: LeaseDatabase) -> PostgresTable:
    """Open the leases in PostgreSQL. If the environment names another URL, it may be another name of the same database:
    only that database knows the store's id."""
    url = requested_database()
    if url == SQLITE:
        message = f"the leases of this store are in {record.database}, but {DATABASE} is sqlite"
        fix = (
            f"leave {DATABASE} unset, or set it to that database; to go back to SQLite, delete the files"
            " .state/leases.* when nothing runs on this store"
        )
        raise stage_error("leases_elsewhere", DATABASE, message, fix)
    return PostgresTable(Postgres(url) if url else _postgres_of(record), record.store)


def _postgres_of(record: LeaseDatabase) -> Postgres:
    postgres = database(record.database)
    assert postgres is not None
    return postgres


def _file(layout: Layout) -> Path:
    return layout.state / "leases.sqlite"


def _place_file(layout: Layout) -> Path:
    return layout.state / "leases.json"


def _recorded(layout: Layout) -> LeaseDatabase | None:
    path: Path | str
    if layout.url:
        path = _place_url(layout)
        fields = _of_object(path)
    else:
        path = _place_file(layout)
        fields = read_state(path, _LOST_PLACE, None)
    try:
        if fields is not None and not all(isinstance(value, str) for value in dict(fields).values()):
            raise TypeError("expected texts")
        return None if fields is None else LeaseDatabase(**fields)
    except (TypeError, ValueError) as error:
        raise damaged(Path(path), f"not as expected: {error}", _LOST_PLACE) from error


def _place_url(layout: Layout) -> str:
    return f"{layout.url}/leases.json"


def _of_object(url: str) -> Any:
    stored = read_object(url)
    try:
        return parse_own_json(stored[0]) if stored else None
    except ValueError as error:
        raise stage_error("damaged_state", url, f"this object is damaged: {error}", _LOST_PLACE) from error


def _record_first(layout: Layout, record: LeaseDatabase) -> LeaseDatabase:
    """Record where the leases are and return it; if another process was first, return what that process recorded."""
    path = _place_file(layout)
    with in_words(path, _LOST_PLACE):
        hidden = _hidden(layout, record)
        try:
            # Fails if another process was first, on a network file system too; that record holds then.
            with suppress(FileExistsError):
                os.link(hidden, path)
        except OSError:  # a file system without second names
            with suppress(FileExistsError), path.open("x", encoding="utf8") as file:
                file.write(hidden.read_text(encoding="utf8"))
        finally:
            hidden.unlink()
    recorded = _recorded(layout)
    assert recorded is not None
    return recorded


def _hidden(layout: Layout, record: LeaseDatabase) -> Path:
    """A file with what leases.json is to say, on its disk."""
    layout.state.mkdir(parents=True, exist_ok=True)
    hidden = layout.state / f".leases.json.{os.getpid()}.{os.urandom(4).hex()}"
    hidden.write_text(_as_text(record), encoding="utf8")
    sync(hidden)
    return hidden


def _as_text(record: LeaseDatabase) -> str:
    return json.dumps(asdict(record)) + "\n"
