"""Where the tracking store of a root lies, and how to reach it: through its server, or straight on its database."""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from infra.servers.settings import settings_of
from infra.servers.state import mlflow_url


def mlflow_folder(root: Path | str) -> Path:
    return Path(root).absolute() / "mlflow"


def artifacts_folder(root: Path | str) -> Path:
    return mlflow_folder(root) / "artifacts"


def database_uri(root: Path | str) -> str:
    """The database that `up` was last told to use; SQLite in the store by default."""
    if postgres := settings_of(root).postgres:
        return postgres.mlflow_uri
    return f"sqlite:///{mlflow_folder(root) / 'mlflow.db'}"


def tracking_uri(root: Path | str) -> str:
    """The server that `up` started, if its process lives; else the database itself. Both are one history."""
    return mlflow_url(root) or database_uri(root)


def check_database(root: Path | str) -> None:
    """Looks into the SQLite file, if that is what is used.

    Raises sqlite3.DatabaseError, naming the file, where MLflow would try for two minutes before it said so.
    """
    if not database_uri(root).startswith("sqlite"):
        return
    path = mlflow_folder(root) / "mlflow.db"
    try:
        with closing(sqlite3.connect(path, timeout=60)) as connection:
            connection.execute("PRAGMA schema_version")
    except sqlite3.DatabaseError as error:
        raise sqlite3.DatabaseError(f"{path}: {error}") from error


@contextmanager
def exclusive(root: Path | str) -> Iterator[None]:
    """One process at a time makes or migrates the database."""
    artifacts_folder(root).mkdir(parents=True, exist_ok=True)
    with open(mlflow_folder(root) / "setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
