"""What `up` has started, in one small file: <root>/servers/services.json."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.process import started_at

# The kernel's clock of process starts drifts from ours by less than this; no pid comes round again that fast.
START_TOLERANCE_S = 5.0


@dataclass(frozen=True)
class Service:
    """A server or worker in the background.

    name: prefect, mlflow, worker or courier. url: its page or API, empty where it has none. started: Unix time of the
    process `pid`, which leads its own process group.
    """

    name: str
    url: str
    pid: int
    started: float = 0.0

    @property
    def alive(self) -> bool:
        return same_process(self.pid, self.started)

    def as_json(self) -> dict[str, str | int]:
        return {"name": self.name, "url": self.url, "pid": self.pid}


def same_process(pid: int, started: float) -> bool:
    """True if `pid` is alive and still the process that started then, not a later one with its number."""
    now = started_at(pid)
    return now is not None and abs(now - started) < START_TOLERANCE_S


def servers_folder(root: Path | str) -> Path:
    return Path(root).absolute() / "servers"


def recorded(root: Path | str) -> dict[str, Service]:
    """What was started, by name, whether or not it still lives."""
    try:
        content = (servers_folder(root) / "services.json").read_text()
    except FileNotFoundError:
        return {}
    return {item["name"]: Service(**item) for item in json.loads(content)}


def record(root: Path | str, services: Iterable[Service]) -> None:
    folder = servers_folder(root)
    hidden = folder / f".services.json.{os.getpid()}"
    hidden.write_text(json.dumps([asdict(service) for service in services], indent=1) + "\n")
    hidden.replace(folder / "services.json")


def prefect_api_url(root: Path | str) -> str | None:
    """The API of the Prefect server that `up` started, if its process lives."""
    service = recorded(root).get("prefect")
    return f"{service.url}/api" if service and service.alive else None


def mlflow_url(root: Path | str) -> str | None:
    """The page and API of the MLflow server that `up` started, if its process lives."""
    service = recorded(root).get("mlflow")
    return service.url if service and service.alive else None
