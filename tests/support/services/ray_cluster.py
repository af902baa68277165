"""A real Ray cluster on this machine: a head without CPUs, and nodes on addresses of loopback that can be lost."""

from __future__ import annotations

import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from infra.process.lifetime import signal_group
from infra.servers.ports import any_free_port
from tests.support.programs.command import environment
from tests.support.programs.processes import wait_until

_RAY = str(Path(sys.executable).with_name("ray"))
# Ray takes 127.0.0.1 for the address by which others reach this machine.
_HEAD = "127.0.0.2"
_TRIES = 4
_HELPERS = ("metrics-export-port", "runtime-env-agent-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port")


class RayCluster:
    """address: of the head; variables: what opens it; nodes: the addresses of those that have a CPU."""

    def __init__(self, folder: str) -> None:
        self.address = f"{_HEAD}:{any_free_port()}"
        self.client_port = any_free_port()
        self.variables = {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # Ray ends workers where memory is short, which counts as a lost node: here others on this machine may hold it.
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
        self._env = environment(RAY_AUTH_MODE="token", **quiet, **self.variables)
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        port = self.address.rpartition(":")[2]
        head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self._folder}"]
        self._start(_HEAD, 0, *head, f"--ray-client-server-port={self.client_port}")

    @property
    def nodes(self) -> list[str]:
        return [address for address in self._processes if address != _HEAD]

    def add(self, address: str, cpus: int = 1) -> None:
        self._start(address, cpus, f"--address={self.address}")

    def lose(self, address: str) -> None:
        """As when the machine dies: nothing of it is left, and nothing says so."""
        process = self._processes.pop(address)
        signal_group(process.pid, signal.SIGKILL)
        process.wait()

    def status(self) -> subprocess.CompletedProcess[str]:
        command = [_RAY, "status", f"--address={self.address}"]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=self._env)

    def end(self) -> None:
        for address in list(self._processes):
            self.lose(address)

    def _start(self, address: str, cpus: int, *options: str) -> None:
        """Ray gives up a node that takes longer than 30 s, as on a busy machine; then it is tried again. It need not
        wait for helpers whose ports are told."""
        each = [f"--node-ip-address={address}", f"--num-cpus={cpus}", "--num-gpus=0", "--object-store-memory=80000000"]
        ports = [f"--{name}={any_free_port()}" for name in _HELPERS]
        command = [_RAY, "start", "--block", "--disable-usage-stats", "--include-log-monitor=false", *each, *ports]
        command += options
        log = Path(self._folder) / f"{address}.log"
        for _ in range(_TRIES):
            with open(log, "wb") as out:
                process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=self._env)
            self._processes[address] = process
            wait_until(lambda: process.poll() is not None or b"Ray runtime started" in log.read_bytes())  # noqa: B023
            if process.poll() is None:
                return
            self.lose(address)
        raise AssertionError(f"Ray did not start: {log.read_text()[-2000:]}")


@contextmanager
def ray_cluster(nodes: int) -> Iterator[RayCluster]:
    # Ray's sockets lie in it, and their paths must be short.
    folder = tempfile.mkdtemp(prefix="ray-")
    cluster = None
    try:
        cluster = RayCluster(folder)
        cluster.start()
        for number in range(nodes):
            cluster.add(f"127.0.0.{3 + number}")
        yield cluster
    finally:
        if cluster is not None:
            cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


def launch_on(cluster: RayCluster) -> Mapping[str, str]:
    """The keys of `launch:` that bring a training there."""
    return {"cluster": "ray", "ray": cluster.address}
