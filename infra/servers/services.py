"""Starts and stops what runs in the background: Prefect, MLflow, a worker, and the courier between runs and MLflow."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from infra.errors import StageError, stage_error
from infra.process import end_group, group_alive, signal_group, started_at
from infra.servers.environment import server_environ
from infra.servers.logs import last_lines
from infra.servers.ports import reserved_port
from infra.servers.specs import (
    DEFAULT_PORTS,
    NAMES,
    TITLES,
    Spec,
    courier_spec,
    mlflow_spec,
    prefect_spec,
    spec_of,
    worker_spec,
)
from infra.servers.state import Service, record, recorded, servers_folder

START_TIMEOUT_S = 180.0
GRACE_S = 15.0
MARK = "STEMMA_SERVICE"

Say = Callable[[str], None]

# Kept so that a starter that lives on (a test, a notebook) reaps the ones that end.
_started: list[subprocess.Popen[bytes]] = []


def up(
    root: Path | str,
    *,
    prefect_port: int | None = None,
    mlflow_port: int | None = None,
    say: Say = lambda line: None,
) -> list[Service]:
    """Starts what does not run yet, side by side, and returns when everything answers.

    prefect_port, mlflow_port: by default the one it had last, else 4200 and 5000, else the next free one.
    say: told what happens, line by line. Processes are detached and outlive the caller.

    Raises StageError: `port_in_use` for a port that was asked for, with its holder; `service_failed` with the end of
    the log. What runs is left running.
    """
    root = Path(root).absolute()
    with _locked(root):
        return _Starter(root, {"prefect": prefect_port, "mlflow": mlflow_port}, say).start()


def down(root: Path | str, *, say: Say = lambda line: None) -> list[Service]:
    """Ends what `up` has started, whole process groups and nothing else; returns what it ended."""
    root = Path(root).absolute()
    if not recorded(root):
        return []
    with _locked(root):
        services = list(recorded(root).values())
        ended = _end(root, services, say)
        record(root, ())
        return ended


def services(root: Path | str) -> list[Service]:
    """What `up` has started and now answers."""
    root = Path(root).absolute()
    known = recorded(root)
    answering = _answering(root, known)
    return [service for service in known.values() if service.name in answering]


class _Starter:
    """One call of `up`, under the lock."""

    def __init__(self, root: Path, asked_ports: dict[str, int | None], say: Say) -> None:
        self.root = root
        self.asked_ports = asked_ports
        self.say = say
        self.known = recorded(root)

    def start(self) -> list[Service]:
        answering = _answering(self.root, self.known)
        waiting: dict[str, Spec] = {}
        with ExitStack() as ports:
            urls: dict[str, str] = {}
            for name in NAMES:
                service = self.known.get(name)
                if service and service.alive and self._still_wanted(service, urls):
                    urls[name] = service.url
                    if name not in answering:
                        waiting[name] = spec_of(service, self.root, urls["prefect"])
                    continue
                if service:
                    _end(self.root, [service], self.say)
                spec = self._spec(name, urls, ports)
                urls[name] = spec.url
                self.known[name] = self._launch(spec)
                waiting[name] = spec
                # Recorded at once: whatever happens to us, `down` will find it.
                record(self.root, self.known.values())
            self._wait(waiting)
        return [self.known[name] for name in NAMES]

    def _still_wanted(self, service: Service, urls: dict[str, str]) -> bool:
        """A worker that polls a server which now has another address is of no use."""
        return service.name != "worker" or service.url == worker_spec(self.root, urls["prefect"]).url

    def _spec(self, name: str, urls: dict[str, str], ports: ExitStack) -> Spec:
        if name == "worker":
            return worker_spec(self.root, urls["prefect"])
        if name == "courier":
            return courier_spec(self.root)
        asked = self.asked_ports[name]
        last = self.known.get(name)
        preferred = asked or (int(last.url.rpartition(":")[2]) if last else DEFAULT_PORTS[name])
        port = ports.enter_context(reserved_port(preferred, asked_for=asked is not None))
        return prefect_spec(self.root, port) if name == "prefect" else mlflow_spec(self.root, port)

    def _launch(self, spec: Spec) -> Service:
        self.say(f"starting {TITLES[spec.name]}")
        folder = servers_folder(self.root)
        with open(log_path(self.root, spec.name), "ab") as log:
            process = subprocess.Popen(
                spec.command,
                cwd=folder,
                env=server_environ({**spec.variables, MARK: _mark(self.root, spec.name)}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _started.append(process)
        return Service(spec.name, spec.url, process.pid, started_at(process.pid) or time.time())

    def _wait(self, waiting: dict[str, Spec]) -> None:
        begin = time.monotonic()
        failures: list[StageError] = []
        while waiting:
            for name, spec in list(waiting.items()):
                service = self.known[name]
                if spec.answers(service):
                    self.say(f"{TITLES[name]} answers after {time.monotonic() - begin:.1f} s  {spec.url}".rstrip())
                    del waiting[name]
                elif not service.alive or time.monotonic() - begin > START_TIMEOUT_S:
                    failures.append(self._failure(name, service))
                    del waiting[name]
                    if name == "prefect":
                        waiting.pop("worker", None)
            time.sleep(0.05)
        if failures:
            raise StageError(*(problem for failure in failures for problem in failure.problems))

    def _failure(self, name: str, service: Service) -> StageError:
        how = "does not answer" if service.alive else "ended before it answered"
        log = log_path(self.root, name)
        return stage_error(
            "service_failed", name, f"{TITLES[name]} {how}; its last words: {last_lines(log)}", f"its log is {log}"
        )


def log_path(root: Path | str, name: str) -> Path:
    return servers_folder(root) / f"{name}.log"


def _answering(root: Path, known: dict[str, Service]) -> set[str]:
    prefect_url = known["prefect"].url if "prefect" in known else ""
    alive = [service for service in known.values() if service.alive]
    with ThreadPoolExecutor(max_workers=len(NAMES)) as pool:
        answers = pool.map(lambda service: spec_of(service, root, prefect_url).answers(service), alive)
        return {service.name for service, answered in zip(alive, answers, strict=True) if answered}


def _end(root: Path, services: Iterable[Service], say: Say) -> list[Service]:
    """Workers before servers, so that a worker's last report finds its server."""
    order = {"worker": 0, "courier": 0, "prefect": 1, "mlflow": 1}
    ours = [service for service in services if _is_ours(root, service)]
    for turn in (0, 1):
        batch = [service for service in ours if order[service.name] == turn]
        for service in batch:
            say(f"stopping {TITLES[service.name]}")
            signal_group(service.pid, signal.SIGTERM)
        with ThreadPoolExecutor(max_workers=len(NAMES)) as pool:
            list(pool.map(lambda s: end_group(s.pid, lambda: not group_alive(s.pid), GRACE_S), batch))
    return ours


def _is_ours(root: Path, service: Service) -> bool:
    """True if the process group is the one we started: by its leader's start, or by the mark that its members bear."""
    if service.alive:
        return True
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == service.pid:
                return process.environ().get(MARK) == _mark(root, service.name)
        except (ProcessLookupError, psutil.Error):
            continue
    return False


def _mark(root: Path, name: str) -> str:
    return f"{name}@{root}"


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    folder = servers_folder(root)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
