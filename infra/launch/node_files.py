"""Messages between a stage and its nodes: small files in the work folder, which all of them share.

FOLDER/order          by the stage: the current order to all nodes, and a count that increases while the stage lives
FOLDER/node-ID        by one node: its state, the state of its ranks, and such a count

A file is overwritten in place: on NFS a reader that opens a file sees the last write to it, while a renamed file may
still lead to the old content for a minute. A checksum detects a file that is read while it is being written.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from infra.io.json import parse_own_json

ORDER = "order"
MACHINE = "STEMMA_MACHINE"
"""Variable that gives ranks the name of their machine for people and schedulers."""
SIGN_S = 1.0
"""Seconds between two signs of the stage, and of each node."""


@dataclass
class Order:
    """Order of the stage to all nodes.

    attempt: counts the starts of ranks. do: wait; run the attempt's ranks; stop them (they may save); leave for good.
    numbers: the nodes of the attempt by their ids, counted from 0. address, port: where rank 0 gathers the others.
    stacks: True if nodes write the stacks of their ranks before they stop them. grace_s: seconds that ranks may save.
    """

    sign: int = 0
    attempt: int = 0
    do: Literal["wait", "run", "stop", "leave"] = "wait"
    numbers: dict[str, int] = field(default_factory=dict)
    address: str = ""
    port: int = 0
    stacks: bool = False
    grace_s: float = 0.0
    command: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    launch: dict[str, Any] = field(default_factory=dict)


@dataclass
class NodeState:
    """State of a node.

    state: checking itself; ready for ranks; running them; leaving, since the scheduler takes its machine back; gone.
    machine: its name for people and schedulers. address, port: where its ranks could gather the others.
    attempt: the newest attempt whose ranks it started; all of them ended if it is ready again.
    ended: (rank, exit code) of the attempt's ranks that ended by themselves. ranks: (count, batch, phase, silent
    seconds, stopped) of each, see `infra.launch.heartbeat`. notes: where each rank was when it hung.
    problems: findings of its checks; time: of its clock when it wrote this.
    """

    sign: int = 0
    state: Literal["checking", "ready", "running", "leaving", "gone"] = "checking"
    machine: str = ""
    address: str = ""
    port: int = 0
    attempt: int = 0
    ended: list[tuple[int, int]] = field(default_factory=list)
    ranks: dict[str, tuple[int, int, str, float, bool]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    time: float = 0.0


T = TypeVar("T", Order, NodeState)


def write(path: Path, fields: Order | NodeState) -> None:
    text = json.dumps(asdict(fields)).encode()
    data = b"%08x %s\n" % (zlib.crc32(text), text)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.pwrite(file, data, 0)
        os.ftruncate(file, len(data))
    finally:
        os.close(file)


def read(path: Path, kind: type[T]) -> T | None:
    """Return the content of a file; None if it does not exist or is being written."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    checksum, _, text = data.strip().partition(b" ")
    if not text or checksum != b"%08x" % zlib.crc32(text):
        return None
    return kind(**parse_own_json(text))


def node_file(folder: Path, node: str) -> Path:
    return folder / f"node-{node}"


def nodes(folder: Path) -> dict[str, NodeState]:
    """Return all nodes that ever wrote into a folder, by their ids."""
    states = {path.name.partition("-")[2]: read(path, NodeState) for path in folder.glob("node-*")}
    return {name: state for name, state in states.items() if state is not None}


class NodeWatch:
    """Time since the last new sign of each of several writers, by the reader's clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def silent_s(self, signs: Mapping[str, int]) -> dict[str, float]:
        """Return the seconds since each writer's last new sign.

        Args:
            signs: the counts that were just read.
        """
        now = time.monotonic()
        for name, sign in signs.items():
            if name not in self._seen or self._seen[name][0] != sign:
                self._seen[name] = sign, now
        return {name: now - self._seen[name][1] for name in signs}
