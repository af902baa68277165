"""Starts the process of a stage, follows what it says, and ends all of it when it is cancelled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from infra.errors import Cancelled, ConfigError, GateRefused, Problem, StageError, StemmaError
from infra.process import LIFELINE, end_group
from infra.project import PROJECT
from infra.servers.environment import OFFLINE, QUIET
from infra.store.lease import Lease
from tasks.child import JOURNAL, OUTCOME, Job, Outcome

LOG = "stage.log"
# glibc gives memory back to the system and asks for it again at every training step, about a third of its time here.
KEEP_MEMORY = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592:glibc.malloc.hugetlb=1"
POLL_S = 0.1
_ERRORS: dict[str, type[StemmaError]] = {
    kind.status: kind for kind in (StageError, ConfigError, GateRefused, Cancelled)
}


def run_child(
    job: Job, lease: Lease, on_message: Callable[[Mapping[str, Any]], None], is_cancelled: Callable[[], bool]
) -> Outcome:
    """Builds a stage in a process of its own, in a session of its own, and returns how that ended.

    on_message: called with each line that the stage writes to its journal (see `infra.run`).

    Raises the error that the stage raised, StageError `killed` if its process was (naming an out-of-memory kill), or
    Cancelled, once every process of the stage is gone.
    """
    scratch = Path(job.scratch)
    (scratch / OUTCOME).unlink(missing_ok=True)
    job_file = scratch / "job.json"
    job.write(job_file)
    read_end, write_end = os.pipe()
    try:
        with open(scratch / LOG, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tasks.child", str(job_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[read_end],
                cwd=scratch,
                env=_environment(job, read_end),
            )
        os.close(read_end)
        lease.works_in(process.pid)
        stopped = _follow(process, scratch / JOURNAL, lease, on_message, is_cancelled)
    finally:
        os.close(write_end)
    if stopped and lease.lost.is_set():
        raise StageError(Problem("lease_lost", job.node, "another builder took this stage over", "run again"))
    if stopped:
        raise Cancelled
    outcome = Outcome.read(scratch / OUTCOME)
    if outcome is None:
        raise StageError(_death(job, process.returncode))
    if outcome.status != "built":
        error = _ERRORS.get(outcome.status, StageError)
        raise error(*(Problem(**problem) for problem in outcome.problems))
    return outcome


def _follow(
    process: subprocess.Popen[bytes],
    journal: Path,
    lease: Lease,
    on_message: Callable[[Mapping[str, Any]], None],
    is_cancelled: Callable[[], bool],
) -> bool:
    """Passes on the journal until the process ends; True if it had to be ended."""
    journal.touch()
    stopped = False
    with open(journal, encoding="utf8") as lines:
        lines.seek(0, os.SEEK_END)
        try:
            while process.poll() is None:
                for message in _messages(lines):
                    on_message(message)
                if is_cancelled() or lease.lost.is_set():
                    stopped = True
                    break
                time.sleep(POLL_S)
            for message in _messages(lines):
                on_message(message)
        finally:
            # Also when the stage ended by itself: nothing of its group may go on writing.
            end_group(process.pid, lambda: process.poll() is not None)
            process.wait()
    return stopped


def _messages(lines: TextIO) -> Iterator[Mapping[str, Any]]:
    """The whole lines that are there by now; a line still being written is left for the next look."""
    while True:
        position = lines.tell()
        line = lines.readline()
        if not line.endswith("\n"):
            lines.seek(position)
            return
        yield json.loads(line)


def _environment(job: Job, lifeline: int) -> dict[str, str]:
    threads = job.launch.get("threads") or max(1, (os.cpu_count() or 1) // job.launch.get("processes", 1))
    return {
        **os.environ,
        **QUIET,
        **OFFLINE,
        LIFELINE: str(lifeline),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH", "")])),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        # Two stages may share the cores: a thread that waits must not spin.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", KEEP_MEMORY),
    }


def _death(job: Job, code: int) -> Problem:
    log = f"stemma logs {job.node}"
    if code == -signal.SIGKILL:
        return Problem(
            "killed",
            job.node,
            "the stage was killed (SIGKILL); most often the machine was out of memory",
            f"a smaller launch.microbatch needs less; {log}",
        )
    if code < 0:
        return Problem("killed", job.node, f"the stage was killed by {signal.Signals(-code).name}", log)
    return Problem("crashed", job.node, f"the stage's process ended with exit code {code} and no result", log)
