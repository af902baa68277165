"""What a rank tells its launcher as it goes: how far it is, in a file of 32 bytes that costs it no system call.

On SIGUSR1 it writes the stacks of all its threads beside that file, also while it waits in native code.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = "STEMMA_HEARTBEATS"
PHASES = ("not watched", "data loading", "forward pass", "backward pass", "optimizer step", "between batches")
_LAYOUT = struct.Struct("<qqqd")


@dataclass(frozen=True)
class Beat:
    """The last sign of life of a rank.

    count: signs so far; ranks that train together give the same ones in the same order.
    time: of the system's monotonic clock, which all processes of a machine share.
    """

    count: int
    batch: int
    phase: str
    time: float


class Heartbeat:
    """A rank's own end. `folder` comes from the launcher's environment; without one nothing is written."""

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
        """Says that this rank has come to a phase of a batch."""
        if self._file is not None:
            self._count += 1
            _LAYOUT.pack_into(self._file, 0, self._count, batch, PHASES.index(phase), time.monotonic())


def beat_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.beat"


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stacks"


def read_beat(folder: Path, rank: int) -> Beat | None:
    """The last sign of life of a rank; None before its first."""
    path = beat_file(folder, rank)
    data = path.read_bytes() if path.exists() else b""
    if len(data) < _LAYOUT.size:
        return None
    count, batch, phase, moment = _LAYOUT.unpack(data)
    return Beat(count, batch, PHASES[phase], moment)
