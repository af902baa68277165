"""Specs of the services: the command and environment of each, and the check that it works."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

from infra.lineage.relay_lock import relay_pid
from infra.servers.credentials import credentials
from infra.servers.environment import HEARTBEAT, OF_ONE_RUN, prefect_home
from infra.servers.http import answers, not_let_in, post
from infra.servers.prefect.intervals import intervals, retention
from infra.servers.settings import Settings
from infra.servers.state import Service

WORK_POOL = "stemma"
NAMES = ("prefect", "mlflow", "worker", "relay", "metrics", "page")
DEFAULT_PORTS = {"prefect": 4200, "mlflow": 5000, "metrics": 9464, "page": 4100}
TITLES = {
    "prefect": "the Prefect server",
    "mlflow": "the MLflow server",
    "worker": "the Prefect worker",
    "relay": "the lineage relay",
    "metrics": "the metrics for Prometheus",
    "page": "the page of runs and models",
}

_PREFECT_SERVER = (sys.executable, "-m", "infra.servers.prefect.server")


@dataclass(frozen=True)
class Spec:
    """Start of one service. answers: returns True once the process that was started does its work."""

    name: str
    url: str
    command: tuple[str, ...]
    answers: Callable[[Service], bool]
    variables: Mapping[str, str] = field(default_factory=dict)


def prefect_spec(root: Path, port: int, settings: Settings) -> Spec:
    url = f"http://{settings.reach}:{port}"
    page = f"http://{settings.page}:{port}"
    variables = prefect_server_variables(prefect_home(root), url, page)
    if postgres := settings.postgres:
        variables |= postgres.prefect_variables()
    variables |= retention(settings.keep_days)
    if login := credentials():
        variables["PREFECT_SERVER_API_AUTH_STRING"] = login.auth_string
    return Spec(
        "prefect",
        url,
        (*_PREFECT_SERVER, "--host", settings.host, "--port", str(port), "--root", str(root)),
        lambda service: answers(f"{service.url}/api/health"),
        variables,
    )


def prefect_server_variables(home: Path, url: str, page: str = "") -> dict[str, str]:
    """Return the variables of a Prefect server.

    Args:
        url: its address for programs on this machine.
        page: its address for browsers, by default the same.
    """
    page = page or url
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_UI_URL": page,
        # A browser finds the API wherever it found the page.
        "PREFECT_SERVER_UI_API_URL": "/api",
        # Pages of other servers may not call the API from a browser on this machine.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(dict.fromkeys((page, url))),
        # By default the page is unpacked into site-packages, where servers of other stores write as well.
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "page"),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
        "PREFECT_SERVER_METRICS_ENABLED": "true",
        # Seconds after which a run that waits for another of its pipeline checks again; 30 by default.
        "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "5",
        **intervals(),
    }


def mlflow_spec(root: Path, port: int, settings: Settings) -> Spec:
    return Spec(
        "mlflow",
        f"http://{settings.reach}:{port}",
        (sys.executable, "-m", "infra.lineage.server", str(root), "--host", settings.host, "--port", str(port)),
        lambda service: answers(f"{service.url}/health"),
        # MLflow refuses requests under a name that it does not know, and pages from any other address.
        {
            "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join([*settings.names, *settings.addresses(port)]),
            "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": ",".join(
                f"{scheme}://{address}" for address in settings.addresses(port) for scheme in ("http", "https")
            ),
        },
    )


def worker_spec(root: Path, prefect_url: str, settings: Settings) -> Spec:
    page = f"http://{settings.page}:{prefect_url.rpartition(':')[2]}"
    return Spec(
        "worker",
        f"{prefect_url}/work-pools/work-pool/{WORK_POOL}",
        (sys.executable, "-m", "infra.servers.prefect.worker", WORK_POOL, str(root)),
        lambda service: _worker_polls(service, prefect_url),
        HEARTBEAT
        | {
            "PREFECT_HOME": str(prefect_home(root)),
            "PREFECT_API_URL": f"{prefect_url}/api",
            "PREFECT_UI_URL": page,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
        },
    )


def flow_run_spec(root: Path, prefect_url: str, settings: Settings) -> Spec:
    """Return the spec of one run in a pod, with the variables of a worker's; see `infra.servers.prefect.flow_pod`."""
    worker = worker_spec(root, prefect_url, settings)
    run_variables = {name: value for name, value in os.environ.items() if name.startswith(OF_ONE_RUN)}
    return replace(
        worker,
        command=(sys.executable, "-m", "infra.servers.prefect.flow_pod"),
        variables={**worker.variables, **run_variables},
    )


def relay_spec(root: Path) -> Spec:
    return Spec(
        "relay",
        "",
        (sys.executable, "-m", "infra.lineage.relay", str(root), "--follow"),
        lambda service: relay_pid(root) == service.pid,
    )


def metrics_spec(root: Path, port: int, settings: Settings) -> Spec:
    url = f"http://{settings.reach}:{port}"
    return Spec(
        "metrics",
        f"{url}/metrics",
        (sys.executable, "-m", "infra.servers.metrics", str(root), "--host", settings.host, "--port", str(port)),
        lambda service: answers(f"{url}/health"),
    )


def page_spec(root: Path, port: int, settings: Settings) -> Spec:
    url = f"http://{settings.reach}:{port}"
    return Spec(
        "page",
        url,
        (sys.executable, "-m", "flows.dashboard.server", str(root), "--host", settings.host, "--port", str(port)),
        lambda service: answers(f"{url}/health"),
    )


def server_spec(name: str, root: Path, port: int, settings: Settings) -> Spec:
    """Return the spec of a service that listens on a port."""
    specs = {"prefect": prefect_spec, "mlflow": mlflow_spec, "metrics": metrics_spec, "page": page_spec}
    return specs[name](root, port, settings)


def spec_of(service: Service, root: Path, prefect_url: str, settings: Settings) -> Spec:
    """Return the spec of a service that was started earlier."""
    if service.name in DEFAULT_PORTS:
        return server_spec(service.name, root, port_of(service), settings)
    return worker_spec(root, prefect_url, settings) if service.name == "worker" else relay_spec(root)


def port_of(service: Service) -> int:
    return urlsplit(service.url).port or 0


def _worker_polls(service: Service, prefect_url: str) -> bool:
    """Return True if the worker has reported to the server since its process started."""
    try:
        workers = post(f"{prefect_url}/api/work_pools/{WORK_POOL}/workers/filter", {})
    except PermissionError:
        raise not_let_in() from None
    except OSError:
        return False
    beats = [worker["last_heartbeat_time"] for worker in workers if worker["status"] == "ONLINE"]
    return any(datetime.fromisoformat(beat).timestamp() > service.started for beat in beats)
