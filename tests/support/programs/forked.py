"""Commands under test that begin with their imports done: forked from servers of the test session, as stages are.

A `stemma run` imports for four seconds and its fork servers for up to twenty more; of the hundreds of commands that the
tests start, each is a process of its own still, in a session of its own, with the streams, environment and exit code
that it would have, and can be signalled and killed like any other. All test workers ask the same servers, so that what
they import is imported once.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.deployment.start import CONSOLE_LEVEL
from infra.process.forked import ForkServer, Process
from infra.process.lifetime import PARENT_FD, die_with_parent
from infra.project import PROJECT
from infra.servers.environment import OFFLINE, QUIET
from tasks.processes.openmp import AWAKE

_PREFECTS = (
    "PREFECT_API_URL",
    "PREFECT_UI_URL",
    "PREFECT_HOME",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE",
    "PREFECT_API_AUTH_STRING",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY",
)
"""Those of Prefect's settings that commands are given or set themselves. It reads them when it is imported, and in a
forked command whenever they have changed."""
# What a process can be told after its imports: all else has to be as it was when the server began.
_SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "SLACK_WEBHOOK", "HTTPS_PROXY")
"""Those that a test plants, which libraries read when they need them."""
_TOLD_LATER = ("STEMMA_", "PYTEST_", "AWS_", *_PREFECTS, *_SECRETS)
_COMMAND = [
    "cli.commands",
    "cli.pipelines.run",
    "cli.pipelines.check",
    "cli.pipelines.status",
    "flows.pipeline",
    "fastapi.encoders",
    "tests.support.programs.forked",
]
_WITH_MODELS = {
    "eval": ["cli.models.eval", "evaluation.harness.tasks", "evaluation.evaluate"],
    "mirror": ["cli.models.mirror", "evaluation.harness.tasks", "evaluation.mirror_writer"],
    "chat": ["cli.models.chat", "training.generation.session"],
    "export": ["cli.models.export", "evaluation.release.export"],
    "serve": ["cli.models.serve", "uvicorn", "training.serving"],
    "feedback export": ["cli.models.feedback", "training.generation.candidates"],
}
"""Commands that import as much as a stage does: the server of the stages forks them, with this imported."""
ENGINE = "prefect.engine"
"""In place of a command of ours, with the id of a flow run: what Prefect's worker starts for it."""
_STAGES = "STEMMA_TEST_STAGE_SERVER"
"""In a forked command: the sockets of the servers that its stages share, one for each number of threads."""
LINE = "line"
_AS_IT_COMES = {"GLIBC_TUNABLES", AWAKE, CONSOLE_LEVEL, "PREFECT__FLOW_RUN_ID", "TOKENIZERS_PARALLELISM"}
"""Variables in which a stage may differ from its server: how glibc keeps memory, how long threads stay awake and
whether tokenizers use several (lm-eval's command and `encode` set that for their process, which may be a test's) change
no result, and a stage uses nothing of Prefect, which the run of a worker has set. So one server imports for all stages
what several would each import."""
_OWN_SERVER = {"OMP_NUM_THREADS", "LOGNAME"}
"""Variables that libraries read when they are imported: a run whose stages differ in one has a separate server."""
_THREADS = (None, 1)
"""`launch.threads` of the stages that share a server: libraries read the number of threads when they are imported."""


