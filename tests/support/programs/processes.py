"""Watching what the command under test starts: its stages' processes, and how far they are."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

import tests.support.programs.command
from infra.process.lifetime import end_group
from infra.run import read_journal


def wait_until(
    what: Callable[[], object],
    timeout_s: float | None = None,
    command: tests.support.programs.command.Command | None = None,
) -> object:
    """Polls until `what()` is true and returns it; the more it costs to ask, the less often.

    timeout_s: for what must have happened; by default `tests.support.programs.command.patience_s`. command: without
    which it will not happen; if that ends first, what it answered is told."""
    deadline = time.monotonic() + (timeout_s or tests.support.programs.command.patience_s)
    while (asked := time.monotonic()) < deadline:
        if found := what():
            return found
        if command is not None and command.poll() is not None and not what():
            raise AssertionError(f"ended before {what}: {command.communicate()}")
        time.sleep(min(0.5, max(0.02, 5 * (time.monotonic() - asked))))
    raise AssertionError(f"still not: {what}")


COLD = {"STEMMA_WARM_START": "off"}
"""For a command whose stages are to be caught at work: as new processes they import for a second or more."""


def running_stage(store: Path, stage: str) -> psutil.Process | None:
    """The process that builds a stage of this store now: the head of a session, at work in the stage's folder."""
    places = {str(job.parent) for job in (store / ".work" / stage).glob("*/scratch/job.json")}
    for process in psutil.process_iter() if places else ():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == process.pid and process.cwd() in places:
                return process
    return None


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def progress_of(store: Path, stage: str) -> float:
    """How far the newest unfinished build of a stage says it is, in its own unit."""
    done = 0.0
    for journal in (store / ".work" / stage).glob("*/scratch/journal.jsonl"):
        done = max([done, *(line["done"] for line in read_journal(journal) if line["kind"] == "progress")])
    return done


@contextmanager
def running(command: list[str], env: Mapping[str, str], log: Path) -> Iterator[None]:
    """A server that is no command of ours, for as long as the body runs; it ends with all that it started."""
    program = [sys.executable if word == "python" else word for word in command]
    with open(log, "wb") as out:
        process = subprocess.Popen(program, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        end_group(process.pid, lambda: process.poll() is not None)
        process.wait()
