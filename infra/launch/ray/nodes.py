"""Nodes of a Ray cluster: a job (`infra.launch.ray.job`) that has an agent on each, and ends with this process."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from infra.errors import Problem, stage_error
from infra.io.json import parse_own_json
from infra.launch.config import LaunchConfig
from infra.launch.hosts import passed_on
from infra.launch.machines import OneJob, Over
from infra.launch.node_files import node_file
from infra.launch.ray.job import INSTALL, RayRequest
from infra.process.lifetime import PARENT_FD
from infra.process.tail import Tail
from infra.project import python_path

_BEGIN_S = 180.0
"""Seconds that a machine may take until its agent gives a sign."""
_ENDING_S = 60.0
_POLL_S = 0.1


class RayNodes(OneJob):
    """One job at a time. The name of a machine is the prefix of its id in Ray and its address.

    environment: of the stage. say: called with (name, message) for what the job waits for.
    """

    def __init__(
        self,
        launch: LaunchConfig,
        folder: Path,
        environment: Mapping[str, str],
        say: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise stage_error(
                "no_ray", "launch.cluster", "ray is not installed", f"{INSTALL}, or another launch.cluster"
            )
        self._launch = launch
        self._folder = folder
        # Includes the keys of S3, as for corpus stages.
        keys = {name: value for name, value in environment.items() if name.startswith("AWS_")}
        self._environment = passed_on(environment, scheduled=True) | keys
        self._say = say
        self._numbers = itertools.count()
        self._number = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._events = Tail(folder / "none")
        self._logs: list[Tail] = []
        self._placed: list[str] = []
        self._since = 0.0
        self._ended: dict[str, str] = {}
        self._problem: Problem | None = None

    def is_ours(self, name: str) -> bool:
        return name.startswith(f"{self._number}.")

    def refused(self, excluded: Mapping[str, str]) -> dict[str, str]:
        """Return the machines whose agent ended, or that Ray lost, with the reason."""
        self._poll()
        reasons = dict(self._ended)
        if self._placed and time.monotonic() - self._since > _BEGIN_S:
            files = [node_file(self._folder, f"{self._number}.{index}") for index in range(len(self._placed))]
            silent = [machine for machine, file in zip(self._placed, files, strict=True) if not file.exists()]
            reasons |= dict.fromkeys(silent, f"its agent gave no sign within {_BEGIN_S:.0f} s")
        return {machine: reason for machine, reason in reasons.items() if machine not in excluded}

    def over(self, excluded: Mapping[str, str]) -> Over | None:
        """Return the problem if the cluster refused the job or was lost. Waiting for machines has no time limit."""
        self._poll()
        if self._problem is None and self._process is not None and self._process.poll() is not None:
            message = (
                f"the job on Ray ended with exit code {self._process.returncode}; its output is in the stage's log"
            )
            fix = "`ray status` shows whether the cluster runs"
            self._problem = Problem("scheduler_unreachable", "launch.ray", message, fix)
        return Over(self._problem, None) if self._problem else None

    def cancel(self) -> None:
        """Do nothing: agents leave when ordered to."""

    def release(self, leaving_s: float = 0.0) -> None:
        if self._process is None:
            return
        end = time.monotonic() + leaving_s
        while time.monotonic() < end and self._process.poll() is None and len(self._ended) < self._launch.nodes:
            time.sleep(_POLL_S)
            self._poll()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # Ray ends what its job started
            self._process.wait()
        self.pass_on_log()
        self._process = None

    def pass_on_log(self) -> None:
        """Write the new output of the agents to this process's log."""
        for log in self._logs:
            for line in log.lines():
                sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def _has_job(self) -> bool:
        return self._process is not None

    def _submit(self) -> None:
        launch, number = self._launch, next(self._numbers)
        names = [f"{number}.{index}" for index in range(launch.nodes)]
        logs = [self._folder / f"log-{name}" for name in names]
        events = self._folder / f"ray-{number}"
        path = python_path(self._environment.get("PYTHONPATH", ""))
        request = RayRequest(
            address=launch.ray or "",
            cpus=launch.processes * (launch.threads or 1),
            gpus=launch.processes if launch.device == "gpu" else 0,
            excluded=[machine.partition("@")[0] for machine in self._excluded],
            command=[sys.executable, "-m", "infra.launch.agent", str(self._folder)],
            environment={**self._environment, "PYTHONPATH": path, PARENT_FD: "0"},
            names=names,
            logs=[str(log) for log in logs],
        )
        environment = {name: value for name, value in os.environ.items() if name != PARENT_FD} | {"PYTHONPATH": path}
        command = [sys.executable, "-m", "infra.launch.ray.job", str(events)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, env=environment)
        assert self._process.stdin is not None
        self._process.stdin.write(request.as_line())
        self._process.stdin.flush()
        self._number, self._problem, self._placed, self._ended = number, None, [], {}
        self._events, self._logs = Tail(events), [Tail(log) for log in logs]

    def _poll(self) -> None:
        for line in self._events.lines():
            event = parse_own_json(line)
            if "waiting" in event:
                self._say("waiting", event["waiting"])
            elif "problem" in event:
                self._problem = Problem(*event["problem"])
            elif "placed" in event:
                self._placed, self._since = event["placed"], time.monotonic()
            else:
                self._ended[event["machine"]] = event["reason"]
