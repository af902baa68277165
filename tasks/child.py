"""The process of one stage: builds it once, in a session of its own, and says how it ended in a file.

    python -m tasks.child JOB.json

or forked from a server that has imported what it needs, see `tasks.warm_start`.

Its own process, because a stage owns torch's threads and random state, may be killed as a whole, and gives back its
memory. It ends with its whole process group as soon as whoever started it is gone. Where the stage trains in several
ranks, this process starts them, each running this program too, and says how the first of them failed.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from infra.errors import Cancelled, StemmaError
from infra.launch.cluster import run_on_cluster
from infra.launch.config import LaunchConfig
from infra.launch.ranks import Ended
from infra.launch.training import run_ranks
from infra.process import die_with_parent
from infra.run import Run, open_journal
from infra.secrets import HidingStream
from infra.store.lease import Claim
from infra.workers import Mapper
from tasks.exits import diagnose_exit, out_of_memory_kills
from tasks.failures import failure_of
from tasks.openmp import watch_others
from tasks.stages import STAGES

JOURNAL = "journal.jsonl"
OUTCOME = "outcome.json"
CHECKPOINTS = "checkpoints"
"""Where a training leaves them in its work folder (training/checkpoint_folder.py)."""


@dataclass(frozen=True)
class Job:
    """What the child is to do. All paths are absolute; `inputs` are finished artifacts, `out` is empty.

    keeps_memory: whether the process keeps what it has freed, for a stage that allocates the same at every step.
    claim: the lease that it works under, as `infra.store.lease.Claim`; empty for work that has none.
    checkpoint_place: see `infra.run.Run`.
    """

    node: str
    stage: str
    config: dict[str, Any]
    launch: dict[str, Any]
    inputs: dict[str, str]
    out: str
    scratch: str
    keeps_memory: bool = False
    claim: dict[str, Any] = field(default_factory=dict)
    checkpoint_place: str = ""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf8")

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls(**json.loads(path.read_text(encoding="utf8")))


@dataclass(frozen=True)
class Outcome:
    """How the child ended; `status` is built or one of the words of `infra.errors`."""

    status: str
    figures: dict[str, float]
    headline: str
    problems: list[dict[str, str]]
    device: str = ""
    time: float = field(default_factory=time.time)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf8")

    @classmethod
    def read(cls, path: Path) -> Outcome | None:
        """None where there is none, or half of one: a process that was killed while it wrote, or had no room to."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf8")))
        except (FileNotFoundError, ValueError):
            return None


def main(argument: str) -> int:
    """argument: the path of a job's file."""
    job_path = Path(argument)
    die_with_parent()
    if not isinstance(sys.stdout, HidingStream):  # a process that was forked has them from its server
        sys.stdout, sys.stderr = HidingStream(sys.stdout), HidingStream(sys.stderr)
    cancelled = False

    def cancel(*_: Any) -> None:
        nonlocal cancelled
        cancelled = True

    def listen() -> None:
        signal.signal(signal.SIGTERM, cancel)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    listen()
    job = Job.read(job_path)
    if job.claim and "RANK" not in os.environ:
        Claim(**job.claim).hold()
    if "RANK" in os.environ:
        outcome = _rank(job, int(os.environ["RANK"]), lambda: cancelled, listen)
    elif STAGES[job.stage].trains and starts_ranks(_launch_of(job)):
        outcome = _all_ranks(job, job_path, lambda: cancelled)
        outcome.write(Path(job.scratch) / OUTCOME)
    else:
        outcome = _alone(job, lambda: cancelled, listen)
        outcome.write(Path(job.scratch) / OUTCOME)
    return 0 if outcome.status == "built" else 1


def starts_ranks(launch: LaunchConfig) -> bool:
    """Whether a stage that trains does so in processes of their own."""
    return launch.ranks > 1 or launch.cluster != "local"


def _launch_of(job: Job) -> LaunchConfig:
    return LaunchConfig(**job.launch)


def _launch_here(job: Job) -> LaunchConfig:
    """`launch:` for the process of a stage. What does not train runs on this machine, also where training is for nodes
    of a cluster: `device: gpu` speaks of those then, and here a GPU is taken if there is one."""
    launch = _launch_of(job)
    if STAGES[job.stage].trains or launch.cluster == "local" or launch.device != "gpu":
        return launch
    return launch.model_copy(update={"device": "auto"})


def _alone(job: Job, is_cancelled: Callable[[], bool], listen: Callable[[], None]) -> Outcome:
    scratch = Path(job.scratch)
    with open_journal(scratch / JOURNAL) as journal:
        launch, mapper = _launch_here(job), _mapper(job)
        run = Run(
            scratch,
            launch,
            journal=journal,
            is_cancelled=is_cancelled,
            listen=listen,
            mapper=mapper,
            checkpoint_place=job.checkpoint_place,
        )
        return _build(job, run)


