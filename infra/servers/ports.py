"""Loopback ports: search for free ones, and for the processes that hold the others."""

from __future__ import annotations

import errno
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from infra.errors import stage_error

HOST = "127.0.0.1"
TRIES = 200
QUIET_PORTS = (20_000, 32_000)


@contextmanager
def reserved_port(
    preferred: int, *, asked_for: bool = False, host: str = HOST, patience_s: float = 0.0
) -> Iterator[int]:
    """Reserve a free port that no other `up` on this machine takes while the block runs.

    The port is `preferred`, or the next free one.

    Args:
        patience_s: seconds that `preferred` may take to become free, if a server of ours has just ended on it.

    Raises StageError `port_in_use`, naming the holder, if the user asked for exactly this port.
    """
    deadline = time.monotonic() + patience_s
    for port in range(preferred, min(preferred + TRIES, 65536)):
        while True:
            with _claim(port) as claimed:
                if claimed and is_free(port, host):
                    yield port
                    return
            if port != preferred or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if asked_for:
            raise stage_error(
                "port_in_use", "", f"port {port} is in use by {holder(port)}", "stop it, or ask for another port"
            )
    raise stage_error("port_in_use", "", f"no free port from {preferred} on", "choose another port")


def is_free(port: int, host: str = HOST) -> bool:
    """Return True if a port is free. Raises StageError `bad_address` for a host that is no address of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                message = f"{host} is not an address of this machine"
                raise stage_error(
                    "bad_address", "--host", message, f"0.0.0.0 listens on all addresses, {HOST} on this machine only"
                ) from None
            return False
        return True


def any_free_port() -> int:
    """Return a free port outside the range of outgoing connections, which could take it before a server does."""
    while True:
        port = random.SystemRandom().randrange(*QUIET_PORTS)
        if is_free(port):
            return port


def holder(port: int) -> str:
    """Return a description of the process that listens on a port, e.g. `pid 4242 (python -m http.server 4200)`."""
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
            try:
                command = " ".join(psutil.Process(connection.pid).cmdline())
            except psutil.Error:
                command = "of another user"
            return f"pid {connection.pid} ({command})"
    return "a process of another user"


@contextmanager
def _claim(port: int) -> Iterator[bool]:
    """Claim a port, so that servers of several stores that start together do not choose the same one.

    Yield True if the claim succeeded. It is a name in the network namespace, which is where ports are too: it holds for
    all users and all folders for temporary files, and ends with this process.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(f"\0stemma-port-{port}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            yield False
        else:
            yield True
