"""Credentials of the servers: one name and password for Prefect and MLflow, read only from the environment."""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass

from infra.errors import ConfigError, Problem

AUTH = "STEMMA_AUTH"
OFF = "off"
SHORTEST_PASSWORD = 12
"""Minimum length of a password, as in MLflow."""


@dataclass(frozen=True)
class Credentials:
    user: str
    password: str

    def __repr__(self) -> str:
        return f"Credentials({self.user!r}, …)"

    @property
    def auth_string(self) -> str:
        """Return `user:password`, as Prefect expects it."""
        return f"{self.user}:{self.password}"

    @property
    def header(self) -> str:
        """The value of an HTTP Authorization header."""
        return f"Basic {base64.b64encode(self.auth_string.encode()).decode()}"


def credentials() -> Credentials | None:
    """Return the credentials in STEMMA_AUTH, None if it is not set or `off`.

    Raises ConfigError for a value that is not user:password.
    """
    text = os.environ.get(AUTH, "")
    if text in ("", OFF):
        return None
    user, colon, password = text.partition(":")
    if not (colon and user and len(password) >= SHORTEST_PASSWORD):
        message = f"expected user:password with a password of at least {SHORTEST_PASSWORD} characters"
        raise ConfigError(Problem("bad_credentials", AUTH, message, how_to_set()))
    return Credentials(user, password)


SERVERS_ONLY = (
    AUTH,
    "STEMMA_API_KEYS",
    "STEMMA_DATABASE_URL",
    "PREFECT_API_AUTH_STRING",
    "PREFECT_API_KEY",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)
"""Variables that a stage does not need, since its process connects to none of our servers."""


def how_to_set() -> str:
    return f'export {AUTH}="$USER:$(openssl rand -hex 16)", and keep it where only you can read it'


def client_variables() -> dict[str, str]:
    """Return the variables that Prefect's and MLflow's clients read; empty without credentials."""
    login = credentials()
    if login is None:
        return {}
    return {
        "PREFECT_API_AUTH_STRING": login.auth_string,
        "MLFLOW_TRACKING_USERNAME": login.user,
        "MLFLOW_TRACKING_PASSWORD": login.password,
    }
