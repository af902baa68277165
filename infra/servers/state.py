"""Record of the services that `up` has started, in one small file: <root>/servers/services.json."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.io.tables import damaged, read_state
from infra.process.lifetime import start_ticks, started_at, this_boot

# The kernel's clock of process starts drifts from ours by less than this; no pid is reused that fast.
START_TOLERANCE_S = 5.0
_LOST = "delete it and say `stemma up` again; servers that still run have to be ended by hand"


@dataclass(frozen=True)
class Service:
    """A server or worker in the background.

    name: prefect, mlflow, worker, relay or metrics. url: its page or API, empty if it has none. started: Unix time at
    which the process `pid` started, which leads its own process group. ticks, boot: the same by `start_ticks` and
    `this_boot`, which do not depend on the clock; earlier versions did not write them.
    """

    name: str
    url: str
    pid: int
    started: float = 0.0
    ticks: int = 0
    boot: str = ""

    @property
    def alive(self) -> bool:
        return same_process(self.pid, self.started, self.ticks, self.boot)

    def as_json(self) -> dict[str, str | int]:
        return {"name": self.name, "url": self.url, "pid": self.pid}


def same_process(pid: int, started: float, ticks: int = 0, boot: str = "") -> bool:
    """Return True if `pid` is alive and still the process that started then, not a later one that reuses the number.

    For the arguments see Service.
    """
    if boot:
        return boot == this_boot() and start_ticks(pid) == ticks
    now = started_at(pid)
    return now is not None and abs(now - started) < START_TOLERANCE_S


def servers_folder(root: Path | str) -> Path:
    return Path(root).absolute() / "servers"


def recorded(root: Path | str) -> dict[str, Service]:
    """Return the services that were started, by name, including those that have ended."""
    path = servers_folder(root) / "services.json"
    content = read_state(path, _LOST, [])
    try:
        return {item["name"]: Service(**item) for item in content}
    except (TypeError, KeyError) as error:
        raise damaged(path, f"not as expected: {error}", _LOST) from error


def record(root: Path | str, services: Iterable[Service]) -> None:
    text = json.dumps([asdict(service) for service in services], indent=1) + "\n"
    write_private(servers_folder(root) / "services.json", text)


def make_servers_folder(root: Path | str) -> Path:
    """Make the folder of logs, databases and state, which only its owner can access, and return it."""
    folder = servers_folder(root)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def write_private(path: Path, text: str) -> None:
    """Write a file atomically, readable for its owner only."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    hidden.unlink(missing_ok=True)
    descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    hidden.replace(path)


def prefect_api_url(root: Path | str) -> str | None:
    """Return the API URL of the Prefect server at STEMMA_PREFECT_URL, else of the one that `up` started if it lives."""
    url = _url_from_environment("STEMMA_PREFECT_URL") or started_here(root, "prefect")
    return f"{url}/api" if url else None


def mlflow_url(root: Path | str) -> str | None:
    """Return the URL of the MLflow server at STEMMA_MLFLOW_URL, else of the one that `up` started if it lives."""
    return _url_from_environment("STEMMA_MLFLOW_URL") or started_here(root, "mlflow") or None


def works_elsewhere() -> bool:
    """Return True if the servers and their workers are not those of `up` on this machine."""
    return bool(_url_from_environment("STEMMA_PREFECT_URL"))


def _url_from_environment(variable: str) -> str:
    return os.environ.get(variable, "").rstrip("/")


def started_here(root: Path | str, name: str) -> str:
    """Return the URL of a service that `up` has started on this machine; empty if it does not live."""
    service = recorded(root).get(name)
    return service.url if service and service.alive else ""
