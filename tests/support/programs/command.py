"""Runs the real `stemma` command in a process of its own, mostly a forked one, and reads what it says."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import yaml

from infra.process.forked import ForkServer, NotForkedError
from tests.support.programs.forked import ENGINE, CommandServer, ForkedCommand, Session

REPOSITORY = Path(__file__).resolve().parents[3]
GUARD = str(REPOSITORY / "tests" / "offline_guard")
Command = ForkedCommand | subprocess.Popen[str]
patience_s = 400.0
"""How long a command or a forked call may take; `conftest` sets it for each test."""


@dataclass(frozen=True)
class Answer:
    """How a command ended. `document` is the one JSON document that it printed."""

    code: int
    document: dict[str, Any]
    stderr: str

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["stage"]: row for row in self.document["stages"]}

    def statuses(self) -> dict[str, str]:
        return {stage: row["status"] for stage, row in self.rows().items()}

    def with_status(self, status: str) -> set[str]:
        return {stage for stage, found in self.statuses().items() if found == status}


session: Path | None = None
"""The folder that all workers of this test session share; `conftest` sets it where there are several."""


@cache
def session_folder() -> Path:
    """See `tests.support.programs.forked.Session`."""
    return session or _own_session().folder


@cache
def _own_session() -> Session:
    own = Session()
    atexit.register(own.close)
    return own


@cache
def _server() -> CommandServer:
    return CommandServer(environment(), session_folder())


def stage_server() -> ForkServer:
    """That of this test session for the stages of commands, and for trainings that tests start themselves."""
    return _server().stages


def environment(**variables: str) -> dict[str, str]:
    """Of commands under test: no relay to MLflow unless they ask for it, and no way off this machine."""
    return {**os.environ, "STEMMA_RELAY": "off", "PYTHONPATH": os.pathsep.join([GUARD, str(REPOSITORY)]), **variables}


def start(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, stderr: IO[Any] | None = None
) -> Command:
    """The command, started with --json and not waited for: forked, where its environment allows that."""
    return _started([*map(str, arguments), "--json"], env or environment(), cwd, stderr)


def start_new(*arguments: str | Path, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    """The command as a new process, whose imports and servers are its own."""
    return _new([*map(str, arguments), "--json"], env or environment(), **options)


def _started(words: Sequence[str], env: Mapping[str, str], cwd: Path | None, stderr: IO[Any] | None) -> Command:
    if _server().serves(env):
        with suppress(NotForkedError):
            return _server().start(words, env, cwd, stderr and stderr.fileno())
    return _new(words, env, cwd=cwd, stderr=stderr or subprocess.PIPE)


def _new(words: Sequence[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cli.main", *words]
    return subprocess.Popen(
        command, text=True, env=dict(env), **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    )


def finish(process: Command, timeout_s: float | None = None) -> Answer:
    """Waits for a started command; its stdout must be one JSON document. One that takes longer is killed.

    timeout_s: by default `patience_s`."""
    timeout_s = timeout_s or patience_s
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        _, stderr = process.communicate()
        raise AssertionError(f"not done after {timeout_s} s; stderr:\n{stderr}") from None
    assert stdout.strip(), f"no document on stdout; exit code {process.returncode}; stderr:\n{stderr}"
    assert process.returncode is not None
    return Answer(process.returncode, json.loads(stdout), stderr or "")


def stemma(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float | None = None,
) -> Answer:
    """Runs `stemma ARGUMENTS --json` to its end."""
    return finish(start(*arguments, env=env, cwd=cwd), timeout_s)


def execute(flow_run: str, env: Mapping[str, str]) -> str:
    """Runs a flow run to its end, or until it is suspended, in the process that Prefect's worker would start for it:
    forked. What it wrote to stderr. env: one that commands are forked with."""
    process = _server().start([ENGINE, flow_run], env, None, None)
    _, stderr = process.communicate(patience_s)
    return stderr


def typed(*words: str, env: Mapping[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs `stemma WORDS` to its end, as a person types it."""
    process = _started(words, env, cwd, None)
    stdout, stderr = process.communicate(timeout=patience_s)
    assert process.returncode is not None
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


def write_config(path: Path, config: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf8")
    return path
