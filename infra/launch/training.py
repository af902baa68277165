"""Ranks of one node, run from their start to their end, and restarted if one hangs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from infra.errors import stage_error
from infra.launch.config import LaunchConfig
from infra.launch.heartbeat import FOLDER, Hang, find_hang, stacks
from infra.launch.ranks import GRACE_S, ClusterNode, Ended, Ranks

# Seconds after the first failure in which further ones are awaited: the first rank to exit need not be the cause.
SETTLE_S = 1.0


def run_ranks(
    command: Sequence[str],
    launch: LaunchConfig,
    work_dir: Path,
    stop: Callable[[], bool],
    say: Callable[[str, str], None],
) -> list[Ended]:
    """Return the ranks of this node that ended by themselves; no rank is left on return.

    stop: called while they run; once it is true they get SIGTERM, save, and end. Those that have not ended are killed
        a little after `launch.grace_s`.
    say: called with (name of the event, message) for each restart, while no rank runs.

    Raises StageError `hang` if ranks hung more than `launch.restarts` times, and a StageError if the environment does
    not identify this node among several.
    """
    for restarts in range(launch.restarts + 1):
        ended, hang = _run_once(command, launch, work_dir, stop)
        if hang is None:
            return ended
        if restarts < launch.restarts:
            tries = f"{restarts + 1} of {launch.restarts}"
            say("restarted", f"{hang}; starting all ranks again from the newest checkpoint ({tries})")
    raise stage_error(
        "hang",
        "launch.hang_s",
        f"{hang}, after {launch.restarts} new starts",
        "the stacks of all ranks are in the stage's log; raise launch.hang_s if batches take that long",
    )


def _run_once(
    command: Sequence[str], launch: LaunchConfig, work_dir: Path, stop: Callable[[], bool]
) -> tuple[list[Ended], Hang | None]:
    # Nodes share the work folder, and each node clears the signs of its ranks only.
    heartbeats = work_dir / "heartbeats" / f"node{ClusterNode.of(launch, os.environ).number}"
    shutil.rmtree(heartbeats, ignore_errors=True)
    heartbeats.mkdir(parents=True)
    ranks = Ranks(command, launch, os.environ | {FOLDER: str(heartbeats)})
    hang: Hang | None = None

    def stop_or_hang() -> bool:
        nonlocal hang
        hang = find_hang(heartbeats, ranks.pids(), launch.hang_s)
        return hang is not None or stop()

    try:
        ended = ranks.wait(stop_or_hang)
        if hang is not None:
            sys.stderr.write(stacks(heartbeats, ranks.pids()) + "\n")
            return ended, hang
        if any(outcome.code for outcome in ended):
            return ranks.settle(SETTLE_S), None
        if len(ended) < launch.processes:
            ranks.terminate()
            return ranks.settle(launch.grace_s), None
        return ended, None
    finally:
        # A hanging rank does not react to SIGTERM.
        ranks.end(0 if hang else GRACE_S)
