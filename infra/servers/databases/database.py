"""Databases of Prefect and MLflow: SQLite in the store, or PostgreSQL with a schema for each."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from infra.errors import ConfigError, Problem, stage_error

DATABASE = "STEMMA_DATABASE_URL"
SQLITE = "sqlite"
EXPECTED = "postgresql://USER:PASSWORD@HOST:5432/NAME, or sqlite, was expected"
PREFECT_SCHEMA = "prefect"
MLFLOW_SCHEMA = "mlflow"
CONNECT_TIMEOUT_S = 10


@dataclass(frozen=True)
class Postgres:
    """One PostgreSQL database. url: with its password, unless libpq finds the password elsewhere (PGPASSFILE)."""

    url: str

    def __repr__(self) -> str:
        return f"Postgres({self.public_url!r})"

    @property
    def public_url(self) -> str:
        """The URL without its password, for files and people."""
        parts = urlsplit(self.url)
        user = f"{parts.username}@" if parts.username else ""
        return f"postgresql://{user}{parts.netloc.rpartition('@')[2]}{parts.path}"

    @property
    def mlflow_uri(self) -> str:
        # %3D encodes the equals sign within the query's value.
        return f"{self._with_driver('psycopg2')}?options=-csearch_path%3D{MLFLOW_SCHEMA}"

    def prefect_variables(self) -> dict[str, str]:
        return {
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": self._with_driver("asyncpg"),
            "PREFECT_SERVER_DATABASE_SQLALCHEMY_CONNECT_ARGS_SEARCH_PATH": f"{PREFECT_SCHEMA}, public",
        }

    def prepare(self) -> None:
        """Make the two schemas.

        Raises StageError `database_unreachable` if no connection is possible, and ConfigError for a database that
        cannot store every character.
        """
        with self._connected() as cursor:
            cursor.execute("SHOW server_encoding")
            encoding = cursor.fetchone()[0]
            if encoding != "UTF8":
                message = f"expected the encoding UTF8, but the database has {encoding}"
                fix = "createdb --encoding UTF8 --template template0 NAME"
                raise ConfigError(Problem("bad_database", self.public_url, message, fix))
            for schema in (PREFECT_SCHEMA, MLFLOW_SCHEMA):
                cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")

    def set_mlflow_aside(self) -> None:
        """Rename MLflow's schema, and make an empty one in its place."""
        with self._connected() as cursor:
            cursor.execute(f"ALTER SCHEMA {MLFLOW_SCHEMA} RENAME TO {MLFLOW_SCHEMA}_{time.strftime('%Y%m%d_%H%M%S')}")
            cursor.execute(f"CREATE SCHEMA {MLFLOW_SCHEMA}")

    def _with_driver(self, driver: str) -> str:
        return f"postgresql+{driver}://{self.url.partition('://')[2]}"

    def connect(self, **options: Any) -> Any:
        """Return a connection of psycopg2.

        Raises StageError `database_unreachable`, ConfigError for a URL that libpq cannot read.

        Args:
            options: of libpq, in addition to the URL.
        """
        import psycopg2

        try:
            return psycopg2.connect(self.url, **{"connect_timeout": CONNECT_TIMEOUT_S, **options})
        except psycopg2.OperationalError as error:
            # The message names host, port and user, never the password.
            reason = " ".join(str(error).split())
            raise stage_error(
                "database_unreachable", self.public_url, reason, f"is PostgreSQL up, and is {DATABASE} right?"
            ) from None
        except psycopg2.ProgrammingError:  # its message repeats a part of the URL
            raise ConfigError(Problem("bad_database", DATABASE, EXPECTED)) from None

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        connection = self.connect()
        try:
            with connection, connection.cursor() as cursor:
                yield cursor
        finally:
            connection.close()


def requested_database() -> str | None:
    """Return the value of STEMMA_DATABASE_URL: `sqlite`, a PostgreSQL URL, or None if it is not set.

    Raises ConfigError for anything else, without repeating it: it may contain a password.
    """
    text = os.environ.get(DATABASE, "").strip()
    if not text or text == SQLITE:
        return text or None
    try:
        parts = urlsplit(text)
        fits = bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        fits = False
    if not (fits and parts.scheme in ("postgresql", "postgres") and re.fullmatch(r"/[^/?#]+", parts.path)):
        raise ConfigError(Problem("bad_database", DATABASE, EXPECTED))
    if parts.query or parts.fragment:
        raise ConfigError(Problem("bad_database", DATABASE, f"{EXPECTED}, without ? or #"))
    return f"postgresql://{text.partition('://')[2]}"


def database(recorded: str) -> Postgres | None:
    """Return the database of a store's settings, with the environment's password for it; None for SQLite.

    Args:
        recorded: `sqlite`, or a URL without password.
    """
    if recorded == SQLITE:
        return None
    url = requested_database()
    if url and url != SQLITE and Postgres(url).public_url == recorded:
        return Postgres(url)
    return Postgres(recorded)


def described(url: str) -> str:
    """Return the form of a `requested_database` that may be stored and shown."""
    return url if url == SQLITE else Postgres(url).public_url
