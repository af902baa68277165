"""The environment of a stage's process."""

from __future__ import annotations

import os

from infra.launch.config import LaunchConfig
from infra.project import python_path
from infra.servers.credentials import SERVERS_ONLY
from infra.servers.environment import OFFLINE, QUIET
from tasks.processes.openmp import wait_policy

# glibc gives memory back to the system and asks for it again at every training step, about a third of its time here,
# and at every token that a model writes, a third of that.
# A stage that streams through a corpus must not keep what it has freed: it would hold twice as much.
KEEP_MEMORY = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592:glibc.malloc.hugetlb=1"


def stage_environment(launch: LaunchConfig, keeps_memory: bool) -> dict[str, str]:
    """The whole environment, except the pipe to the parent that starts the process.

    Args:
        keeps_memory: True if the process keeps what it has freed, for a stage that allocates the same at every
            step.
    """
    threads = launch.threads or os.cpu_count() or 1
    return {
        **{name: value for name, value in os.environ.items() if name not in SERVERS_ONLY},
        **QUIET,
        **OFFLINE,
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        # Several ranks share the cores among themselves, and stages of the corpus do not watch other processes.
        **wait_policy(threads, watches=keeps_memory and launch.ranks == 1 and launch.cluster == "local"),
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", KEEP_MEMORY if keeps_memory else ""),
    }
