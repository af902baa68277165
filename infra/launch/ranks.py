"""Start and joint end of the ranks of one node: no rank outlives its launcher, and the first to fail is named."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import psutil

from infra.errors import stage_error
from infra.launch.config import LaunchConfig
from infra.process.lifetime import PARENT_FD

# Names that torchrun and Composer, srun, and an Indexed Job of Kubernetes use.
_NODE_RANK = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
_ADDRESS = ("MASTER_ADDR", "SLURM_LAUNCH_NODE_IPADDR")
_PORT = 29_400


@dataclass(frozen=True)
class ClusterNode:
    """One machine of a training run, counted from 0, and the address on which rank 0 gathers the others."""

    number: int
    address: str
    port: int

    @classmethod
    def of(cls, launch: LaunchConfig, environment: Mapping[str, str]) -> ClusterNode:
        """Return this machine. Raises StageError for several nodes if the environment does not identify this one."""
        if launch.nodes == 1:
            return cls(0, "127.0.0.1", free_port())
        number = next((environment[name] for name in _NODE_RANK if name in environment), None)
        address = next((environment[name] for name in _ADDRESS if name in environment), None)
        if number is None or address is None or not number.isdecimal() or int(number) >= launch.nodes:
            raise stage_error(
                "no_node_rank",
                "launch.nodes",
                f"expected variables of the scheduler that identify this node among {launch.nodes} and locate node 0",
                "set a launch.cluster that starts them, or start one process on each node with NODE_RANK and "
                "MASTER_ADDR set, as srun and Indexed Jobs do",
            )
        return cls(int(number), address, int(environment.get("MASTER_PORT", _PORT)))

    def rank_environment(self, launch: LaunchConfig, local_rank: int) -> dict[str, str]:
        """Return the variables that torch.distributed, Composer and mosaicml-streaming read in one rank's process."""
        variables = {
            "RANK": str(self.number * launch.processes + local_rank),
            "WORLD_SIZE": str(launch.ranks),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(launch.processes),
            "NODE_RANK": str(self.number),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }
        # gloo would look up the host's name, which need not lead to an address that other machines reach.
        interface = "lo" if launch.nodes == 1 else interface_to(self.address)
        if interface and (launch.nodes == 1 or "GLOO_SOCKET_IFNAME" not in os.environ):
            variables["GLOO_SOCKET_IFNAME"] = interface
        return variables


def interface_to(address: str) -> str:
    """Return the network interface of this machine that reaches an address, or that has the address itself.

    Empty if there is no route.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 1))  # sends nothing
            own_address = probe.getsockname()[0]
    except OSError:
        return ""
    interfaces = psutil.net_if_addrs().items()
    return next(
        (name for name, addresses in interfaces if any(entry.address == own_address for entry in addresses)), ""
    )


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port on which no process listens; an empty address stands for all addresses of this machine."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


POLL_S = 0.1
# A rank that waits for a lost one handles no signal: Python's handlers run only between bytecodes.
GRACE_S = 2.0


@dataclass(frozen=True)
class Ended:
    """End of a rank: its exit code, negative for a signal as in `subprocess`."""

    rank: int
    code: int


class Ranks:
    """The running ranks of one node, all in the process group of the process that starts them.

    Every rank holds the read end of a pipe (see `infra.process.lifetime.die_with_parent`) whose write end only this
    process holds.
    """

    def __init__(
        self,
        command: Sequence[str],
        launch: LaunchConfig,
        environment: Mapping[str, str],
        node: ClusterNode | None = None,
    ) -> None:
        """Start the ranks.

        Args:
            node: this machine; by default as in the environment, see `ClusterNode.of`.
        """
        node = node or ClusterNode.of(launch, environment)
        self.first = node.number * launch.processes
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        read_end, self._parent_pipe = os.pipe()
        shared = {**environment, PARENT_FD: str(read_end)}
        if launch.threads is None:
            shared["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // launch.processes))
        try:
            for local_rank in range(launch.processes):
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[read_end],
                    env={**shared, **node.rank_environment(launch, local_rank)},
                )
                self._processes.append(process)
                assert process.stdout is not None
                reader = threading.Thread(target=_tag, args=(process.stdout, self.first + local_rank), daemon=True)
                reader.start()
                self._readers.append(reader)
        except BaseException:
            self.end()
            raise
        finally:
            os.close(read_end)

    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {self.first + index: process.pid for index, process in enumerate(self._processes)}

    def ended(self) -> list[Ended]:
        """Return the ranks that have ended by now."""
        codes = [(self.first + index, process.poll()) for index, process in enumerate(self._processes)]
        return [Ended(rank, code) for rank, code in codes if code is not None]

    def wait(self, stop: Callable[[], bool]) -> list[Ended]:
        """Wait until all have ended well, one has failed, or `stop()` is true. Return those that have ended."""
        while True:
            ended = self.ended()
            if len(ended) == len(self._processes) or any(outcome.code for outcome in ended) or stop():
                return ended
            time.sleep(POLL_S)

    def terminate(self) -> None:
        """Send SIGTERM to all that still run: they save and end."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def settle(self, patience_s: float) -> list[Ended]:
        """Wait until all have ended, at most `patience_s` seconds. Return those that have."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and len(self.ended()) < len(self._processes):
            time.sleep(POLL_S / 2)
        return self.ended()

    def end(self, grace_s: float = GRACE_S) -> None:
        """Send SIGTERM to all that still run, SIGKILL after `grace_s` seconds; return when none is left."""
        self.terminate()
        self.settle(grace_s)
        for process in self._processes:
            process.kill()
            process.wait()
        for reader in self._readers:
            reader.join(timeout=GRACE_S)
        os.close(self._parent_pipe)


def _tag(lines: IO[bytes], rank: int) -> None:
    """Forward the output of a rank, each line with the rank's number."""
    for line in lines:
        sys.stderr.buffer.write(b"[rank %d] %s" % (rank, line if line.endswith(b"\n") else line + b"\n"))
        sys.stderr.buffer.flush()


def own_process_group() -> None:
    """Make this process the leader of a process group, which its ranks join and which ends as a whole."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()