def _mapper(job: Job) -> Mapper | None:
    """What brings partitions to a Ray cluster, where the config names one."""
    launch = _launch_of(job)
    if launch.ray is None:
        return None
    from tasks.ray_mapper import map_on_ray

    # Of what is mapped, models alone are asked on GPUs.
    gpus = launch.device != "cpu" and STAGES[job.stage].makes == "scores"
    return map_on_ray(launch.ray, launch.workers, job.node, gpus=gpus)


def _rank(job: Job, rank: int, is_cancelled: Callable[[], bool], listen: Callable[[], None]) -> Outcome:
    """One of several ranks; only the first speaks, and only what it writes is kept."""
    scratch = Path(job.scratch)
    if rank == 0:
        outcome = _alone(job, is_cancelled, listen)
    else:
        aside = scratch / f"rank{rank}.out"
        aside.mkdir(exist_ok=True)
        run = Run(
            scratch,
            _launch_of(job),
            is_cancelled=is_cancelled,
            listen=listen,
            checkpoint_place=job.checkpoint_place,
        )
        outcome = _build(replace(job, out=str(aside)), run)
        shutil.rmtree(aside, ignore_errors=True)
    outcome.write(_rank_outcome(scratch, rank))
    return outcome


def _all_ranks(job: Job, job_path: Path, is_cancelled: Callable[[], bool]) -> Outcome:
    scratch, launch = Path(job.scratch), _launch_of(job)
    ranks = range(launch.ranks)
    kills = out_of_memory_kills()

    def forget_outcomes() -> None:
        for rank in ranks:
            _rank_outcome(scratch, rank).unlink(missing_ok=True)

    def say(name: str, message: str) -> None:
        forget_outcomes()  # of ranks that were ended, and start again
        note_event(scratch, name, message)

    forget_outcomes()
    try:
        command = [sys.executable, "-m", "tasks.child", str(job_path)]
        if launch.cluster == "local":
            ended = run_ranks(command, launch, scratch, is_cancelled, say)
        else:
            progress = partial(_newest_checkpoint, scratch)
            ended = run_on_cluster(command, launch, scratch, job.node, is_cancelled, say, os.environ, progress)
    except StemmaError as error:
        return _failed(error)
    outcomes = {rank: found for rank in ranks if (found := Outcome.read(_rank_outcome(scratch, rank)))}
    if all(one.code == 0 for one in ended) and 0 in outcomes:
        return outcomes[0]
    if is_cancelled():
        return _failed(Cancelled())
    return _first_failure(job, ended, outcomes, out_of_memory_kills() > kills)


def _newest_checkpoint(scratch: Path) -> str:
    return max((path.name for path in scratch.glob(f"{CHECKPOINTS}/ba*")), default="")


def note_event(scratch: Path, name: str, message: str) -> None:
    """An event in the journal of a stage of which no process writes to it now."""
    with open_journal(scratch / JOURNAL) as journal:
        Run(scratch, journal=journal).event(name, message)


def _first_failure(job: Job, ended: list[Ended], outcomes: dict[int, Outcome], out_of_memory: bool) -> Outcome:
    """Of several failed ranks the one that began: one that died without a word, else the first to say why.

    The others fail only because they lost it.
    """
    silent = [one for one in ended if one.code and one.rank not in outcomes]
    if silent:
        died = diagnose_exit(job.node, silent[0].code, out_of_memory)
        return Outcome("failed", {}, "", [replace(died, message=f"rank {silent[0].rank}: {died.message}").as_json()])
    _, rank = min((outcome.time, rank) for rank, outcome in outcomes.items() if outcome.status != "built")
    first = outcomes[rank]
    if first.status != "failed":
        return first
    problems = [problem | {"message": f"rank {rank}: {problem['message']}"} for problem in first.problems]
    return replace(first, problems=problems)


def _rank_outcome(scratch: Path, rank: int) -> Path:
    return scratch / f"outcome.rank{rank}.json"


def _build(job: Job, run: Run) -> Outcome:
    try:
        stage = STAGES[job.stage]
        config = stage.config.model_validate(job.config)
        inputs = {name: Path(folder) for name, folder in job.inputs.items()}
        build = stage.load()
        watch_others()
        result = build(config, inputs, Path(job.out), run)
        figures = {name: float(value) for name, value in result.figures.items()}
        return Outcome("built", figures, result.headline, [], _device())
    except StemmaError as error:
        return _failed(error)
    except Exception as error:
        # The traceback goes to the stage's log, what it comes to goes to the user.
        traceback.print_exc()
        return _failed(failure_of(error, job.node, Path(job.out), f"stemma logs {job.node}"))


def _device() -> str:
    """What the stage computed on, as far as it used torch at all."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"cpu ({platform.machine()})"


def _failed(error: StemmaError) -> Outcome:
    return Outcome(error.status, {}, "", [problem.as_json() for problem in error.problems])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
