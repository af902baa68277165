"""Starts the ranks of one node and ends them together: none outlives its launcher, and the first to fail is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from infra.launch.config import LaunchConfig
from infra.launch.nodes import Node
from infra.process import PARENT_FD

POLL_S = 0.1
# A rank that waits for a lost one hears no signal: Python's handlers run only between bytecodes.
GRACE_S = 2.0


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code, negative for a signal as in `subprocess`."""

    rank: int
    code: int


class Ranks:
    """The running ranks of one node, all in the process group of whoever starts them.

    Every rank holds the read end of a pipe (see `infra.process.die_with_parent`) whose write end is here alone.
    """

    def __init__(self, command: Sequence[str], launch: LaunchConfig, environment: Mapping[str, str]) -> None:
        node = Node.of(launch, environment)
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
        return {self.first + place: process.pid for place, process in enumerate(self._processes)}

    def ended(self) -> list[Ended]:
        """Those that have ended by now."""
        codes = [(self.first + place, process.poll()) for place, process in enumerate(self._processes)]
        return [Ended(rank, code) for rank, code in codes if code is not None]

    def wait(self, stop: Callable[[], bool]) -> list[Ended]:
        """Returns when all have ended well, or as soon as one ended badly or `stop()` says so."""
        while True:
            ended = self.ended()
            if len(ended) == len(self._processes) or any(one.code for one in ended) or stop():
                return ended
            time.sleep(POLL_S)

    def terminate(self) -> None:
        """SIGTERM to all that still run: they save and end."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def settle(self, patience_s: float) -> list[Ended]:
        """Those that have ended once all have, or after `patience_s` seconds."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and len(self.ended()) < len(self._processes):
            time.sleep(POLL_S / 2)
        return self.ended()

    def end(self, grace_s: float = GRACE_S) -> None:
        """SIGTERM to all that still run, SIGKILL after `grace_s` seconds; returns when none is left."""
        self.terminate()
        self.settle(grace_s)
        for process in self._processes:
            process.kill()
            process.wait()
        for reader in self._readers:
            reader.join(timeout=GRACE_S)
        os.close(self._parent_pipe)


def _tag(lines: IO[bytes], rank: int) -> None:
    """Passes on what a rank prints, each line with the rank's number."""
    for line in lines:
        sys.stderr.buffer.write(b"[rank %d] %s" % (rank, line if line.endswith(b"\n") else line + b"\n"))
        sys.stderr.buffer.flush()


def own_process_group() -> None:
    """Makes this process the head of a group, which its ranks join and which ends as a whole."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()
