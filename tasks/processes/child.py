"""The process of one stage: builds it once, in its own session, and writes its outcome to a file.

    python -m tasks.processes.child JOB.json

or forked from a server that has imported what it needs, see `tasks.processes.warm_start`.

A stage has its own process because it owns torch's threads and random state, may be killed as a whole, and gives back
its memory. The process ends with its whole process group as soon as its parent is gone. If the stage trains in several
ranks, this process starts them. Each rank runs this program too, and this process reports how the first of them failed.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from infra.errors import Cancelled, StemmaError
from infra.io.json import read_own_json
from infra.launch.cluster import run_on_cluster
from infra.launch.config import LaunchConfig
from infra.launch.devices.gpu_usage import sampled
from infra.launch.ranks import Ended
from infra.launch.training import run_ranks
from infra.leases.lease import LeaseClaim
from infra.ledger.record import TIMES, TimeRecord
from infra.process.held_folder import hold_sockets
from infra.process.lifetime import die_with_parent, leave
from infra.process.workers import Mapper
from infra.run import Result, Run, open_journal
from infra.secrets import HidingStream
from infra.store.store import is_full, is_of_the_disk
from tasks.processes.exits import BROKEN, NO_ROOM, READ_ONLY, diagnose_exit, out_of_memory_kills
from tasks.processes.failures import failure_of
from tasks.processes.openmp import watch_others
from tasks.stages import STAGES

JOURNAL = "journal.jsonl"
OUTCOME = "outcome.json"
CHECKPOINTS = "checkpoints"
"""The folder of a training's checkpoints in its work folder (training/checkpoint/folder.py)."""


@dataclass(frozen=True)
class Job:
    """The work of the child. All paths are absolute; `inputs` are finished artifacts, `out` is empty.

    keeps_memory: True if the process keeps what it has freed, for a stage that allocates the same at every step.
    measurement: the folder for the measurement of the model that is trained, empty too; "" if there is no measurement.
    claim: the lease that it works under, as `infra.leases.lease.LeaseClaim`; empty for work that has none.
    checkpoint_place, answers: see `infra.run.Run`.
    """

    node: str
    stage: str
    config: dict[str, Any]
    launch: dict[str, Any]
    inputs: dict[str, str]
    out: str
    scratch: str
    measurement: str = ""
    keeps_memory: bool = False
    claim: dict[str, Any] = field(default_factory=dict)
    checkpoint_place: str = ""
    answers: str = ""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf8")

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls(**read_own_json(path))


@dataclass(frozen=True)
class TrainingMeasurement:
    """The measurement that the process of a training took of its model, once the model was written.

    place: position in the journal of the first byte about the measurement. started: seconds since 1970.
    """

    figures: dict[str, float]
    headline: str
    place: int
    started: float
    seconds: float


@dataclass(frozen=True)
class ChildOutcome:
    """The end of the child; `status` is built or one of the words of `infra.errors`.

    A training writes its outcome once its model is whole, and again when it is measured. `measuring` is true in
    between, and where measuring failed.
    """

    status: str
    figures: dict[str, float]
    headline: str
    problems: list[dict[str, str]]
    device: str = ""
    time: float = field(default_factory=time.time)
    measuring: bool = False
    measured: TrainingMeasurement | None = None

    @property
    def is_built(self) -> bool:
        return self.status == "built"

    def write(self, path: Path) -> None:
        fresh = path.with_suffix(".fresh")  # of a process that is killed here the earlier word counts
        fresh.write_text(json.dumps(asdict(self), indent=1), encoding="utf8")
        fresh.replace(path)

    @classmethod
    def read(cls, path: Path) -> ChildOutcome | None:
        """The outcome in a file; None if the file is missing or incomplete: its process was killed while it wrote, or
        had no room."""
        try:
            content = read_own_json(path)
        except (FileNotFoundError, ValueError):
            return None
        measured = content.pop("measured", None)
        return cls(**content, measured=TrainingMeasurement(**measured) if measured else None)


def main(argument: str) -> int:
    """argument: the path of a job's file."""
    try:
        return _build_job(Path(argument))
    except OSError as error:  # of the journal, or of the outcome itself
        if not is_of_the_disk(error):
            raise
        return NO_ROOM if is_full(error) else READ_ONLY if error.errno == errno.EROFS else BROKEN


def _build_job(job_path: Path) -> int:
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
    hold_sockets()
    job = Job.read(job_path)
    if job.claim and "RANK" not in os.environ:
        LeaseClaim(**job.claim).hold()
    if "RANK" in os.environ:
        outcome = _rank(job, int(os.environ["RANK"]), lambda: cancelled, listen)
    elif STAGES[job.stage].trains and starts_ranks(_launch_of(job)):
        outcome = _all_ranks(job, job_path, lambda: cancelled)
        outcome.write(Path(job.scratch) / OUTCOME)
    else:
        outcome = _alone(job, lambda: cancelled, listen, Path(job.scratch) / OUTCOME)
        outcome.write(Path(job.scratch) / OUTCOME)
    # A rank that could not measure ends as one that failed, so that the others are not waiting for it.
    return 0 if outcome.is_built and not outcome.measuring else 1


