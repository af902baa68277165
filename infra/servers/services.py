"""Start and stop of background services: Prefect, MLflow, a worker, the relay between runs and MLflow, and metrics."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil

from infra.errors import ConfigError, Problem, StageError, stage_error
from infra.process.held_folder import IMPORTS, WORKER, remove_left
from infra.process.lifetime import end_group, group_alive, signal_group, start_ticks, started_at, this_boot
from infra.process.tail import last_lines
from infra.project import PROJECT
from infra.servers.environment import server_environ
from infra.servers.ports import reserved_port
from infra.servers.settings import Settings, chosen, settings_of
from infra.servers.specs import (
    DEFAULT_PORTS,
    NAMES,
    TITLES,
    Spec,
    relay_spec,
    server_spec,
    spec_of,
    worker_spec,
)
from infra.servers.state import Service, make_servers_folder, record, recorded, servers_folder

PORT_PATIENCE_S = 3.0
"""Seconds to wait for a restarted server's previous port, since people have its address in their bookmarks."""
START_TIMEOUT_S = 180.0
GRACE_S = 15.0
MARK = "STEMMA_SERVICE"

Say = Callable[[str], None]
State = Literal["answers", "silent", "gone"]

# Kept so that a parent that lives on (a test, a notebook) reaps the processes that end.
_started: list[subprocess.Popen[bytes]] = []


def up(
    root: Path | str,
    *,
    prefect_port: int | None = None,
    mlflow_port: int | None = None,
    host: str | None = None,
    keep_days: int | None = None,
    keep_runs: int | None = None,
    say: Say = lambda line: None,
) -> list[Service]:
    """Start the services that do not run yet, concurrently, and return when all of them answer.

    Credentials and the database come from the environment, see `infra.servers.credentials` and
    `infra.servers.databases.database`.

    Raises StageError: `port_in_use` for a port that was asked for, with its holder; `service_failed` with the end of
    the log; `database_unreachable`. ConfigError: `no_credentials` for an address that other machines reach;
    `already_up` if the running services have other settings. Services that run are left running.

    Processes are detached and outlive the caller.

    Args:
        prefect_port, mlflow_port: by default the previous port, else 4200 and 5000, else the next free one.
        host: the address to listen on; by default the previous one, else loopback.
        keep_days, keep_runs: when runs are forgotten, see `infra.servers.settings.Settings`; by default as before.
        say: called with each line of progress.
    """
    root = Path(root).absolute()
    with _locked(root):
        before = settings_of(root)
        settings = chosen(before, host, keep_days=keep_days, keep_runs=keep_runs)
        _check_running(root, before, settings)
        if settings.database != before.database and (servers_folder(root) / "settings.json").exists():
            say(f"the database is now {settings.database}; what {before.database} knows stays there")
        if postgres := settings.postgres:
            postgres.prepare()
        settings.write(root)
        return _Starter(root, settings, {"prefect": prefect_port, "mlflow": mlflow_port}, say).start()


def down(root: Path | str, *, say: Say = lambda line: None) -> list[Service]:
    """End the services that `up` has started, as whole process groups; return those that it ended."""
    root = Path(root).absolute()
    if not recorded(root):
        return []
    with _locked(root):
        services = list(recorded(root).values())
        ended = _end(root, services, say)
        record(root, ())
    for name in (WORKER, IMPORTS):  # those that are killed leave their folders
        remove_left(name)
    return ended


def services(root: Path | str) -> list[Service]:
    """Return the services that `up` has started and that now answer."""
    return [service for service, state in states(root) if state == "answers"]


def states(root: Path | str) -> list[tuple[Service, State]]:
    """Return the services that `up` has started, each with its current state."""
    root = Path(root).absolute()
    recorded_services = recorded(root)
    answering = _answering(root, recorded_services, settings_of(root))
    return [
        (service, "answers" if service.name in answering else "silent" if service.alive else "gone")
        for service in recorded_services.values()
    ]


def _check_running(root: Path, before: Settings, requested: Settings) -> None:
    """Raise ConfigError `already_up` if services run with another address, database or use of credentials."""
    running = [service for service in recorded(root).values() if service.alive]
    names = ("host", "database", "guarded", "keep_days", "keep_runs")
    differing = [name for name in names if getattr(requested, name) != getattr(before, name)]
    if running and differing:
        message = "; ".join(f"{name} {getattr(before, name)}, not {getattr(requested, name)}" for name in differing)
        raise ConfigError(
            Problem("already_up", str(root), f"the servers run with {message}", "stemma down, then up again")
        )


