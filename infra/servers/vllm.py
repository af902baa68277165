"""vLLM as a server process of a stage: started, queried for tokens, given new weights, and ended with the stage.

The program is installed in a separate environment. Its development endpoints, with which weights are reloaded, are open
to every client that reaches it, and its API key protects none of them. So it listens on a Unix socket in a folder that
only this user can enter, and on no port.

python -m infra.servers.vllm PROGRAM …    runs it so that it ends with the process that started it
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.errors import Cancelled, Problem, StageError, stage_error
from infra.io.json import parse_json
from infra.launch.launchers import VllmConfig
from infra.process.lifetime import GRACE_S, PARENT_FD, end_group, group_alive, signal_group
from infra.project import PROJECT
from infra.servers.environment import OFFLINE

PROGRAM = "STEMMA_VLLM"
"""Variable that names the program of vLLM if no config does."""
AT_ONCE = 256
"""Maximum number of concurrent questions: as many as vLLM computes at once by default (--max-num-seqs)."""
POLL_S = 0.1
NO_USAGE_STATS = {"VLLM_NO_USAGE_STATS": "1"}
"""Disables vLLM's usage statistics, which are on by default (vLLM's docs, "Usage Stats Collection")."""
_NAME = "model"
_NOT_ITS = ("STEMMA_", "PYTHON", "OMP_NUM_THREADS", "GLIBC_TUNABLES", "VIRTUAL_ENV", "CONDA_PREFIX")
"""Prefixes of our variables that vLLM must not get: they set the packages, cores and memory of our own Python."""
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables of ranks, with which vLLM would act as one of our ranks."""
_BY_SIGNAL = 128
"""Offset of exit codes that stand for a signal, as in shells."""
_LONGEST_SOCKET = 107
"""Maximum bytes of a socket's path on Linux."""
_LOG_BYTES = 4_000_000
_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
_NO_MEMORY = ("outofmemory", "out of memory", "memory on node", "free memory on device", "kv cache", "cannot allocate")


def vllm_command(program: str, folder: Path, name: str, *arguments: str) -> list[str]:
    """Return the command that serves one model; pages of other sites may not call the server."""
    return [program, "serve", str(folder), "--served-model-name", name, "--allowed-origins", "[]", *arguments]


def program_of(config: VllmConfig) -> str | None:
    """Return the program of vLLM; None if it cannot be started here."""
    return shutil.which(_program(config))


def _program(config: VllmConfig) -> str:
    return config.program or os.environ.get(PROGRAM) or "vllm"


def program_problem(config: VllmConfig) -> Problem | None:
    """Return the reason why the program cannot be started here; None if it can."""
    if program_of(config):
        return None
    path = Path(_program(config))
    expectation = "a program that can be executed" if path.exists() else "an existing program"
    message = f"expected {expectation}, not {path}" + ("" if path.is_absolute() else ", which is not on the PATH")
    fix = "install vLLM in a separate environment (docs/alignment/vllm.md) and name its bin/vllm"
    return Problem("no_vllm", "launch.vllm.program", message, fix)


