"""Empty SQLite databases of Prefect and MLflow with all their tables, kept in ~/.cache/stemma.

Their migrations take seconds of an empty database, a copy of the outcome none. A copy belongs to one version of its
package. Without one, whatever the reason, everything is as it would be without this: it is only slower.
"""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from infra.io.files import sync

_FAULTS = (OSError, RuntimeError, sqlite3.Error)  # RuntimeError: a user without a home


def take(package: str, version: str, target: Path) -> bool:
    """Puts a copy of the one that is kept at `target`, which is not there yet; False where that did not work."""
    try:
        _copy(_kept(package, version), target)
    except _FAULTS:
        return False
    return True


def keep(package: str, version: str, source: Path) -> None:
    """Keeps a copy of an empty database whose tables were made just now."""
    try:
        kept = _kept(package, version)
        kept.parent.mkdir(parents=True, exist_ok=True)
        _copy(source, kept)
    except _FAULTS:
        return


def _kept(package: str, version: str) -> Path:
    return Path.home() / ".cache" / "stemma" / f"{package}-{version}.db"


def _copy(source: Path, target: Path) -> None:
    """There is a whole database under the name of the target afterwards, or none."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".copy-") as folder:
        copy = Path(folder) / target.name
        with (
            closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as there,
            closing(sqlite3.connect(copy)) as here,
        ):
            there.backup(here)
            here.execute("PRAGMA journal_mode = DELETE")  # one file; Prefect's connections turn it back
        sync(copy)
        copy.rename(target)
