"""A model that answers for the page: `stemma serve` on loopback, beside the model that it was made from.

The process runs on the CPU with low priority, since the page shares its machine with trainings. It ends after IDLE_S
without a question, when another model is tried, and with the page.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

import psutil
from starlette.responses import JSONResponse, Response, StreamingResponse

from infra.process.lifetime import PARENT_FD, signal_group
from infra.process.tail import last_lines
from infra.servers.credentials import credentials
from infra.servers.http import answers, get
from infra.servers.ports import HOST, any_free_port

IDLE_S, POLL_S, ANSWER_S = 600.0, 0.5, 600.0
LOW_PRIORITY = 5


class ParentPipe:
    """A pipe that breaks when this process ends, so that the processes that it started end too."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()

    def variables(self) -> dict[str, str]:
        """Return the variables of a process that ends with this one, and that uses no GPU."""
        return {**os.environ, PARENT_FD: str(self.read_end), "CUDA_VISIBLE_DEVICES": ""}


class ServedModel:
    """A process that serves models.

    names: of the models in requests; empty until they are loaded.

    Args:
        models: addresses; the page names the first one.
        store: path or URL of the store that they are in.
    """

    def __init__(self, models: Sequence[str], store: str, parent: ParentPipe) -> None:
        self.models = tuple(models)
        self.port = any_free_port()
        self.names: list[str] = []
        self._used_at = time.monotonic()
        self._log = tempfile.NamedTemporaryFile(prefix="stemma-serve-", suffix=".log")  # noqa: SIM115 - it goes with this object
        words = ["serve", *models, "--host", HOST, "--port", str(self.port), "--engine", "own", "--root", store]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "infra.process.lifetime", "cli.main", *words],
            env=parent.variables(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(parent.read_end,),
        )
        with suppress(psutil.Error):
            psutil.Process(self._process.pid).nice(LOW_PRIORITY)
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def is_ready(self) -> bool:
        return bool(self.names) and self.is_alive

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self) -> str:
        """Wait until the models are loaded; return the reason why they cannot be, "" once they are."""
        while self.is_alive:
            if answers(f"http://{HOST}:{self.port}/health"):
                self.names = [model["id"] for model in get(f"http://{HOST}:{self.port}/v1/models")["data"]]
                return ""
            time.sleep(POLL_S)
        return last_lines(Path(self._log.name)) or "the process ended without a message"

    def end(self) -> None:
        signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()

    async def relay(self, path: str, body: bytes) -> Response:
        """Return the answer to a request of OpenAI's protocol, in pieces as the model writes them."""
        self._used_at = time.monotonic()
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_S)
        headers = {"Content-Type": "application/json"}
        if login := credentials():
            headers["Authorization"] = login.header
        try:
            await asyncio.to_thread(connection.request, "POST", path, body, headers)
            answer = await asyncio.to_thread(connection.getresponse)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return refused(f"the model does not answer: {error}", HTTPStatus.BAD_GATEWAY)
        connected = connection.sock

        async def pieces() -> AsyncIterator[bytes]:
            try:
                while piece := await asyncio.to_thread(answer.read1, 65536):
                    self._used_at = time.monotonic()
                    yield piece
            finally:  # the reader may have gone: a model stops writing once its client has
                if connected is not None:
                    with suppress(OSError):
                        connected.shutdown(socket.SHUT_RDWR)
                connection.close()

        kind = answer.getheader("Content-Type", "application/json")
        return StreamingResponse(pieces(), answer.status, {"Cache-Control": "no-store"}, media_type=kind)

    def _watch(self) -> None:
        while self.is_alive:
            if time.monotonic() - self._used_at > IDLE_S:
                self.end()
            time.sleep(POLL_S)


def refused(message: str, status: HTTPStatus = HTTPStatus.CONFLICT) -> Response:
    """Return an error in the shape of OpenAI's protocol."""
    return JSONResponse({"error": {"message": message}}, status)