class _Starter:
    """One call of `up`, under the lock."""

    def __init__(self, root: Path, settings: Settings, asked_ports: dict[str, int | None], say: Say) -> None:
        self.root = root
        self.settings = settings
        self.asked_ports = asked_ports
        self.say = say
        self.known = recorded(root)

    def start(self) -> list[Service]:
        answering = _answering(self.root, self.known, self.settings)
        waiting: dict[str, Spec] = {}
        kept = [service for service in self.known.values() if service.alive]
        with ExitStack() as ports:
            urls: dict[str, str] = {}
            for name in NAMES:
                service = self.known.get(name)
                if service and service.alive and self._is_current(service, urls):
                    urls[name] = service.url
                    if name not in answering:
                        waiting[name] = spec_of(service, self.root, urls["prefect"], self.settings)
                    continue
                if service:
                    _end(self.root, [service], self.say)
                spec = self._spec(name, urls, ports)
                urls[name] = spec.url
                self.known[name] = self._launch(spec)
                waiting[name] = spec
                # Recorded immediately, so that `down` finds it even if this process dies.
                record(self.root, self.known.values())
            self._wait(waiting)
        if older := of_older_code([service for service in kept if service in self.known.values()]):
            self.say(f"older than the code: {older}; `stemma down`, then `up`, starts them again")
        return [self.known[name] for name in NAMES]

    def _is_current(self, service: Service, urls: dict[str, str]) -> bool:
        """Return False for a worker that polls a previous address of the server."""
        return service.name != "worker" or service.url == worker_spec(self.root, urls["prefect"], self.settings).url

    def _spec(self, name: str, urls: dict[str, str], ports: ExitStack) -> Spec:
        if name == "worker":
            return worker_spec(self.root, urls["prefect"], self.settings)
        if name == "relay":
            return relay_spec(self.root)
        requested_port = self.asked_ports.get(name)
        preferred = requested_port or self.settings.ports.get(name, DEFAULT_PORTS[name])
        had = name in self.settings.ports and requested_port is None
        reserved = reserved_port(
            preferred,
            asked_for=requested_port is not None,
            host=self.settings.host,
            patience_s=PORT_PATIENCE_S if had else 0.0,
        )
        port = ports.enter_context(reserved)
        self.settings = replace(self.settings, ports={**self.settings.ports, name: port})
        self.settings.write(self.root)
        return server_spec(name, self.root, port, self.settings)

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
        started, ticks = started_at(process.pid) or time.time(), start_ticks(process.pid) or 0
        return Service(spec.name, spec.url, process.pid, started, ticks, this_boot())

    def _wait(self, waiting: dict[str, Spec]) -> None:
        begin = time.monotonic()
        failures: list[StageError] = []
        while waiting:
            for name, spec in list(waiting.items()):
                service = self.known[name]
                # Another program may answer at the address of one that has ended.
                if service.alive and spec.answers(service):
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
        state = "does not answer" if service.alive else "ended before it answered"
        log = log_path(self.root, name)
        return stage_error(
            "service_failed", name, f"{TITLES[name]} {state}; its last words: {last_lines(log)}", f"its log is {log}"
        )


def of_older_code(running: Iterable[Service]) -> str:
    """Return the titles of services that were started before the last change of the code of infra/ or of the lock.

    All services run that code. Empty if there are none.
    """
    code = [*(PROJECT / "infra").rglob("*.py"), PROJECT / "requirements.lock"]
    changed = max(path.stat().st_mtime for path in code if path.exists())
    older = [service for service in running if service.started < changed]
    return ", ".join(TITLES[service.name] for service in older)


def log_path(root: Path | str, name: str) -> Path:
    return servers_folder(root) / f"{name}.log"


def _answering(root: Path, services: dict[str, Service], settings: Settings) -> set[str]:
    prefect_url = services["prefect"].url if "prefect" in services else ""
    alive = [service for service in services.values() if service.alive]
    with ThreadPoolExecutor(max_workers=len(NAMES)) as pool:
        answers = pool.map(lambda service: _answers(spec_of(service, root, prefect_url, settings), service), alive)
        return {service.name for service, has_answered in zip(alive, answers, strict=True) if has_answered}


def _answers(spec: Spec, service: Service) -> bool:
    """Return True if a service answers; False for a guarded server without credentials for it."""
    try:
        return spec.answers(service)
    except ConfigError:
        return False


def _end(root: Path, services: Iterable[Service], say: Say) -> list[Service]:
    """End services, workers before servers, so that a worker's last report reaches its server."""
    servers = ("prefect", "mlflow")
    own_services = [service for service in services if _is_ours(root, service)]
    for are_servers in (False, True):
        batch = [service for service in own_services if (service.name in servers) == are_servers]
        for service in batch:
            say(f"stopping {TITLES.get(service.name, service.name)}")
            signal_group(service.pid, signal.SIGTERM)
        with ThreadPoolExecutor(max_workers=len(NAMES)) as pool:
            list(pool.map(lambda s: end_group(s.pid, lambda: not group_alive(s.pid), GRACE_S), batch))
    return own_services


def _is_ours(root: Path, service: Service) -> bool:
    """Return True if we started the process group, judged by its leader's start or by the mark of its members."""
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
    with open(make_servers_folder(root) / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
