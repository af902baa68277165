"""Runs the real `stemma` command in a process of its own and reads what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infra.forked import NotForkedError
from tests.forked import CommandServer

REPOSITORY = Path(__file__).resolve().parent.parent


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


_servers: list[CommandServer] = []


def fork_commands(env: Mapping[str, str]) -> None:
    """From now on, commands in this environment are forked (see tests/forked.py)."""
    _servers.append(CommandServer(env))


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "STEMMA_RELAY": "off", "PYTHONPATH": str(REPOSITORY), **variables}


def start(*arguments: str | Path, env: Mapping[str, str] | None = None, **kwargs: Any) -> subprocess.Popen[str]:
    """The command, started with --json and not waited for."""
    return subprocess.Popen(
        [sys.executable, "-m", "cli.main", *map(str, arguments), "--json"],
        text=True,
        env=dict(env or environment()),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs},
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 400) -> Answer:
    """Waits for a started command; its stdout must be one JSON document. One that takes longer is killed."""
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        _, stderr = process.communicate()
        raise AssertionError(f"not done after {timeout_s} s; stderr:\n{stderr}") from None
    assert stdout.strip(), f"no document on stdout; exit code {process.returncode}; stderr:\n{stderr}"
    return Answer(process.returncode, json.loads(stdout), stderr or "")


def stemma(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout_s: float = 400
) -> Answer:
    """Runs `stemma ARGUMENTS --json` to its end: forked with its imports done, where environment and folder allow."""
    if _servers and cwd is None and _servers[0].serves(env or environment()):
        with suppress(NotForkedError):
            words = [*map(str, arguments), "--json"]
            code, stdout, stderr = _servers[0].run(words, env or environment(), timeout_s)
            assert stdout.strip(), f"no document on stdout; exit code {code}; stderr:\n{stderr}"
            return Answer(code, json.loads(stdout), stderr)
    return finish(start(*arguments, env=env, cwd=cwd), timeout_s)


def write_config(path: Path, config: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf8")
    return path
