"""A Prefect server for one run, for when `up` has not started one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from infra.errors import stage_error
from infra.process.held_folder import held_folder
from infra.process.lifetime import PARENT_FD, group_alive, signal_group
from infra.process.tail import last_lines
from infra.servers.environment import server_environ
from infra.servers.http import answers
from infra.servers.ports import HOST, any_free_port
from infra.servers.specs import prefect_server_variables

START_TIMEOUT_S = 180.0
LOG = "server.log"
_WITHOUT_BLOCKS = {"PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false"}
"""Setting that skips the registration of block types, which no client requests from a private server."""


@contextmanager
def private_prefect_server(page: bool = False) -> Iterator[str]:
    """Start a Prefect server with an empty database on a free port, and yield its API URL; it ends after the block.

    The server also ends when this process dies, even by SIGKILL; its files are then removed with the next server.

    Args:
        page: True serves Prefect's page too, which is not used on the server of one run.

    Raises StageError `service_failed` if it does not start.
    """
    with starting_prefect_server(page) as (url, wait):
        wait()
        yield url


@contextmanager
def starting_prefect_server(page: bool = False) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the API URL of `private_prefect_server` while it still starts, and a function that waits until it answers.

    The caller can do its imports in the meantime.
    """
    with held_folder("stemma-prefect") as folder, _parent_pipe() as line:
        url, process = launch_prefect_server(folder, page, line)
        try:
            yield url, partial(wait_for_prefect_server, url, process, folder)
            say_last_words()
        finally:
            _kill(process)


def launch_prefect_server(home: Path, page: bool, line: int) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a Prefect server that keeps its data in the folder `home`; return its API URL and its process.

    Args:
        page: see `private_prefect_server`.
        line: the read end of a pipe that breaks when the server is to end.
    """
    port = any_free_port()
    url = f"http://{HOST}:{port}"
    variables = _WITHOUT_BLOCKS | {"PREFECT_SERVER_UI_ENABLED": str(page).lower(), PARENT_FD: str(line)}
    command = ("infra.servers.prefect.server", "--host", HOST, "--port", str(port))
    with open(home / LOG, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "infra.process.lifetime", *command],
            env=server_environ(prefect_server_variables(home, url) | variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(line,),
        )
    return f"{url}/api", process


def wait_for_prefect_server(url: str, process: subprocess.Popen[bytes], home: Path) -> None:
    """Wait until a server that was launched answers. Raises StageError `service_failed`."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not answers(f"{url}/health"):
        if process.poll() is not None or time.monotonic() > deadline:
            words = last_lines(home / LOG)
            raise stage_error("service_failed", "prefect", f"the private Prefect server did not start: {words}")
        time.sleep(0.05)


@contextmanager
def _parent_pipe() -> Iterator[int]:
    """Yield the read end of a pipe that breaks when this process ends."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)


def say_last_words() -> None:
    """Send the logs and events that Prefect's client still holds, while there is a server to receive them."""
    if "prefect.events.worker" in sys.modules:
        from prefect.events.worker import EventsWorker

        EventsWorker.drain_all(timeout=5)
    if "prefect.logging.handlers" in sys.modules:
        from prefect.logging.handlers import APILogWorker

        APILogWorker.drain_all(timeout=5)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a server. Its database is discarded, so it needs no orderly end."""
    signal_group(process.pid, signal.SIGKILL)
    process.wait()
    while group_alive(process.pid):
        time.sleep(0.02)
