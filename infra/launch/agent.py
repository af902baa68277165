"""Agent of one node of a training on a cluster: starts and ends the ranks of its machine as the stage orders.

    python -m infra.launch.agent FOLDER [ID MACHINE]

FOLDER is that of `infra.launch.node_files`. Under Slurm, id and machine are read from its variables. The scheduler's
SIGTERM ends the ranks, which save. A node that sees no sign of its stage for `launch.lost_s` also ends them, because
they may have been started elsewhere by then.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from infra.launch import node_files
from infra.launch.config import LaunchConfig
from infra.launch.devices.diagnostics import examine
from infra.launch.heartbeat import FOLDER, dump_stacks, is_stopped, notes_on, read_beat, stacks
from infra.launch.node_files import NodeState, Order, Watch
from infra.launch.ranks import GRACE_S, ClusterNode, Ranks, free_port, own_process_group
from infra.process.lifetime import PARENT_FD, die_with_parent

POLL_S = 0.1
_GPU = "/dev/nvidia0"


class Agent:
    """One node. Its actions depend only on the current order, which `run` reads in every iteration."""

    def __init__(self, folder: Path, name: str, machine: str, address: str) -> None:
        self._folder = folder
        self._name = name
        self._watch = Watch()
        self._lock = threading.Lock()
        self._state = NodeState(machine=machine, address=address)
        self._order = Order()
        self._ranks: Ranks | None = None
        self._beats = Path()
        self.told_to_leave = False

    def run(self) -> None:
        """Run until the node is no longer wanted or its machine is taken back; no rank is left on return."""
        threading.Thread(target=self._send_heartbeats, name="signs", daemon=True).start()
        try:
            while not self._is_over():
                if self._state.state == "checking":
                    self._check()
                elif self._ranks is not None:
                    self._watch_ranks()
                elif self._is_to_run():
                    self._start()
                time.sleep(POLL_S)
        finally:
            self._end()
            self._set_state(state="gone")

    def _is_over(self) -> bool:
        """Return True if the node has to leave because of the order, the scheduler, or the stage's silence."""
        latest = node_files.read(self._folder / node_files.ORDER, Order)
        self._order = latest or self._order
        silent_s = self._watch.silent_s({"stage": self._order.sign})["stage"]
        if silent_s > LaunchConfig(**self._order.launch).lost_s:
            _report_problem(f"no sign of the stage for {silent_s:.0f} s: this node ends its ranks")
            return True
        if self.told_to_leave:
            self._set_state(state="leaving")
        return self.told_to_leave or self._order.do == "leave"

    def _check(self) -> None:
        if not self._order.sign:
            return
        launch = LaunchConfig(**self._order.launch)
        unpacked = Path(launch.scratch) if launch.scratch else Path(gettempdir())
        gpus = launch.device == "gpu" or (launch.device == "auto" and os.path.exists(_GPU))
        problems, figures = examine([self._folder, unpacked], gpus=gpus)
        self._set_state(state="ready", problems=problems, figures=figures, port=free_port(""))

    def _is_to_run(self) -> bool:
        order = self._order
        return order.do == "run" and self._name in order.numbers and order.attempt > self._state.attempt

    def _start(self) -> None:
        order = self._order
        launch = LaunchConfig(**order.launch)
        self._beats = self._folder / f"beats-{self._name}"
        shutil.rmtree(self._beats, ignore_errors=True)
        self._beats.mkdir()
        node = ClusterNode(order.numbers[self._name], order.address, order.port)
        node_variables = {FOLDER: str(self._beats), node_files.MACHINE: self._state.machine}
        environment = {**os.environ, **order.environment, **node_variables}
        self._ranks = Ranks(order.command, launch, environment, node)
        self._set_state(state="running", attempt=order.attempt, ended=[], notes={})

    def _watch_ranks(self) -> None:
        """Report on the ranks. End them once all of them ended, or when the order asks for it."""
        assert self._ranks is not None
        order, pids = self._order, self._ranks.pids()
        ended = self._ranks.ended()
        moments = {}
        for rank, pid in pids.items():
            if beat := read_beat(self._beats, rank):
                silent_s = round(time.monotonic() - beat.time, 1)
                moments[str(rank)] = (beat.count, beat.batch, beat.phase, silent_s, is_stopped(pid))
        before = len(self._state.ended)
        self._note(ranks=moments, ended=[(outcome.rank, outcome.code) for outcome in ended])
        if len(ended) > before:
            self._write()
        if len(ended) == len(pids):
            self._end()
            self._set_state(state="checking")
        elif order.attempt != self._state.attempt or order.do != "run":
            if order.stacks:
                stopped = {rank for rank, pid in pids.items() if is_stopped(pid)}
                dump_stacks(self._beats, pids)
                sys.stderr.write(stacks(self._beats, pids) + "\n")
                sys.stderr.flush()
                self._note(notes={str(rank): note for rank, note in notes_on(self._beats, pids, stopped).items()})
            self._end()
            self._set_state(state="checking")

    def _end(self) -> None:
        """End the ranks after the time to save that the order or the scheduler gives them."""
        if self._ranks is None:
            return
        grace_s = GRACE_S if self._order.do == "run" else self._order.grace_s
        if self.told_to_leave:
            grace_s = LaunchConfig(**self._order.launch).grace_s
        if grace_s:
            self._ranks.terminate()
            ended = self._ranks.settle(grace_s)
            self._note(ended=[(outcome.rank, outcome.code) for outcome in ended])
        self._ranks.end(0)
        self._ranks = None

    def _note(self, **fields: Any) -> None:
        with self._lock:
            for name, value in fields.items():
                setattr(self._state, name, value)

    def _set_state(self, **fields: Any) -> None:
        self._note(**fields)
        self._write()

    def _write(self) -> None:
        with self._lock:
            self._state.sign += 1
            self._state.time = time.time()
            node_files.write(node_files.node_file(self._folder, self._name), self._state)

    def _send_heartbeats(self) -> None:
        while True:
            try:
                self._write()
            except OSError as error:
                _report_problem(f"this node could not write its sign: {error}")
            time.sleep(node_files.SIGN_S)


def _report_problem(message: str) -> None:
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def slurm_id(environment: Mapping[str, str]) -> str:
    """Return the id of this node: the job's id, its start (Slurm may requeue it), and the node's number in it."""
    start = environment.get("SLURM_RESTART_COUNT", "0")
    return f"{environment['SLURM_JOB_ID']}.{start}.{environment['SLURM_NODEID']}"


def main() -> None:
    own_process_group()
    if os.environ.get(PARENT_FD) == "0":  # the remote shell's: it breaks with the connection
        die_with_parent()
    os.environ.pop(PARENT_FD, None)
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        name, machine = sys.argv[2:]
        address = machine.rpartition("@")[2]
    else:
        name, machine = slurm_id(os.environ), os.environ.get("SLURMD_NODENAME", socket.gethostname())
        address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", machine)
    agent = Agent(folder, name, machine, address)

    def leave(*_: Any) -> None:
        agent.told_to_leave = True

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent.run()


if __name__ == "__main__":
    main()
