"""MLflow's SQLite database, created and upgraded in a copy that replaces the original by one rename.

MLflow's migrations are not atomic on SQLite: an interrupted one can neither be continued nor repeated. (On PostgreSQL
all of them are one transaction.)
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from infra.errors import StageError, stage_error
from infra.io.files import link_or_copy, sync
from infra.lineage.tracking import database_path, exclusive
from infra.servers.databases.empty import keep, take

COPIES_KEPT = 3
"""Databases as they were before their last upgrades."""
LOCK_TIMEOUT_S = 60.0
_COMPANIONS = ("-journal", "-wal", "-shm")
_PASSING_SQLITE = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL}
_PASSING_SYSTEM = {errno.ENOSPC, errno.EDQUOT, errno.EIO}
_REBUILD = "`stemma down`, then `stemma lineage --rebuild`, which rebuilds it from the artifacts and keeps this file"

log = logging.getLogger("stemma.relay")


def prepare(root: Path | str) -> None:
    """Make the database of a root, or bring it to the installed MLflow's revision; only a look if it is there.

    Killed at any moment, the next call begins again from what was there before. Of several processes one does it and
    the others wait. Before an upgrade the database is kept as `mlflow.db.revision-<revision>.<time>`. One that cannot
    be upgraded and holds no run, as a kill left it while it was made, is set aside for a new one.

    Raises StageError `broken_database` or `newer_database`, with its file and what to do; sqlite3.OperationalError or
    OSError for a lock or a disk (see `passes`).
    """
    path = database_path(root)
    if path is None:
        return
    with exclusive(root):
        revision = _revision(path)
        if path.exists() and revision == _newest_revision():
            return
        temporary = path.with_name(f"{path.name}.unfinished")
        _remove(temporary)
        if not _tables(path):
            _make(temporary)
            _replace_database(temporary, path)
            return
        try:
            _upgrade(path, revision, temporary)
        except StageError:
            raise
        except Exception as error:
            if passes(error):
                raise
            _remove(temporary)
            _answer_broken(path, revision, temporary, error)


def passes(error: BaseException) -> bool:
    """Return True if waiting helps: a locked database, a full disk, an I/O error, a server that is away or too slow."""
    return any(_passes(cause) for cause in _causes(error))


def is_of_the_database(error: BaseException) -> bool:
    """Return True if the whole database is at fault: no message can be delivered until the user repairs it."""
    return any(
        isinstance(cause, sqlite3.OperationalError)
        or (isinstance(cause, StageError) and cause.problems[0].code in ("broken_database", "newer_database"))
        or type(cause) is sqlite3.DatabaseError
        # A server reports any OperationalError of its database so, with its words.
        or getattr(cause, "error_code", "") == "TEMPORARILY_UNAVAILABLE"
        for cause in _causes(error)
    )


def set_aside(path: Path, suffix: str) -> Path:
    """Rename a database and its other files: an old journal would be applied to the next database of that name."""
    target = path.with_name(f"{path.name}.{suffix}")
    for companion in _COMPANIONS:
        if (companion_path := path.with_name(path.name + companion)).exists():
            companion_path.rename(target.with_name(target.name + companion))
    path.rename(target)
    return target


def _causes(error: BaseException | None) -> list[BaseException]:
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes


def _passes(error: BaseException) -> bool:
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)  # absent where Python itself raised it
        return code is not None and code & 0xFF in _PASSING_SQLITE
    if {"ConnectionError", "Timeout"} & _names(error, "requests"):
        return True
    if isinstance(error, OSError):
        return error.errno in _PASSING_SYSTEM
    if getattr(error, "error_code", "") == "TEMPORARILY_UNAVAILABLE":
        message = str(error)
        return "sqlite3." not in message or any(word in message for word in ("is locked", "is full", "I/O error"))
    return "OperationalError" in _names(error, "psycopg2")


def _names(error: BaseException, package: str) -> set[str]:
    """The classes of a package that an error is of, without importing it."""
    return {kind.__name__ for kind in type(error).__mro__ if kind.__module__.split(".")[0] == package}


def _newest_revision() -> str:
    from mlflow.store.db.utils import _get_latest_schema_revision

    return str(_get_latest_schema_revision())


def _revision(path: Path) -> str | None:
    """Return the revision that a database records; None if it records none or does not exist."""
    if "alembic_version" not in _tables(path, but=""):
        return None
    with closing(sqlite3.connect(path, timeout=LOCK_TIMEOUT_S)) as connection:
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return str(row[0]) if row else None


def _tables(path: Path, but: str = "alembic_") -> set[str]:
    """Raise StageError `broken_database` for a file that is no database."""
    if not path.exists():
        return set()
    try:
        with closing(sqlite3.connect(path, timeout=LOCK_TIMEOUT_S)) as connection:
            names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.DatabaseError as error:
        if passes(error):
            raise
        raise stage_error("broken_database", str(path), f"SQLite cannot read it: {error}", _REBUILD) from error
    return {name for name in names if not (but and name.startswith(but))}


def _upgrade(path: Path, revision: str | None, temporary: Path) -> None:
    """Upgrade a copy of the database while writers are locked out, and replace the original with it."""
    with closing(sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, isolation_level=None)) as guard:
        guard.execute("BEGIN IMMEDIATE")
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(temporary)) as copy:
            source.backup(copy)
        _migrate(temporary, revision)
        kept = path.with_name(f"{path.name}.revision-{revision or 'none'}.{time.strftime('%Y%m%d-%H%M%S')}")
        kept.unlink(missing_ok=True)
        link_or_copy(path, kept)
        _replace_database(temporary, path)
    log.info("upgraded %s from revision %s; the former file is %s", path, revision, kept.name)
    for older in _copies(path)[COPIES_KEPT:]:
        older.unlink()


def _copies(path: Path) -> list[Path]:
    """Return the databases from before their upgrades, newest first."""
    return sorted(path.parent.glob(f"{path.name}.revision-*"), key=lambda copy: copy.stat().st_mtime, reverse=True)


def _make(path: Path) -> None:
    """Make a new database with all tables: a copy if one is kept, which takes hundredths of a second, not seconds."""
    from mlflow import __version__

    if take("mlflow", __version__, path) and _revision(path) == _newest_revision():
        return
    _remove(path)
    _migrate(path, None)
    keep("mlflow", __version__, path)


def _migrate(path: Path, revision: str | None) -> None:
    """Make all tables, or bring those of a revision to the newest."""
    import sqlalchemy
    from alembic.util import CommandError
    from mlflow.store.db import utils

    engine = sqlalchemy.create_engine(f"sqlite:///{path}", poolclass=sqlalchemy.pool.NullPool)
    try:
        if revision is None:
            utils._initialize_tables(engine)
        else:
            utils._upgrade_db(engine)
    except CommandError as error:
        raise stage_error(
            "newer_database",
            str(path.with_name(path.name.removesuffix(".unfinished"))),
            f"it is from a version of MLflow that this one cannot read: {error}",
            f"install that version again, or {_REBUILD}",
        ) from error
    finally:
        engine.dispose()


def _answer_broken(path: Path, revision: str | None, temporary: Path, error: Exception) -> None:
    """Replace a broken database without runs by a new one; any other is left for a person to decide."""
    if not _holds_runs(path):
        log.warning("%s was cut while it was made (%s): it is set aside, and a new one made", path, error)
        _make(temporary)
        set_aside(path, f"broken-{time.strftime('%Y%m%d-%H%M%S')}")
        _replace_database(temporary, path)
        return
    reason = str(error).splitlines()[0]
    fix = _REBUILD
    if copies := _copies(path):
        fix = f"put {copies[0].name}, from before its last upgrade, in its place; or {_REBUILD}"
    raise stage_error(
        "broken_database",
        str(path),
        f"an upgrade of its tables was interrupted at revision {revision or 'none'} and cannot continue: {reason}",
        fix,
    ) from error


def _holds_runs(path: Path) -> bool:
    if "runs" not in _tables(path):
        return False
    with closing(sqlite3.connect(path, timeout=LOCK_TIMEOUT_S)) as connection:
        return bool(connection.execute("SELECT EXISTS (SELECT 1 FROM runs)").fetchone()[0])


def _replace_database(temporary: Path, path: Path) -> None:
    # Remove files of an earlier database of this name. An existing database was read just now: a journal still next to
    # it was cut before it counted, and would stay next to the new one.
    for companion in ("-journal",) if path.exists() else _COMPANIONS:
        path.with_name(path.name + companion).unlink(missing_ok=True)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def _remove(path: Path) -> None:
    for name in (path.name, *(path.name + companion for companion in _COMPANIONS)):
        path.with_name(name).unlink(missing_ok=True)
