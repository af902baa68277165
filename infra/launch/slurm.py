"""Nodes of Slurm: a job with an agent on each, submitted, queried and cancelled with Slurm's commands."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from infra.errors import Problem, StageError
from infra.launch.config import LaunchConfig
from infra.launch.launchers import SLURM_NOTICE_S
from infra.launch.machines import OneJob, Over
from infra.process.lifetime import PARENT_FD
from infra.process.tail import Tail, last_lines

_ASK_S = 2.0
"""Seconds between two queries about a job; more frequent ones would burden Slurm's controllers."""
_COMMAND_S = 60.0
_ENDING_S = 120.0
"""Seconds that a cancelled job may take to end; Slurm's KillWait is 30 s by default."""
_RECORD = "slurm-job"
_ALIVE = {
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED"),
    *("RESIZING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SIGNALING", "STAGE_OUT", "RESV_DEL_HOLD"),
}


class Slurm(OneJob):
    """At most one job at a time. Its number is stored in the work folder, so that the next attempt cancels a job that
    was left.

    say: called with (name, message) for events of the job before any rank runs.
    """

    def __init__(
        self, launch: LaunchConfig, folder: Path, name: str, say: Callable[[str, str], None] = lambda *_: None
    ) -> None:
        self._launch = launch
        self._folder = folder
        self._name = name
        self._say = say
        self._record = folder.parent / _RECORD
        self._job = ""
        self._fields: dict[str, str] = {}
        self._asked = 0.0
        self._start = 0
        self._log: Tail | None = None
        if self._record.exists():
            self._job = self._record.read_text().strip()
            self.release()

    def is_ours(self, name: str) -> bool:
        return name.startswith(f"{self._job}.{self._start}.")

    def over(self, excluded: Mapping[str, str]) -> Over | None:
        """Return the outcome of the job, queried every few seconds; None while it waits or runs."""
        if not self._job or time.monotonic() - self._asked < _ASK_S:
            return None
        self._poll()
        state, reason = self._fields.get("JobState", "GONE"), self._fields.get("Reason", "None")
        job = f"Slurm job {self._job}"
        start = int(self._fields.get("Restarts", self._start))
        if start > self._start:
            self._start = start
            return Over(
                Problem("requeued", self._name, f"Slurm took the nodes of job {self._job}, and queued it again"), False
            )
        if state in _ALIVE:
            return None
        self._remove_record()
        detail = "" if reason in ("None", "") else f" ({reason})"
        if state == "CANCELLED":
            fix = f"run again, or raise launch.retries; `stemma logs {self._name}`"
            return Over(Problem("job_cancelled", self._name, f"{job} was cancelled from outside{detail}", fix), None)
        if state == "OUT_OF_MEMORY":
            fix = "a smaller launch.microbatch needs less; launch.slurm.arguments: [--mem=…] asks for more"
            return Over(Problem("out_of_memory", self._name, f"Slurm ended {job}, which ran out of memory", fix), None)
        if state in ("TIMEOUT", "DEADLINE"):
            fix = "raise launch.slurm.time_limit_h, or lower checkpoint_every"
            return Over(Problem("time_limit", "launch.slurm.time_limit_h", f"{job} reached its time limit", fix), False)
        if state == "PREEMPTED":
            return Over(Problem("preempted", self._name, f"{job} was pre-empted", "run again"), False)
        if state in ("NODE_FAIL", "BOOT_FAIL"):
            return Over(Problem("node_lost", self._name, f"{job} lost a node{detail}", "run again"), True)
        if state == "GONE":
            return Over(Problem("node_lost", self._name, f"Slurm no longer knows {job}", "run again"), True)
        return Over(self._failure(state, detail), None)

    def cancel(self) -> None:
        """Make Slurm end the job: SIGTERM, and SIGKILL after its KillWait."""
        if self._job:
            _command("scancel", self._job)

    def release(self, leaving_s: float = 0.0) -> None:
        """Cancel the job, and return when it has ended.

        Args:
            leaving_s: seconds in which it may first end by itself.
        """
        if not self._job:
            return
        end = time.monotonic() + leaving_s
        self._poll()
        while time.monotonic() < end and self._fields.get("JobState", "GONE") in _ALIVE:
            time.sleep(0.2)
            self._poll()
        if self._fields.get("JobState", "GONE") in _ALIVE:
            self.cancel()
        end = time.monotonic() + _ENDING_S
        while time.monotonic() < end and self._fields.get("JobState", "GONE") in _ALIVE:
            time.sleep(0.2)
            self._poll()
        self._remove_record()

    def pass_on_log(self) -> None:
        """Write the new output of the job to this process's log."""
        for line in self._log.lines() if self._log else ():
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def _has_job(self) -> bool:
        return bool(self._job)

    def _submit(self) -> None:
        launch, slurm = self._launch, self._launch.slurm
        log = self._folder / "job.log"
        agent = shlex.join([sys.executable, "-m", "infra.launch.agent", str(self._folder)])
        cores = slurm.cpus_per_process or launch.threads
        # srun does not inherit --cpus-per-task from sbatch (since Slurm 22.05).
        cpus_option = f"--cpus-per-task={cores * launch.processes} " if cores else ""
        script = f"#!/bin/bash\nexec srun --ntasks-per-node=1 {cpus_option}--kill-on-bad-exit=1 --unbuffered {agent}\n"
        gpus = slurm.gpus_per_process if slurm.gpus_per_process is not None else int(launch.device == "gpu")
        options = [
            f"--job-name=stemma-{self._name}",
            f"--nodes={launch.nodes}",
            "--ntasks-per-node=1",
            f"--chdir={self._folder}",
            f"--output={log}",
            "--open-mode=append",
            "--requeue" if slurm.requeue else "--no-requeue",
            f"--signal=TERM@{math.ceil(launch.grace_s + SLURM_NOTICE_S)}",
            *([f"--partition={slurm.partition}"] if slurm.partition else []),
            *([f"--time={math.ceil(slurm.time_limit_h * 60)}"] if slurm.time_limit_h else []),
            *([f"--cpus-per-task={cores * launch.processes}"] if cores else []),
            *([f"--gpus-per-node={gpus * launch.processes}"] if gpus else []),
            *([f"--exclude={','.join(sorted(self._excluded))}"] if self._excluded else []),
            *slurm.arguments,
        ]
        answer = _command("sbatch", "--parsable", *options, text=script)
        if answer.returncode:
            code = "scheduler_unreachable" if _is_unreachable(answer.stderr) else "slurm_refused"
            fix = "correct the request in launch.slurm as sbatch's message says"
            raise StageError(Problem(code, "launch.slurm", f"sbatch refused the job: {answer.stderr.strip()}", fix))
        self._job = answer.stdout.strip().partition(";")[0]
        self._record.write_text(self._job)
        self._fields, self._start, self._asked = {}, 0, time.monotonic()
        self._log = Tail(log, from_end=True)
        self._say("submitted", f"submitted as Slurm job {self._job}")

    def _poll(self) -> None:
        answer = _command("scontrol", "show", "job", "--oneliner", self._job)
        self._asked = time.monotonic()
        if answer.returncode == 0:
            self._fields = dict(re.findall(r"(\S+?)=(\S*)", answer.stdout))
        elif not _is_unreachable(answer.stderr):
            self._fields = {"JobState": "GONE"}

    def _remove_record(self) -> None:
        self.pass_on_log()
        self._job = ""
        self._record.unlink(missing_ok=True)

    def _failure(self, state: str, detail: str) -> Problem:
        code = self._fields.get("ExitCode", "?")
        log_tail = last_lines(self._folder / "job.log", 2)
        message = f"Slurm job ended as {state}{detail} with exit code {code}: {log_tail}"
        return Problem("job_failed", self._name, message, f"stemma logs {self._name}")


def _command(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    # Within a Slurm job, the job's variables would be read as options of the new one.
    environment = {
        name: value
        for name, value in os.environ.items()
        if (not name.startswith(("SLURM_", "SBATCH_")) or name == "SLURM_CONF") and name != PARENT_FD
    }
    try:
        return subprocess.run(words, input=text, capture_output=True, text=True, env=environment, timeout=_COMMAND_S)
    except FileNotFoundError:
        problem = Problem(
            "no_slurm",
            "launch.cluster",
            f"expected the command {words[0]} on this machine",
            "run where jobs are submitted",
        )
        raise StageError(problem) from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", "Unable to contact slurm controller: no answer")


def _is_unreachable(message: str) -> bool:
    return any(words in message for words in ("Unable to contact", "Socket timed out", "Connection refused"))