def starts_ranks(launch: LaunchConfig) -> bool:
    """Return True if a stage that trains does so in separate processes."""
    return launch.ranks > 1 or launch.cluster != "local"


def _launch_of(job: Job) -> LaunchConfig:
    return LaunchConfig(**job.launch)


def _launch_here(job: Job) -> LaunchConfig:
    """Return `launch:` for the process of a stage.

    A stage that does not train runs on this machine, even if training runs on nodes of a cluster. In that case `device:
    gpu` refers to those nodes, and a GPU of this machine is used if there is one.
    """
    launch = _launch_of(job)
    if STAGES[job.stage].trains or launch.cluster == "local" or launch.device != "gpu":
        return launch
    return launch.model_copy(update={"device": "auto"})


def _alone(job: Job, is_cancelled: Callable[[], bool], listen: Callable[[], None], word: Path) -> ChildOutcome:
    """Build a stage in this process, without other ranks.

    Args:
        job: the stage, its inputs and folders.
        is_cancelled: returns True if the build has to stop.
        listen: starts to listen for cancellation.
        word: file to which the outcome is written as soon as a model is complete.
    """
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
            answers_dir=Path(job.answers) if job.answers else None,
            times=TimeRecord(scratch / TIMES),
        )
        with sampled(run, launch):
            return _build(job, run, word)


def _mapper(job: Job) -> Mapper | None:
    """The mapper that runs partitions on a Ray cluster, if the config names one."""
    launch = _launch_of(job)
    if launch.ray is None:
        return None
    from tasks.processes.ray_mapper import map_on_ray

    # Only mapped stages that query models use GPUs.
    gpus = launch.device != "cpu" and STAGES[job.stage].makes == "scores"
    return map_on_ray(launch.ray, launch.workers, job.node, gpus=gpus)


def _rank(job: Job, rank: int, is_cancelled: Callable[[], bool], listen: Callable[[], None]) -> ChildOutcome:
    """One of several ranks; only the first reports, and only its output is kept."""
    scratch = Path(job.scratch)
    if rank == 0:
        outcome = _alone(job, is_cancelled, listen, _rank_outcome(scratch, rank))
    else:
        rank_folder = scratch / f"rank{rank}.out"
        rank_folder.mkdir(exist_ok=True)
        measured_aside = rank_folder / "measurement"
        measured_aside.mkdir(exist_ok=True)
        run = Run(
            scratch,
            _launch_of(job),
            is_cancelled=is_cancelled,
            listen=listen,
            checkpoint_place=job.checkpoint_place,
        )
        apart = replace(job, out=str(rank_folder), measurement=str(measured_aside) if job.measurement else "")
        outcome = _build(apart, run, _rank_outcome(scratch, rank))
        shutil.rmtree(rank_folder, ignore_errors=True)
    outcome.write(_rank_outcome(scratch, rank))
    return outcome


def _all_ranks(job: Job, job_path: Path, is_cancelled: Callable[[], bool]) -> ChildOutcome:
    scratch, launch = Path(job.scratch), _launch_of(job)
    ranks = range(launch.ranks)
    kills = out_of_memory_kills()

    def forget_outcomes() -> None:
        for rank in ranks:
            _rank_outcome(scratch, rank).unlink(missing_ok=True)

    times, began = TimeRecord(scratch / TIMES), time.monotonic()

    def say(name: str, message: str) -> None:
        forget_outcomes()  # of ranks that were ended, and start again
        note_event(scratch, name, message)
        if name == "restarted":
            times.write("fault", cause="hang" if launch.cluster == "local" else "ranks_lost")
        elif name == "nodes":  # the scheduler gave its machines
            times.write("spent", seconds={"queue": round(time.monotonic() - began, 3)})

    forget_outcomes()
    try:
        command = [sys.executable, "-m", "tasks.processes.child", str(job_path)]
        if launch.cluster == "local":
            ended = run_ranks(command, launch, scratch, is_cancelled, say)
        else:
            progress = partial(_newest_checkpoint, scratch)
            ended = run_on_cluster(command, launch, scratch, job.node, is_cancelled, say, os.environ, progress)
    except StemmaError as error:
        return _failed(error)
    outcomes = {rank: outcome for rank in ranks if (outcome := ChildOutcome.read(_rank_outcome(scratch, rank)))}
    # Once the model is whole it stays so, whatever befalls a rank that measures it.
    if (first := outcomes.get(0)) and (
        first.measuring or first.measured or all(process.code == 0 for process in ended)
    ):
        return first
    if is_cancelled():
        return _failed(Cancelled())
    # Only this process stops its ranks. One that stopped for a signal from elsewhere is lost like a killed one.
    signalled = next((rank for rank, outcome in outcomes.items() if outcome.status == Cancelled.status), None)
    if signalled is not None:
        lost = diagnose_exit(job.node, -signal.SIGTERM, False)
        return ChildOutcome("failed", {}, "", [replace(lost, message=f"rank {signalled}: {lost.message}").as_json()])
    return _first_failure(job, ended, outcomes, out_of_memory_kills() > kills)


