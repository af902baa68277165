"""Empty SQLite databases of Prefect and MLflow with all their tables, kept in ~/.cache/stemma.

The migrations of an empty database take seconds; a copy of the result takes almost none. A copy belongs to one version
of its package. Without a copy, for any reason, the behaviour is the same, only slower.
"""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from infra.io.files import sync

_FAULTS = (OSError, RuntimeError, sqlite3.Error)  # RuntimeError: a user without a home


def take(package: str, version: str, target: Path) -> bool:
    """Copy the kept database to `target`, which does not exist yet; return False if that failed."""
    try:
        _copy(_cache_file(package, version), target)
    except _FAULTS:
        return False
    return True


def keep(package: str, version: str, source: Path) -> None:
    """Keep a copy of an empty database whose tables were just created."""
    try:
        kept = _cache_file(package, version)
        kept.parent.mkdir(parents=True, exist_ok=True)
        _copy(source, kept)
    except _FAULTS:
        return


def _cache_file(package: str, version: str) -> Path:
    return Path.home() / ".cache" / "stemma" / f"{package}-{version}.db"


def _copy(source: Path, target: Path) -> None:
    """Copy a database atomically: `target` is then complete or absent."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".copy-") as folder:
        copy = Path(folder) / target.name
        with (
            closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as source_connection,
            closing(sqlite3.connect(copy)) as copy_connection,
        ):
            source_connection.backup(copy_connection)
            copy_connection.execute("PRAGMA journal_mode = DELETE")  # one file; Prefect's connections switch it back
        sync(copy)
        copy.rename(target)