class Vllm:
    """A running server.

    Raises StageError with the end of its log: `vllm_failed` if it ends, `vllm_out_of_memory` if it ends for lack of
    memory, `vllm_silent` if it gives no answer in time, `vllm_refused` if it answers with an error.
    """

    def __init__(
        self,
        config: VllmConfig,
        folder: Path,
        log: Path,
        arguments: Sequence[str] = (),
        kv_cache_bytes: int = 0,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start the server and return once it has answered a question.

        Args:
            folder: the model.
            log: a file that the server appends to.
            arguments: of `vllm serve`, before those of the config.
            kv_cache_bytes: bytes that vLLM's CPU build reserves for keys and values, rounded up to whole GiB.
            stop: called while waiting; Cancelled is raised once it is true.
        """
        if problem := program_problem(config):
            raise StageError(problem)
        self._config, self._log, self._stop, self._closed = config, log, stop, False
        self._log_begins = log.stat().st_size if log.exists() else 0
        self._place = Path(tempfile.mkdtemp(prefix="stemma-vllm-", dir=_short_folder()))
        self._socket = self._place / "socket"
        # If an argument is given twice, the later value counts: the config's.
        options = ("--uds", str(self._socket), *arguments, *config.arguments)
        command = vllm_command(str(program_of(config)), folder, _NAME, *options)
        read_end, self._parent_pipe = os.pipe()
        try:
            with log.open("ab") as file:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "infra.servers.vllm", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    pass_fds=[read_end],
                    env={**os.environ, **self._variables(kv_cache_bytes), PARENT_FD: str(read_end)},
                    start_new_session=True,
                )
        finally:
            os.close(read_end)
        try:
            self._wait()
            self.complete([{"prompt": [0], "max_tokens": 1}])  # some kernels fail only at the first question
        except BaseException:
            self.close()
            raise

    def _variables(self, kv_cache_bytes: int) -> dict[str, str]:
        variables = {**NO_USAGE_STATS, **OFFLINE, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(PROJECT)}
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            variables["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, -(-kv_cache_bytes // 2**30)))
        if self._config.gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = self._config.gpus
        return variables

    def complete(self, questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the only choice of each answer, in order.

        Args:
            questions: bodies of /v1/completions, without the model.
        """
        completions: list[dict[str, Any]] = [{} for _ in questions]
        pool = ThreadPoolExecutor(min(AT_ONCE, max(1, len(questions))), "vllm")
        try:
            futures = {pool.submit(self._complete, question): number for number, question in enumerate(questions)}
            last_heard = time.monotonic()
            while futures:
                done, _ = wait(futures, timeout=POLL_S, return_when=FIRST_COMPLETED)
                for future in done:
                    completions[futures.pop(future)] = future.result()
                last_heard = time.monotonic() if done else last_heard
                self._check_server(last_heard, self._config.silent_s, "launch.vllm.silent_s", "no answer")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return completions

    def reload_weights(self) -> None:
        """Load the weights that are now in the model's folder, and drop caches computed with the earlier ones.

        No question may be asked in the meantime.
        """
        self._post("/collective_rpc", {"method": "reload_weights"})
        if not self._post("/reset_prefix_cache", {}).get("success", True):
            raise self._error("vllm_refused", "did not reset the KV cache of earlier weights")

    def close(self) -> None:
        """End the server and all processes that it started."""
        if self._closed:
            return
        self._closed = True
        end_group(self._process.pid, lambda: self._process.poll() is not None and not group_alive(self._process.pid))
        self._process.wait()
        os.close(self._parent_pipe)
        shutil.rmtree(self._place, ignore_errors=True)

    def _complete(self, question: Mapping[str, Any]) -> dict[str, Any]:
        (choice,) = self._post("/v1/completions", {"model": _NAME, **question})["choices"]
        return dict(choice)

    def _wait(self) -> None:
        started = time.monotonic()
        while True:
            self._check_server(started, self._config.start_s, "launch.vllm.start_s", "no sign of being ready")
            try:
                self._request("GET", "/health")
                return
            except OSError:
                time.sleep(POLL_S)

    def _check_server(self, since: float, limit_s: float, key: str, missing: str) -> None:
        if self._stop():
            raise Cancelled
        if self._process.poll() is not None:
            raise self._end_error()
        if time.monotonic() - since > limit_s:
            fix = f"look at its log, {self._log}, or raise {key}"
            raise stage_error("vllm_silent", key, f"vLLM gave {missing} for {limit_s:g} s: {self._last_words()}", fix)

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            text = self._request("POST", path, json.dumps(body).encode())
        except OSError as error:
            if self._wait_for_end():
                raise self._end_error() from None
            raise self._error("vllm_failed", f"broke off: {error}") from None
        return parse_json(text, f"vLLM's answer to {path}", nan=True) if text.strip() else {}

    def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Return the body of an answer. Raises OSError without an answer, StageError `vllm_refused` for an error."""
        connection = _Connection(self._socket)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            answer = connection.getresponse()
            text = answer.read()
        except http.client.HTTPException as error:
            raise OSError(str(error) or type(error).__name__) from error
        finally:
            connection.close()
        if answer.status != http.HTTPStatus.OK:
            if answer.status >= http.HTTPStatus.INTERNAL_SERVER_ERROR and self._wait_for_end():
                raise self._end_error()
            raise self._error(
                "vllm_refused", f"answered {path} with {answer.status}: {text[:500].decode('utf8', 'replace')}"
            )
        return text

    def _wait_for_end(self, patience_s: float = 30.0) -> bool:
        """Return True if the server ends within `patience_s`.

        Its processes notify each other, and log the reason, within seconds of an error.
        """
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return True
            time.sleep(POLL_S)
        return False

    def _end_error(self) -> StageError:
        code = self._process.wait()
        signal_number = abs(code) if code < 0 else code - _BY_SIGNAL
        cause = signal.Signals(signal_number).name if signal_number > 0 else f"code {code}"
        log_tail = self._last_words()
        if signal_number == signal.SIGKILL or any(phrase in log_tail.lower() for phrase in _NO_MEMORY):
            fix = (
                "give it separate GPUs (launch.vllm.gpus), or less of their memory "
                "(launch.vllm.arguments: [--gpu-memory-utilization=0.4]); on a CPU set VLLM_CPU_KVCACHE_SPACE"
            )
            return self._error("vllm_out_of_memory", f"ended with {cause}", fix)
        return self._error("vllm_failed", f"ended with {cause}")

    def _error(self, code: str, event: str, fix: str = "") -> StageError:
        fix = fix or "correct the cause, or leave vLLM out to use the built-in sampler"
        return stage_error(
            code, "launch.vllm", f"vLLM {event}; its last words: {self._last_words()}", f"{fix}; its log is {self._log}"
        )

    def _last_words(self) -> str:
        """Return the cause of its end from its log: the first errors, which cause later ones, else the last lines."""
        with self._log.open("rb") as file:
            file.seek(self._log_begins)
            lines = file.read(_LOG_BYTES).decode("utf8", errors="replace").splitlines()
        errors = [line.strip() for line in lines if _ERROR.search(line) and " WARNING " not in line]
        excerpt = errors[:3] or [line.strip() for line in lines if line.strip()][-4:]
        return " | ".join(line[-300:] for line in dict.fromkeys(excerpt)) or "its log is empty"


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("vllm")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))


def own_environment() -> dict[str, str]:
    """Return the environment of a program that is not ours: without the variables of our Python and our ranks."""

    def kept() -> Iterator[tuple[str, str]]:
        for name, value in os.environ.items():
            if not name.startswith(_NOT_ITS) and name not in _OF_RANKS:
                yield name, value

    return dict(kept())


def _short_folder() -> str:
    """Return the folder for sockets: the temporary folder, unless its path is too long for a socket's path."""
    folder = tempfile.gettempdir()
    return folder if len(folder) + len("/stemma-vllm-12345678/socket") <= _LONGEST_SOCKET else "/tmp"


def _serve(command: Sequence[str]) -> int:
    """Run vLLM, and end it in an orderly way once the parent of this process is gone.

    If it were killed, its data in shared memory would remain there.
    """
    server, alone = subprocess.Popen(command, env=own_environment()), threading.Event()

    def watch() -> None:
        os.read(int(os.environ[PARENT_FD]), 1)
        alone.set()
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(GRACE_S)
        shutil.rmtree(Path(command[command.index("--uds") + 1]).parent, ignore_errors=True)
        signal_group(os.getpgrp(), signal.SIGKILL)

    watcher = threading.Thread(target=watch, name="parent", daemon=True)
    watcher.start()
    code = server.wait()
    if alone.is_set():
        watcher.join()
    return code if code >= 0 else _BY_SIGNAL - code


if __name__ == "__main__":
    sys.exit(_serve(sys.argv[1:]))
