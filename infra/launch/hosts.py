"""Machines that the config names, each reached by a remote shell such as ssh."""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from infra.errors import Problem
from infra.launch.config import LaunchConfig
from infra.launch.machines import Over
from infra.launch.node_files import node_file
from infra.process.lifetime import PARENT_FD

_PATIENCE_S = 10.0
_BEGIN_S = 180.0
"""Seconds until a host's agent must give its first sign of life: a remote shell, and Python with few imports."""
# Variables that a remote shell does not pass on and training needs; secrets stay here.
_PASSED_ON = ("STEMMA_", "PYTHON", "OMP_", "NCCL_", "GLOO_", "TORCH", "CUDA_", "HF_", "GLIBC_", "TOKENIZERS_", "MKL_")
_OURS_ALONE = ("STEMMA_AUTH", "STEMMA_DATABASE_URL", "STEMMA_HEARTBEATS", PARENT_FD)


def passed_on(environment: Mapping[str, str], *, scheduled: bool = False) -> dict[str, str]:
    """Return the variables that a training on another machine gets from this one.

    Args:
        scheduled: True if a scheduler there assigns the GPUs.
    """
    local_only = (*_OURS_ALONE, *(["CUDA_VISIBLE_DEVICES"] if scheduled else []))
    return {
        name: value for name, value in environment.items() if name.startswith(_PASSED_ON) and name not in local_only
    }


class Hosts:
    """An agent on each used host. It ends when the pipe to its remote shell breaks, however this process ends."""

    def __init__(self, launch: LaunchConfig, folder: Path, environment: Mapping[str, str]) -> None:
        self._launch = launch
        self._folder = folder
        self._environment = passed_on(environment)
        self._agents: dict[str, tuple[str, subprocess.Popen[bytes], float]] = {}
        self._numbers = itertools.count()

    def request(self, excluded: Mapping[str, str]) -> None:
        """Start agents up to the number `launch.nodes`, and end those on excluded hosts."""
        for name, (host, _, _) in list(self._agents.items()):
            if host in excluded:
                self._end(name)
        used = {host for host, _, _ in self._agents.values()}
        for host in self._launch.hosts:
            if len(self._agents) < self._launch.nodes and host not in used and host not in excluded:
                self._begin(host)

    def is_ours(self, name: str) -> bool:
        return name in self._agents

    def order_of(self, name: str) -> int:
        """Return the place of a node among the others; the first of them gathers the ranks."""
        return self._launch.hosts.index(self._agents[name][0])

    def refused(self, excluded: Mapping[str, str]) -> dict[str, str]:
        """Return the hosts on which no agent runs any more, with the reason."""
        reasons = {}
        for name, (host, process, started) in self._agents.items():
            if host not in excluded and process.poll() is not None:
                reasons[host] = f"its agent ended, or never began: exit code {process.returncode}"
            elif time.monotonic() - started > _BEGIN_S and not node_file(self._folder, name).exists():
                reasons[host] = f"its agent gave no sign within {_BEGIN_S:.0f} s"
        return reasons

    def over(self, excluded: Mapping[str, str]) -> Over | None:
        usable = [host for host in self._launch.hosts if host not in excluded]
        if len(usable) >= self._launch.nodes:
            return None
        reasons = "; ".join(f"{host}: {reason}" for host, reason in excluded.items())
        problem = Problem(
            "too_few_hosts",
            "launch.hosts",
            f"expected {self._launch.nodes} working hosts, got {len(usable)}: {reasons}",
            "repair them, or set other hosts",
        )
        return Over(problem, None)

    def cancel(self) -> None:
        """Do nothing: agents leave when ordered to."""

    def release(self, leaving_s: float = 0.0) -> None:
        for name in list(self._agents):
            self._end(name)

    def pass_on_log(self) -> None:
        """Do nothing: the remote shells write into this process's log themselves."""

    def _begin(self, host: str) -> None:
        name = f"{next(self._numbers)}.{host}"
        variables = [f"{key}={value}" for key, value in {**self._environment, PARENT_FD: "0"}.items()]
        agent = [sys.executable, "-m", "infra.launch.agent", str(self._folder), name, host]
        line = f"cd {shlex.quote(str(self._folder))} && exec env {shlex.join([*variables, *agent])}"
        command = [word.replace("{host}", host) for word in self._launch.remote_shell]
        process = subprocess.Popen([*command, line], stdin=subprocess.PIPE, env=_without_our_pipe())
        self._agents[name] = host, process, time.monotonic()

    def _end(self, name: str) -> None:
        _, process, _ = self._agents.pop(name)
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _without_our_pipe() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != PARENT_FD}
