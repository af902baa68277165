"""Location of a root's tracking store, and access to it: through its server, or directly on its database."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.servers.settings import settings_of
from infra.servers.state import mlflow_url


def mlflow_folder(root: Path | str) -> Path:
    return Path(root).absolute() / "mlflow"


def artifacts_folder(root: Path | str) -> Path:
    return mlflow_folder(root) / "artifacts"


def database_uri(root: Path | str) -> str:
    """Return the database that `up` was last given; SQLite in the store by default."""
    if postgres := settings_of(root).postgres:
        return postgres.mlflow_uri
    return f"sqlite:///{mlflow_folder(root) / 'mlflow.db'}"


def tracking_uri(root: Path | str) -> str:
    """The server that `up` started, if its process lives; else the database itself. Both are one history."""
    return mlflow_url(root) or database_uri(root)


def database_path(root: Path | str) -> Path | None:
    """Return the SQLite file, if SQLite is used."""
    return mlflow_folder(root) / "mlflow.db" if database_uri(root).startswith("sqlite") else None


@contextmanager
def exclusive(root: Path | str) -> Iterator[None]:
    """Hold a lock with which only one process at a time makes or migrates the database."""
    artifacts_folder(root).mkdir(parents=True, exist_ok=True)
    with open(mlflow_folder(root) / "setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