def _newest_checkpoint(scratch: Path) -> str:
    return max((path.name for path in scratch.glob(f"{CHECKPOINTS}/ba*")), default="")


def note_event(scratch: Path, name: str, message: str) -> None:
    """An event in the journal of a stage of which no process writes to it now."""
    with open_journal(scratch / JOURNAL) as journal:
        Run(scratch, journal=journal).event(name, message)


def _first_failure(
    job: Job, ended: list[Ended], outcomes: dict[int, ChildOutcome], out_of_memory: bool
) -> ChildOutcome:
    """The failure that came first among several failed ranks: a rank that died without an outcome, else the first to
    write its reason.

    The others fail only because they lost it.
    """
    silent = [process for process in ended if process.code and process.rank not in outcomes]
    if silent:
        died = diagnose_exit(job.node, silent[0].code, out_of_memory)
        return ChildOutcome(
            "failed", {}, "", [replace(died, message=f"rank {silent[0].rank}: {died.message}").as_json()]
        )
    _, rank = min((outcome.time, rank) for rank, outcome in outcomes.items() if outcome.status != "built")
    first = outcomes[rank]
    if first.status != "failed":
        return first
    problems = [problem | {"message": f"rank {rank}: {problem['message']}"} for problem in first.problems]
    return replace(first, problems=problems)


def _rank_outcome(scratch: Path, rank: int) -> Path:
    return scratch / f"outcome.rank{rank}.json"


def _build(job: Job, run: Run, word: Path) -> ChildOutcome:
    """Build a stage and measure its model.

    Args:
        job: the stage, its inputs and folders.
        run: receives progress and figures.
        word: file to which the outcome is written as soon as a model is complete.
    """
    try:
        stage = STAGES[job.stage]
        config = stage.config.model_validate(job.config)
        inputs = {name: Path(folder) for name, folder in job.inputs.items()}
        if stage.trains or stage.makes == "scores":
            import_torch(Path(job.scratch))
        build = stage.load()
        watch_others()
        if run.times:
            run.times.write("work")
        result = build(config, inputs, Path(job.out), run)
        built = ChildOutcome("built", _plain(result.figures), result.headline, [], _device(stage.trains, run.launch))
        if result.measure is None or not job.measurement:
            return built
        return _measured(job, run, built, result.measure, word)
    except StemmaError as error:
        return _failed(error)
    except Exception as error:
        # The traceback goes to the stage's log, its summary goes to the user.
        traceback.print_exc()
        return _failed(failure_of(error, job.node, Path(job.out), f"stemma logs {job.node}"))


def import_torch(folder: Path) -> None:
    """Import torch, which writes a module among the temporary files during its import. A killed process leaves that
    module behind; in the stage's work folder it is removed with the folder."""
    usual, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        importlib.import_module("torch.distributed.nn.jit.instantiator")
    finally:
        tempfile.tempdir = usual


def _measured(
    job: Job, run: Run, built: ChildOutcome, measure: Callable[[Path, Run], Result], word: Path
) -> ChildOutcome:
    """The outcome with the measurement of the model. If measuring fails, the model is built all the same: the separate
    stage that measures it reports the reason."""
    measuring = replace(built, measuring=True)
    try:
        if "RANK" in os.environ:
            from training.core.ranks import wait_for_all

            wait_for_all()  # until every rank has written what the model is made of
        measuring.write(word)
        position, started, ticks = run.place() or 0, time.time(), time.monotonic()
        result = measure(Path(job.measurement), run)
        seconds = round(time.monotonic() - ticks, 3)
        return replace(
            built, measured=TrainingMeasurement(_plain(result.figures), result.headline, position, started, seconds)
        )
    except Cancelled:
        return measuring
    except Exception as error:
        traceback.print_exc()
        run.event("not_measured", f"the model is complete, but measuring it failed: {error}")
        return measuring


def _plain(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items()}


def _device(trains: bool, launch: LaunchConfig) -> str:
    """The device that the stage computed on, as far as it used torch at all, and for a training also the precision."""
    torch = sys.modules.get("torch")
    has_gpu = torch is not None and torch.cuda.is_available()
    name = str(torch.cuda.get_device_name()) if torch is not None and has_gpu else f"cpu ({platform.machine()})"
    if torch is None or not trains:
        return name
    from training.core.hardware import precision_of

    kind = "cuda" if has_gpu and launch.device != "cpu" else "cpu"
    return f"{name}, {precision_of(launch, torch.device(kind))}"


def _failed(error: StemmaError) -> ChildOutcome:
    return ChildOutcome(error.status, {}, "", [problem.as_json() for problem in error.problems])


if __name__ == "__main__":
    leave(main(sys.argv[1]))
