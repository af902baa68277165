"""Starts the process of a stage, follows its output, and ends all of it when it is cancelled."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from infra.errors import Cancelled, ConfigError, GateRefused, Problem, StageError, StemmaError
from infra.launch.config import LaunchConfig
from infra.leases.lease import Lease
from infra.process.forked import NotForkedError, Process
from infra.process.held_folder import SOCKETS, remove_left
from infra.process.lifetime import GRACE_S, PARENT_FD, end_group, wait_for_end
from infra.process.tail import Tail
from infra.run import messages_in
from infra.store.store import full_disk
from tasks.processes.child import JOURNAL, OUTCOME, ChildOutcome, Job
from tasks.processes.environment import stage_environment
from tasks.processes.exits import NO_ROOM, diagnose_exit, out_of_memory_kills
from tasks.processes.warm_start import PROGRAM, WarmStart

LOG = "stage.log"
FORKED = "forked from a server that had its imports done"
"""Usual first line of the log. It is not passed on as a message."""
POLL_S = 0.25
"""Seconds between two looks at a stage's messages, and the longest delay of a cancellation; its end is seen at once."""
TOO_LITTLE_BYTES = 2_000_000
"""With less room than this, a process that left no outcome had no room to write one."""
_ERRORS: dict[str, type[StemmaError]] = {
    kind.status: kind for kind in (StageError, ConfigError, GateRefused, Cancelled)
}


def run_child(
    job: Job,
    lease: Lease,
    on_message: Callable[[Mapping[str, Any]], None],
    is_cancelled: Callable[[], bool],
    patience_s: Callable[[], float] = lambda: GRACE_S,
    warm_start: WarmStart | None = None,
) -> ChildOutcome:
    """Build a stage in its own process and its own session, and return how that ended.

    on_message: called with each line that the stage writes to its journal (see `infra.run`), and with {"kind": "log",
        "message": line} for each that it prints.
    patience_s: called once it is cancelled: seconds that the stage has to save and end, before it is killed.
    warm_start: forks the process, unless a new one is needed; None always starts a new one.

    Raises the error that the stage raised, StageError `killed` or `out_of_memory` if its process was, or Cancelled,
    once every process of the stage is gone. A training whose model was whole by then is built.
    """
    scratch = Path(job.scratch)
    (scratch / OUTCOME).unlink(missing_ok=True)
    job_file = scratch / "job.json"
    job.write(job_file)
    read_end, write_end = os.pipe()
    printed = Tail(scratch / LOG, from_end=True)
    kills = out_of_memory_kills()
    try:
        with open(scratch / LOG, "ab", buffering=0) as log:
            process = _start(job, job_file, log, read_end, warm_start, lambda: is_cancelled() or lease.lost.is_set())
        os.close(read_end)
        lease.works_in(process.pid)
        stopped = _follow(process, scratch / JOURNAL, printed, lease, on_message, is_cancelled, patience_s)
    finally:
        os.close(write_end)
    if lease.lost.is_set():
        raise lease_lost(job.node)
    outcome = ChildOutcome.read(scratch / OUTCOME)
    if outcome is not None and outcome.measuring:
        return outcome
    if stopped:
        raise Cancelled
    if outcome is not None and outcome.status == Cancelled.status and not is_cancelled():
        # Only this run cancels a stage. One that stopped for a signal from elsewhere is lost like a killed one.
        raise StageError(diagnose_exit(job.node, -signal.SIGTERM, False))
    # There may be room again by now: a stage that fails removes files, and a quota does not show.
    if outcome is None and (process.wait() == NO_ROOM or shutil.disk_usage(scratch).free < TOO_LITTLE_BYTES):
        raise full_disk(job.node, scratch)
    if outcome is None:
        raise StageError(diagnose_exit(job.node, process.wait(), out_of_memory_kills() > kills))
    if not outcome.is_built:
        error = _ERRORS.get(outcome.status, StageError)
        raise error(*(Problem(**problem) for problem in outcome.problems))
    return outcome


def _start(
    job: Job,
    job_file: Path,
    log: IO[bytes],
    parent: int,
    warm_start: WarmStart | None,
    stop: Callable[[], bool],
) -> Process:
    """Start the process of a stage, forked or new; its log begins with which of the two, and why.

    A process that starts after a stop ends at the next poll.

    Args:
        stop: polled while a server still imports.
    """
    if warm_start is not None:
        try:
            process = warm_start.start(job, str(job_file), log.fileno(), parent, stop)
        except NotForkedError as error:
            log.write(f"a new process: {error}\n".encode())
        else:
            log.write(f"{FORKED}\n".encode())
            return process
    return subprocess.Popen(
        [sys.executable, "-m", PROGRAM, str(job_file)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        pass_fds=[parent],
        cwd=job.scratch,
        env={**stage_environment(LaunchConfig(**job.launch), job.keeps_memory), PARENT_FD: str(parent)},
    )


def lease_lost(node: str) -> StageError:
    """The error of a builder that was taken for dead but resumed: another builder has taken over its work."""
    return StageError(Problem("lease_lost", node, "another builder took this stage over", "run again"))


def _follow(
    process: Process,
    journal: Path,
    printed: Tail,
    lease: Lease,
    on_message: Callable[[Mapping[str, Any]], None],
    is_cancelled: Callable[[], bool],
    patience_s: Callable[[], float],
) -> bool:
    """Pass on the journal and what is printed until the process ends; True if it had to be ended."""
    tail = Tail(journal, from_end=True)

    def pass_on() -> None:
        for line in messages_in(tail.lines()):
            on_message(line)
        for text in printed.lines():
            if text.rstrip() != FORKED:
                on_message({"kind": "log", "message": text})

    stopped = False
    try:
        while process.poll() is None:
            pass_on()
            if is_cancelled() or lease.lost.is_set():
                stopped = True
                break
            wait_for_end(process.pid, POLL_S)
        pass_on()
    finally:
        # Also when the stage ended by itself: nothing of its group may go on writing.
        patience = patience_s() if is_cancelled() else GRACE_S
        end_group(process.pid, lambda: process.poll() is not None, patience)
        process.wait()
        remove_left(SOCKETS)
    return stopped
