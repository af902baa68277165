"""Training on nodes of a cluster, run from the process of its stage.

The stage gathers machines, has them check themselves, assigns ranks to each, and watches all of them. If a rank hangs
or a node is lost, it restarts all ranks from the newest checkpoint. `infra.launch.node_files` defines the messages
between the stage and its nodes.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from infra.errors import Problem, StageError
from infra.launch import node_files
from infra.launch.config import LaunchConfig
from infra.launch.devices.diagnostics import slow_machines
from infra.launch.heartbeat import Beat, Hang, stuck_ranks
from infra.launch.hosts import Hosts, passed_on
from infra.launch.kube.launcher import Kubernetes
from infra.launch.machines import Machines, Over
from infra.launch.node_files import NodeState, NodeWatch, Order
from infra.launch.ranks import GRACE_S, Ended
from infra.launch.ray.nodes import RayNodes
from infra.launch.slurm import Slurm
from infra.launch.training import SETTLE_S

POLL_S = 0.1
CLOCK_S = 30.0
"""Seconds by which the clock of a node may differ from ours: file times, logs and certificates depend on it."""
# A node that was cut off ends its ranks by itself after `launch.lost_s`; they may start elsewhere only after that.
_SURELY_S = 10.0


def run_on_cluster(
    command: Sequence[str],
    launch: LaunchConfig,
    work_dir: Path,
    name: str,
    stop: Callable[[], bool],
    say: Callable[[str, str], None],
    environment: Mapping[str, str],
    progress: Callable[[], object] = lambda: None,
) -> list[Ended]:
    """Return the ranks that ended by themselves; no rank is left on return.

    name: of the stage. stop, say: as for `infra.launch.training.run_ranks`.
    progress: returns a value that changes once there is a newer checkpoint. A job that reached its time limit or was
        pre-empted is followed by another, without a limit on their number, if each writes a checkpoint.

    Raises StageError for a hang or lost nodes more than `launch.restarts` times, for a job that was refused, failed, or
    was cancelled from outside, and if too few hosts pass their checks.
    """
    folder = work_dir / "cluster"
    folder.mkdir(parents=True, exist_ok=True)
    _end_former(folder, launch, stop)
    attempt_folder = folder / f"{time.time_ns()}"
    attempt_folder.mkdir()
    with _Nodes(attempt_folder, command, launch, name, stop, say, environment, work_dir.resolve().parent.name) as nodes:
        restarts, newest = 0, progress()
        while True:
            result = nodes.attempt()
            if not isinstance(result, Over):
                return result
            summary = str(replace(result.problem, fix="", path=""))
            if result.counts is None or (result.counts and restarts >= launch.restarts):
                after = f", after {restarts} new starts" if restarts else ""
                raise StageError(replace(result.problem, message=result.problem.message + after))
            if result.counts:
                restarts += 1
                summary += f"; starting all ranks again from the newest checkpoint ({restarts} of {launch.restarts})"
            else:
                if progress() == newest:
                    message = f"{result.problem.message}, and no checkpoint was written since it began"
                    raise StageError(replace(result.problem, message=message))
                newest = progress()
                summary += "; going on from the newest checkpoint"
            say("restarted", summary)


def _end_former(folder: Path, launch: LaunchConfig, stop: Callable[[], bool]) -> None:
    """Order the nodes of a killed predecessor to leave, and wait until they have left or must have by now."""
    former = [path for path in folder.iterdir() if path.is_dir()]
    for path in former:
        order = node_files.read(path / node_files.ORDER, Order) or Order()
        node_files.write(path / node_files.ORDER, replace(order, sign=order.sign + 1, do="leave"))
    watch = NodeWatch()
    for path in former:
        while not stop():
            signs = {name: state.sign for name, state in node_files.nodes(path).items() if state.state != "gone"}
            if all(silent > launch.lost_s + _SURELY_S for silent in watch.silent_s(signs).values()):
                break
            time.sleep(POLL_S)
        shutil.rmtree(path, ignore_errors=True)


@dataclass
class _Seen:
    """Known state of a node, timed by our clock."""

    state: NodeState
    since: float
    signs: int = 0
    clock_s: float = 0.0

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.since


@dataclass
class _Nodes:
    """The nodes of one attempt at a stage. While it is open, a thread gives them our signs of life."""

    folder: Path
    command: Sequence[str]
    launch: LaunchConfig
    name: str
    stop: Callable[[], bool]
    say: Callable[[str, str], None]
    environment: Mapping[str, str]
    build: str
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> _Nodes:
        self._order = Order(
            command=list(self.command),
            environment=passed_on(self.environment, scheduled=self.launch.cluster != "hosts"),
            launch=self.launch.model_dump(mode="json"),
        )
        self._excluded: dict[str, str] = {}
        self._passed = ""
        self._write()
        threading.Thread(target=self._send_heartbeats, name="signs", daemon=True).start()
        self._machines: Machines = self._choose_machines()
        return self

    def __exit__(self, *_: object) -> None:
        self._send_order("leave", grace_s=0.0)
        end = time.monotonic() + GRACE_S
        while remaining := [node for name, node in self._poll().items() if self._machines.is_ours(name)]:
            if time.monotonic() > end or all(node.state.state == "gone" for node in remaining):
                break
            time.sleep(POLL_S)
        self._machines.release(leaving_s=GRACE_S if remaining and not self.stop() else 0.0)
        self._machines.pass_on_log()
        self._closed.set()
        shutil.rmtree(self.folder, ignore_errors=True)

    def attempt(self) -> list[Ended] | Over:
        """Start all ranks once and wait for their end; no rank is left on return."""
        gathered = self._gather()
        if not isinstance(gathered, list):
            return gathered or []
        first = self._seen[gathered[0]].state
        address, port = ("127.0.0.1", first.port) if self.launch.nodes == 1 else (first.address, first.port)
        numbers = {name: number for number, name in enumerate(gathered)}
        self._send_order("run", attempt=self._order.attempt + 1, numbers=numbers, address=address, port=port)
        ended_badly: float | None = None
        while True:
            observed = self._poll()
            nodes = [observed[name] for name in gathered]
            ended = [Ended(*record) for node in nodes if self._is_in(node) for record in node.state.ended]
            if self.stop():
                return self._stopped(gathered)
            # The scheduler takes the machines back; it will soon report the outcome of the job.
            has_left = any(node.state.state in ("leaving", "gone") for node in nodes)
            is_taken_back = has_left and any(outcome.code for outcome in ended)
            if len(ended) == self.launch.ranks and all(self._is_idle(node) for node in nodes) and not is_taken_back:
                return sorted(ended, key=lambda outcome: outcome.rank)
            if over := self._taken_back(gathered):
                return over  # the scheduler ended what ran there
            if self._lost(gathered):
                return self._end_failed(gathered)
            if hang := self._hang(nodes):
                return self._end_hang(gathered, hang)
            if any(outcome.code for outcome in ended):
                ended_badly = ended_badly or time.monotonic()
                if time.monotonic() - ended_badly > SETTLE_S and not is_taken_back:
                    return self._end_failed(gathered)
            time.sleep(POLL_S)

    def _choose_machines(self) -> Machines:
        if self.launch.cluster == "slurm":
            return Slurm(self.launch, self.folder, self.name, self.say)
        if self.launch.cluster == "ray":
            return RayNodes(self.launch, self.folder, self.environment, self.say)
        if self.launch.cluster == "kubernetes":
            return Kubernetes(self.launch, self.folder, self.name, self.build, self.say)
        return Hosts(self.launch, self.folder, self.environment)

    def _gather(self) -> list[str] | Over | None:
        """Return the ids of nodes that passed their checks, in order; None if the run was stopped."""
        self._send_order("wait")
        while True:
            self._machines.request(self._excluded)
            while not self.stop():
                observed = self._poll()
                if over := self._machines.over(self._excluded):
                    return over
                own_nodes = sorted(filter(self._machines.is_ours, observed), key=self._machines.order_of)
                bad = {
                    observed[name].state.machine: wrong
                    for name in own_nodes
                    if (wrong := self._problems_of(observed[name]))
                }
                bad |= self._machines.refused(self._excluded)
                if bad:
                    self._exclude(bad)
                    break
                ready = [
                    name for name in own_nodes if observed[name].state.state == "ready" and observed[name].signs > 1
                ]
                if len(ready) >= self.launch.nodes:
                    chosen = ready[: self.launch.nodes]
                    self._report_passed({observed[name].state.machine: observed[name].state.figures for name in chosen})
                    return chosen
                time.sleep(POLL_S)
            else:
                self._machines.cancel()
                return None

    def _problems_of(self, node: _Seen) -> str:
        """Return the problems that a node's checks found, or that it went silent; empty for a healthy node."""
        if node.silent_s > self.launch.lost_s + _SURELY_S and node.signs:
            return f"it gave no sign for {node.silent_s:.0f} s"
        if node.signs > 1 and abs(node.clock_s) > CLOCK_S:
            return f"clock: it is {abs(node.clock_s):.0f} s {'behind' if node.clock_s > 0 else 'ahead'}"
        return "; ".join(node.state.problems)

    def _exclude(self, bad: Mapping[str, str]) -> None:
        """Leave machines out for the rest of this attempt at the stage."""
        self._excluded |= bad
        for machine, reason in bad.items():
            self.say("node_excluded", f"node {machine} is left out: {reason}")

    def _report_passed(self, machines: Mapping[str, Mapping[str, float]]) -> None:
        names = ", ".join(machines)
        if names != self._passed:
            self._passed = names
            checked = "passed their checks" if len(machines) > 1 else "passed its checks"
            self.say("nodes", f"training on {names}, which {checked} of arithmetic, memory, disk and clock")
            for machine, reason in slow_machines(machines).items():
                self.say("slow_node", f"node {machine} is slow, and the others will wait for it: {reason}")

    def _stopped(self, nodes: Sequence[str]) -> list[Ended]:
        self._machines.cancel()
        self._send_order("stop", grace_s=self.launch.grace_s)
        self._wait_for(nodes)
        observed = (self._seen[name] for name in nodes)
        return [Ended(*record) for node in observed if self._is_in(node) for record in node.state.ended]

    def _taken_back(self, nodes: Sequence[str]) -> Over | None:
        """Return the reason if the machines were taken back, also if they left before the scheduler ended them."""
        over = self._machines.over(self._excluded)
        leaving_machines = [
            state.machine for name in nodes if (state := self._seen[name].state).state in ("leaving", "gone")
        ]
        if over is not None and over.problem.code == "job_failed" and leaving_machines:
            message = f"the scheduler ended the job, on {', '.join(leaving_machines)}"
            return Over(replace(over.problem, code="time_limit", message=message), False)
        return over

    def _lost(self, nodes: Sequence[str]) -> dict[str, str]:
        """Return the machines of nodes that are silent, or left without the scheduler reporting it, with the reason."""
        reasons = self._machines.refused(self._excluded)
        for name in nodes:
            node = self._seen[name]
            if node.state.state == "gone" and node.silent_s > _SURELY_S:
                reasons.setdefault(node.state.machine, "it left while its ranks trained")
            elif node.state.state != "gone" and node.silent_s > self.launch.lost_s + _SURELY_S:
                reasons.setdefault(node.state.machine, f"it gave no sign for {node.silent_s:.0f} s")
        return reasons

    def _hang(self, nodes: Sequence[_Seen]) -> Hang | None:
        """Return the ranks that hang, over all nodes together; None if there are none."""
        beats: dict[int, Beat] = {}
        silent_s: dict[int, float] = {}
        stopped = set()
        for node in nodes:
            if node.state.state != "running" or not self._is_in(node):
                continue
            for rank, (count, batch, phase, seconds, is_stopped) in node.state.ranks.items():
                beats[int(rank)] = Beat(count, batch, phase, 0.0)
                silent_s[int(rank)] = seconds
                if is_stopped:
                    stopped.add(int(rank))
        stuck = stuck_ranks(beats, silent_s, self.launch.hang_s)
        return Hang(tuple(rank for rank in stuck if rank in stopped) or stuck, beats, {}) if stuck else None

    def _end_hang(self, nodes: Sequence[str], hang: Hang) -> Over:
        self._send_order("stop", stacks=True, grace_s=0.0)
        if setback := self._wait_for(nodes):
            return setback
        notes = {int(rank): note for name in nodes for rank, note in self._seen[name].state.notes.items()}
        description = str(replace(hang, notes=notes))
        fix = "the stacks of all ranks are in the stage's log; raise launch.hang_s if batches take that long"
        return Over(Problem("hang", "launch.hang_s", description, fix), True)

    def _end_failed(self, nodes: Sequence[str]) -> list[Ended] | Over:
        """End the ranks after a rank or a node failed. Return the lost nodes if there are any, else the ended ranks."""
        self._send_order("stop", grace_s=GRACE_S)
        return self._wait_for(nodes) or [Ended(*record) for name in nodes for record in self._seen[name].state.ended]

    def _wait_for(self, nodes: Sequence[str]) -> Over | None:
        """Wait until no rank of these nodes is or can be left. Return a loss of nodes or of the job, else None."""
        while True:
            observed = self._poll()
            patience_s = self.launch.lost_s + _SURELY_S
            if all(self._is_idle(observed[name]) or observed[name].silent_s > patience_s for name in nodes):
                break
            if over := self._taken_back(nodes):
                return over
            time.sleep(POLL_S)
        lost = self._lost(nodes)
        if not lost:
            return None
        if self.launch.cluster == "slurm":
            self._machines.release()  # a job without one of its nodes is of no use, and Slurm knows which to avoid
        else:
            self._excluded |= lost
        message = "; ".join(f"node {machine} was lost: {reason}" for machine, reason in lost.items())
        return Over(Problem("node_lost", "launch.nodes", message, "run again"), True)

    def _is_in(self, node: _Seen) -> bool:
        return node.state.attempt == self._order.attempt

    def _is_idle(self, node: _Seen) -> bool:
        return node.state.state in ("checking", "ready", "gone")

    def _poll(self) -> dict[str, _Seen]:
        """Return the current state of the nodes, and forward their output."""
        self._machines_log()
        now = time.monotonic()
        for name, state in node_files.nodes(self.folder).items():
            before = self._seen.get(name)
            if before is None:
                self._seen[name] = _Seen(state, now)
            elif state.sign != before.state.sign:
                self._seen[name] = _Seen(state, now, before.signs + 1, time.time() - state.time)
        return self._seen

    def _machines_log(self) -> None:
        if hasattr(self, "_machines"):
            self._machines.pass_on_log()

    def _send_order(
        self,
        do: Literal["wait", "run", "stop", "leave"],
        *,
        stacks: bool = False,
        grace_s: float = 0.0,
        **fields: object,
    ) -> None:
        with self._lock:
            self._order = replace(self._order, do=do, stacks=stacks, grace_s=grace_s, **fields)  # type: ignore[arg-type]
        self._write()

    def _write(self) -> None:
        with self._lock:
            self._order.sign += 1
            node_files.write(self.folder / node_files.ORDER, self._order)

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(node_files.SIGN_S):
            with suppress(OSError):  # the next one may be written
                self._write()
