"""The small files of a store next to its artifacts: errors state what is wrong with a file, and what to do."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from infra.errors import StageError, stage_error
from infra.io.json import read_own_json

_DAMAGED = {
    *(sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_MISMATCH),
    *(sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT),
}
"""SQLITE_ERROR: our statements fail by nothing but tables of another form."""
_UNWRITABLE = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR}
_FULL = {errno.ENOSPC, errno.EDQUOT}


def is_damaged(error: sqlite3.DatabaseError) -> bool:
    """Return True if the file is no SQLite database, a broken one, or one with other tables and columns than ours;
    False for a lock, a full disk and the like."""
    is_undecodable = "Could not decode to UTF-8" in str(error)  # an error of Python's, without a code
    return _code(error) in _DAMAGED or is_undecodable


def cannot_write(error: sqlite3.DatabaseError) -> bool:
    """Return True if there is no space or no permission to write the file."""
    return _code(error) in {*_UNWRITABLE, sqlite3.SQLITE_FULL}


@contextmanager
def in_words(path: Path, lost: str) -> Iterator[None]:
    """Errors of a table as StageError: `damaged_state` with what is `lost` by deleting it, `unwritable`,
    `disk_full`."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if is_damaged(error):
            raise damaged(path, str(error), lost) from error
        if cannot_write(error):
            number = errno.ENOSPC if _code(error) == sqlite3.SQLITE_FULL else errno.EIO
            raise unwritable(OSError(number, str(error)), path) from error
        raise
    except OSError as error:
        raise unwritable(error, path) from error


def check(path: Path, lost: str) -> None:
    """Read a whole table. Raises StageError `damaged_state`; a file that is not there is none."""
    if path.exists():
        with in_words(path, lost):
            connection = sqlite3.connect(path, timeout=60)
            try:
                result = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            finally:
                connection.close()
        if result != "ok":
            raise damaged(path, str(result), lost)


def damaged(path: Path | str, reason: str, lost: str) -> StageError:
    """lost: what to do, and what is lost by it."""
    return stage_error("damaged_state", str(path), f"this file is damaged: {reason}", lost)


def read_state(path: Path, lost: str, otherwise: Any) -> Any:
    """Return the content of a JSON file, `otherwise` if there is none. Raises StageError `damaged_state`."""
    try:
        return read_own_json(path)
    except FileNotFoundError:
        return otherwise
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error), lost) from error


def set_aside(path: Path) -> None:
    """Rename a damaged table, so that a new one takes its place."""
    damaged_path = path.with_name(f"{path.name}.damaged-{os.getpid()}")
    for ending in ("-journal", "-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)
    with suppress(FileNotFoundError):  # another process was first
        path.replace(damaged_path)


def unwritable(error: OSError, path: Path) -> StageError:
    """Return the error that a user should read if a file of the store cannot be written."""
    if error.errno in _FULL:
        return stage_error(
            "disk_full", str(path), "the disk is full: this file could not be written", "free some space and run again"
        )
    reason = error.strerror or str(error)
    return stage_error(
        "unwritable",
        str(path),
        f"cannot be written: {reason}",
        "make it writable for this user, or choose another --root",
    )


def _code(error: sqlite3.DatabaseError) -> int:
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF
