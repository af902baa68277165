"""The record of a build's time: JSON lines that each process of an attempt appends as it goes.

    {"kind": "attempt", "id": …, "run": …, "stage": "pretrain", "devices": 8, "rates": {…}, "alive_s": "000000012.500"}
    {"kind": "work"}                                  the stage's function begins; what came before was start-up
    {"kind": "loop", "key": "scratch", "batch": 40}   a training loop begins after this batch
    {"kind": "spent", "key": "scratch", "from": 40, "to": 52, "seconds": {"step": 1.9, "data": 0.1}, "tokens": 98304}
    {"kind": "kept"}                                  work up to here survives the process, as a finished partition does
    {"kind": "done"}                                  a training loop is over
    {"kind": "fault", "cause": "hang"}                the processes of the attempt were ended, and start again
    {"kind": "end", "cause": ""}                      the attempt ended; cause is "" if it built its artifact

Every line has `time` (seconds since 1970), `ticks` (seconds of a clock that is never set) and `boot` (the machine that
this clock belongs to). An attempt that is killed with its builder writes no end: its builder overwrites `alive_s` in
place twice a second. A record never fails a build: what cannot be written is missing.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from infra.io.json import parse_own_json
from infra.process.lifetime import this_boot

TIMES = "times.jsonl"
ALIVE_EVERY_S = 0.5
_ALIVE = b'"alive_s": "'


@cache
def _boot() -> str:
    with suppress(OSError):
        return this_boot().partition(" ")[0]
    return ""


class TimeRecord:
    """Appends lines to one record. Several processes may: each line is one write at the file's end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began: float | None = None
        self._alive_at = -ALIVE_EVERY_S
        self._kept_at = -ALIVE_EVERY_S
        self._alive_place = -1
        self._stopped = threading.Event()

    def write(self, kind: str, **fields: Any) -> None:
        """Append a line; do nothing if that fails."""
        stamp = {"time": round(time.time(), 3), "ticks": round(time.monotonic(), 3), "boot": _boot()}
        line = f"{json.dumps({'kind': kind, **stamp, **fields})}\n".encode()
        with suppress(OSError):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    line = b"\n" + line  # a crash cut the last line short
                os.write(descriptor, line)
            finally:
                os.close(descriptor)

    def begin(self, **about: Any) -> str:
        """Start an attempt, and return its id.

        Args:
            about: facts of the attempt: run, stage, devices, rates (see `infra.ledger.energy`), seconds that it waited.
        """
        identity = uuid.uuid4().hex[:12]
        self._began = time.monotonic()
        self.write("attempt", id=identity, **about, alive_s=_fixed(0.0))
        with suppress(OSError, ValueError):
            content = self.path.read_bytes()
            self._alive_place = content.index(_ALIVE, content.rindex(f'"id": "{identity}"'.encode())) + len(_ALIVE)
        return identity

    def alive(self) -> None:
        """Record that the attempt still lives; call often."""
        if self._began is None or self._alive_place < 0:
            return
        now = time.monotonic()
        if now - self._alive_at < 0.9 * ALIVE_EVERY_S:
            return
        self._alive_at = now
        with suppress(OSError):
            descriptor = os.open(self.path, os.O_WRONLY)
            try:
                os.pwrite(descriptor, _fixed(now - self._began).encode(), self._alive_place)
            finally:
                os.close(descriptor)

    def send_signs(self) -> None:
        """Record in a thread that the attempt still lives, until `stop_signs`, or until this process ends."""

        def renew() -> None:
            while not self._stopped.wait(ALIVE_EVERY_S):
                self.alive()

        threading.Thread(target=renew, name="signs of life", daemon=True).start()

    def stop_signs(self) -> None:
        self._stopped.set()

    def keep(self) -> None:
        """Record that the work so far survives this process; call as often as there is news."""
        now = time.monotonic()
        if now - self._kept_at >= ALIVE_EVERY_S:
            self._kept_at = now
            self.write("kept")

    def end(self, cause: str) -> None:
        """Record the end of the attempt; `cause` is "" if it built its artifact, else the code of its first problem."""
        self.write("end", cause=cause)

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Record the seconds within as waiting for `cause`, such as servers."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.write("spent", seconds={cause: round(time.monotonic() - began, 3)})


def _fixed(seconds: float) -> str:
    """Return seconds in a text of a fixed width, which can be overwritten in place."""
    return f"{seconds:013.3f}"


def this_clock() -> tuple[float, str]:
    """Return the ticks of this machine's clock, and the name of that clock."""
    return time.monotonic(), _boot()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a record, in order; empty if there is none."""
    lines = []
    try:
        content = path.read_bytes()
    except OSError:
        return []
    for text in content.splitlines():
        with suppress(ValueError):
            line = parse_own_json(text)
            if isinstance(line, dict) and isinstance(line.get("kind"), str) and "ticks" in line:
                lines.append(line)
    return lines


def furthest(path: Path, key: str) -> int:
    """Return the last batch that a training reached in any attempt so far; 0 for none."""
    reached = [line.get("to", 0) for line in read_lines(path) if line["kind"] == "spent" and line.get("key") == key]
    return max((int(batch) for batch in reached), default=0)
