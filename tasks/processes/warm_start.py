"""Starts the processes of stages with their imports done: forked from a server, where a fork is safe.

A stage imports for one to thirteen seconds before its first line. So one server for each package of stages (corpus,
training, evaluation) imports what the run's stages need, in the order of the pipeline and while the first of them work,
and every stage is forked from its package's server. Servers share nothing, since each package has its own environment
(`keeps_memory` decides its glibc settings). A new process is started instead wherever a fork might not do the same:
the log of each stage records how it was started, and why.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from infra.launch.config import LaunchConfig
from infra.launch.devices.gpus import has_gpu
from infra.process.forked import ForkServer, NotForkedError, Process
from tasks.processes.child import Job, starts_ranks
from tasks.processes.environment import stage_environment
from tasks.stage import Node
from tasks.stages import STAGES

SWITCH = "STEMMA_WARM_START"
"""Set to `off`, every stage begins as a new process."""

PROGRAM = "tasks.processes.child"
_WITH_CUDA = ("training", "evaluation")
"""Packages all of whose stages may use a GPU."""


class WarmStart:
    """The fork servers of one pipeline run. They start when the first stage is built, and end with `close`.

    upcoming: takes the id of a node that is about to be built, and returns the nodes that the run will probably build
        with and after it.
    """

    def __init__(self, upcoming: Callable[[str], Iterable[Node]] = lambda node: ()) -> None:
        self._upcoming = upcoming
        self._lock = threading.Lock()
        self._servers: dict[str, ForkServer] = {}
        self._expected: set[str] = set()

    def start(self, job: Job, argument: str, output: int, parent: int, stop: Callable[[], bool]) -> Process:
        """Fork the process that builds a job. Raises NotForkedError if it must be a new one.

        Args:
            argument: of the program.
            output, parent, stop: see `infra.process.forked.ForkServer.start`.
        """
        launch = LaunchConfig(**job.launch)
        if reason := not_forked(job.stage, launch):
            raise NotForkedError(reason)
        with self._lock:
            modules = modules_of(job.stage, launch)
            server = self._server(job.stage, modules, stage_environment(launch, job.keeps_memory))
            self._expect(job.node, launch)
        return server.start(modules, [PROGRAM, argument], Path(job.scratch), output, parent, stop)

    def close(self) -> None:
        """End the servers; forked processes continue."""
        with self._lock:
            for server in self._servers.values():
                server.close()
            self._servers.clear()

    def _server(self, stage: str, modules: list[str], environment: Mapping[str, str]) -> ForkServer:
        """The one of this stage's package. Raises NotForkedError where its environment is not this one: libraries read
        it when they are imported, glibc when a process starts."""
        package = _package(stage)
        if package not in self._servers:
            self._servers[package] = ForkServer(environment)
            self._servers[package].expect([PROGRAM, *modules])
        server = self._servers[package]
        different = sorted({name for name, _ in server.environment.items() ^ environment.items()})
        if different:
            raise NotForkedError(f"the server was started with another {', '.join(different)}")
        return server

    def _expect(self, id: str, launch: LaunchConfig) -> None:
        """Import the modules of further stages in the background."""
        for node in self._upcoming(id):
            if node.stage.name not in self._expected and not not_forked(node.stage.name, launch):
                self._expected.add(node.stage.name)
                with suppress(NotForkedError):
                    environment = stage_environment(launch, node.stage.keeps_memory)
                    modules = modules_of(node.stage.name, launch)
                    self._server(node.stage.name, modules, environment).expect(modules)


def modules_of(stage: str, launch: LaunchConfig) -> list[str]:
    """Modules that a server imports for the processes that build this stage."""
    # streaming brings torch: a corpus stage that finds it imported would take the GPU for what it computed on.
    later = [name for name in STAGES[stage].imports_later if name != "streaming" or not has_gpu()]
    if STAGES[stage].makes_weights and STAGES[stage].trains:
        later.append(f"training.backends.{launch.trainer}")
    return [STAGES[stage].function.partition(":")[0], *later]


def not_forked(stage: str, launch: LaunchConfig) -> str:
    """Why this stage's process is always a new one; empty where a server may be asked."""
    if os.environ.get(SWITCH) == "off":
        return f"{SWITCH} is off"
    if launch.nodes > 1 and launch.cluster == "local":
        return "it runs on several machines"
    if STAGES[stage].trains and starts_ranks(launch):
        return "it starts one process per rank"
    if launch.ray is not None:
        return "it sends its work to Ray"
    if uses_gpu(stage):
        return "it may use the GPU of this machine, and CUDA does not survive a fork"
    return ""


def uses_gpu(stage: str) -> bool:
    """Return True if this stage trains or queries models, on a machine that has a GPU."""
    return (_package(stage) in _WITH_CUDA or STAGES[stage].uses_gpu or STAGES[stage].trains) and has_gpu()


def _package(stage: str) -> str:
    return STAGES[stage].package
