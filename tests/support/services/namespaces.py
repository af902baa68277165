"""Several hosts on this machine: network namespaces, each joined to a switch by a veth pair; needs root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Network:
    """The hosts' addresses, and what may happen to them."""

    tag: str
    hosts: tuple[str, ...]

    @property
    def shell(self) -> list[str]:
        """A `launch.remote_shell` that runs a command line on {host}."""
        return [*self.command("{host}"), "sh", "-c"]

    def command(self, host: str) -> list[str]:
        """What makes the rest of a command run on a host, on its network alone."""
        return ["ip", "netns", "exec", f"{self.tag}-{host}"]

    def machine(self, host: str) -> list[str]:
        """The same with a name and processes of its own, as another machine: those here are not seen there."""
        apart = ["unshare", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
        return [*self.command(host), *apart, "sh", "-c", 'hostname "$0" && exec "$@"', f"host-{host}"]

    def cut(self, host: str) -> None:
        """Pulls the host's cable out of the switch."""
        _ip("-n", self.tag, "link", "set", self._port(host), "down")

    def heal(self, host: str) -> None:
        _ip("-n", self.tag, "link", "set", self._port(host), "up")

    def slow_down(self, host: str, mbit: int) -> None:
        """From now on the host sends and gets no more than so many Mbit/s."""
        for place, device in ((f"{self.tag}-{host}", "eth0"), (self.tag, self._port(host))):
            limit = ("tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")
            _run("tc", "-n", place, "qdisc", "replace", "dev", device, "root", *limit)

    def lose(self, host: str) -> None:
        """The host is gone at once, with all that ran on it."""
        self.cut(host)
        for pid in _pids(f"{self.tag}-{host}"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _port(self, host: str) -> str:
        return f"port{self.hosts.index(host)}"


@contextmanager
def network(count: int) -> Iterator[Network]:
    """So many hosts that reach each other, and nothing else. Skips where we may not make them."""
    if shutil.which("ip") is None:
        pytest.skip("the command ip (iproute2) is not on this machine")
    if os.geteuid() != 0:
        pytest.skip("network namespaces are made by root")
    tag = f"stm{uuid.uuid4().hex[:6]}"
    made = Network(tag, tuple(f"10.77.0.{number + 1}" for number in range(count)))
    names = [tag, *(f"{tag}-{host}" for host in made.hosts)]
    try:
        if subprocess.run(["ip", "netns", "add", tag], capture_output=True).returncode:
            pytest.skip("this machine has no network namespaces")
        _ip("-n", tag, "link", "add", "switch", "type", "bridge")
        _ip("-n", tag, "link", "set", "switch", "up")
        for number, host in enumerate(made.hosts):
            name, port = f"{tag}-{host}", f"port{number}"
            _ip("netns", "add", name)
            _ip("-n", tag, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", tag, "link", "set", port, "master", "switch", "up")
            _ip("-n", name, "addr", "add", f"{host}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", name, "link", "set", link, "up")
        yield made
    finally:
        for name in names:
            for pid in _pids(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)


def _pids(name: str) -> list[int]:
    told = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    return list(map(int, told.stdout.split()))
