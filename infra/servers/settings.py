"""Settings of the servers of a store: <root>/servers/settings.json, which contains no secret."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from infra.errors import ConfigError, Problem
from infra.io.tables import damaged, read_state
from infra.servers.credentials import AUTH, OFF, credentials, how_to_set
from infra.servers.databases.database import SQLITE, Postgres, database, described, requested_database
from infra.servers.ports import HOST
from infra.servers.prefect.callers import NAMES, Callers, host_name
from infra.servers.state import mlflow_url, prefect_api_url, servers_folder, started_here, write_private

_LOST = "delete it: `stemma up` then sets the servers up again, on its usual ports"
EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Settings:
    """Settings of the servers of a store.

    host: the address that Prefect and MLflow listen on. database: `sqlite`, or a PostgreSQL URL without password.
    guarded: True if they ask for credentials. ports: by service, kept so that links stay valid.
    keep_days, keep_runs: days, and newer runs of the pipeline, after which a run is forgotten of whose results nothing
    is left, see `flows.runs.retention`; 0 days for never.
    """

    host: str = HOST
    database: str = SQLITE
    guarded: bool = False
    ports: Mapping[str, int] = field(default_factory=dict)
    keep_days: int = 30
    keep_runs: int = 500

    @property
    def reach(self) -> str:
        """The host under which programs on this machine find the servers."""
        return _bracketed(HOST if self.host in EVERYWHERE else self.host)

    @property
    def page(self) -> str:
        """The host under which people find them."""
        if addresses := _given_addresses():
            return host_name(addresses[0])
        return _bracketed(socket.getfqdn() if self.host in EVERYWHERE else self.host)

    def page_of(self, url: str) -> str:
        """Return the address for people in place of the one that our programs use."""
        return url.replace(f"//{self.reach}:", f"//{self.page}:", 1)

    @property
    def names(self) -> list[str]:
        """All names under which people may reach the servers, without ports, in lower case."""
        names = [*map(host_name, _given_addresses()), HOST, "localhost", "[::1]", self.reach, self.page]
        if self.host in EVERYWHERE:
            addresses = (address for card in psutil.net_if_addrs().values() for address in card)
            names += [
                _bracketed(item.address) for item in addresses if item.family in (socket.AF_INET, socket.AF_INET6)
            ]
        if not is_loopback(self.host):
            hostname = socket.gethostname()
            names += [hostname, hostname.partition(".")[0], socket.getfqdn()]
        return list(dict.fromkeys(name.lower() for name in names))

    def addresses(self, port: int) -> list[str]:
        """Return the hosts and ports in a browser's address bar for our server on `port`, direct or behind a proxy."""
        return list(dict.fromkeys([*(f"{name}:{port}" for name in self.names), *map(str.lower, _given_addresses())]))

    def callers(self, port: int, *, json_only: bool = True) -> Callers:
        """Return the rules for the requests that the server on `port` accepts."""
        return Callers(frozenset(self.names), frozenset(self.addresses(port)), json_only)

    @property
    def postgres(self) -> Postgres | None:
        return database(self.database)

    def write(self, root: Path | str) -> None:
        write_private(servers_folder(root) / "settings.json", json.dumps(asdict(self), indent=1) + "\n")


def settings_of(root: Path | str) -> Settings:
    """Return the last settings of a store, the defaults for a new one."""
    path = servers_folder(root) / "settings.json"
    fields = read_state(path, _LOST, {})
    try:
        settings = Settings(**fields)
    except TypeError as error:
        raise damaged(path, f"not as expected: {error}", _LOST) from error
    for name in ("keep_days", "keep_runs"):
        if type(value := getattr(settings, name)) is not int or value < 0:
            raise damaged(path, f"{name}: expected a number, 0 or more, got {value!r}", _LOST)
    return settings


def prefect_page(root: Path | str) -> str | None:
    """Return the address of Prefect's page for people; None if no server is known or running."""
    url = prefect_api_url(root)
    return settings_of(root).page_of(url.removesuffix("/api")) if url else None


def mlflow_page(root: Path | str) -> str | None:
    """Return the address of MLflow's page for people; None if no server is known or running."""
    url = mlflow_url(root)
    return settings_of(root).page_of(url) if url else None


def run_page(root: Path | str, run_id: str) -> str | None:
    """Return the address of a run's page for people; None if its server does not run."""
    url = started_here(root, "page")
    return f"{settings_of(root).page_of(url)}/run/{run_id}" if url else None


def chosen(before: Settings, host: str | None, **kept: int | None) -> Settings:
    """Return the settings for `up`: those requested now, else the previous ones, so that a reboot changes nothing.

    Raises ConfigError if that would open a server without credentials.

    Args:
        kept: keep_days and keep_runs; None as before.
    """
    login = credentials()
    host = host or before.host
    url = requested_database()
    closed_before = before.guarded and os.environ.get(AUTH) != OFF
    if login is None and not is_loopback(host):
        message = f"{host} is reached from other machines, but the servers require no credentials"
        raise ConfigError(Problem("no_credentials", "--host", message, f"{how_to_set()}; or leave --host at {HOST}"))
    if login is None and closed_before:
        message = "these servers were started with credentials, but would now start without any"
        fix = f"export {AUTH} as before, or {AUTH}={OFF} to remove the credentials"
        raise ConfigError(Problem("no_credentials", AUTH, message, fix))
    keeps: dict[str, Any] = {name: value for name, value in kept.items() if value is not None}
    stored = described(url) if url else before.database
    return replace(before, host=host, database=stored, guarded=login is not None, **keeps)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _given_addresses() -> list[str]:
    """Return names that only the network knows, e.g. of a container or proxy: STEMMA_NAMES=stemma.lab:8443,mlflow."""
    return [name.strip() for name in os.environ.get(NAMES, "").split(",") if name.strip()]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
