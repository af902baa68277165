"""Which node this is and where rank 0 listens, as a scheduler's environment tells it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from infra.errors import stage_error
from infra.launch.config import LaunchConfig

# torchrun's and Composer's own name, srun's, an Indexed Job's of Kubernetes.
_NODE_RANK = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
_ADDRESS = ("MASTER_ADDR", "SLURM_LAUNCH_NODE_IPADDR")
_PORT = 29_400


@dataclass(frozen=True)
class Node:
    """One machine of a training run, counted from 0, and the address on which rank 0 gathers the others."""

    number: int
    address: str
    port: int

    @classmethod
    def of(cls, launch: LaunchConfig, environment: Mapping[str, str]) -> Node:
        """This machine. Raises StageError for several nodes in an environment that does not say which one this is."""
        if launch.nodes == 1:
            return cls(0, "127.0.0.1", _free_port())
        number = next((environment[name] for name in _NODE_RANK if name in environment), None)
        address = next((environment[name] for name in _ADDRESS if name in environment), None)
        if number is None or address is None or not number.isdecimal() or int(number) >= launch.nodes:
            raise stage_error(
                "no_node_rank",
                "launch.nodes",
                f"expected the scheduler to say which of {launch.nodes} nodes this is and where node 0 is",
                "start one process on each node with NODE_RANK and MASTER_ADDR set, as srun and Indexed Jobs do",
            )
        return cls(int(number), address, int(environment.get("MASTER_PORT", _PORT)))

    def rank_environment(self, launch: LaunchConfig, local_rank: int) -> dict[str, str]:
        """What torch.distributed, Composer and mosaicml-streaming read in the process of one rank."""
        variables = {
            "RANK": str(self.number * launch.processes + local_rank),
            "WORLD_SIZE": str(launch.ranks),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(launch.processes),
            "NODE_RANK": str(self.number),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }
        if launch.nodes == 1:
            # gloo would look up the host's name, which need not lead to an address of this machine.
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        return variables


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
