"""A job on a Ray cluster: an agent (`infra.launch.agent`) on each node of a placement group.

    python -m infra.launch.ray.job EVENTS

The request (`RayRequest`, as JSON) is the first line of its input. The job appends its events, one per line, to the
file EVENTS. It ends when its input ends, hence with its stage, however that ends.

It is a separate program because Ray takes over a process's signals, and ends the process if the cluster is lost.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.io.json import parse_own_json

INSTALL = "pip install -e '.[ray]' in the project's folder"
"""Command that installs Ray."""
POLL_S = 0.5
_ENDING_S = 20.0
_WAITED = 10
"""Number of looks for free nodes after which the job reports what it waits for."""
_NODE_ID = "ray.io/node-id"


@dataclass(frozen=True)
class RayRequest:
    """Request of a stage to its job.

    cpus, gpus: of each node. excluded: prefixes of the ids of Ray nodes that get no agent.
    command: of an agent, followed by its id (names[i]) and machine. environment: variables that it gets in addition to
    those of its node. logs: the output file of each agent.
    """

    address: str
    cpus: int
    gpus: int
    excluded: list[str]
    command: list[str]
    environment: dict[str, str]
    names: list[str]
    logs: list[str]

    def as_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def use_token() -> None:
    """Make Ray's client send this machine's token, if there is one.

    `ray start` requires the token as soon as it exists; the client sends it only when RAY_AUTH_MODE is set.
    """
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if os.environ.get("RAY_AUTH_TOKEN") or path.is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def run_agent(command: list[str], variables: dict[str, str], log: str) -> int:
    """Run an agent on a node, in a Ray worker, and return its exit code. It ends with this worker, however that ends.

    Ray sends this function there by value: it imports what it needs here, and nothing from the project.
    """
    import os
    import subprocess

    import ray

    address = ray.util.get_node_ip_address()
    machine = f"{ray.get_runtime_context().get_node_id()[:8]}@{address}"
    # Ray sets the threads to the CPUs of its worker; ranks have their own settings.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | variables
    with open(log, "ab") as out:
        process = subprocess.Popen(
            [*command, machine], stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env=environment
        )
        return process.wait()


class _Job:
    """The job of one request, until `is_over`."""

    def __init__(self, request: RayRequest, events: Path, is_over: threading.Event) -> None:
        self._request = request
        self._events = events
        self._is_over = is_over
        self._nodes: list[str] = []

    def run(self) -> None:
        use_token()  # Ray reads the environment when it is imported
        import ray
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

        request = self._request
        try:
            _reach(request.address)
            ray.init(address=request.address, log_to_driver=False)
        except Exception as error:
            message = f"the Ray cluster at {request.address} rejected the job: {_first_line(error)}"
            self._write_event(
                problem=("scheduler_unreachable", "launch.ray", message, "`ray status` there shows its state")
            )
            return
        bundle = {"CPU": float(request.cpus), **({"GPU": float(request.gpus)} if request.gpus else {})}
        bundles = [bundle for _ in request.names]
        group = placement_group(bundles, strategy="STRICT_SPREAD", bundle_label_selector=self._selectors())
        polls = 0
        while not self._is_over.is_set() and not group.wait(POLL_S):
            polls += 1
            if polls == _WAITED:
                self._write_event(waiting=self._awaited())
        agents: dict[Any, int] = {}
        if not self._is_over.is_set():
            placed = placement_group_table(group)["bundles_to_node_id"]
            addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            self._nodes = [f"{placed[i][:8]}@{addresses.get(placed[i], '?')}" for i in range(len(bundles))]
            self._write_event(placed=self._nodes)
            agents = {self._agent(group, index): index for index in range(len(bundles))}
        while not self._is_over.is_set():
            self._note_ended(agents)
        for agent in agents:
            ray.cancel(agent, force=True)
        remove_placement_group(group)
        if agents:
            ray.wait(list(agents), num_returns=len(agents), timeout=_ENDING_S)
        ray.shutdown()

    def _agent(self, group: Any, index: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        request = self._request
        options: dict[str, Any] = {
            "num_cpus": request.cpus,
            "num_gpus": request.gpus,
            "max_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        }
        command = [*request.command, request.names[index]]
        task = ray.remote(**options)(run_agent)
        return task.remote(command, request.environment, request.logs[index])

    def _note_ended(self, agents: dict[Any, int]) -> None:
        """Wait up to POLL_S for an agent to end, and record those that ended."""
        import ray

        done, _ = ray.wait(list(agents), timeout=POLL_S) if agents else ([], self._is_over.wait(POLL_S))
        for agent in done:
            index = agents.pop(agent)
            try:
                reason = f"its agent ended with exit code {ray.get(agent)}"
            except Exception as error:  # Ray's, of many kinds: the node died, or Ray ended the worker
                reason = f"Ray lost it: {_first_line(error)}"
            self._write_event(ended=index, machine=self._nodes[index], reason=reason)

    def _selectors(self) -> list[dict[str, str]] | None:
        """Return the label selectors that keep agents off excluded nodes, one per agent; None if none is excluded."""
        import ray

        ids = [node["NodeID"] for node in ray.nodes() if node["NodeID"].startswith(tuple(self._request.excluded))]
        return [{_NODE_ID: f"!in({','.join(ids)})"} for _ in self._request.names] if ids else None

    def _awaited(self) -> str:
        """Describe what the job waits for."""
        import ray

        request = self._request
        gpus = f" and {request.gpus} GPUs" if request.gpus else ""
        alive = [node for node in ray.nodes() if node["Alive"]]
        sizes = [(int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0))) for node in alive]
        has = "; ".join(f"{sizes.count(size)} of {size[0]} CPUs, {size[1]} GPUs" for size in sorted(set(sizes)))
        without = f", less {len(request.excluded)} left out" if request.excluded else ""
        requirement = f"{len(request.names)} nodes of Ray with {request.cpus} CPUs{gpus} free each"
        return f"waiting for {requirement}; it has {has}{without}"

    def _write_event(self, **event: Any) -> None:
        with open(self._events, "a", encoding="utf8") as file:
            file.write(json.dumps(event) + "\n")


def _reach(address: str) -> None:
    """Raise OSError if no process listens at an address: Ray itself would retry for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_ENDING_S).close()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def main(arguments: Sequence[str]) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    request = RayRequest(**parse_own_json(sys.stdin.buffer.readline()))
    is_over = threading.Event()

    def end_with_input() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        is_over.set()
        # A cluster that does not answer ends the job by itself once this process is gone.
        threading.Timer(2 * _ENDING_S, os._exit, [1]).start()

    threading.Thread(target=end_with_input, name="input", daemon=True).start()
    try:
        _Job(request, Path(arguments[0]), is_over).run()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