class ForkedCommand:
    """A command that was forked. It has what tests use of `subprocess.Popen`, and ends with its test worker."""

    def __init__(self, process: Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self.pid = process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self._process.poll()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """stdout and stderr once it has ended; no stderr where that went elsewhere. Raises TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("stemma", timeout or 0.0)
            time.sleep(0.01)
        self._process.wait()
        return _text(self._folder / "stdout"), _text(self._folder / "stderr")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf8", errors="replace") if path.exists() else ""


class Session:
    """A folder that goes when this process ends, with a pipe in it that breaks then, however it ends. So what several
    processes share has the life of this one, whichever of them starts it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stemma-tests-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        os.mkfifo(self.folder / LINE)
        self._line = os.open(self.folder / LINE, os.O_RDWR)

    def close(self) -> None:
        os.close(self._line)
        self._folder.cleanup()


class SessionServer(ForkServer):
    """A fork server that all processes of a session ask, and that ends with it.

    Whoever comes first starts it. environment: of which what is told later does not count. session: the folder of a
    `Session`.
    """

    def __init__(self, environment: Mapping[str, str], session: Path) -> None:
        self._own_sessions = True
        known = json.dumps(_without_told_later(environment), sort_keys=True)
        self.place = session / f"forks-{hashlib.sha256(known.encode()).hexdigest()[:16]}"
        with open(self.place.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.place.exists():
                _launch(environment, self.place, session / LINE)
        self.environment = _environment_at(self.place)
        self._requests = _asking(self.place)

    def close(self) -> None:
        """Others may ask it still."""
        self._requests.close()


def _launch(environment: Mapping[str, str], place: Path, line: Path) -> None:
    place.with_suffix(".json").write_text(json.dumps(dict(environment)))
    parent = os.open(line, os.O_RDONLY | os.O_NONBLOCK)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as theirs:
        theirs.bind(str(place))
        process = subprocess.Popen(
            [sys.executable, "-m", "infra.process.fork_server", str(theirs.fileno()), str(parent)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[theirs.fileno(), parent],
            cwd=PROJECT,
            env={**environment, PARENT_FD: str(parent)},
        )
    os.close(parent)
    _launched.append(process)


_launched: list[subprocess.Popen[bytes]] = []


def _asking(place: Path) -> socket.socket:
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    asking.connect(str(place))
    return asking


def _environment_at(place: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(place.with_suffix(".json").read_text())
    return found


class CommandServer:
    """Forks commands that are to run in an environment like `environment`.

    stages: the server that their stages share. session: see `SessionServer`.
    """

    def __init__(self, environment: Mapping[str, str], session: Path) -> None:
        self._environment = _as_at_import(environment)
        # A server costs next to nothing until it is asked to import.
        self._stages = [SessionServer(_environment_of_stages(self._environment, n), session) for n in _THREADS]
        self.stages = self._stages[0]
        self._server = SessionServer(self._environment, session)
        self._folder = tempfile.TemporaryDirectory(prefix="stemma-commands-")
        self._line, self._ours = os.pipe()
        atexit.register(self.close)

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether a command with this environment may be forked."""
        return _as_at_import(environment) == self._environment

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path | None, stderr: int | None
    ) -> ForkedCommand:
        """`stemma ARGUMENTS`. stderr: the descriptor to write that to. Raises NotForkedError."""
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        asked = folder / "request.json"
        told = {**environment, _STAGES: os.pathsep.join(str(server.place) for server in self._stages)}
        asked.write_text(json.dumps({"arguments": arguments, "environment": told, "stdout": str(folder / "stdout")}))
        server, modules = self._server, _COMMAND
        if heavy := _WITH_MODELS.get(arguments[0]) or _WITH_MODELS.get(" ".join(arguments[:2])):
            server, modules = self.stages, [*heavy, "tests.support.programs.forked"]
        with open(os.dup(stderr) if stderr is not None else folder / "stderr", "wb") as output:
            argv = ["tests.support.programs.forked", str(asked)]
            process = server.start(modules, argv, cwd or Path.cwd(), output.fileno(), self._line, lambda: False)
        return ForkedCommand(process, folder)

    def close(self) -> None:
        self._server.close()
        for server in self._stages:
            server.close()
        self._folder.cleanup()


class SharedForkServer(ForkServer):
    """In a forked command, what a run takes for its own fork server: the test session's, where that fits."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._shared = False
        for place in map(Path, os.environ[_STAGES].split(os.pathsep)):
            different = {name for name, _ in environment.items() ^ _environment_at(place).items()} - _AS_IT_COMES
            obstacles = {name for name in different if not name.startswith(_TOLD_LATER) or name not in environment}
            # A separate server for every run would cost the tests half of their time, and no test would fail.
            assert obstacles <= _OWN_SERVER, f"{obstacles}: which list in tests/support/programs/forked.py has them?"
            if not obstacles:
                self._shared = True
                self.environment = dict(environment)
                self._own_sessions = True
                self._later = {name: environment[name] for name in different}
                self._requests = _asking(place)
                return
        super().__init__(environment)

    def start(self, *arguments: Any, **options: Any) -> Any:
        return super().start(*arguments, **options, **({"set": self._later} if self._shared else {}))

    def close(self) -> None:
        if self._shared:
            self._requests.close()
        else:
            super().close()


def _as_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment that a command has set before it imports, without what it can be told later."""
    return _without_told_later({CONSOLE_LEVEL: "CRITICAL", **environment, **QUIET, **OFFLINE})


def _without_told_later(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_TOLD_LATER)}


def _environment_of_stages(environment: Mapping[str, str], threads: int | None) -> dict[str, str]:
    """That of the stages of a command with this environment. threads: their `launch.threads`."""
    from infra.launch.config import LaunchConfig
    from tasks.processes.environment import stage_environment

    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        return stage_environment(LaunchConfig(threads=threads), keeps_memory=True)
    finally:
        os.environ.clear()
        os.environ.update(before)


def main(path: str) -> int:
    """The forked process: becomes the command. path: of the request."""
    die_with_parent()
    asked = json.loads(Path(path).read_text())
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.environ.pop(PARENT_FD, None)  # it names a descriptor that is open here, and not in what the command starts
    import tasks.processes.warm_start
    from cli.main import main as command

    if "prefect" in sys.modules:
        _read_prefects_settings_when_they_change()
    tasks.processes.warm_start.ForkServer = SharedForkServer  # type: ignore[misc]
    sys.argv = ["stemma", *asked["arguments"]]
    with open(asked["stdout"], "wb") as stdout:
        os.dup2(stdout.fileno(), 1)
    if asked["arguments"][0] == ENGINE:
        from flows.prefect.execution import ON_WORKER

        sys.argv = asked["arguments"]
        os.environ[ON_WORKER] = sys.argv[1]
        runpy.run_module(ENGINE, run_name="__main__", alter_sys=True)
    else:
        command()
    return 0


def _read_prefects_settings_when_they_change() -> None:
    """A command sets some of them before it imports Prefect, which here is long done."""
    import prefect.context
    from prefect.context import SettingsContext

    get = SettingsContext.__dict__["get"].__func__
    known: dict[str, str | None] = {}

    def anew(kind: type[SettingsContext]) -> SettingsContext | None:
        now = {name: os.environ.get(name) for name in _PREFECTS}
        if now != known:
            known.update(now)  # first: whoever reads them asks for them
            prefect.context.refresh_global_settings_context()
        found: SettingsContext | None = get(kind)
        return found

    SettingsContext.get = classmethod(anew)  # type: ignore[method-assign, assignment]
