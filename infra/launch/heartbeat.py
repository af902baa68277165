"""Signs of life of ranks, and detection of the rank that hangs: the one furthest behind when the signs stop.

A rank reports its progress in a file of 32 bytes, without a system call. On SIGUSR1 it writes the stacks of all its
threads next to that file, also while it waits in native code.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import re
import signal
import struct
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

FOLDER = "STEMMA_HEARTBEATS"
MEETING = "first meeting of the ranks"
TRIAL = "first exchange between nodes"
PHASES = (
    "not watched",
    "data loading",
    "forward pass",
    "backward pass",
    "optimizer step",
    "between batches",
    MEETING,
    TRIAL,
)
_LAYOUT = struct.Struct("<qqqd")


@dataclass(frozen=True)
class Beat:
    """The last sign of life of a rank.

    count: signs so far; ranks that train together give the same signs in the same order.
    time: by the system's monotonic clock, which all processes of a machine share.
    """

    count: int
    batch: int
    phase: str
    time: float


class Heartbeat:
    """The rank's side. The launcher's environment names the folder; without it, nothing is written."""

    def __init__(self, rank: int) -> None:
        self._file: mmap.mmap | None = None
        self._count = 0
        folder = os.environ.get(FOLDER)
        if folder is None:
            return
        path = beat_file(Path(folder), rank)
        path.write_bytes(_LAYOUT.pack(0, 0, 0, time.monotonic()))
        with path.open("r+b") as file:
            self._file = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._stacks = stack_file(Path(folder), rank).open("w")
        faulthandler.register(signal.SIGUSR1, self._stacks, all_threads=True)

    def beat(self, batch: int, phase: str) -> None:
        """Record that this rank has reached a phase of a batch."""
        if self._file is not None:
            self._count += 1
            _LAYOUT.pack_into(self._file, 0, self._count, batch, PHASES.index(phase), time.monotonic())


def beat_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.beat"


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stacks"


def read_beat(folder: Path, rank: int) -> Beat | None:
    """Return the last sign of life of a rank; None before its first."""
    path = beat_file(folder, rank)
    data = path.read_bytes() if path.exists() else b""
    if len(data) < _LAYOUT.size:
        return None
    count, batch, phase, moment = _LAYOUT.unpack(data)
    return Beat(count, batch, PHASES[phase], moment)


# Seconds that a rank may take to write its stacks; a stopped one first has to wake up.
_DUMP_S = 2.0


@dataclass(frozen=True)
class Hang:
    """Ranks that gave no sign of life.

    stuck: the ranks furthest behind, for which the others wait. If any of them was stopped by a signal, only the
        stopped ones. All ranks if none is behind: they then wait for something outside, such as a disk or the network.
    """

    stuck: tuple[int, ...]
    beats: Mapping[int, Beat]
    notes: Mapping[int, str]

    def __str__(self) -> str:
        first = self.stuck[0]
        beat = self.beats[first]
        numbers = ", ".join(map(str, self.stuck))
        subject = f"rank {numbers} hangs" if len(self.stuck) == 1 else f"ranks {numbers} hang"
        batch = "" if beat.phase in (MEETING, TRIAL) else f" of batch {beat.batch + 1:,}"
        return f"{subject} in the {beat.phase}{batch}{self.notes.get(first, '')}"


def stuck_ranks(beats: Mapping[int, Beat], silent_s: Mapping[int, float], patience_s: float) -> tuple[int, ...]:
    """Return the ranks furthest behind, once none of them has given a sign of life for `patience_s`; none before.

    Args:
        beats: the last sign of each of the ranks that train together.
    """
    watched = {rank: beat for rank, beat in beats.items() if beat.phase != "not watched"}
    # Only the ranks furthest behind can be the cause. They get the full time even if the others have waited longer.
    lowest = min((beat.count for beat in watched.values()), default=0)
    stuck = tuple(rank for rank, beat in watched.items() if beat.count == lowest)
    return stuck if all(silent_s[rank] > patience_s for rank in stuck) else ()


def find_hang(folder: Path, pids: Mapping[int, int], patience_s: float) -> Hang | None:
    """Return a hang among the ranks of this node, after writing all their stacks to `folder`; None if there is none.

    Args:
        patience_s: seconds for which a watched rank may give no sign of life.
    """
    beats = {rank: beat for rank in pids if (beat := read_beat(folder, rank)) and beat.phase != "not watched"}
    silent_s = {rank: time.monotonic() - beat.time for rank, beat in beats.items()}
    stuck = stuck_ranks(beats, silent_s, patience_s)
    if not stuck:
        return None
    stopped = {rank for rank, pid in pids.items() if is_stopped(pid)}
    # Ranks also wait for each other within a phase: among ranks in the same phase, a stopped one blocks the others.
    stuck = tuple(rank for rank in stuck if rank in stopped) or stuck
    dump_stacks(folder, pids)
    return Hang(stuck, beats, notes_on(folder, pids, stopped))


def notes_on(folder: Path, pids: Mapping[int, int], stopped: Collection[int]) -> dict[int, str]:
    """Return the place where each rank was, once the stacks are written."""
    notes = {rank: _where(folder, rank) for rank in pids}
    notes |= {rank: " (its process has ended)" for rank, pid in pids.items() if _has_ended(pid)}
    return notes | dict.fromkeys(stopped, " (its process was stopped)")


def dump_stacks(folder: Path, pids: Mapping[int, int]) -> None:
    """Make every rank write the Python stacks of its threads to `folder`, and wait until they are written."""
    alive = {rank: pid for rank, pid in pids.items() if not _has_ended(pid)}  # the others may wait for one that left
    for pid in alive.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + _DUMP_S
    while time.monotonic() < deadline and not all(_stacks(folder, rank) for rank in alive):
        time.sleep(0.05)


def stacks(folder: Path, pids: Mapping[int, int]) -> str:
    """Return the stacks that were written, each with its rank."""
    return "\n".join(f"stacks of rank {rank}:\n{_stacks(folder, rank) or 'none came'}" for rank in pids)


def _stacks(folder: Path, rank: int) -> str:
    path = stack_file(folder, rank)
    return path.read_text(errors="replace") if path.exists() else ""


def _where(folder: Path, rank: int) -> str:
    """Return the innermost Python line of the main thread, which faulthandler writes last."""
    main = _stacks(folder, rank).rpartition("Current thread")[2] or _stacks(folder, rank).rpartition("Thread 0x")[2]
    match = re.search(r'File "([^"]+)", line (\d+) in (\S+)', main)
    return f", at {match[3]} ({Path(match[1]).name}:{match[2]})" if match else ""


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_stopped(pid: int) -> bool:
    """Return True if a process was stopped by a signal and waits to be woken."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
