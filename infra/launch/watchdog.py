"""Finds a rank that hangs: the one that is furthest behind when signs of life stop coming."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from infra.launch.heartbeat import Beat, read_beat, stack_file

# How long a rank may take to write its stacks; a stopped one first has to wake up.
_DUMP_S = 2.0


@dataclass(frozen=True)
class Hang:
    """Ranks that gave no sign of life.

    stuck: those furthest behind, of which only the stopped where any is; the others wait for them. All ranks where none
        is behind: then they wait for something outside, such as a disk or the network.
    """

    stuck: tuple[int, ...]
    beats: Mapping[int, Beat]
    notes: Mapping[int, str]

    def __str__(self) -> str:
        first = self.stuck[0]
        beat = self.beats[first]
        numbers = ", ".join(map(str, self.stuck))
        who = f"rank {numbers} hangs" if len(self.stuck) == 1 else f"ranks {numbers} hang"
        return f"{who} in the {beat.phase} of batch {beat.batch + 1:,}{self.notes[first]}"


def find_hang(folder: Path, pids: Mapping[int, int], patience_s: float) -> Hang | None:
    """A hang among the ranks of this node, with the stacks of all of them written to `folder`; None if there is none.

    patience_s: how long a rank that is watched may give no sign of life.
    """
    beats = {rank: beat for rank in pids if (beat := read_beat(folder, rank)) and beat.phase != "not watched"}
    if not beats:
        return None
    # Only those furthest behind can be to blame, and they are given their time even if the others have waited longer.
    behind = min(beat.count for beat in beats.values())
    stuck = tuple(rank for rank, beat in beats.items() if beat.count == behind)
    if any(time.monotonic() - beats[rank].time <= patience_s for rank in stuck):
        return None
    stopped = {rank for rank, pid in pids.items() if _is_stopped(pid)}
    # Ranks wait for each other within a phase too: of those in the same one, it is a stopped one that keeps the others.
    stuck = tuple(rank for rank in stuck if rank in stopped) or stuck
    dump_stacks(folder, pids)
    notes = {rank: " (its process was stopped)" if rank in stopped else _where(folder, rank) for rank in pids}
    return Hang(stuck, beats, notes)


def dump_stacks(folder: Path, pids: Mapping[int, int]) -> None:
    """Has every rank write the Python stacks of its threads to `folder`; returns when they are there."""
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)
        os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + _DUMP_S
    while time.monotonic() < deadline and not all(_stacks(folder, rank) for rank in pids):
        time.sleep(0.05)


def stacks(folder: Path, pids: Mapping[int, int]) -> str:
    """The stacks that were written, each with its rank."""
    return "\n".join(f"stacks of rank {rank}:\n{_stacks(folder, rank) or 'none came'}" for rank in pids)


def _stacks(folder: Path, rank: int) -> str:
    path = stack_file(folder, rank)
    return path.read_text(errors="replace") if path.exists() else ""


def _where(folder: Path, rank: int) -> str:
    """The innermost Python line of the main thread, which faulthandler writes last."""
    main = _stacks(folder, rank).rpartition("Current thread")[2] or _stacks(folder, rank).rpartition("Thread 0x")[2]
    found = re.search(r'File "([^"]+)", line (\d+) in (\S+)', main)
    return f", at {found[3]} ({Path(found[1]).name}:{found[2]})" if found else ""


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
