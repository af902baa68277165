"""What each service is: its command, its environment, and how to tell that it works."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from infra.lineage.courier_lock import courier_pid
from infra.servers.environment import prefect_home
from infra.servers.http import answers, post
from infra.servers.ports import HOST
from infra.servers.state import Service

WORK_POOL = "stemma"
NAMES = ("prefect", "mlflow", "worker", "courier")
DEFAULT_PORTS = {"prefect": 4200, "mlflow": 5000}
TITLES = {
    "prefect": "the Prefect server",
    "mlflow": "the MLflow server",
    "worker": "the Prefect worker",
    "courier": "the lineage courier",
}


@dataclass(frozen=True)
class Spec:
    """How to start one service. answers: True once the process that was started does its work."""

    name: str
    url: str
    command: tuple[str, ...]
    answers: Callable[[Service], bool]
    variables: Mapping[str, str] = field(default_factory=dict)


def prefect_spec(root: Path, port: int) -> Spec:
    url = f"http://{HOST}:{port}"
    return Spec(
        "prefect",
        url,
        (sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)),
        lambda service: answers(f"{service.url}/api/health"),
        prefect_server_variables(prefect_home(root), url),
    )


def prefect_server_variables(home: Path, url: str) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_UI_URL": url,
        "PREFECT_SERVER_UI_API_URL": f"{url}/api",
        # By default the page is unpacked into site-packages, where servers of other stores write too.
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "page"),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    }


def mlflow_spec(root: Path, port: int) -> Spec:
    return Spec(
        "mlflow",
        f"http://{HOST}:{port}",
        (sys.executable, "-m", "infra.lineage.server", str(root), "--host", HOST, "--port", str(port)),
        lambda service: answers(f"{service.url}/health"),
    )


def worker_spec(root: Path, prefect_url: str) -> Spec:
    return Spec(
        "worker",
        f"{prefect_url}/work-pools/work-pool/{WORK_POOL}",
        (sys.executable, "-m", "infra.servers.worker", WORK_POOL),
        lambda service: _worker_polls(service, prefect_url),
        {
            "PREFECT_API_URL": f"{prefect_url}/api",
            "PREFECT_UI_URL": prefect_url,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
        },
    )


def courier_spec(root: Path) -> Spec:
    return Spec(
        "courier",
        "",
        (sys.executable, "-m", "infra.lineage.courier", str(root), "--follow"),
        lambda service: courier_pid(root) == service.pid,
    )


def spec_of(service: Service, root: Path, prefect_url: str) -> Spec:
    """The spec of a service that was started earlier."""
    port = int(service.url.rpartition(":")[2]) if service.name in DEFAULT_PORTS else 0
    match service.name:
        case "prefect":
            return prefect_spec(root, port)
        case "mlflow":
            return mlflow_spec(root, port)
        case "worker":
            return worker_spec(root, prefect_url)
        case _:
            return courier_spec(root)


def _worker_polls(service: Service, prefect_url: str) -> bool:
    """True if the worker has reported to the server since its process started."""
    try:
        workers = post(f"{prefect_url}/api/work_pools/{WORK_POOL}/workers/filter", {})
    except OSError:
        return False
    beats = [worker["last_heartbeat_time"] for worker in workers if worker["status"] == "ONLINE"]
    return any(datetime.fromisoformat(beat).timestamp() > service.started for beat in beats)
