"""Looks at a store while a pipeline runs in it: which stages run, how far they are, and which processes do the work."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from flows.runs.journal import RunJournal
from infra.lineage.relay_lock import relay_pid
from infra.process.tail import Tail
from infra.run import messages_in
from infra.servers.state import recorded

MARK = "STEMMA_DRILL"
"""Set in the environment of every process of a drill: its value is the drill's own."""


@dataclass
class Progress:
    """The state of a stage, from the journals of all runs. farthest: the most that any process reported as done.

    began: when it was first seen to run, by the monotonic clock.
    """

    status: str = "waiting"
    began: float = 0.0
    farthest: float = 0.0
    changes: list[tuple[float, str, float]] = field(default_factory=list)


class Watch:
    """Follows the journals of all runs in a store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stages: dict[str, Progress] = {}
        self.events: list[tuple[str, str]] = []
        self._tails: dict[str, Tail] = {}

    def look(self) -> None:
        """Read what was added."""
        runs = self.root / "runs"
        for folder in sorted(runs.iterdir()) if runs.is_dir() else ():
            tail = self._tails.setdefault(folder.name, Tail(folder / "journal.jsonl"))
            for line in messages_in(tail.lines()):
                self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        stage = line.get("stage")
        if line["kind"] == "event":
            self.events.append((stage or "", line["message"]))
        if not stage or line["kind"] not in ("stage", "progress"):
            return
        progress = self.stages.setdefault(stage, Progress())
        if line["kind"] == "stage":
            progress.status = line["status"]
            if line["status"] == "running":
                progress.began = time.monotonic()
                progress.changes.append((line["time"], "running", 0.0))
            elif line["status"] in ("built", "reused"):
                progress.changes.append((line["time"], "ended", float("inf")))
        else:
            progress.farthest = max(progress.farthest, line["done"])
            progress.changes.append((line["time"], "progress", line["done"]))

    def running(self) -> list[str]:
        return sorted(stage for stage, progress in self.stages.items() if progress.status == "running")

    def now_beyond(self, stage: str, done: float) -> bool:
        """True once a stage is farther than `done`, or has ended."""
        progress = self.stages.get(stage, Progress())
        return progress.status in ("built", "reused") or progress.farthest > done

    def newest_run(self) -> RunJournal | None:
        runs = self.root / "runs"
        folders = sorted(runs.iterdir()) if runs.is_dir() else []
        return RunJournal(runs, folders[-1].name) if folders else None


def marked(mark: str) -> list[psutil.Process]:
    """The living processes of a drill: those that have its mark in their environment."""
    entry = f"{MARK}={mark}".encode()
    processes = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            content = Path(f"/proc/{process.pid}/environ").read_bytes()
            if entry in content.split(b"\0") and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def targets(role: str, root: Path, mark: str) -> list[tuple[psutil.Process, str]]:
    """The processes in a role now, each with the stage that it works for; "" where that is none."""
    everyone = marked(mark)
    if role == "relay":
        return [(process, "") for process in everyone if process.pid == relay_pid(root)]
    if role in ("mlflow", "worker"):
        service = recorded(root).get(role)
        return [(process, "") for process in everyone if service and process.pid == service.pid]
    if role == "prefect":
        return [(process, "") for process in everyone if "infra.servers.prefect.server" in _command(process)]
    if role == "orchestrator":
        journal = Watch(root).newest_run()
        number = journal.process() if journal else None
        return [(process, "") for process in everyone if process.pid == number]
    if role == "imports":
        return [(process, "") for process in everyone if "infra.process.fork_server" in _command(process)]
    processes = []
    for process in everyone:
        with suppress(OSError, psutil.Error):
            stage = _stage_of(process, root)
            if stage and _role(process) == role:
                processes.append((process, stage))
    return sorted(processes, key=lambda pair: pair[0].pid)


def _stage_of(process: psutil.Process, root: Path) -> str:
    """The stage in whose work folder a process, or the one that started it, is at work."""
    work = (root / ".work").resolve()
    for ancestor in [process, *process.parents()]:
        with suppress(psutil.Error, OSError):
            folder = Path(ancestor.cwd())
            if folder.is_relative_to(work) and folder != work:
                return folder.relative_to(work).parts[0]
    return ""


def _role(process: psutil.Process) -> str:
    command = _command(process)
    if "training.rl.grading" in command:
        return "grader"
    if "training.rl.rollouts.sampler" in command or "vllm" in command:
        return "sampler"
    if process.name().startswith("pt_data_worker"):
        return "loader"
    if "tasks.processes.child" in command or "fork_server" in command:
        with suppress(OSError):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            if b"\0RANK=" in environment:
                return "rank"
        return "stage" if os.getsid(process.pid) == process.pid else ""
    return ""


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_for(condition: Any, seconds: float, every_s: float = 0.2) -> bool:
    """Wait until a function returns something true; False where it did not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True
