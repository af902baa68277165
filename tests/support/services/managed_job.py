"""A stand-in for SkyPilot's managed jobs: machines are processes with separate home folders, and can be lost.

The schema is written from the documentation of SkyPilot's YAML. It allows only the fields that we use.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import psutil

from tests.support.programs.command import REPOSITORY
from tests.support.programs.processes import gone, wait_until

_TEXT, _COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 1}
_AT_LEAST = {"type": "string", "pattern": r"^\d+(\.\d+)?\+$"}
_NAMES = {"pattern": "^[A-Z_][A-Z0-9_]*$"}


def _closed(required: str = "", **properties: Any) -> dict[str, Any]:
    kept = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**kept, "required": required.split()}


SCHEMA = _closed(
    "resources run",
    name={"type": "string", "pattern": "^[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*$"},
    workdir=_TEXT,
    num_nodes=_COUNT,
    resources=_closed(
        use_spot={"type": "boolean"},
        disk_size=_COUNT,
        cpus=_AT_LEAST,
        memory=_AT_LEAST,
        image_id=_TEXT,
        accelerators={"type": "object", "additionalProperties": _COUNT},
        any_of={"type": "array", "items": _closed("infra", infra=_TEXT)},
        job_recovery=_closed(
            strategy={"enum": ["FAILOVER", "EAGER_NEXT_REGION"]},
            max_restarts_on_errors={"type": "integer", "minimum": 0},
        ),
    ),
    envs={"type": "object", "propertyNames": _NAMES, "additionalProperties": {"type": "string"}},
    secrets={"type": "object", "propertyNames": _NAMES, "additionalProperties": {"type": "null"}},
    setup=_TEXT,
    run=_TEXT,
)


def problem_of(task: Mapping[str, Any]) -> str:
    """Return what SkyPilot would refuse; empty if it would take the task."""
    errors = sorted(jsonschema.Draft202012Validator(SCHEMA).iter_errors(task), key=str)
    return f"{errors[0].json_path}: {errors[0].message}" if errors else ""


class ManagedJob:
    """A job that runs on one machine after another.

    known: the environment of its user, from which its secrets are taken. folder: of the machines.
    """

    def __init__(self, task: dict[str, Any], folder: Path, known: Mapping[str, str]) -> None:
        assert not problem_of(task), problem_of(task)
        self._task, self._folder = task, folder
        self._variables = {**task["envs"], **{name: known[name] for name in task["secrets"]}}
        self.machines: list[subprocess.Popen[str]] = []
        self._launch()

    def lose_machine(self) -> None:
        """As when a cloud takes a spot machine back: without notice, and its disk is gone. The next one follows."""
        process = self.machines[-1]
        processes = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for running in processes:
            if not gone(running):
                running.send_signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: all(map(gone, processes)), timeout_s=60)
        self._launch()

    def log(self) -> str:
        return (self._folder / f"machine-{len(self.machines)}" / "log").read_text()

    @property
    def has_ended(self) -> bool:
        return self.machines[-1].poll() is not None

    def wait(self, timeout_s: float) -> int:
        return self.machines[-1].wait(timeout_s)

    def close(self) -> None:
        if not self.has_ended:
            os.killpg(self.machines[-1].pid, signal.SIGKILL)
            self.machines[-1].wait()

    def _launch(self) -> None:
        home = self._folder / f"machine-{len(self.machines) + 1}"
        home.mkdir(parents=True)
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), **self._variables}
        script = f"{self._task['setup']}\n{self._task['run']}"
        with open(home / "log", "w") as log:
            self.machines.append(
                subprocess.Popen(
                    ["bash", "-c", script],
                    cwd=REPOSITORY,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    text=True,
                )
            )
